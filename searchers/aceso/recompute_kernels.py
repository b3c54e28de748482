"""Which operators of a stage are recomputed, and what that frees: three orders of choosing them, compiled."""

from __future__ import annotations

import numpy as np

from searchers.aceso import arrays as layout
from searchers.aceso.arrays import ENTRY, FORWARD, KEPT, LISTED, Arrays, Bytes, Int32s
from simulator.compiled_cache import compiled_with

kernel = compiled_with(layout)


@kernel
def run_kept(
    arrays: Arrays, cells: Int32s, flags: Bytes, first: int, last: int, start: int, stop: int
) -> float:
    """Return bytes that the recomputed run ``[first, last]`` brings back at once.

    The release counts the last operator too where the next layer's first is recomputed.
    """
    total = 0.0
    for index in range(first, last + 1):
        if index < last or (arrays.rules[1] and index + 1 < stop and flags[index + 1 - start]):
            total += arrays.columns[cells[index - start], KEPT, index]
    return total


@kernel
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
        freed -= arrays.columns[cells[index - start], ENTRY, index]
        for inner in range(index, last + 1):
            seconds += arrays.columns[cells[inner - start], FORWARD, inner]
            if inner < last:
                freed += arrays.columns[cells[inner - start], KEPT, inner]
        largest = max(largest, run_kept(arrays, cells, flags, index, last, start, stop))
        index = last + 1
    return freed, largest, seconds


@kernel
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
            gain = arrays.columns[cells[offset], KEPT, index]
            cost = 0.0
            if not flags[offset]:
                cost += arrays.columns[cells[offset], FORWARD, index]
            if not flags[offset + 1]:
                cost += arrays.columns[cells[offset + 1], FORWARD, index + 1]
            # Neighbours that are flagged already are freed as well.
            if offset > 0 and flags[offset - 1] and not flags[offset] and (
                arrays.layer[index - 1] == arrays.layer[index]
            ):
                gain += arrays.columns[cells[offset - 1], KEPT, index - 1]
            if offset + 2 < count and flags[offset + 2] and not flags[offset + 1] and (
                arrays.layer[index + 2] == arrays.layer[index]
            ):
                gain += arrays.columns[cells[offset + 1], KEPT, index + 1]
            before_flagged = offset > 0 and flags[offset - 1] and arrays.layer[index - 1] == arrays.layer[index]
            after_flagged = offset + 2 < count and flags[offset + 2] and (
                arrays.layer[index + 2] == arrays.layer[index]
            )
            if not flags[offset]:
                if not before_flagged:
                    gain -= arrays.columns[cells[offset], ENTRY, index]
                if flags[offset + 1]:
                    gain += arrays.columns[cells[offset + 1], ENTRY, index + 1]
            if not flags[offset + 1] and after_flagged:
                gain += arrays.columns[cells[offset + 2], ENTRY, index + 2]
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
            for flagged in (offset, offset + 1):
                if not flags[flagged]:
                    flags[flagged] = 1
                    seconds += arrays.columns[cells[flagged], FORWARD, start + flagged]
                    if flagged > 0 and flags[flagged - 1] and (
                        arrays.layer[start + flagged - 1] == arrays.layer[start + flagged]
                    ):
                        freed += arrays.columns[cells[flagged - 1], KEPT, start + flagged - 1]
                    else:
                        freed -= arrays.columns[cells[flagged], ENTRY, start + flagged]
                    if flagged + 1 < count and flags[flagged + 1] and (
                        arrays.layer[start + flagged + 1] == arrays.layer[start + flagged]
                    ):
                        freed += arrays.columns[cells[flagged], KEPT, start + flagged]
                        freed += arrays.columns[cells[flagged + 1], ENTRY, start + flagged + 1]
            first = last = offset
            while first > 0 and flags[first - 1] and arrays.layer[start + first - 1] == arrays.layer[index]:
                first -= 1
            while last + 1 < count and flags[last + 1] and arrays.layer[start + last + 1] == arrays.layer[index]:
                last += 1
            largest = max(largest, run_kept(arrays, cells, flags, start + first, start + last, start, stop))
            missing = fixed + (kept - freed) * in_flight + largest - limit
            if missing <= 0.0 or (by_time and missing <= gained * in_flight):
                break
    return freed, largest, seconds


@kernel
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
