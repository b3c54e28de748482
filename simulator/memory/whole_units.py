"""What ZeRO has whole for a while on one device: gathered parameters, and gradients that are not scattered yet.

Both by unit, or by what of it is whole at once (``CostTables.unit_parts``). Those of the root are gathered first and
scattered last, all as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hardware_models.runtime import Way
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import parameter_groups, units_gathered_for
from simulator.lowering.whole_gradients import bucket_buffer_bytes, num_buffers, whole_gradients_begin
from simulator.memory.events import GATHERED, GRADIENTS, UNSHARDED, Pass

Anew = Mapping[int, Sequence[int]]


class WholeUnits:
    """Follows the passes of a stage.

    Args:
        view: The stage.
        reshards: ZeRO-3 parameters are freed after use; else gathered in the first forward pass of an iteration, and
            freed in the last backward pass, each unit when that is through with it.
        sharded_gradients: Gradients of ZeRO-2 and 3 are reduced in every backward pass.
        anew: By unit, bytes of gradients that the first backward pass makes: of what is scattered, its shards.
    """

    def __init__(self, view: StageView, *, reshards: bool, sharded_gradients: bool, anew: Anew) -> None:
        self.view = view
        self._runtime = runtime = view.costs.problem.runtime
        self._unit_of = view.costs.unit_parts
        self._copies_first = runtime.flattens_sharded
        self._anew = anew
        self._root = sorted(
            {self._unit_of[index] for index in view.operators if view.costs.units[index] in view.costs.root_units}
        )
        self._gathers, self._reshards = self._gathered_units(), reshards
        scattered, wait = runtime.travelling_gradient_bytes, runtime.waiting_gradient_share
        self._unsharded = self._gradients(self._unit_of, scattered) if sharded_gradients else {}
        every = range(len(view.costs.problem.workload.operators))
        self._waiting = self._gradients(every, scattered * wait) if sharded_gradients and wait is not None else {}
        self._buckets = [0]
        if sharded_gradients:
            self._buckets = [int(bucket_buffer_bytes(parameter_groups(view), runtime))] * num_buffers(view.plan)
        self._unmade, self._at_end = list[int](), list[int]()  # units without gradients yet, and those made at the end
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
        """Go on to the next unit of a forward pass: free what one has gathered, and hold what the other has.

        Args:
            leaving: The unit before; None where the pass begins.
            entering: The unit that follows; None where the pass ends.
            events: Of the pass.
        """
        if self._reshards:
            self._give_back(leaving, events, all_units=entering is None)
        self.hold(leaving, entering, events, "forward")

    def leave(self, unit: int | None, events: Pass, *, is_last: bool, gathers: bool, scatters: bool) -> None:
        """End the backward pass of a unit: scatter its gradients and free what it gathered.

        Where autograd copies the gradients into one tensor, that comes first.

        Args:
            unit: The unit; None for none.
            events: Of the pass.
            is_last: No other follows.
            gathers: The pass computes input gradients: units are gathered for it.
            scatters: It computes weight gradients.
        """
        if unit is None:
            return
        if scatters and self._copies_first:
            self._scatter_left(unit, events, is_last=is_last)
        if gathers:
            self._give_back(unit, events, all_units=is_last)
            for each in self._root if is_last else ():
                self._free(each, events)
        if scatters and not self._copies_first:
            self._scatter_left(unit, events, is_last=is_last)

    def _give_back(self, leaving: int | None, events: Pass, *, all_units: bool) -> None:
        for unit in self._gathers:
            if (unit == leaving or all_units) and unit not in self._root:
                self._free(unit, events)

    def _free(self, unit: int, events: Pass) -> None:
        free = events.free if self._reshards else events.free_at_last
        free(f"unit {unit}/gathered")

    def _allocate(self, unit: int, events: Pass, *, lasting: bool = False) -> None:
        lasting = lasting or not self._reshards
        events.allocate(f"unit {unit}/gathered", self._gathers.get(unit, 0.0), GATHERED, lasting=lasting)

    def hold(self, leaving: int | None, entering: int | None, events: Pass, way: Way) -> None:
        """Hold what a unit has gathered, and the one after where that is there by then (``Runtime.holds_next``).

        Those of the root are gathered first and stay from a forward pass to the end of its backward pass, once
        for all microbatches in flight. The backward pass begins with the root's, whatever it computes first, so the
        last unit is gathered then. What stays is there in backward passes.

        Args:
            leaving, entering, events: As for ``gather``.
            way: Of the pass.
        """
        if not self._gathers or entering is None or (way == "backward" and not self._reshards):
            return
        for unit in self._root if leaving is None else ():
            self._allocate(unit, events, lasting=True)
        units = [unit for unit in self._gathers if unit not in self._root]
        begins_in_root = way == "backward" and leaving is None and bool(self._gathers.keys() & self._root)
        if entering in units:
            self._allocate(entering, events)
        elif not begins_in_root:
            return
        after = [unit for unit in units if (unit > entering if way == "forward" else unit < entering)]
        if self._runtime.holds_next(way) and after:
            following = after[0 if way == "forward" else -1]
            self._allocate(following, events)

    # Gradients

    def begin(self, events: Pass) -> None:
        """Begin a backward pass: make the buffers that gradients are written into, where there are any."""
        self._unmade, self._at_end = sorted(self._anew), []
        events.allocate_each("gradient bucket", self._buckets, UNSHARDED)

    def scatters(self, unit: int) -> bool:
        """Return whether a unit has whole gradients that are scattered."""
        return unit in self._unsharded

    def enter(self, unit: int, events: Pass) -> None:
        """Make room for a unit's gradients; those of the unit but one above have been scattered by then."""
        if not self.scatters(unit):
            self._make_anew(unit, events)
        elif self._waiting:
            self._open = None if unit in self._root else unit
        else:
            above = sorted(each for each in self._unsharded if each > unit and each not in self._root)
            for each in above[1:]:
                events.free(f"unit {each}/unsharded")
            events.allocate(f"unit {unit}/unsharded", self._unsharded[unit], UNSHARDED)

    def wait(self, index: int, events: Pass) -> None:
        """Hold the gradient that an operator has made until its unit is scattered."""
        if index in self._waiting:
            events.allocate(self._waits_as(index), self._waiting[index], UNSHARDED)

    def _scatter_left(self, unit: int, events: Pass, *, is_last: bool) -> None:
        """Scatter the gradients of a unit that a backward pass has gone through, at its end those of the root too."""
        if self._open is not None:
            self._scatter([self._open], events)
        self._make_anew(unit, events)
        if not is_last:
            self._let_go(events)
            return
        if self._waiting:
            self._scatter(self._root, events)
        self._make_anew(None, events)
        for each in self._unsharded:
            events.free(f"unit {each}/unsharded")
        events.free_each("gradient bucket", self._buckets)
        self._open = self._travelling = None

    def _scatter(self, units: Sequence[int], events: Pass) -> None:
        """Copy gradients into what is scattered of them at once; what was before has been by then."""
        if self._travelling is not None:
            events.free(f"unit {self._travelling}/unsharded")
        for unit in units:
            events.allocate(f"unit {unit}/unsharded", self._unsharded.get(unit, 0.0), UNSHARDED)
        for index in self._waiting:
            if self._unit_of[index] in units:
                events.free(self._waits_as(index))
        self._travelling, self._open = self._open, None

    def _let_go(self, events: Pass) -> None:
        """Free what is being scattered, as the host of torch's first FSDP does once it has launched that."""
        if self._copies_first and self._travelling is not None:
            events.free(f"unit {self._travelling}/unsharded")
            self._travelling = None

    def _make_anew(self, lowest: int | None, events: Pass) -> None:
        """Make gradients that no pass has made before, of units from one on but the root's; of all where it is None."""
        made = list[int]()
        while self._unmade and (lowest is None or self._unmade[-1] >= lowest):
            unit = self._unmade.pop()
            waits = lowest is not None and unit in self._root and self.scatters(unit)
            (self._at_end if waits else made).append(unit)
        for unit in [*reversed(made), *(self._at_end[::-1] if lowest is None else ())]:
            for number, size in enumerate(self._anew[unit]):
                events.allocate(f"unit {unit}/gradient {number}", size, GRADIENTS, lasting=True)

    def _waits_as(self, index: int) -> str:
        return f"operator {index}/waiting"
