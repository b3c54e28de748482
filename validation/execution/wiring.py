"""How tensors reach the operators of a stage: layouts at every edge and the conversions between them.

The layouts are those of ``lowering.edges`` and ``ProgramBuilder``: forward, the producer's layout
becomes the consumer's; backward, the gradient as the consumer makes it becomes what the producer needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from simulator.lowering.mesh import batch_coordinate, batch_degree, mesh_sizes
from simulator.lowering.program import StageView
from simulator.lowering.transfers import Region, regions, replica_bounds
from validation.execution.conversions import conversion_groups
from validation.execution.groups import GroupKey, group_keys
from validation.execution.layouts import Conversion, Layout, convert, is_settled
from workloads.kinds.base import Shape
from workloads.placements import PARTIAL, Placement, Replicate, Shard

GRAPH, OWN, ARRIVAL = "graph", "own", "arrival"


@dataclass(frozen=True)
class Wire:
    """One input of one operator.

    Attributes:
        tensor: Name.
        source: GRAPH (training data), OWN (made in this stage) or ARRIVAL (received).
        forward: From the source's layout to the operator's.
        backward: From the layout of the gradient to what the source needs.
        gathers: Backward gathers again what forward gathers.
        want: Layout the operator reads; readers that want one layout share its copy.
        gradient: Layout of the gradient it makes; equal ones are summed before they move.
        alone: Reader and input whose gradient moves alone, where the runtime does not sum partial gradients first.
        own_copy: Reader and input that shares its copy with nobody (``StageView.gathers_alone``).
    """

    tensor: str
    source: str
    forward: Conversion | None = None
    backward: Conversion | None = None
    gathers: bool = False
    want: Layout | None = None
    gradient: Layout | None = None
    alone: tuple[int, int] | None = None
    own_copy: tuple[int, int] | None = None

    @property
    def copy(self) -> CopyKey | None:
        """Which copy of the tensor it reads; None if the tensor as it was made."""
        return None if self.forward is None or self.want is None else (self.tensor, self.want, self.own_copy)

    @property
    def share(self) -> ShareKey | None:
        """Which sum of gradients it adds to before that moves; None if it need not move."""
        return None if self.backward is None or self.gradient is None else (self.tensor, self.gradient, self.alone)


CopyKey = tuple[str, Layout, tuple[int, int] | None]
"""A tensor in a layout, for all who read it so or for one reader's input."""

ShareKey = tuple[str, Layout, tuple[int, int] | None]
"""A tensor whose gradients in a layout move together, or that of one reader's input."""


@dataclass
class Uses:
    """How often a pass over some operators reads each tensor as it was made, and each copy.

    Attributes:
        sources: Reads of the tensor itself; making a copy is one.
        copies: Reads of each copy.
    """

    sources: dict[str, int]
    copies: dict[CopyKey, int]


