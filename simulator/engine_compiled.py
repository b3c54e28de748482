"""Run a task graph with numba: the SimPy engine's semantics, two to three orders of magnitude faster.

``taskgraph`` states the semantics and ``engine_simpy`` defines them readably. Times come out bit for bit as
there, because both do the same arithmetic. The differences are in what needs a clock:

- A task whose speed cannot change ends when plain arithmetic says, once all it waits for have ended. Such
  tasks never see the heap, and are worked out ahead of the clock, as hosts are. A graph without changing
  speeds is a longest-path sweep.
- The heap holds only tasks whose speed may change: their begin where that lies ahead, and their end, one entry
  each that moves when the speed changes.
- Loads are summed in twice the precision, so they do not depend on the order of users (SimPy's engine: fsum).

The first call in a fresh environment compiles for some seconds and says so on the log ``windtunnel``; compiled
code is kept on disk (``compiled_cache`` says where; ``NUMBA_CACHE_DIR`` moves it).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simulator.compiled_cache import compiled, inlined, is_cached
from simulator.compiled_prepare import (
    Bytes,
    Flags,
    Floats,
    Int32s,
    Int64s,
    bounds_of_launched,
    capacities,
    crowding_shares,
    slowing_devices,
    successors,
    times_are_legal,
)
from simulator.engine_common import DeadlockError, explain_deadlock
from simulator.taskgraph import Schedule, TaskGraph

__all__ = ["DeadlockError", "run_compiled"]

TASKS_PER_PROGRESS_CALL = 1 << 18
"""Tasks between two returns to Python, for progress and for interrupts."""

SHARE_TOLERANCE = 1e-12  # As engine_common's; a global of another file would not make the cache stale.

# Places in ``_State.counters``.
NUM_ENDED, HEAP_SIZE, NUM_READY, NUM_HOSTS, NUM_FREE, NUM_DEVICES, NUM_RESOURCES, EVENTS, SPEED_CHANGES = range(9)
COUNTERS = 9


class _Graph(NamedTuple):
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


class _State(NamedTuple):
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


def run_compiled(graph: TaskGraph, progress: Callable[[int], None] | None = None) -> Schedule:
    """Simulate one iteration and return when every task ran, as ``run_simpy`` does.

    Args:
        graph: What to run; all times in seconds, finite and >= 0.
        progress: Called now and then with the number of tasks ended so far, at last with all of them.

    Returns:
        Start, end and host arrival of every task in seconds from the start of the iteration. A task
        that no host launches has arrival 0 and no bound. ``statistics`` holds ``events`` (put on the
        heap) and ``speed_changes`` (of running tasks).

    Raises:
        DeadlockError: If tasks wait for each other in a circle; the message names the circle.
    """
    if not is_cached(_advance):
        logging.getLogger("windtunnel").warning("compiling the engine, once on this machine (some seconds) ...")
    fixed, state = _prepare(graph)
    counters = state.counters
    while True:
        ended = int(counters[NUM_ENDED])
        going_on = _advance(fixed, state, ended + TASKS_PER_PROGRESS_CALL)
        if not going_on:
            break
        if progress is not None:
            progress(int(counters[NUM_ENDED]))
    if counters[NUM_ENDED] < graph.num_tasks:
        raise DeadlockError(explain_deadlock(graph, state.end_s, _host_positions(graph, state)))
    if progress is not None:
        progress(int(counters[NUM_ENDED]))
    return Schedule(
        start_s=state.start_s,
        end_s=state.end_s,
        host_arrival_s=state.arrival_s,
        statistics={"events": float(counters[EVENTS]), "speed_changes": float(counters[SPEED_CHANGES])},
    )


def _host_positions(graph: TaskGraph, state: _State) -> list[int]:
    """Return where each host has stopped: at a task it waits for, or behind its last."""
    positions = state.host_position.tolist()
    for device, position in enumerate(positions):
        last = graph.hosts.row(device)[position - 1] if position else -1
        if last >= 0 and graph.host_waits[last] and np.isnan(state.end_s[last]):
            positions[device] -= 1
    return positions


def _array(column: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """Return a column in the one layout that the engine is compiled for."""
    found = np.ascontiguousarray(column, dtype=dtype)
    return found if found.flags.writeable else found.copy()


def _prepare(graph: TaskGraph) -> tuple[_Graph, _State]:
    num_tasks, num_devices, num_resources = graph.num_tasks, graph.num_devices, len(graph.resource_names)
    names = ("work_s", "latency_s", "lead_s", "host_s", "bound_s")
    work_s, latency_s, lead_s, host_s, bound_s = (_array(getattr(graph, name), np.float64) for name in names)
    assert times_are_legal(work_s, latency_s, lead_s, host_s, bound_s)
    rows = (graph.predecessors, graph.streams, graph.hosts, graph.shares)
    before, streams, hosts, shares = (
        (_array(row.offsets, np.int32), _array(row.items, np.int32)) for row in rows
    )
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
    fixed = _Graph(
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
    state = _State(
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


# The heap: smallest time first. What ties is settled in any order, as everything of one instant is.


@inlined
def _rise(heap_s: Floats, heap_id: Int32s, heap_place: Int32s, place: int, time_s: float, identity: int) -> None:
    """Put an entry into the hole at ``place``, or above it."""
    while place > 0:
        above = (place - 1) >> 1
        if heap_s[above] <= time_s:
            break
        heap_s[place] = heap_s[above]
        moved = heap_id[above]
        heap_id[place] = moved
        if moved >= 0:
            heap_place[moved] = place
        place = above
    heap_s[place] = time_s
    heap_id[place] = identity
    if identity >= 0:
        heap_place[identity] = place


@inlined
def _sink(
    heap_s: Floats, heap_id: Int32s, heap_place: Int32s, size: int, place: int, time_s: float, identity: int
) -> None:
    """Put an entry into the hole at ``place``, or below it."""
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and heap_s[below + 1] < heap_s[below]:
            below += 1
        if heap_s[below] >= time_s:
            break
        heap_s[place] = heap_s[below]
        moved = heap_id[below]
        heap_id[place] = moved
        if moved >= 0:
            heap_place[moved] = place
        place = below
    heap_s[place] = time_s
    heap_id[place] = identity
    if identity >= 0:
        heap_place[identity] = place


@inlined
def _slowness(graph: _Graph, state: _State, task: int) -> float:
    """Return one over the speed of a running task, from the states in force."""
    load = 1.0
    factor = 1.0
    for place in range(graph.share_offsets[task], graph.share_offsets[task + 1]):
        load = max(load, state.load[graph.shares[place]])
    for place in range(graph.device_offsets[task], graph.device_offsets[task + 1]):
        device = graph.devices[place]
        if state.slowed[device]:
            factor = max(factor, graph.slowdowns[graph.kind[task], device])
    return load * factor


@inlined
def _mark_device(state: _State, device: int) -> None:
    if not state.device_is_changed[device]:
        state.device_is_changed[device] = True
        state.changed_devices[state.counters[NUM_DEVICES]] = device
        state.counters[NUM_DEVICES] += 1


@inlined
def _mark_resource(state: _State, resource: int) -> None:
    if not state.resource_is_changed[resource]:
        state.resource_is_changed[resource] = True
        state.changed_resources[state.counters[NUM_RESOURCES]] = resource
        state.counters[NUM_RESOURCES] += 1


@inlined
def _begin_work(graph: _Graph, state: _State, task: int, now_s: float) -> None:
    """Let a task whose latency has passed run."""
    counters = state.counters
    counters[NUM_FREE] -= 1
    slot = state.free_slots[counters[NUM_FREE]]
    state.slot_task[slot] = task
    kind = graph.kind[task]
    for place in range(graph.device_offsets[task], graph.device_offsets[task + 1]):
        device = graph.devices[place]
        state.on_device[state.device_row[device] + state.num_on_device[device]] = slot
        state.num_on_device[device] += 1
        state.num_running[kind, device] += 1
        if state.num_running[kind, device] == 1 and state.num_running[1 - kind, device] > 0:
            _mark_device(state, device)
    for place in range(graph.share_offsets[task], graph.share_offsets[task + 1]):
        resource, fraction = graph.shares[place], graph.fractions[place]
        free = state.resource_row[resource] + state.num_on_resource[resource]
        state.on_resource[free] = slot
        state.on_resource_fraction[free] = fraction
        state.num_on_resource[resource] += 1
        if state.num_on_resource[resource] > 1 or fraction > 1.0:
            _mark_resource(state, resource)
    slowness = _slowness(graph, state, task)
    state.since_s[slot] = now_s
    state.remaining_s[slot] = graph.work_s[task]
    state.slowness[slot] = slowness
    size = counters[HEAP_SIZE]
    counters[HEAP_SIZE] += 1
    counters[EVENTS] += 1
    finish_s = now_s + graph.work_s[task] * slowness
    _rise(state.heap_s, state.heap_id, state.heap_place, size, finish_s, slot)


@inlined
def _finish_work(graph: _Graph, state: _State, slot: int) -> None:
    """Take a task off its devices and resources."""
    task = state.slot_task[slot]
    kind = graph.kind[task]
    for place in range(graph.device_offsets[task], graph.device_offsets[task + 1]):
        device = graph.devices[place]
        row = state.device_row[device]
        last = row + state.num_on_device[device] - 1
        at = row
        while state.on_device[at] != slot:
            at += 1
        state.on_device[at] = state.on_device[last]
        state.num_on_device[device] -= 1
        state.num_running[kind, device] -= 1
        if state.num_running[kind, device] == 0 and state.num_running[1 - kind, device] > 0:
            _mark_device(state, device)
    for place in range(graph.share_offsets[task], graph.share_offsets[task + 1]):
        resource = graph.shares[place]
        row = state.resource_row[resource]
        last = row + state.num_on_resource[resource] - 1
        at = row
        while state.on_resource[at] != slot:
            at += 1
        state.on_resource[at] = state.on_resource[last]
        state.on_resource_fraction[at] = state.on_resource_fraction[last]
        state.num_on_resource[resource] -= 1
        if state.load[resource] > 1.0:
            _mark_resource(state, resource)
    state.free_slots[state.counters[NUM_FREE]] = slot
    state.counters[NUM_FREE] += 1


@inlined
def _touch(state: _State, slot: int, num_touched: int) -> int:
    if not state.is_touched[slot]:
        state.is_touched[slot] = True
        state.touched[num_touched] = slot
        num_touched += 1
    return num_touched


@inlined
def _change_speeds(graph: _Graph, state: _State, now_s: float) -> None:
    """Put new overlaps and loads in force; settle and re-time the running tasks they touch."""
    counters = state.counters
    num_touched = 0
    for number in range(counters[NUM_DEVICES]):
        device = state.changed_devices[number]
        state.device_is_changed[device] = False
        slowed = state.num_running[0, device] > 0 and state.num_running[1, device] > 0
        if slowed != state.slowed[device]:
            state.slowed[device] = slowed
            row = state.device_row[device]
            for place in range(row, row + state.num_on_device[device]):
                num_touched = _touch(state, state.on_device[place], num_touched)
    counters[NUM_DEVICES] = 0
    for number in range(counters[NUM_RESOURCES]):
        resource = state.changed_resources[number]
        state.resource_is_changed[resource] = False
        row = state.resource_row[resource]
        high, low = 0.0, 0.0  # Their sum is exact to about 100 bits, so the order of users does not matter.
        for place in range(row, row + state.num_on_resource[resource]):
            fraction = state.on_resource_fraction[place]
            total = high + fraction
            part = total - high
            low += (high - (total - part)) + (fraction - part)
            high = total
        load = high + low
        if not load > 1.0 + SHARE_TOLERANCE:
            load = 1.0
        if load != state.load[resource]:
            state.load[resource] = load
            for place in range(row, row + state.num_on_resource[resource]):
                num_touched = _touch(state, state.on_resource[place], num_touched)
    counters[NUM_RESOURCES] = 0

    for number in range(num_touched):
        slot = state.touched[number]
        state.is_touched[slot] = False
        slowness = _slowness(graph, state, state.slot_task[slot])
        if slowness == state.slowness[slot]:
            continue
        counters[SPEED_CHANGES] += 1
        done_s = (now_s - state.since_s[slot]) / state.slowness[slot]
        remaining_s = max(0.0, state.remaining_s[slot] - done_s)
        state.since_s[slot] = now_s
        state.remaining_s[slot] = remaining_s
        state.slowness[slot] = slowness
        finish_s = now_s + remaining_s * slowness
        place = state.heap_place[slot]
        if finish_s < state.heap_s[place]:
            _rise(state.heap_s, state.heap_id, state.heap_place, place, finish_s, slot)
        else:
            _sink(state.heap_s, state.heap_id, state.heap_place, counters[HEAP_SIZE], place, finish_s, slot)


@inlined
def _walk(graph: _Graph, state: _State, device: int, num_ready: int) -> int:
    """Let a host launch tasks until it must wait; return the number of ready tasks."""
    clock_s = state.host_clock_s[device]
    position = graph.host_offsets[device] + state.host_position[device]
    while position < graph.host_offsets[device + 1]:
        task = graph.hosts[position]
        position += 1
        arrival_s = clock_s + graph.lead_s[task]
        if arrival_s > state.arrival_s[task]:
            state.arrival_s[task] = arrival_s
        state.waits[task] -= 1
        if state.waits[task] == 0:
            state.ready[num_ready] = task
            num_ready += 1
        clock_s += graph.host_s[task]
        if graph.host_waits[task]:
            state.next_waiting[device] = state.first_waiting[task]
            state.first_waiting[task] = device
            break
    state.host_clock_s[device] = clock_s
    state.host_position[device] = position - graph.host_offsets[device]
    return num_ready


@compiled
def _advance(graph: _Graph, state: _State, until_ended: int) -> bool:
    """Run until so many tasks have ended; return whether anything is left that can run."""
    counters = state.counters
    now_s = state.now_s[0]
    num_ended = counters[NUM_ENDED]
    num_ready = counters[NUM_READY]
    start_s, end_s, arrival_s = state.start_s, state.end_s, state.arrival_s
    waits, ready = state.waits, state.ready
    goes_on = True
    while True:
        if num_ended >= until_ended:
            break
        if num_ready > 0:
            num_ready -= 1
            task = ready[num_ready]
            arrival = arrival_s[task]
            begin = max(start_s[task], arrival)
            start_s[task] = begin
            begin += graph.latency_s[task]
            if (
                graph.device_offsets[task + 1] > graph.device_offsets[task]
                or graph.share_offsets[task + 1] > graph.share_offsets[task]
            ):
                if begin > now_s:
                    size = counters[HEAP_SIZE]
                    counters[HEAP_SIZE] += 1
                    counters[EVENTS] += 1
                    _rise(state.heap_s, state.heap_id, state.heap_place, size, begin, ~task)
                else:
                    _begin_work(graph, state, task, now_s)
                continue
            end = begin + graph.work_s[task]
        elif counters[NUM_HOSTS] > 0:
            counters[NUM_HOSTS] -= 1
            num_ready = _walk(graph, state, state.walking[counters[NUM_HOSTS]], num_ready)
            continue
        else:
            size = counters[HEAP_SIZE]
            due = counters[NUM_DEVICES] + counters[NUM_RESOURCES] > 0
            if due and (size == 0 or state.heap_s[0] > now_s):
                _change_speeds(graph, state, now_s)
                continue
            if size == 0:
                goes_on = False
                break
            now_s = state.heap_s[0]
            identity = state.heap_id[0]
            size -= 1
            counters[HEAP_SIZE] = size
            if size > 0:
                _sink(
                    state.heap_s, state.heap_id, state.heap_place, size, 0, state.heap_s[size], state.heap_id[size]
                )
            if identity < 0:
                _begin_work(graph, state, ~identity, now_s)
                continue
            task = state.slot_task[identity]
            _finish_work(graph, state, identity)
            arrival = arrival_s[task]
            end = now_s

        # The task's work is done at ``end``.
        end = max(end, arrival + graph.bound_s[task])
        end_s[task] = end
        num_ended += 1
        for place in range(graph.successor_offsets[task], graph.successor_offsets[task + 1]):
            successor = graph.successors[place]
            if end > start_s[successor]:
                start_s[successor] = end
            left = waits[successor] - 1
            waits[successor] = left
            if left == 0:
                ready[num_ready] = successor
                num_ready += 1
        if graph.host_waits[task]:
            device = state.first_waiting[task]
            state.first_waiting[task] = -1
            while device >= 0:
                state.host_clock_s[device] = max(state.host_clock_s[device], end)
                state.walking[counters[NUM_HOSTS]] = device
                counters[NUM_HOSTS] += 1
                device = state.next_waiting[device]
    state.now_s[0] = now_s
    counters[NUM_ENDED] = num_ended
    counters[NUM_READY] = num_ready
    return goes_on
