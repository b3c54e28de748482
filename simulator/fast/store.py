"""Growing arrays of the fast estimate: tables, rows, boundaries, and the hash table that finds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.fast.arrays import (
    FAMILY,
    HOST_COLUMNS,
    LINE,
    MAX_FAMILIES,
    OF_INPUTS,
    STEP_COLUMNS,
    TIME_COLUMNS,
    TimeTables,
)
from simulator.fast.layouts import Spent
from simulator.fast.memory import MAXIMA, MEMORY_COLUMNS, NUM_STATES, MemoryTables
from simulator.fast.step import step_rates
from simulator.fast.tables import Table, TableBuilder

Ints = NDArray[np.int64]

MAX_MISSES = 4096
"""Of one pass over the plans."""


class Store:
    """Everything that one estimator has worked out.

    Attributes:
        time, memory: What the compiled functions read.
        misses, counts: What they write of things that are missing.
    """

    def __init__(self, builder: TableBuilder) -> None:
        self._builder = builder
        self._gpu_types = tuple(dict.fromkeys(builder.problem.gpu_types))
        shape, savings = builder.structure, builder.savings
        count, tied = len(shape.classes), len(shape.tied)
        levels = max(1, count.bit_length())
        most_inputs = int(np.diff(shape.input_offsets).max(initial=1))
        none = np.zeros(0, dtype=np.int64)
        self.time = TimeTables(
            sums=np.zeros((0, count + 1, TIME_COLUMNS)),
            entering_s=np.zeros((0, len(shape.input_producers), 2)),
            settling_s=np.zeros((0, len(shape.producers), 2)),
            has_private=np.zeros((0, count), dtype=np.int64),
            made=np.zeros((0, len(shape.producers)), dtype=np.int64),
            read=np.zeros((0, len(shape.readers)), dtype=np.int64),
            passed=np.zeros((0, count), dtype=np.int64),
            in_shards=np.zeros((0, len(shape.producers)), dtype=np.int64),
            families=np.zeros((0, MAX_FAMILIES, FAMILY), dtype=np.int64),
            tied=np.zeros((0, tied, 4), dtype=np.int64),
            tied_work=np.zeros((0, tied, STEP_COLUMNS)),
            aliases=none,
            line_offsets=np.zeros(1, dtype=np.int64),
            lines=np.zeros((0, LINE)),
            point_offsets=np.zeros(1, dtype=np.int64),
            points=np.zeros((0, 2)),
            goes_on=none,
            channel_hosts_s=np.zeros((0, HOST_COLUMNS)),
            rows=np.zeros((0, OF_INPUTS + most_inputs, 2)),
            beyond_host_s=np.zeros((0, count if builder.waits_for_gathers else 0, 4)),
            boundaries=np.zeros((0, 4)),
            norms_s=np.zeros(0),
            step_rates=np.array([step_rates(builder.costs, gpu_type) for gpu_type in self._gpu_types]),
            keys=np.zeros(4 * MAX_MISSES, dtype=np.uint64),
            values=np.zeros(4 * MAX_MISSES, dtype=np.int64),
            placement_shape=none,
            placement_form=none,
            placement_node=none,
            placement_types=none,
        )
        self.memory = MemoryTables(
            sums=np.zeros((0, count + 1, MEMORY_COLUMNS)),
            saved_bytes=np.zeros((0, len(savings.operators), 3)),
            made_bytes=np.zeros((0, len(shape.producers))),
            read_bytes=np.zeros((0, len(shape.readers))),
            in_shards=np.zeros((0, len(shape.producers)), dtype=np.int64),
            num_parts=np.zeros((0, len(shape.readers)), dtype=np.int64),
            replicas=none,
            maxima=np.zeros((0, MAXIMA, levels, count)),
            tied_bytes=np.zeros((0, tied, NUM_STATES)),
            tied_layouts=np.zeros((0, tied), dtype=np.int64),
            capacity_bytes=np.zeros(0),
        )
        self.misses = np.zeros((MAX_MISSES, 4), dtype=np.int64)
        self.counts = np.zeros(1, dtype=np.int64)
        self._used = dict.fromkeys(("table", "row", "boundary", "placement", "norm"), 0)
        self._num_keys = 0

    def add_placement(self, shape: int, form: int, node: int, gpu_types: set[str], capacity_bytes: float) -> None:
        """Append a placement."""
        of_time = ("placement_shape", "placement_form", "placement_node", "placement_types")
        number = self._next("placement", of_time, ("capacity_bytes",))
        self.time.placement_types[number] = sum(1 << self._gpu_types.index(gpu_type) for gpu_type in gpu_types)
        self.time.placement_shape[number] = shape
        self.time.placement_form[number] = form
        self.time.placement_node[number] = node
        self.memory.capacity_bytes[number] = capacity_bytes

    def add_table(self, slot: int, table: Table, alias: int) -> None:
        """Append a table and let the slot of the hash table name it; see ``TimeTables.aliases``."""
        layouts = ("made", "read", "passed", "in_shards")
        of_operators = ("sums", "entering_s", "settling_s", "has_private", "beyond_host_s")
        own = (*of_operators, *layouts, "families", "tied", "tied_work")
        sizes = ("saved_bytes", "made_bytes", "read_bytes", "tied_bytes")
        same = (*sizes, "in_shards", "num_parts", "replicas")
        of_memory = (*same, "sums", "maxima", "tied_layouts")
        number = self._next("table", (*own, "aliases"), of_memory)
        for name in own:
            getattr(self.time, name)[number] = getattr(table, name)
        self.time.aliases[number] = alias
        self.memory.sums[number] = table.memory_sums
        for name in same:
            getattr(self.memory, name)[number] = getattr(table, name)
        self.memory.maxima[number, :, : table.maxima.shape[1]] = table.maxima
        self.memory.tied_layouts[number] = table.tied[:, 2]
        self._name(slot, number)
        self._copy_channels()

    def add_tie(self, slot: int, channel: int) -> None:
        """Let the slot of the hash table name a channel, as ``Channels.of_tied`` counts it."""
        self._name(slot, channel)
        self._copy_channels()

    def _copy_channels(self) -> None:
        channels = self._builder.channels
        if len(channels.lines) + 1 != len(self.time.line_offsets):
            self.time = self.time._replace(
                line_offsets=_offsets([len(found) for found in channels.lines]),
                lines=np.array([line for found in channels.lines for line in found]).reshape(-1, LINE),
                point_offsets=_offsets([len(found) for found in channels.points]),
                points=np.array([point for found in channels.points for point in found]).reshape(-1, 2),
                goes_on=np.array(channels.goes_on, dtype=np.int64),
                channel_hosts_s=np.array(channels.hosts_s, dtype=np.float64).reshape(-1, HOST_COLUMNS),
            )

    def add_row(self, slot: int, row: list[Spent]) -> None:
        """Append an operator between unlike neighbours."""
        number = self._next("row", ("rows",), ())
        self.time.rows[number, : len(row)] = row
        self._name(slot, number)

    def add_boundary(self, slot: int, row: list[float]) -> None:
        """Append a boundary."""
        number = self._next("boundary", ("boundaries",), ())
        self.time.boundaries[number] = row
        self._name(slot, number)

    def add_norm(self, slot: int, seconds: float) -> None:
        """Append the collective of a norm."""
        number = self._next("norm", ("norms_s",), ())
        self.time.norms_s[number] = seconds
        self._name(slot, number)

    def forget(self, slots: Ints) -> None:
        """Let the next plan that needs these slots ask for them again."""
        keys, values = self.time.keys, self.time.values
        live = (keys != 0) & ~np.isin(np.arange(len(keys)), slots)
        self._rebuilt(keys[live], values[live], len(keys))

    def make_room(self) -> None:
        """Keep the hash table at most a third full, with room for the misses of another pass."""
        keys, values = self.time.keys, self.time.values
        if 3 * (self._num_keys + MAX_MISSES) > len(keys):
            live = keys != 0
            self._rebuilt(keys[live], values[live], 4 * len(keys))

    def _name(self, slot: int, number: int) -> None:
        self.time.values[slot] = number
        self._num_keys += 1

    def _rebuilt(self, keys: NDArray[np.uint64], values: Ints, size: int) -> None:
        found, numbers = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=np.int64)
        for key, value in zip(keys.tolist(), values.tolist(), strict=True):
            slot = (key >> 20) % size
            while found[slot]:
                slot = (slot + 1) % size
            found[slot], numbers[slot] = key, value
        self.time = self.time._replace(keys=found, values=numbers)

    def _next(self, what: str, of_time: tuple[str, ...], of_memory: tuple[str, ...]) -> int:
        """Return the number of a new entry; arrays double when they are full."""
        number = self._used[what]
        self._used[what] += 1
        if number == len(getattr(self.time, of_time[0])):
            self.time = self.time._replace(**{name: _doubled(getattr(self.time, name)) for name in of_time})
            self.memory = self.memory._replace(**{name: _doubled(getattr(self.memory, name)) for name in of_memory})
        return number


def _doubled(array: NDArray) -> NDArray:  # type: ignore[type-arg]
    longer = np.zeros((max(8, 2 * len(array)), *array.shape[1:]), dtype=array.dtype)
    longer[: len(array)] = array
    return longer


def _offsets(counts: list[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
