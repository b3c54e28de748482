"""The stages of a plan and what passes between them, for microbatches of one size."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from simulator.lowering.mesh import MeshCollective
from simulator.lowering.placement import StagePlacement
from simulator.lowering.program import StageView
from simulator.lowering.transfers import Transfer, boundary, crossing_tensors, received_gathers
from simulator.lowering.variants import Variant
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, FORWARD


@dataclass(frozen=True)
class Flow:
    """Stages, and the transfers of one microbatch over their boundaries.

    Attributes:
        views: Stages.
        crossing: Tensors over each boundary.
        transfers: Per boundary and turn, those of activations and of their gradients.
        traffic: What tells its transfers from those of microbatches of another size between the same devices.
    """

    views: tuple[StageView, ...]
    crossing: list[list[str]]
    transfers: list[list[tuple[list[Transfer], list[Transfer]]]]
    traffic: str

    @property
    def num_turns(self) -> int:
        """Microbatches after which the same replicas have their turn."""
        return lcm(*(view.num_turns for view in self.views))

    def gathers_of_received(self, stage: int, variant: Variant) -> list[MeshCollective]:
        """Return the all-gathers that make whole what a pass received in parts."""
        if variant.kind == FORWARD and stage > 0:
            return received_gathers(self.views[stage], self.views[stage - 1], self.crossing[stage - 1])
        if variant.kind in (BACKWARD, BACKWARD_INPUT) and stage + 1 < len(self.views):
            return received_gathers(self.views[stage], self.views[stage + 1], self.crossing[stage])
        return []

    def families(self) -> Iterator[tuple[Hashable, Transfer]]:
        """Yield every transfer with the family of its channel."""
        for position, turns in enumerate(self.transfers):
            for turn, (forward, backward) in enumerate(turns):
                for kind, transfers in ((FORWARD, forward), (BACKWARD, backward)):
                    for transfer in transfers:
                        yield ("transfer", position, kind, turn), transfer

    def family_behind(self, stage: int, variant: Variant) -> Hashable | None:
        """Return the family of the transfers that leave after a pass; None at the pipeline's end."""
        if variant.kind == FORWARD and stage + 1 < len(self.views):
            return ("transfer", stage, FORWARD, variant.turn)
        if variant.kind in (BACKWARD, BACKWARD_INPUT) and stage > 0:
            return ("transfer", stage - 1, BACKWARD, variant.turn)
        return None

    def num_receives(self, stage: int, variant: Variant, placement: StagePlacement) -> dict[int, int]:
        """Return how many transfers a device of each representative posts before a pass."""
        if variant.kind == FORWARD and stage > 0:
            incoming = self.transfers[stage - 1][variant.turn][0]
        elif variant.kind in (BACKWARD, BACKWARD_INPUT) and stage + 1 < len(self.views):
            incoming = self.transfers[stage][variant.turn][1]
        else:
            return {}
        counts: dict[int, int] = {}
        devices = self.views[stage].stage.devices
        class_of_example = {devices[local]: c for c, local in placement.example.items()}
        for transfer in incoming:
            if transfer.target in class_of_example:
                c = class_of_example[transfer.target]
                counts[c] = counts.get(c, 0) + 1
        return counts


def flow(views: Sequence[StageView], traffic: str) -> Flow:
    """Return what passes between stages."""
    crossing = crossing_tensors(views)
    num_turns = lcm(*(view.num_turns for view in views))
    transfers = [
        [boundary(first, second, relayed, turn) for turn in range(num_turns)]
        for first, second, relayed in zip(views, views[1:], crossing, strict=False)
    ]
    return Flow(tuple(views), crossing, transfers, traffic)
