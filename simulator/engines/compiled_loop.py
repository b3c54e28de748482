"""The loop of the compiled engine. ``engine_compiled`` says how it thinks."""

from __future__ import annotations

from simulator.compiled_cache import compiled_with, inlined
from simulator.engines import compiled_arrays, compiled_heap
from simulator.engines.compiled_arrays import (
    EVENTS,
    HEAP_SIZE,
    NUM_DEVICES,
    NUM_ENDED,
    NUM_FREE,
    NUM_HOSTS,
    NUM_READY,
    NUM_RESOURCES,
    SPEED_CHANGES,
    FixedArrays,
    RunState,
)
from simulator.engines.compiled_heap import rise, sink
from simulator.engines.compiled_prepare import Flags, Floats, Int32s

SHARE_TOLERANCE = 1e-12  # As engine_common's; a global of another file would not make the cache stale.


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


@compiled_with(compiled_arrays, compiled_heap)
def advance(graph: FixedArrays, state: RunState, until_ended: int) -> bool:
    """Run until so many tasks have ended; return whether anything is left that can run.

    One long function: its parts share a dozen numbers that change.
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
                    sink(heap_s, heap_id, heap_place, size, 0, begin, ~task)
                else:
                    rise(heap_s, heap_id, heap_place, size, begin, ~task)
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
                sink(heap_s, heap_id, heap_place, size, 0, heap_s[size], heap_id[size])
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
                        rise(heap_s, heap_id, heap_place, place, finish_s, slot)
                    else:
                        sink(heap_s, heap_id, heap_place, size, place, finish_s, slot)
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
                    overlapped = num_running[kind, device] == 0 and num_running[1 - kind, device] > 0
                    if overlapped and not device_is_changed[device]:
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
                overlaps = num_running[kind, device] == 1 and num_running[1 - kind, device] > 0
                if overlaps and not device_is_changed[device]:
                    device_is_changed[device] = True
                    changed_devices[num_devices] = device
                    num_devices += 1
            for place in range(share_offsets[begins], share_offsets[begins + 1]):
                resource = shares[place]
                last = resource_row[resource] + num_on_resource[resource]
                on_resource[last] = slot
                on_resource_fraction[last] = fractions[place]
                num_on_resource[resource] += 1
                may_crowd = num_on_resource[resource] > 1 or fractions[place] > 1.0
                if may_crowd and not resource_is_changed[resource]:
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
                sink(heap_s, heap_id, heap_place, size, 0, finish_s, slot)
            else:
                rise(heap_s, heap_id, heap_place, size, finish_s, slot)
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
            sink(heap_s, heap_id, heap_place, size, 0, heap_s[size], heap_id[size])
    now_of[0] = now_s
    counters[NUM_ENDED], counters[HEAP_SIZE], counters[NUM_READY] = num_ended, size, num_ready
    counters[NUM_HOSTS], counters[NUM_FREE] = num_walking, num_free
    counters[NUM_DEVICES], counters[NUM_RESOURCES] = num_devices, num_resources
    counters[EVENTS], counters[SPEED_CHANGES] = events, speed_changes
    return goes_on
