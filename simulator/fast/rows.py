"""Rows of the fast estimate: one operator between unlike neighbours, and boundaries between stages, by the lowering."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simulator.closed_forms.stage_prices import collective_s, items_s, transfers_s
from simulator.costs import CostTables
from simulator.fast.arrays import Structure
from simulator.fast.holdings import view_of
from simulator.fast.layouts import Spent, spent
from simulator.fast.structure import Names
from simulator.fidelity import Fidelity
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.lowering.recompute import copies_saved_part
from simulator.lowering.transfers import boundary, received_gathers
from simulator.plan import Sharding


class RowBuilder:
    """Works out what operators take between given neighbours, and what crosses between stages."""

    def __init__(self, costs: CostTables, structure: Structure, names: Names) -> None:
        self.costs = costs
        self.structure = structure
        self.names = names

    def row(
        self,
        index: int,
        strategies: Mapping[int, Sharding],
        devices: Sequence[int],
        microbatch_size: int,
        entering: Iterable[int] = (),
    ) -> list[Spent]:
        """Return what an operator takes forward and backward, and by input what a segment does not repeat.

        Between these, first of a pair, whether it saves a part that it copies; and what its backward pass takes longer
        where its weight gradients come later.

        Args:
            index: The operator.
            strategies: Its own and those of its neighbours in its stage.
            devices: Of the stage.
            microbatch_size: Samples over all replicas.
            entering: Tensors that arrive in shards of the sequence.
        """
        names = [self.names.tensors[tensor] for tensor in entering]
        view = view_of(self.costs, strategies, devices, microbatch_size, names)
        forward, backward, entering = ProgramBuilder(view, Fidelity()).operator_alone(index)
        parted_s = 0.0
        if any(item.collective is not None and not item.chained for item in backward):  # It travels beside them.
            halves = view_of(self.costs, strategies, devices, microbatch_size, names, schedule="zb-h1")
            _, apart, _ = ProgramBuilder(halves, Fidelity()).operator_alone(index)
            parted_s = items_s(halves, apart) - items_s(view, backward)
        inputs = self.structure.input_offsets[index + 1] - self.structure.input_offsets[index]
        parts = [forward, backward, *(entering.get(position, []) for position in range(inputs))]
        found = [spent(view, items) for items in parts]
        return [*found[:2], (float(copies_saved_part(view, index)), 0.0), (parted_s, 0.0), *found[2:]]

    def boundary(self, first: StageView, second: StageView, tensors: Iterable[int]) -> list[float]:
        """Return seconds of transfers forward and backward, and of making whole what arrives, on either side.

        Args:
            first, second: The stages.
            tensors: Numbers of the tensors that cross.
        """
        names = [self.names.tensors[tensor] for tensor in tensors]
        forward, backward = boundary(first, second, names)
        return [
            transfers_s(self.costs, forward),
            transfers_s(self.costs, backward),
            sum(collective_s(second, item) for item in received_gathers(second, first, names)),
            sum(collective_s(first, item) for item in received_gathers(first, second, names)),
        ]
