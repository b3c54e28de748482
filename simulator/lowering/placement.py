"""A stage on representative devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from simulator.fidelity import Fidelity
from simulator.lowering.copies import COPIES, copy_segment
from simulator.lowering.items import Item, Program
from simulator.lowering.mesh import batch_coordinate, batch_degree
from simulator.lowering.program import StageView
from simulator.operator_cost import OperatorCost
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

    def host_is_behind(self, fidelity: Fidelity) -> bool:
        """Return whether the device waits for every launch, and host time is device time."""
        return fidelity.host and not self.view.costs.problem.runtime.host_runs_ahead

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

    def segments(self, program: Program, representative: int, *, apart: bool) -> list[Segment]:
        """Return the computation of every item of a program on a representative; nothing for collectives.

        Args:
            program: The stage's.
            representative: Which.
            apart: The host never runs ahead: every operator takes the longer of its kernels and its host time. That is
                in ``device_s``, and nothing is left that could be launched beside it.
        """
        key = (self.all_samples(representative), self.gpu_type[representative], apart)
        if key not in program.segments:
            shift = self.view.operators[0] - program.first
            make = self._segment_apart if apart else self._segment
            program.segments[key] = [make(item, representative, shift) for item in program.items]
        return program.segments[key]

    def _segment(self, item: Item, representative: int, shift: int) -> Segment:
        total = EMPTY
        for named, phase in item.parts:
            total = total.then(self._phase(named + shift, phase, representative))
        return total

    def _segment_apart(self, item: Item, representative: int, shift: int) -> Segment:
        total = EMPTY
        for (named, _), parts in groupby(item.parts, key=lambda part: (part[0], part[1] in COPIES)):
            whole = EMPTY
            for _, phase in parts:
                whole = whole.then(self._phase(named + shift, phase, representative))
            seconds = max(whole.device_s, whole.host_s)
            total = total.then(Segment(device_s=seconds, bound_s=seconds, recorded=whole.recorded))
        return total

    def _phase(self, index: int, phase: str, representative: int) -> Segment:
        if phase in COPIES:
            return copy_segment(self.view, phase, index, self.gpu_type[representative])
        segment: Segment = getattr(self._cost(index, representative), phase)
        return segment

    def _cost(self, index: int, representative: int) -> OperatorCost:
        view = self.view
        samples = self.samples(index, representative)
        return view.costs.operator(index, view.shardings[index], samples, self.gpu_type[representative])
