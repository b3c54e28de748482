"""Gathers of sharded parameters: unit i+1 is gathered while unit i computes.

What was stepped in shards is gathered so in the first forward pass (``refreshes_in_forward``). Its first unit does not
wait for the passes before: its gather was begun with the last unit of the chunk before, or behind the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.lowering.copies import GATHERED_COPY
from simulator.lowering.items import Item, ItemList
from simulator.lowering.mesh import MeshCollective, MeshSizes
from simulator.lowering.recompute import whole_units
from simulator.lowering.synchronisation import gather_calls, gather_collectives, refreshes_in_forward


@dataclass
class ParameterGathers(ItemList):
    """A list of items in the making, where units (``CostTables.units``) wait for gathers of their parameters."""

    _units: list[int] = field(default_factory=list)
    _first_of: dict[int, int] = field(default_factory=dict)
    _gather_items: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _gather_calls: dict[tuple[int, MeshSizes, tuple[int, ...]], int] = field(default_factory=dict)
    _copied: set[int] = field(default_factory=set)
    _pass_cause: str = "forward"
    _unit_started: int | None = None
    _previous_chain_end: int | None = None

    def _gathers(self, order: list[int]) -> dict[int, list[MeshCollective]]:
        self._units, self._gather_items, self._copied = [], {}, set()
        self._unit_started = self._previous_chain_end = None
        if not self.fidelity.parameter_gather:
            return {}
        found = gather_collectives(self.view)
        self._gather_calls = gather_calls(self.view)
        unit_of = self.view.costs.units
        self._units = list(dict.fromkeys(unit_of[index] for index in order))
        self._first_of = {unit_of[index]: index for index in sorted(order, reverse=True)}
        return found

    def _start_unit(self, index: int, gathers: dict[int, list[MeshCollective]]) -> None:
        if not gathers:
            return
        unit = self.view.costs.units[index]
        if unit == self._unit_started:
            return
        position = self._units.index(unit)
        before = self._last_chained()
        prefetches = self.view.costs.problem.runtime.prefetches_gathers
        self._emit_gather(unit, gathers, self._previous_chain_end if prefetches else before)
        if "gather" in self.view.costs.problem.runtime.host_waits and self._gather_items[unit]:
            after = self._gather_items[unit]
            self.items.append(Item(cause="parameter gather", after=after, operator=index, waits=True))
        if prefetches and position + 1 < len(self._units):
            self._emit_gather(self._units[position + 1], gathers, before)
        self._unit_started = unit
        self._previous_chain_end = before
        gathered = self._gather_items.get(unit, ())
        root = self.view.costs.root_units
        together = [unit] if unit not in root else [each for each in self._gather_items if each in root]
        self._pending_after += tuple(item for each in together for item in self._gather_items.get(each, ()))
        if gathered and unit not in self._copied and self.view.costs.problem.runtime.copies_gathered:
            self._copied.add(unit)
            self._compute(self._pass_cause, index, (GATHERED_COPY,))

    def _release(self, start: int, stop: int) -> None:
        """Give back the gathered parameters of units that lie whole in a segment which was just computed again."""
        for unit in whole_units(self.view.costs.units, start, stop):
            self._gather_items.pop(unit, None)
            self._copied.discard(unit)
        self._unit_started = None

    def _emit_gather(self, unit: int, gathers: dict[int, list[MeshCollective]], after: int | None) -> None:
        if unit in self._gather_items:
            return
        positions = []
        for collective in gathers.get(unit, ()):
            positions.append(len(self.items))
            self.items.append(
                Item(
                    cause="parameter gather",
                    collective=collective,
                    role="gather",
                    chained=False,
                    after=() if after is None else (after,),
                    early=refreshes_in_forward(self.view),
                    operator=self._first_of[unit],
                    num_calls=self._gather_calls.get((unit, collective.sizes, collective.axes), 1),
                    num_entries=self._num_entries(collective),
                )
            )
        self._gather_items[unit] = tuple(positions)