@dataclass
class StageWiring:
    """All edges of a stage; the same on each of its ranks.

    Attributes:
        view: The stage.
        ranks: Global ranks of its devices, mesh order.
    """

    view: StageView
    ranks: tuple[int, ...]
    wires: dict[int, tuple[Wire, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workload = self.view.costs.problem.workload
        for index in self.view.operators:
            self.wires[index] = tuple(
                self._wire(index, position) for position in range(len(self.workload.operators[index].inputs))
            )
        first: dict[ShareKey, tuple[int, int]] = {}
        for index, wires in self.wires.items():
            for position, wire in enumerate(wires):
                if wire.share is not None and first.get(wire.share, (index, 0))[0] == index:
                    first[wire.share] = (index, position)
        self.moving = set(first.values())
        """``(operator, input)`` after whose backward the sum of equal gradients moves: the first reader."""

    @cached_property
    def ragged(self) -> bool:
        """Whether replicas take unequal parts of a microbatch."""
        plan = self.view.plan
        return not plan.rotates and any(
            plan.microbatch_size % batch_degree(sharding) for sharding in set(self.view.shardings.values())
        )

    def _placements(self, index: int, which: str, number: int) -> Layout:
        sharding = self.view.shardings[index]
        splits = self.view.costs.splits(index, sharding)
        found: tuple[Placement, ...]
        if which in ("inputs", "outputs"):
            found = tuple(getattr(split, which)[number] for split in splits)
        else:
            found = tuple(getattr(split, which)(number) for split in splits)
        return mesh_sizes(sharding), found

    def output_layout(self, tensor: str) -> Layout:
        """Return the layout in which this stage makes ``tensor``."""
        producer = self.workload.producer[tensor]
        return self._placements(producer, "outputs", self.workload.operators[producer].outputs.index(tensor))

    def _wire(self, index: int, position: int) -> Wire:
        name = self.workload.operators[index].inputs[position]
        producer = self.workload.producer.get(name)
        if producer is None:
            return Wire(name, GRAPH)
        want = self._placements(index, "inputs", position)
        gradient = self._placements(index, "input_gradient", position)
        if producer in self.view.shardings:
            number = self.workload.operators[producer].outputs.index(name)
            have = self._placements(producer, "outputs", number)
            needed = self._placements(producer, "output_gradient", number)
            source = OWN
        else:
            have = needed = self.boundary_layout(name)
            source = ARRIVAL
        forward = convert(have, want, ragged=self.ragged)
        steps = () if forward is None else forward.steps
        gathered = [step.source_dim for step in steps if step.collective == "all_gather"]
        summed = self.view.costs.problem.runtime.sums_input_gradients or PARTIAL not in gradient[1]
        return Wire(
            tensor=name,
            source=source,
            forward=forward,
            backward=convert(gradient, needed, ragged=self.ragged),
            gathers=bool(gathered)
            and all(dim > 0 for dim in gathered)
            and self.view.gathers_again(index, position),
            want=want,
            gradient=gradient,
            alone=None if summed else (index, position),
            own_copy=(index, position) if self.view.gathers_alone(index, position) else None,
        )

    def uses(self, operators: Iterable[int]) -> Uses:
        """Return how often a pass over ``operators`` reads what."""
        sources: dict[str, int] = {}
        copies: dict[CopyKey, int] = {}
        for wire in (wire for index in operators for wire in self.wires[index] if wire.source != GRAPH):
            if wire.copy is None or wire.copy not in copies:
                sources[wire.tensor] = sources.get(wire.tensor, 0) + 1
            if wire.copy is not None:
                copies[wire.copy] = copies.get(wire.copy, 0) + 1
        return Uses(sources, copies)

    @cached_property
    def leaving(self) -> dict[str, Conversion | None]:
        """Tensors made here and read later, and what reduces their partial sums before they are sent."""
        return {
            tensor: convert(self.output_layout(tensor), is_settled(self.output_layout(tensor)), ragged=self.ragged)
            for tensor in self.view.leaving
        }

    def leaving_copy(self, tensor: str) -> CopyKey | None:
        """Return the copy that a reader of this stage has made of a partial sum that leaves, if it is whole."""
        key = (tensor, is_settled(self.output_layout(tensor)), None)
        read = {wire.copy for wires in self.wires.values() for wire in wires}
        return key if self.leaving[tensor] is not None and key in read else None

    def boundary_layout(self, tensor: str) -> Layout:
        """Return how ``tensor`` lies on this stage where it crosses a boundary: made, read or passed on here."""
        held = self.view.crossing(tensor)
        return held.sizes, held.placements

    def boundary_regions(self, tensor: str, turn: int) -> dict[int, Region]:
        """Return, by local device, the part of ``tensor`` it holds at a boundary; see ``transfers.boundary``."""
        sizes, placements = self.boundary_layout(tensor)
        samples = self.view.plan.microbatch_size
        if self.view.num_turns == 1:
            return dict(enumerate(regions(sizes, placements, samples)))
        whole = tuple(Replicate() if placement == Shard(0) else placement for placement in placements)
        return {
            local: region
            for local, region in enumerate(regions(sizes, whole, samples))
            if self.turn_of(local) == turn % self.view.num_turns
        }

    def turn_of(self, local_rank: int) -> int:
        """Return which replica a local device belongs to."""
        return batch_coordinate(self.view.shardings[self.view.operators[0]], local_rank)

    def works_on(self, local_rank: int, microbatch: int) -> bool:
        """Return whether a local device works on a microbatch: all do, unless replicas take turns."""
        return self.view.num_turns == 1 or self.turn_of(local_rank) == microbatch % self.view.num_turns

    def local_samples(self, index: int, local_rank: int) -> int:
        """Return the samples a local device works on at once in operator ``index``."""
        plan, sharding = self.view.plan, self.view.shardings[index]
        if plan.rotates:
            return plan.microbatch_size
        replica = batch_coordinate(sharding, local_rank)
        bounds = replica_bounds(plan.microbatch_size, batch_degree(sharding))
        return int((bounds[replica + 1] - bounds[replica]) * plan.microbatch_size)

    def shape(self, tensor: str) -> Shape:
        """Return the shape of a tensor of one microbatch over all replicas."""
        return (self.view.plan.microbatch_size, *self.workload.tensors[tensor])

    def conversions(self) -> Iterator[Conversion]:
        """Yield every conversion of the stage."""
        for wires in self.wires.values():
            for wire in wires:
                for conversion in (wire.forward, wire.backward):
                    if conversion is not None:
                        yield conversion
        for settling in self.leaving.values():
            if settling is not None:
                yield settling

    def groups(self) -> set[GroupKey]:
        """Return the communicators that conversions and operators need."""
        found = {key for conversion in set(self.conversions()) for key in conversion_groups(conversion, self.ranks)}
        for index, sharding in self.view.shardings.items():
            axes = internal_axes(self.workload.operators[index].kind, sharding)
            if axes:
                found |= set(group_keys("tensor", self.ranks, mesh_sizes(sharding), axes))
        return found


def internal_axes(kind: str, sharding: tuple[tuple[str, int, int], ...]) -> tuple[int, ...]:
    """Return the axes over which an operator communicates inside: those that cut its vocabulary."""
    inside = {"lm_loss": "vocab", "embedding": "vocab_sequence"}.get(kind)
    return tuple(position for position, (split, _, _) in enumerate(sharding) if split == inside)
