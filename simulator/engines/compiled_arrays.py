"""The arrays that the loop of the compiled engine works on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.engines.compiled_prepare import Bytes, Flags, Floats, Int32s, Int64s

# Places in ``RunState.counters``.
NUM_ENDED, HEAP_SIZE, NUM_READY, NUM_HOSTS, NUM_FREE, NUM_DEVICES, NUM_RESOURCES, EVENTS, SPEED_CHANGES = range(9)
COUNTERS = 9


class FixedArrays(NamedTuple):
    """What stays as it is during a run. Rows are (offsets, items)."""

    work_s: Floats
    latency_s: Floats
    lead_s: Floats
    host_s: Floats
    bound_s: Floats
    kind: Bytes
    host_waits: Flags
    successor_offsets: Int64s
    successors: Int32s
    host_offsets: Int32s
    hosts: Int32s
    device_offsets: Int32s
    devices: Int32s
    share_offsets: Int32s
    shares: Int32s
    fractions: Floats
    slowdowns: NDArray[np.float64]  # [2, D], by kind.


class RunState(NamedTuple):
    """What a run changes; enough to go on after a return to Python.

    A *slot* holds a running task whose speed may change.
    """

    now_s: Floats  # [1]
    counters: Int64s
    start_s: Floats  # Until a task is released: the latest end of what it waited for.
    end_s: Floats
    arrival_s: Floats
    waits: Int32s
    ready: Int32s  # Stack of tasks that wait for nothing any more.
    host_clock_s: Floats
    host_position: Int64s
    walking: Int32s  # Stack of hosts that can go on.
    first_waiting: Int32s  # Per task, the hosts that wait for it, chained through next_waiting; -1 ends.
    next_waiting: Int32s
    heap_s: Floats
    heap_id: Int32s  # A slot, or ~task where the task's work is yet to begin.
    heap_place: Int32s  # Per slot.
    free_slots: Int32s
    slot_task: Int32s
    since_s: Floats
    remaining_s: Floats
    slowness: Floats
    touched: Int32s
    is_touched: Flags
    num_running: NDArray[np.int32]  # [2, D], by kind.
    slowed: Flags
    changed_devices: Int32s
    device_is_changed: Flags
    device_row: Int64s
    on_device: Int32s  # Slots, device_row[d] and on.
    num_on_device: Int32s
    load: Floats
    changed_resources: Int32s
    resource_is_changed: Flags
    resource_row: Int64s
    on_resource: Int32s  # Slots, resource_row[r] and on.
    on_resource_fraction: Floats
    num_on_resource: Int32s
