"""From a task graph to the arrays of the compiled engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simulator.engines.compiled_arrays import COUNTERS, NUM_FREE, NUM_HOSTS, NUM_READY, FixedArrays, RunState
from simulator.engines.compiled_prepare import (
    bounds_of_launched,
    capacities,
    crowding_shares,
    slowing_devices,
    successors,
    times_are_legal,
)
from simulator.taskgraph import TaskGraph


def _array(column: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return a column in the one layout that the engine is compiled for."""
    found = np.ascontiguousarray(column, dtype=dtype)
    return found if found.flags.writeable else found.copy()


def prepare(graph: TaskGraph) -> tuple[FixedArrays, RunState]:
    """Return what stays fixed in a run and where it starts."""
    num_tasks, num_devices, num_resources = graph.num_tasks, graph.num_devices, len(graph.resource_names)
    names = ("work_s", "latency_s", "lead_s", "host_s", "bound_s")
    work_s, latency_s, lead_s, host_s, bound_s = (_array(getattr(graph, name), np.float64) for name in names)
    assert times_are_legal(work_s, latency_s, lead_s, host_s, bound_s)
    rows = (graph.predecessors, graph.streams, graph.hosts, graph.shares)
    before, streams, hosts, shares = ((_array(row.offsets, np.int32), _array(row.items, np.int32)) for row in rows)
    kind = _array(graph.kind, np.int8)
    stream_device = _array(graph.stream_device, np.int32)
    slowdowns = np.stack([graph.slowdown_computation, graph.slowdown_communication]).astype(np.float64)
    after_offsets, after, waits = successors(num_tasks, *before, *streams, hosts[1])
    device_offsets, devices = slowing_devices(
        work_s, kind, *streams, stream_device, slowdowns[0].copy(), slowdowns[1].copy()
    )
    share_offsets, share_items, fractions = crowding_shares(
        work_s, *shares, _array(graph.share_fractions, np.float64), num_resources, *streams
    )
    at_once, device_row, resource_row = capacities(
        device_offsets, share_offsets, share_items, num_resources, stream_device, streams[1], num_devices
    )
    fixed = FixedArrays(
        work_s=work_s,
        latency_s=latency_s,
        lead_s=lead_s,
        host_s=host_s,
        bound_s=bounds_of_launched(bound_s, hosts[1]),
        kind=kind,
        host_waits=_array(graph.host_waits, np.bool_),
        successor_offsets=after_offsets,
        successors=after,
        host_offsets=hosts[0],
        hosts=hosts[1],
        device_offsets=device_offsets,
        devices=devices,
        share_offsets=share_offsets,
        shares=share_items,
        fractions=fractions,
        slowdowns=slowdowns,
    )
    ready = np.empty(num_tasks, dtype=np.int32)
    released = np.flatnonzero(waits == 0)
    ready[: len(released)] = released
    counters = np.zeros(COUNTERS, dtype=np.int64)
    counters[NUM_READY], counters[NUM_HOSTS], counters[NUM_FREE] = len(released), num_devices, at_once
    state = RunState(
        now_s=np.zeros(1),
        counters=counters,
        start_s=np.zeros(num_tasks),
        end_s=np.full(num_tasks, np.nan),
        arrival_s=np.zeros(num_tasks),
        waits=waits,
        ready=ready,
        host_clock_s=np.zeros(num_devices),
        host_position=np.zeros(num_devices, dtype=np.int64),
        walking=np.arange(num_devices, dtype=np.int32),
        first_waiting=np.full(num_tasks if bool(fixed.host_waits.any()) else 0, -1, dtype=np.int32),
        next_waiting=np.full(num_devices, -1, dtype=np.int32),
        heap_s=np.empty(at_once),
        heap_id=np.empty(at_once, dtype=np.int32),
        heap_place=np.empty(at_once, dtype=np.int32),
        free_slots=np.arange(at_once, dtype=np.int32)[::-1].copy(),
        slot_task=np.empty(at_once, dtype=np.int32),
        since_s=np.empty(at_once),
        remaining_s=np.empty(at_once),
        slowness=np.empty(at_once),
        touched=np.empty(at_once, dtype=np.int32),
        is_touched=np.zeros(at_once, dtype=np.bool_),
        num_running=np.zeros((2, num_devices), dtype=np.int32),
        slowed=np.zeros(num_devices, dtype=np.bool_),
        changed_devices=np.empty(num_devices, dtype=np.int32),
        device_is_changed=np.zeros(num_devices, dtype=np.bool_),
        device_row=device_row,
        on_device=np.empty(int(device_row[-1]), dtype=np.int32),
        num_on_device=np.zeros(num_devices, dtype=np.int32),
        load=np.ones(num_resources),
        changed_resources=np.empty(num_resources, dtype=np.int32),
        resource_is_changed=np.zeros(num_resources, dtype=np.bool_),
        resource_row=resource_row,
        on_resource=np.empty(int(resource_row[-1]), dtype=np.int32),
        on_resource_fraction=np.empty(int(resource_row[-1])),
        num_on_resource=np.zeros(num_resources, dtype=np.int32),
    )
    return fixed, state
