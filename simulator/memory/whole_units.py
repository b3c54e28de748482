"""What ZeRO has whole for a while on one device: gathered parameters, and gradients that are not scattered yet.

Both by unit (``CostTables.gather_units``). Those of the root are gathered first and scattered last, all as one.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import (
    bucket_buffer_bytes,
    parameter_groups,
    units_gathered_for,
    whole_gradients_begin,
)
from simulator.memory.events import GATHERED, UNSHARDED, Pass


class WholeUnits:
    """Follows the passes of a stage.

    Args:
        view: The stage.
        reshards: ZeRO-3 parameters are freed after use.
        sharded_gradients: Gradients of ZeRO-2 and 3 are reduced in every backward pass.
    """

    def __init__(self, view: StageView, *, reshards: bool, sharded_gradients: bool) -> None:
        self.view = view
        runtime, operators = view.costs.problem.runtime, view.costs.problem.workload.operators
        self._unit_of = view.costs.gather_units
        self._prefetches = runtime.prefetches_gathers
        self._root = sorted(
            {self._unit_of[index] for index in view.operators if operators[index].layer in view.costs.root_layers}
        )
        self._gathers = self._gathered_units() if reshards else {}
        scattered, wait = runtime.gradient_accumulation_bytes, runtime.waiting_gradient_share
        self._unsharded = self._gradients(self._unit_of, scattered) if sharded_gradients else {}
        every = range(len(operators))
        self._waiting = self._gradients(every, scattered * wait) if sharded_gradients and wait is not None else {}
        self._bucket = bucket_buffer_bytes(parameter_groups(view), runtime) if sharded_gradients else 0.0
        self._open: int | None = None  # the unit whose gradients wait
        self._travelling: int | None = None  # the unit whose gradients are being scattered

    def _gathered_units(self) -> dict[int, float]:
        """Return the bytes that each unit gathers."""
        runtime = self.view.costs.problem.runtime
        found: dict[int, float] = {}
        for group in parameter_groups(self.view):
            for unit in units_gathered_for(self.view, group):
                found[unit] = found.get(unit, 0.0) + group.num_elements * runtime.gathered_parameter_bytes
        return dict(sorted(found.items()))

    def _gradients(self, key: Sequence[int], bytes_each: float) -> dict[int, float]:
        """Return the bytes of whole gradients that are scattered, by what each operator has in ``key``."""
        found: dict[int, float] = {}
        for group in parameter_groups(self.view):
            for index in whole_gradients_begin(self.view, group):
                found[key[index]] = found.get(key[index], 0.0) + group.num_elements * bytes_each
        return found

    # Parameters

    def gather(self, leaving: int | None, entering: int | None, events: Pass) -> None:
        """Free the gathered parameters of a unit; hold those of the next, and of the one after where it is prefetched.

        Those of the root are gathered first and stay from a forward pass to the end of its backward pass, once
        for all microbatches in flight.

        Args:
            leaving: The unit before; None where a pass begins.
            entering: The unit that follows; None where a pass ends.
            events: Of the pass.
        """
        if not self._gathers:
            return
        for unit in self._root if leaving is None else ():
            events.allocate(f"unit {unit}/gathered", self._gathers.get(unit, 0.0), GATHERED, lasting=True)
        units = [unit for unit in self._gathers if unit not in self._root]
        if leaving in units:
            events.free(f"unit {leaving}/gathered")
        if entering is None:
            for unit in units:
                events.free(f"unit {unit}/gathered")
            return
        if entering in units:
            events.allocate(f"unit {entering}/gathered", self._gathers[entering], GATHERED)
            if not self._prefetches:
                return
            position = units.index(entering)
            step = -1 if leaving is not None and leaving > entering else 1
            if leaving is None and position == len(units) - 1:
                step = -1
            after = position + step
            if 0 <= after < len(units):
                events.allocate(f"unit {units[after]}/gathered", self._gathers[units[after]], GATHERED)

    def free_root(self, events: Pass) -> None:
        """Free the root's gathered parameters: its backward pass is over."""
        for unit in self._root:
            events.free(f"unit {unit}/gathered")

    # Gradients

    def begin(self, events: Pass) -> None:
        """Make the buffer that gradients of a backward pass are written into."""
        events.allocate("gradient bucket", self._bucket, UNSHARDED)

    def scatters(self, unit: int) -> bool:
        """Return whether a unit has whole gradients that are scattered."""
        return unit in self._unsharded

    def enter(self, unit: int, events: Pass) -> None:
        """Make room for a unit's gradients; those of the unit but one above have been scattered by then."""
        if not self.scatters(unit):
            return
        if self._waiting:
            if unit != self._open:
                self._scatter_open(events)
                self._open = None if unit in self._root else unit
            return
        above = sorted(each for each in self._unsharded if each > unit and each not in self._root)
        for each in above[1:]:
            events.free(f"unit {each}/unsharded")
        events.allocate(f"unit {unit}/unsharded", self._unsharded[unit], UNSHARDED)

    def wait(self, index: int, events: Pass) -> None:
        """Hold the gradient that an operator has made until its unit is scattered."""
        if index in self._waiting:
            events.allocate(self._waits_as(index), self._waiting[index], UNSHARDED)

    def scatter_rest(self, events: Pass) -> None:
        """Scatter what a backward pass leaves: the last unit, and the root."""
        if self._waiting:
            self._scatter_open(events)
            self._scatter(self._root, events)
            self._open = self._travelling = None
        for unit in self._unsharded:
            events.free(f"unit {unit}/unsharded")
        events.free("gradient bucket")

    def _scatter_open(self, events: Pass) -> None:
        if self._open is not None:
            self._scatter([self._open], events)
            self._travelling = self._open

    def _scatter(self, units: Sequence[int], events: Pass) -> None:
        """Copy gradients into what is scattered of them at once; what was before has been by then."""
        if self._travelling is not None:
            events.free(f"unit {self._travelling}/unsharded")
        for unit in units:
            events.allocate(f"unit {unit}/unsharded", self._unsharded.get(unit, 0.0), UNSHARDED)
        for index in self._waiting:
            if self._unit_of[index] in units:
                events.free(self._waits_as(index))

    def _waits_as(self, index: int) -> str:
        return f"operator {index}/waiting"
