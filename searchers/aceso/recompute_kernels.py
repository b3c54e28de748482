"""Which operators of a stage are recomputed, and what that frees: three orders of choosing them, compiled."""

from __future__ import annotations

import numpy as np

from searchers.aceso import arrays as layout
from searchers.aceso.arrays import ENTRY, FAR, FORWARD, KEPT, LISTED, OWN, Arrays, Bytes, Int32s
from simulator.compiled_cache import compiled_with, inlined, uncounted


@inlined
def run_made(arrays: Arrays, cells: Int32s, first: int, last: int, start: int) -> float:
    """Return bytes that recomputing the operators ``[first, last]`` of a stage drops and brings back at once.

    What the last hands on stays, and what an operator behind it needs.
    """
    total = arrays.columns[cells[last - start], OWN, last]
    for index in range(first, last + 1):
        if index < last:
            total += arrays.columns[cells[index - start], KEPT, index]
        if arrays.reach[index] <= last:
            total += arrays.columns[cells[index - start], FAR, index]
    return float(total)


@inlined
def run_kept(
    arrays: Arrays, cells: Int32s, flags: Bytes, first: int, last: int, start: int, stop: int
) -> float:
    """Return bytes that the recomputed run ``[first, last]`` brings back at once.

    The release counts the last operator too where the next layer's first is recomputed.
    """
    total = run_made(arrays, cells, first, last, start)
    if arrays.rules[1] and last + 1 < stop and flags[last + 1 - start]:
        total += arrays.columns[cells[last - start], KEPT, last]
    return float(total)


@inlined
def run_freed(arrays: Arrays, cells: Int32s, first: int, last: int, start: int) -> float:
    """Return bytes per microbatch that recomputing ``[first, last]`` frees: without what it must keep to begin."""
    if last < first:
        return 0.0
    entry = arrays.columns[cells[first - start], ENTRY, first]
    return float(run_made(arrays, cells, first, last, start) - entry)


@inlined
def joined_run(
    arrays: Arrays, cells: Int32s, flags: Bytes, offset: int, start: int, stop: int
) -> tuple[float, int, int]:
    """Return what flagging an operator of a stage and the next frees, and the run they are then part of."""
    first = last = start + offset
    layer = arrays.layer[first]
    while first > start and flags[first - 1 - start] and arrays.layer[first - 1] == layer:
        first -= 1
    last += 1
    while last + 1 < stop and flags[last + 1 - start] and arrays.layer[last + 1] == layer:
        last += 1
    before = run_freed(arrays, cells, first, start + offset - 1 + int(flags[offset]), start)
    behind = run_freed(arrays, cells, start + offset + 2 - int(flags[offset + 1]), last, start)
    return run_freed(arrays, cells, first, last, start) - before - behind, first, last


@inlined
def freed_and_largest(
    arrays: Arrays, cells: Int32s, flags: Bytes, start: int, stop: int
) -> tuple[float, float, float]:
    """Return bytes per microbatch that recomputation frees, the largest run, and its extra forward seconds."""
    freed = largest = seconds = 0.0
    index = start
    while index < stop:
        if not flags[index - start]:
            index += 1
            continue
        last = index
        while last + 1 < stop and flags[last + 1 - start] and arrays.layer[last + 1] == arrays.layer[index]:
            last += 1
        freed += run_freed(arrays, cells, index, last, start)
        for inner in range(index, last + 1):
            seconds += arrays.columns[cells[inner - start], FORWARD, inner]
        largest = max(largest, run_kept(arrays, cells, flags, index, last, start, stop))
        index = last + 1
    return freed, largest, seconds


