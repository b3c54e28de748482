"""A stage on representative devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from simulator.lowering.mesh import batch_coordinate, batch_degree
from simulator.lowering.program import Item, Program, StageView
from simulator.segments import EMPTY, Segment


@dataclass(frozen=True)
class StagePlacement:
    """A stage on representative devices.

    Attributes:
        view: The stage.
        classes: Representatives of the stage's devices, ascending.
        example: Representative to the local index of one of its devices.
        gpu_type: Representative to device type.
    """

    view: StageView
    classes: tuple[int, ...]
    example: Mapping[int, int]
    gpu_type: Mapping[int, str]

    def samples(self, index: int, representative: int) -> int:
        """Return the samples that the representative works on in operator ``index``."""
        if self._even:
            return self.view.samples(index)
        sharding = self.view.shardings[index]
        degree = batch_degree(sharding)
        base, extra = divmod(self.view.plan.microbatch_size, degree)
        if not extra:
            return base
        return base + (batch_coordinate(sharding, self.example[representative]) < extra)

    def all_samples(self, representative: int) -> tuple[int, ...]:
        """Return the samples of the representative in every operator; nothing where all replicas have as many."""
        if self._even:
            return ()
        return tuple(self.samples(index, representative) for index in self.view.operators)

    @cached_property
    def _even(self) -> bool:
        """Whether all replicas have as many samples."""
        size, shardings = self.view.plan.microbatch_size, {sharding for _, sharding in self.view.stage.shardings}
        return self.view.plan.rotates or not any(size % batch_degree(sharding) for sharding in shardings)

    def taking_turn(self, turn: int) -> StagePlacement:
        """Return the part of the stage that works on microbatches with this number modulo all turns."""
        if self.view.num_turns == 1:
            return self
        sharding = self.view.shardings[self.view.operators[0]]
        replica = turn % self.view.num_turns
        chosen = [c for c in self.classes if batch_coordinate(sharding, self.example[c]) == replica]
        return replace(self, classes=tuple(chosen))

    def segments(self, program: Program, representative: int) -> list[Segment]:
        """Return the computation of every item of a program on a representative; nothing for collectives."""
        key = (self.all_samples(representative), self.gpu_type[representative])
        if key not in program.segments:
            shift = self.view.operators[0] - program.first
            program.segments[key] = [self._segment(item, representative, shift) for item in program.items]
        return program.segments[key]

    def _segment(self, item: Item, representative: int, shift: int) -> Segment:
        total = EMPTY
        costs = self.view.costs
        for named, phase in item.parts:
            index = named + shift
            cost = costs.operator(
                index, self.view.shardings[index], self.samples(index, representative), self.gpu_type[representative]
            )
            total = total.then(getattr(cost, phase))
        return total
