"""What the compiled engine works out from a task graph before it runs it: in time linear in the graph.

The same as ``engine_common`` says for the SimPy engine, but for one thing: a pair of tasks related in several
ways counts as often, in the successors and in what a task waits for, which saves a sort and changes nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

Floats = NDArray[np.float64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Bytes = NDArray[np.int8]
Flags = NDArray[np.bool_]

SHARE_TOLERANCE = 1e-12  # As engine_common's; a global of another file would not make the cache stale.
COMPUTATION, COMMUNICATION, OTHER = 0, 1, 2  # As taskgraph's.


@compiled
def times_are_legal(work_s: Floats, latency_s: Floats, lead_s: Floats, host_s: Floats, bound_s: Floats) -> bool:
    """Return whether all times are finite and >= 0."""
    for column in (work_s, latency_s, lead_s, host_s, bound_s):
        for index in range(len(column)):
            if not 0.0 <= column[index] < np.inf:
                return False
    return True


@compiled
def bounds_of_launched(bound_s: Floats, host_items: Int32s) -> Floats:
    """Return the bounds, 0 for tasks that no host launches."""
    found = np.zeros(len(bound_s), np.float64)
    for task in host_items:
        found[task] = bound_s[task]
    return found


@compiled
def successors(
    num_tasks: int,
    before_offsets: Int32s,
    before_items: Int32s,
    stream_offsets: Int32s,
    stream_items: Int32s,
    host_items: Int32s,
) -> tuple[Int64s, Int32s, Int32s]:
    """Return successors as rows (offsets, items), and what each task waits for: tasks and hosts, counted."""
    waits = np.zeros(num_tasks, np.int32)
    offsets = np.zeros(num_tasks + 1, np.int64)
    for task in range(num_tasks):
        waits[task] = before_offsets[task + 1] - before_offsets[task]
    for task in host_items:
        waits[task] += 1
    for task in before_items:
        offsets[task + 1] += 1
    for stream in range(len(stream_offsets) - 1):
        for place in range(stream_offsets[stream], stream_offsets[stream + 1] - 1):
            offsets[stream_items[place] + 1] += 1
            waits[stream_items[place + 1]] += 1
    for task in range(num_tasks):
        offsets[task + 1] += offsets[task]
    items = np.empty(offsets[num_tasks], np.int32)
    free = offsets[:-1].copy()
    for stream in range(len(stream_offsets) - 1):
        for place in range(stream_offsets[stream], stream_offsets[stream + 1] - 1):
            task = stream_items[place]
            items[free[task]] = stream_items[place + 1]
            free[task] += 1
    for task in range(num_tasks):
        for place in range(before_offsets[task], before_offsets[task + 1]):
            before = before_items[place]
            items[free[before]] = task
            free[before] += 1
    return offsets, items, waits


@compiled
def slowing_devices(
    work_s: Floats,
    kind: Bytes,
    stream_offsets: Int32s,
    stream_items: Int32s,
    stream_device: Int32s,
    slowdown_computation: Floats,
    slowdown_communication: Floats,
) -> tuple[Int32s, Int32s]:
    """Return for each task the devices on which overlap may change its or others' speed (offsets, items)."""
    num_tasks, num_devices = len(work_s), len(slowdown_computation)
    num_streams = len(stream_device)
    some = False
    seen = np.zeros((num_devices, 3), np.bool_)
    for device in range(num_devices):
        some |= slowdown_computation[device] > 1.0 or slowdown_communication[device] > 1.0
    offsets = np.zeros(num_tasks + 1, np.int32)
    if not some:
        return offsets, np.empty(0, np.int32)
    for stream in range(num_streams):
        for task in stream_items[stream_offsets[stream] : stream_offsets[stream + 1]]:
            if work_s[task] > 0.0:
                seen[stream_device[stream], kind[task]] = True
    for stream in range(num_streams):
        device = stream_device[stream]
        slows = slowdown_computation[device] > 1.0 or slowdown_communication[device] > 1.0
        if slows and seen[device, COMPUTATION] and seen[device, COMMUNICATION]:
            for task in stream_items[stream_offsets[stream] : stream_offsets[stream + 1]]:
                if work_s[task] > 0.0 and kind[task] != OTHER:
                    offsets[task + 1] += 1
    for task in range(num_tasks):
        offsets[task + 1] += offsets[task]
    items = np.empty(offsets[num_tasks], np.int32)
    filled = np.zeros(num_tasks, np.int32)
    for stream in range(num_streams):
        device = stream_device[stream]
        slows = slowdown_computation[device] > 1.0 or slowdown_communication[device] > 1.0
        if slows and seen[device, COMPUTATION] and seen[device, COMMUNICATION]:
            for task in stream_items[stream_offsets[stream] : stream_offsets[stream + 1]]:
                if work_s[task] > 0.0 and kind[task] != OTHER:
                    first = offsets[task]
                    known = False
                    for place in range(first, first + filled[task]):
                        known |= items[place] == device
                    if not known:
                        items[first + filled[task]] = device
                        filled[task] += 1
    return _without_gaps(offsets, items, filled)


