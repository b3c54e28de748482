"""Compiled parts of the batch evaluation: passes of stages, boundaries, and pipelines in closed form.

A pass of a stage on one device is a chain of computation and collectives, which begins when the pass before has
ended; ranks that meet in a collective wait for each other there. So a pass is described by

- TOTAL: all of it, one after the other;
- FIRST: collectives before the first computation;
- LEAD: computation up to the next collective;
- NUM_FIRST, NUM_LATER: how many collectives there are before, and after, the first computation.

The first backward pass may add its gradients to none: then it is shorter.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

TOTAL, FIRST, LEAD, NUM_FIRST, NUM_LATER = range(5)
PASS = 5

# Columns of ``op_seconds``/``op_counts`` and of ``row_seconds``/``row_counts``.
FORWARD_S, BACKWARD_S, AFTER_FORWARD, SETTLING, ADDED_S = range(5)
BEFORE_FORWARD, BEFORE_AGAIN, AFTER_BACKWARD = range(3)

_MIX = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing.


@compiled
def _compute(found: Floats, seconds: float) -> None:
    found[TOTAL] += seconds
    if found[NUM_LATER] == 0:
        found[LEAD] += seconds


@compiled
def _communicate(found: Floats, seconds: float, count: int, computed: bool) -> None:
    if count > 0:
        found[TOTAL] += seconds
        if computed:
            found[NUM_LATER] += count
        else:
            found[FIRST] += seconds
            found[NUM_FIRST] += count


@compiled
def row_of(first: int, index: int, row_offsets: Ints, row_limits: Ints) -> int:
    row = int(row_offsets[index])
    while first > row_limits[row]:
        row += 1
    return row


@compiled
def _forward(
    found: Floats,
    first: int,
    low: int,
    high: int,
    before: int,
    computed: bool,
    op_seconds: Floats,
    op_counts: Ints,
    row_seconds: Floats,
    row_counts: Ints,
    row_offsets: Ints,
    row_limits: Ints,
) -> bool:
    """Add the forward pass of operators ``[low, high)`` of the stage that begins at ``first``.

    ``before`` is BEFORE_FORWARD, or BEFORE_AGAIN in recomputation.
    """
    for index in range(low, high):
        row = row_of(first, index, row_offsets, row_limits)
        _communicate(found, row_seconds[row, before], row_counts[row, before], computed)
        _compute(found, op_seconds[index, FORWARD_S])
        computed = True
        _communicate(found, op_seconds[index, AFTER_FORWARD], op_counts[index, AFTER_FORWARD], True)
    return computed


@compiled
def measure_passes(
    firsts: Ints,
    stops: Ints,
    tables: Ints,
    recompute: Flags,
    stops_early: bool,
    op_seconds: Floats,
    op_counts: Ints,
    row_seconds: Floats,
    row_counts: Ints,
    row_offsets: Ints,
    row_limits: Ints,
    segment_first: Ints,
    segment_stop: Ints,
    first_saver: Ints,
    first_reader: Ints,
) -> Floats:
    """Return forward and backward of stages, and by what the first backward pass is less: float64[S, 3, PASS].

    Args:
        firsts, stops: int64[S]. Operators ``[first, stop)`` of each stage.
        tables: int64[S]. Which table (tensor degree, samples, place) holds for it.
        recompute: bool[S]. Repeated layers are recomputed.
        stops_early: The tail of a segment that nothing saved needs is not.
        op_seconds, op_counts: [tables, N, 5] and [tables, N, 4].
        row_seconds, row_counts: [tables, rows, 4].
        row_offsets, row_limits, segment_first, segment_stop, first_saver, first_reader: See ``ModelShape``.
    """
    result = np.zeros((len(firsts), 3, PASS))
    for stage in range(len(firsts)):
        first, stop, table = firsts[stage], stops[stage], tables[stage]
        seconds, counts = op_seconds[table], op_counts[table]
        around_s, around = row_seconds[table], row_counts[table]
        forward, backward, less = result[stage, 0], result[stage, 1], result[stage, 2]
        _forward(
            forward,
            first,
            first,
            stop,
            BEFORE_FORWARD,
            False,
            seconds,
            counts,
            around_s,
            around,
            row_offsets,
            row_limits,
        )
        for index in range(first, stop):
            if counts[index, SETTLING] > 0 and first_reader[index] >= stop:
                _communicate(forward, seconds[index, SETTLING], counts[index, SETTLING], True)
        computed = False
        for index in range(stop - 1, first - 1, -1):
            segment_end = min(segment_stop[index], stop)
            if recompute[stage] and index + 1 == segment_end:
                low, high = max(segment_first[index], first), segment_end
                while stops_early and high > low and first_saver[high - 1] >= segment_end:
                    high -= 1
                computed = _forward(
                    backward,
                    first,
                    low,
                    high,
                    BEFORE_AGAIN,
                    computed,
                    seconds,
                    counts,
                    around_s,
                    around,
                    row_offsets,
                    row_limits,
                )
            row = row_of(first, index, row_offsets, row_limits)
            _compute(backward, seconds[index, BACKWARD_S])
            less[TOTAL] += seconds[index, ADDED_S]
            if backward[NUM_LATER] == 0:
                less[LEAD] = less[TOTAL]
            computed = True
            _communicate(backward, around_s[row, AFTER_BACKWARD], around[row, AFTER_BACKWARD], True)
    return result


@compiled
def boundary_codes(
    firsts: Ints,
    cuts: Ints,
    stops: Ints,
    degrees: Ints,
    tensor_ids: Ints,
    made: Ints,
    read: Ints,
    reader_offsets: Ints,
    readers: Ints,
    producers: Ints,
    crossing_offsets: Ints,
    crossing: Ints,
) -> tuple[NDArray[np.uint64], Ints, Ints]:
    """Return what the transfers of every boundary depend on.

    Args:
        firsts, cuts, stops: int64[B]. The stages are ``[first, cut)`` and ``[cut, stop)``.
        degrees: int64[B, K]. Meshes, samples and place; go into the key as they are.
        tensor_ids: int64[T]. Equal for tensors of equal size.
        made, read: Layout codes (``StageRowsBuilder.layouts``).
        reader_offsets, readers, producers, crossing_offsets, crossing: See ``ModelShape``.

    Returns:
        A 64-bit key of each boundary; and for each of its crossing tensors (rows as long as those of
        ``crossing``, one boundary after the other) the layout on either side.
    """
    total = 0
    for cut in cuts:
        total += crossing_offsets[cut + 1] - crossing_offsets[cut]
    sent = np.zeros(total, np.int64)
    received = np.zeros(total, np.int64)
    keys = np.zeros(len(cuts), np.uint64)
    at = 0
    for number in range(len(cuts)):
        first, cut, stop = firsts[number], cuts[number], stops[number]
        key = np.uint64(0)
        for place in range(crossing_offsets[cut], crossing_offsets[cut + 1]):
            tensor = crossing[place]
            reader = reader_offsets[tensor]
            if producers[tensor] >= first:
                sent[at] = made[tensor]
            else:
                while readers[reader] < first:
                    reader += 1
                if readers[reader] < cut:
                    sent[at] = read[reader]
            while readers[reader] < cut:
                reader += 1
            if readers[reader] < stop:
                received[at] = read[reader]
            word = np.uint64(((1 + tensor_ids[tensor]) * 64 + sent[at]) * 64 + received[at])
            key = (key ^ word) * _MIX
            key ^= key >> np.uint64(29)
            at += 1
        for column in range(degrees.shape[1]):
            key = (key ^ np.uint64(1 + degrees[number, column])) * _MIX
            key ^= key >> np.uint64(29)
        keys[number] = key
    return keys, sent, received


@compiled
def run_pipelines(
    plan_stages: Ints,
    num_microbatches: Ints,
    warmups: Ints,
    blocking: bool,
    stage_units: Ints,
    group_sizes: Ints,
    passes: Floats,
    channel_offsets: Ints,
    channel_sources: Ints,
    channel_targets: Ints,
    channel_seconds: Floats,
) -> Floats:
    """Return the iteration time of every plan, in seconds; NaN where passes wait for each other for ever.

    The exact longest path: every pass of every unit, in the static order of the schedule. A *unit* is a
    device, or stands for devices that behave alike. Plans with an array that is too large in all should come
    apart from others: the work space is as large as the largest needs.

    Args:
        plan_stages: int64[P + 1]. Stages of each plan.
        num_microbatches: int64[P].
        warmups: int64[S]. Forwards before the first backward (GPipe: all).
        blocking: A stage goes on only when what it sent has arrived.
        stage_units: int64[S + 1]. Units of each stage.
        group_sizes: int64[S]. Units that take part in one collective; neighbours.
        passes: float64[U, 3, PASS]. As ``measure_passes`` has them.
        channel_offsets: int64[2 S + 1]. Channels from stage s forward (row 2 s) and backward (row 2 s + 1).
        channel_sources, channel_targets: Units, counted from the first of their stage.
        channel_seconds: Seconds of one transfer alone.
    """
    result = np.zeros(len(num_microbatches))
    most_units, most_received, most_channels, most_stages = 0, 0, 0, 0
    for plan in range(len(num_microbatches)):
        low, high = plan_stages[plan], plan_stages[plan + 1]
        units = stage_units[high] - stage_units[low]
        most_units = max(most_units, units)
        most_received = max(most_received, units * num_microbatches[plan])
        most_channels = max(most_channels, channel_offsets[2 * high] - channel_offsets[2 * low])
        most_stages = max(most_stages, high - low)
    received = np.zeros((2, most_received))
    channel_free = np.zeros(most_channels)
    ends = np.zeros(most_units)  # End of the last pass of each unit, ...
    held = np.zeros(most_units)  # ... and of what it sent, where the unit waits for that.
    forwards = np.zeros(most_stages, np.int64)
    backwards = np.zeros(most_stages, np.int64)
    for plan in range(len(num_microbatches)):
        low, high = plan_stages[plan], plan_stages[plan + 1]
        num_stages = high - low
        m = num_microbatches[plan]
        base = stage_units[low]
        units = stage_units[high] - base
        channel_base = channel_offsets[2 * low]
        received[:, : units * m] = 0.0
        channel_free[: channel_offsets[2 * high] - channel_base] = 0.0
        for unit in range(units):
            ends[unit] = 0.0
            held[unit] = 0.0
        for stage in range(num_stages):
            forwards[stage] = 0
            backwards[stage] = 0
        left = 2 * m * num_stages
        latest = 0.0
        downwards = True
        moved = True
        while left > 0 and moved:
            moved = False
            for turn in range(num_stages):
                stage = turn if downwards else num_stages - 1 - turn
                row = low + stage
                first_unit, end_unit = stage_units[row] - base, stage_units[row + 1] - base
                while backwards[stage] < m:
                    done = forwards[stage]
                    goes_forward = done < m and done < warmups[row] + backwards[stage]
                    if goes_forward:
                        way = 0
                        microbatch = done
                        if stage > 0 and forwards[stage - 1] <= microbatch:
                            break
                    else:
                        way = 1
                        microbatch = backwards[stage]
                        if stage < num_stages - 1 and backwards[stage + 1] <= microbatch:
                            break
                    moved = True
                    left -= 1
                    size = group_sizes[row]
                    for group in range(first_unit, end_unit, size):
                        num_first = passes[base + group, way, NUM_FIRST]
                        lead_s, total_s = passes[base + group, way, LEAD], passes[base + group, way, TOTAL]
                        if way == 1 and microbatch == 0:
                            lead_s -= passes[base + group, 2, LEAD]
                            total_s -= passes[base + group, 2, TOTAL]
                        for unit in range(group, group + size):
                            ends[unit] = max(ends[unit], received[way, unit * m + microbatch], held[unit])
                        if num_first > 0:
                            begin = 0.0
                            for unit in range(group, group + size):
                                begin = max(begin, ends[unit])
                            for unit in range(group, group + size):
                                ends[unit] = begin + passes[base + group, way, FIRST]
                        for unit in range(group, group + size):
                            ends[unit] += lead_s
                        if passes[base + group, way, NUM_LATER] > 0:
                            begin = 0.0
                            for unit in range(group, group + size):
                                begin = max(begin, ends[unit])
                            begin += total_s - passes[base + group, way, FIRST] - lead_s
                            for unit in range(group, group + size):
                                ends[unit] = begin
                        for unit in range(group, group + size):
                            held[unit] = 0.0
                            latest = max(latest, ends[unit])
                    if goes_forward:
                        forwards[stage] += 1
                        other = end_unit
                    else:
                        backwards[stage] += 1
                        other = stage_units[max(row - 1, low)] - base
                    for channel in range(channel_offsets[2 * row + way], channel_offsets[2 * row + way + 1]):
                        source = first_unit + channel_sources[channel]
                        target = (other + channel_targets[channel]) * m + microbatch
                        free = max(ends[source], channel_free[channel - channel_base]) + channel_seconds[channel]
                        channel_free[channel - channel_base] = free
                        if free > received[way, target]:
                            received[way, target] = free
                        if blocking and free > held[source]:
                            held[source] = free
            downwards = not downwards
        result[plan] = latest if left == 0 else np.nan
    return result
