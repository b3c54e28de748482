"""Gathers of sharded parameters: layer i+1 is gathered while layer i computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from simulator.lowering.copies import GATHERED_COPY
from simulator.lowering.items import Item, ItemList
from simulator.lowering.mesh import MeshCollective, MeshSizes
from simulator.lowering.recompute import whole_layers
from simulator.lowering.synchronisation import gather_calls, gather_collectives


@dataclass
class ParameterGathers(ItemList):
    """A list of items in the making, where layers wait for gathers of their parameters."""

    _units: list[int] = field(default_factory=list)
    _first_of: dict[int, int] = field(default_factory=dict)
    _gather_items: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _gather_calls: dict[tuple[int, MeshSizes, tuple[int, ...]], int] = field(default_factory=dict)
    _copied: set[int] = field(default_factory=set)
    _pass_cause: str = "forward"
    _layer_started: int | None = None
    _previous_chain_end: int | None = None

    def _gathers(self, order: list[int]) -> dict[int, list[MeshCollective]]:
        self._units, self._gather_items, self._copied = [], {}, set()
        self._layer_started = self._previous_chain_end = None
        if not self.fidelity.parameter_gather:
            return {}
        found = gather_collectives(self.view)
        self._gather_calls = gather_calls(self.view)
        workload = self.view.costs.problem.workload
        self._units = list(dict.fromkeys(workload.operators[index].layer for index in order))
        self._first_of = {workload.operators[index].layer: index for index in sorted(order, reverse=True)}
        return found

    def _start_layer(self, index: int, gathers: dict[int, list[MeshCollective]]) -> None:
        if not gathers:
            return
        layer = self.view.costs.problem.workload.operators[index].layer
        if layer == self._layer_started:
            return
        position = self._units.index(layer)
        before = self._last_chained()
        prefetches = self.view.costs.problem.runtime.prefetches_gathers
        self._emit_gather(layer, gathers, self._previous_chain_end if prefetches else before)
        if "gather" in self.view.costs.problem.runtime.host_waits and self._gather_items[layer]:
            after = self._gather_items[layer]
            self.items.append(Item(cause="parameter gather", after=after, operator=index, waits=True))
        if prefetches and position + 1 < len(self._units):
            self._emit_gather(self._units[position + 1], gathers, before)
        self._layer_started = layer
        self._previous_chain_end = before
        gathered = self._gather_items.get(layer, ())
        root = self.view.costs.root_layers
        together = [layer] if layer not in root else [each for each in self._gather_items if each in root]
        self._pending_after += tuple(item for each in together for item in self._gather_items.get(each, ()))
        if gathered and layer not in self._copied and self.view.costs.problem.runtime.copies_gathered:
            self._copied.add(layer)
            self._compute(self._pass_cause, index, (GATHERED_COPY,))

    def _release(self, start: int, stop: int) -> None:
        """Give back the gathered parameters of layers that lie whole in a segment which was just computed again."""
        operators = self.view.costs.problem.workload.operators
        for layer in whole_layers(operators, start, stop):
            self._gather_items.pop(layer, None)
            self._copied.discard(layer)
        self._layer_started = None

    def _emit_gather(self, layer: int, gathers: dict[int, list[MeshCollective]], after: int | None) -> None:
        if layer in self._gather_items:
            return
        positions = []
        for collective in gathers.get(layer, ()):
            positions.append(len(self.items))
            self.items.append(
                Item(
                    cause="parameter gather",
                    collective=collective,
                    role="gather",
                    chained=False,
                    after=() if after is None else (after,),
                    operator=self._first_of[layer],
                    num_calls=self._gather_calls.get((layer, collective.sizes, collective.axes), 1),
                    num_entries=self._num_entries(collective),
                )
            )
        self._gather_items[layer] = tuple(positions)