@uncounted
def choose(
    arrays: Arrays,
    cells: Int32s,
    flags: Bytes,
    start: int,
    stop: int,
    in_flight: int,
    fixed: float,
    kept: float,
    limit: float,
    by_time: bool,
) -> tuple[float, float, float]:
    """Flag operators until the stage fits: largest activation first, or most bytes freed per second first.

    Returns bytes freed per microbatch, the largest run and the extra seconds.
    """
    count = stop - start
    freed = largest = seconds = 0.0
    while fixed + (kept - freed) * in_flight + largest > limit:
        chosen, best, worth_bytes = -1, -1.0, 0.0
        covering, cheapest = -1, np.inf
        missing = fixed + (kept - freed) * in_flight + largest - limit
        for offset in range(count - 1):
            index = start + offset
            if not arrays.may_free[index] or arrays.layer[index + 1] != arrays.layer[index]:
                continue
            if flags[offset] and flags[offset + 1]:
                continue
            cost = 0.0
            if not flags[offset]:
                cost += arrays.columns[cells[offset], FORWARD, index]
            if not flags[offset + 1]:
                cost += arrays.columns[cells[offset + 1], FORWARD, index + 1]
            gain, _, _ = joined_run(arrays, cells, flags, offset, start, stop)
            if gain <= 0.0:
                continue
            if by_time:
                if gain * in_flight >= missing and cost < cheapest:
                    covering, cheapest = offset, cost
                worth = gain / max(cost, 1e-12)
            else:
                worth = gain
            if worth > best * (1 + 1e-12):
                chosen, best, worth_bytes = offset, worth, gain
        if chosen < 0:
            return freed, largest, seconds
        gained = worth_bytes
        if covering >= 0:
            chosen = covering
        # The rest of the group from the front, as many layers as are needed.
        name = arrays.group[start + chosen]
        for offset in range(chosen, count - 1):
            index = start + offset
            if arrays.group[index] != name or (flags[offset] and flags[offset + 1]):
                continue
            if arrays.layer[index + 1] != arrays.layer[index] or not arrays.may_free[index]:
                continue
            gain, first, last = joined_run(arrays, cells, flags, offset, start, stop)
            freed += gain
            for flagged in (offset, offset + 1):
                if not flags[flagged]:
                    flags[flagged] = 1
                    seconds += arrays.columns[cells[flagged], FORWARD, start + flagged]
            largest = max(largest, run_kept(arrays, cells, flags, first, last, start, stop))
            missing = fixed + (kept - freed) * in_flight + largest - limit
            if missing <= 0.0 or (by_time and missing <= gained * in_flight):
                break
    return freed, largest, seconds


@compiled_with(layout)
def choose_as_released(
    arrays: Arrays,
    cells: Int32s,
    flags: Bytes,
    start: int,
    stop: int,
    in_flight: int,
    fixed: float,
    kept: float,
    limit: float,
) -> None:
    """Flag operators until the stage fits, as the public code does.

    Operators of one name are a group; the group that keeps most over the whole stage comes first. Of it as many are
    flagged, from the front and each with the operator behind it, as would do if each freed what the profile lists for
    the first of them, though it may free more. Then memory is computed anew. A group is taken once, and one that
    stands behind a taken group no more.
    """
    count = stop - start
    groups = 1
    for offset in range(count):
        groups = max(groups, arrays.group[start + offset] + 1)
    totals = np.zeros(groups)
    first = np.full(groups, count)
    for offset in range(count):
        name = arrays.group[start + offset]
        if arrays.may_free[start + offset]:
            totals[name] += arrays.columns[cells[offset], LISTED, start + offset]
            first[name] = min(first[name], offset)
    while True:
        freed, largest, _ = freed_and_largest(arrays, cells, flags, start, stop)
        missing = fixed + (kept - freed) * in_flight + largest - limit
        if missing <= 0.0:
            return
        chosen = -1
        for name in range(groups):
            if totals[name] > 0.0 and (
                chosen < 0
                or totals[name] > totals[chosen]
                or (totals[name] == totals[chosen] and first[name] < first[chosen])
            ):
                chosen = name
        if chosen < 0:
            return
        totals[chosen] = 0.0
        gain = arrays.columns[cells[first[chosen]], LISTED, start + first[chosen]] * in_flight
        needed = np.ceil(missing / gain) if gain > 0.0 else 0.0
        for offset in range(count):
            if arrays.group[start + offset] != chosen or not arrays.may_free[start + offset]:
                continue
            if needed > 0.0:
                flags[offset] = 1
                needed -= 1.0
                if offset + 1 < count:
                    flags[offset + 1] = 1
            if offset + 1 < count:
                totals[arrays.group[start + offset + 1]] = 0.0
