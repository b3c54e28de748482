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
def _slowness(
    task: int,
    kind: int,
    device_offsets: Int32s,
    devices: Int32s,
    share_offsets: Int32s,
    shares: Int32s,
    slowdowns: Floats,
    slowed: Flags,
    loads: Floats,
) -> float:
    """Return one over the speed of a running task, from the states in force."""
    load = 1.0
    factor = 1.0
    for place in range(share_offsets[task], share_offsets[task + 1]):
        load = max(load, loads[shares[place]])
    for place in range(device_offsets[task], device_offsets[task + 1]):
        if slowed[devices[place]]:
            factor = max(factor, slowdowns[kind, devices[place]])
    return load * factor


@compiled
def _advance(graph: _Graph, state: _State, until_ended: int) -> bool:
    """Run until so many tasks have ended; return whether anything is left that can run.

    One long function: passing dozens of arrays to helpers would take most of the time.
    """
    work_s, latency_s, lead_s, host_s, bound_s = graph[:5]
    kinds, host_waits, successor_offsets, successors, host_offsets, hosts = graph[5:11]
    device_offsets, devices, share_offsets, shares, fractions, slowdowns = graph[11:]
    now_of, counters, start_s, end_s, arrival_s, waits, ready = state[:7]
    host_clock_s, host_position, walking, first_waiting, next_waiting = state[7:12]
    heap_s, heap_id, heap_place = state[12:15]
    free_slots, slot_task, since_s, remaining_s, slownesses, touched, is_touched = state[15:22]
    num_running, slowed, changed_devices, device_is_changed, device_row, on_device, num_on_device = state[22:29]
    loads, changed_resources, resource_is_changed = state[29:32]
    resource_row, on_resource, on_resource_fraction, num_on_resource = state[32:]

    now_s = now_of[0]
    num_ended, size, num_ready = counters[NUM_ENDED], counters[HEAP_SIZE], counters[NUM_READY]
    num_walking, num_free = counters[NUM_HOSTS], counters[NUM_FREE]
    num_devices, num_resources = counters[NUM_DEVICES], counters[NUM_RESOURCES]
    events, speed_changes = counters[EVENTS], counters[SPEED_CHANGES]
    goes_on = True
    hole = False  # The top of the heap has been taken; the next entry put in takes its place.
    while num_ended < until_ended:
        begins = -1
        task = -1
        end = now_s
        if num_ready > 0:  # Release a task that waits for nothing but, perhaps, the arrival of its hosts.
            num_ready -= 1
            task = ready[num_ready]
            start = max(start_s[task], arrival_s[task])
            start_s[task] = start
            begin = start + latency_s[task]
            if device_offsets[task + 1] == device_offsets[task] and share_offsets[task + 1] == share_offsets[task]:
                end = begin + work_s[task]
            elif begin > now_s:
                events += 1
                if hole:
                    hole = False
                    _sink(heap_s, heap_id, heap_place, size, 0, begin, ~task)
                else:
                    _rise(heap_s, heap_id, heap_place, size, begin, ~task)
                    size += 1
                continue
            else:
                begins = task

        elif num_walking > 0:  # A host launches tasks, ahead of the clock, until it must wait.
            num_walking -= 1
            device = walking[num_walking]
            clock_s = host_clock_s[device]
            first = host_offsets[device]
            position = host_position[device]
            while first + position < host_offsets[device + 1]:
                launched = hosts[first + position]
                position += 1
                arrival = clock_s + lead_s[launched]
                if arrival > arrival_s[launched]:
                    arrival_s[launched] = arrival
                left = waits[launched] - 1
                waits[launched] = left
                if left == 0:
                    ready[num_ready] = launched
                    num_ready += 1
                clock_s += host_s[launched]
                if host_waits[launched]:
                    next_waiting[device] = first_waiting[launched]
                    first_waiting[launched] = device
                    break
            host_clock_s[device] = clock_s
            host_position[device] = position
            continue

        elif hole:
            hole = False
            size -= 1
            if size > 0:
                _sink(heap_s, heap_id, heap_place, size, 0, heap_s[size], heap_id[size])
            continue

        elif num_devices + num_resources > 0 and (size == 0 or heap_s[0] > now_s):
            # Put new overlaps and loads in force; settle and re-time the running tasks they touch.
            num_touched = 0
            for number in range(num_devices):
                device = changed_devices[number]
                device_is_changed[device] = False
                overlaps = num_running[0, device] > 0 and num_running[1, device] > 0
                if overlaps != slowed[device]:
                    slowed[device] = overlaps
                    row = device_row[device]
                    for place in range(row, row + num_on_device[device]):
                        slot = on_device[place]
                        if not is_touched[slot]:
                            is_touched[slot] = True
                            touched[num_touched] = slot
                            num_touched += 1
            num_devices = 0
            for number in range(num_resources):
                resource = changed_resources[number]
                resource_is_changed[resource] = False
                row = resource_row[resource]
                high = 0.0
                low = 0.0  # high + low is exact to about 100 bits: the order of users does not matter.
                for place in range(row, row + num_on_resource[resource]):
                    fraction = on_resource_fraction[place]
                    total = high + fraction
                    part = total - high
                    low += (high - (total - part)) + (fraction - part)
                    high = total
                load = high + low
                if not load > 1.0 + SHARE_TOLERANCE:
                    load = 1.0
                if load != loads[resource]:
                    loads[resource] = load
                    for place in range(row, row + num_on_resource[resource]):
                        slot = on_resource[place]
                        if not is_touched[slot]:
                            is_touched[slot] = True
                            touched[num_touched] = slot
                            num_touched += 1
            num_resources = 0
            for number in range(num_touched):
                slot = touched[number]
                is_touched[slot] = False
                slowness = _slowness(
                    slot_task[slot],
                    kinds[slot_task[slot]],
                    device_offsets,
                    devices,
                    share_offsets,
                    shares,
                    slowdowns,
                    slowed,
                    loads,
                )
                if slowness != slownesses[slot]:
                    speed_changes += 1
                    done_s = (now_s - since_s[slot]) / slownesses[slot]
                    left_s = max(0.0, remaining_s[slot] - done_s)
                    since_s[slot] = now_s
                    remaining_s[slot] = left_s
                    slownesses[slot] = slowness
                    finish_s = now_s + left_s * slowness
                    place = heap_place[slot]
                    if finish_s < heap_s[place]:
                        _rise(heap_s, heap_id, heap_place, place, finish_s, slot)
                    else:
                        _sink(heap_s, heap_id, heap_place, size, place, finish_s, slot)
            continue

        elif size == 0:
            goes_on = False
            break

        else:  # The next moment at which a task begins or ends its work.
            now_s = heap_s[0]
            identity = heap_id[0]
            hole = True
            if identity < 0:
                begins = ~identity
            else:  # Take it off its devices and resources.
                task = slot_task[identity]
                kind = kinds[task]
                for place in range(device_offsets[task], device_offsets[task + 1]):
                    device = devices[place]
                    at = device_row[device]
                    while on_device[at] != identity:
                        at += 1
                    num_on_device[device] -= 1
                    on_device[at] = on_device[device_row[device] + num_on_device[device]]
                    num_running[kind, device] -= 1
                    if num_running[kind, device] == 0 and num_running[1 - kind, device] > 0:
                        if not device_is_changed[device]:
                            device_is_changed[device] = True
                            changed_devices[num_devices] = device
                            num_devices += 1
                for place in range(share_offsets[task], share_offsets[task + 1]):
                    resource = shares[place]
                    at = resource_row[resource]
                    while on_resource[at] != identity:
                        at += 1
                    num_on_resource[resource] -= 1
                    last = resource_row[resource] + num_on_resource[resource]
                    on_resource[at] = on_resource[last]
                    on_resource_fraction[at] = on_resource_fraction[last]
                    if loads[resource] > 1.0 and not resource_is_changed[resource]:
                        resource_is_changed[resource] = True
                        changed_resources[num_resources] = resource
                        num_resources += 1
                free_slots[num_free] = identity
                num_free += 1
                end = now_s

        if begins >= 0:  # Begin the work of a task whose speed may change.
            num_free -= 1
            slot = free_slots[num_free]
            slot_task[slot] = begins
            kind = kinds[begins]
            for place in range(device_offsets[begins], device_offsets[begins + 1]):
                device = devices[place]
                on_device[device_row[device] + num_on_device[device]] = slot
                num_on_device[device] += 1
                num_running[kind, device] += 1
                if num_running[kind, device] == 1 and num_running[1 - kind, device] > 0:
                    if not device_is_changed[device]:
                        device_is_changed[device] = True
                        changed_devices[num_devices] = device
                        num_devices += 1
            for place in range(share_offsets[begins], share_offsets[begins + 1]):
                resource = shares[place]
                last = resource_row[resource] + num_on_resource[resource]
                on_resource[last] = slot
                on_resource_fraction[last] = fractions[place]
                num_on_resource[resource] += 1
                if num_on_resource[resource] > 1 or fractions[place] > 1.0:
                    if not resource_is_changed[resource]:
                        resource_is_changed[resource] = True
                        changed_resources[num_resources] = resource
                        num_resources += 1
            slowness = _slowness(begins, kind, device_offsets, devices, share_offsets, shares, slowdowns, slowed, loads)
            since_s[slot] = now_s
            remaining_s[slot] = work_s[begins]
            slownesses[slot] = slowness
            finish_s = now_s + work_s[begins] * slowness
            events += 1
            if hole:
                hole = False
                _sink(heap_s, heap_id, heap_place, size, 0, finish_s, slot)
            else:
                _rise(heap_s, heap_id, heap_place, size, finish_s, slot)
                size += 1
            continue

        # The work of a task is done; it ends, and frees its streams, successors and waiting hosts.
        end = max(end, arrival_s[task] + bound_s[task])
        end_s[task] = end
        num_ended += 1
        for place in range(successor_offsets[task], successor_offsets[task + 1]):
            successor = successors[place]
            if end > start_s[successor]:
                start_s[successor] = end
            left = waits[successor] - 1
            waits[successor] = left
            if left == 0:
                ready[num_ready] = successor
                num_ready += 1
        if host_waits[task]:
            device = first_waiting[task]
            first_waiting[task] = -1
            while device >= 0:
                host_clock_s[device] = max(host_clock_s[device], end)
                walking[num_walking] = device
                num_walking += 1
                device = next_waiting[device]

    if hole:
        size -= 1
        if size > 0:
            _sink(heap_s, heap_id, heap_place, size, 0, heap_s[size], heap_id[size])
    now_of[0] = now_s
    counters[NUM_ENDED], counters[HEAP_SIZE], counters[NUM_READY] = num_ended, size, num_ready
    counters[NUM_HOSTS], counters[NUM_FREE] = num_walking, num_free
    counters[NUM_DEVICES], counters[NUM_RESOURCES] = num_devices, num_resources
    counters[EVENTS], counters[SPEED_CHANGES] = events, speed_changes
    return goes_on