@compiled
def _without_gaps(offsets: Int32s, items: Int32s, filled: Int32s) -> tuple[Int32s, Int32s]:
    """Return rows cut to their filled part."""
    exact = np.zeros(len(offsets), np.int32)
    for row in range(len(filled)):
        for place in range(filled[row]):
            items[exact[row] + place] = items[offsets[row] + place]
        exact[row + 1] = exact[row] + filled[row]
    return exact, items[: exact[len(filled)]].copy()


@compiled
def crowding_shares(
    work_s: Floats,
    share_offsets: Int32s,
    share_items: Int32s,
    fractions: Floats,
    num_resources: int,
    stream_offsets: Int32s,
    stream_items: Int32s,
) -> tuple[Int32s, Int32s, Floats]:
    """Return for each task its shares of resources that may become overfull (offsets, resources, fractions).

    Tasks of one stream never run at once: a resource cannot be overfull if the largest shares of each
    stream's tasks add up to 1 or less.
    """
    num_tasks, num_streams = len(work_s), len(stream_offsets) - 1
    offsets = np.zeros(num_tasks + 1, np.int32)
    if len(share_items) == 0:
        return offsets, np.empty(0, np.int32), np.empty(0, np.float64)
    last_stream = np.full(num_tasks, -1, np.int32)
    for stream in range(num_streams):
        for task in stream_items[stream_offsets[stream] : stream_offsets[stream + 1]]:
            last_stream[task] = stream
    fullest = np.zeros(num_resources, np.float64)
    largest = np.zeros(num_resources, np.float64)
    stamp = np.full(num_resources, -1, np.int32)
    for stream in range(num_streams):
        for task in stream_items[stream_offsets[stream] : stream_offsets[stream + 1]]:
            if last_stream[task] == stream and work_s[task] > 0.0:
                for place in range(share_offsets[task], share_offsets[task + 1]):
                    resource, fraction = share_items[place], fractions[place]
                    if stamp[resource] != stream:
                        stamp[resource] = stream
                        largest[resource] = 0.0
                    if fraction > largest[resource]:
                        fullest[resource] += fraction - largest[resource]
                        largest[resource] = fraction
    for task in range(num_tasks):
        if last_stream[task] < 0 and work_s[task] > 0.0:
            for place in range(share_offsets[task], share_offsets[task + 1]):
                fullest[share_items[place]] += fractions[place]
    for task in range(num_tasks):
        count = 0
        if work_s[task] > 0.0:
            for place in range(share_offsets[task], share_offsets[task + 1]):
                crowds = fullest[share_items[place]] > 1.0 + SHARE_TOLERANCE
                count += crowds and fractions[place] > 0.0
        offsets[task + 1] = offsets[task] + count
    items = np.empty(offsets[num_tasks], np.int32)
    kept = np.empty(offsets[num_tasks], np.float64)
    for task in range(num_tasks):
        at = offsets[task]
        if offsets[task + 1] > at:
            for place in range(share_offsets[task], share_offsets[task + 1]):
                if fullest[share_items[place]] > 1.0 + SHARE_TOLERANCE and fractions[place] > 0.0:
                    items[at], kept[at] = share_items[place], fractions[place]
                    at += 1
    return offsets, items, kept


@compiled
def capacities(
    device_offsets: Int32s,
    share_offsets: Int32s,
    share_items: Int32s,
    num_resources: int,
    stream_device: Int32s,
    stream_items: Int32s,
    num_devices: int,
) -> tuple[int, Int64s, Int64s]:
    """Return how many tasks with a changing speed may be under way at once: in all, per device, per resource.

    One task per stream at most, and any number of tasks without a stream. The latter two as row offsets.
    """
    num_tasks = len(device_offsets) - 1
    on_stream = np.zeros(num_tasks, np.bool_)
    for task in stream_items:
        on_stream[task] = True
    changing, free = 0, 0
    for task in range(num_tasks):
        if device_offsets[task + 1] > device_offsets[task] or share_offsets[task + 1] > share_offsets[task]:
            changing += 1
            free += not on_stream[task]
    of_device = np.zeros(num_devices + 1, np.int64)
    for device in stream_device:
        of_device[device + 1] += 1
    for device in range(num_devices):
        of_device[device + 1] += of_device[device]
    at_once = min(changing, len(stream_device) + free)
    of_resource = np.zeros(num_resources + 1, np.int64)
    for resource in share_items:
        of_resource[resource + 1] += 1
    for resource in range(num_resources):
        of_resource[resource + 1] = of_resource[resource] + min(of_resource[resource + 1], at_once)
    return at_once, of_device, of_resource
