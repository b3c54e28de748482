"""Compiled parts of the batch evaluation: passes of stages, boundaries, and pipelines in closed form.

A pass of a stage on one device is a chain of computation and collectives. The computation stream and the
communication stream of a device take their tasks in order, and nothing else holds the next pass back: a
collective that ends a pass runs beside the computation that begins the next. So a pass is described by

- TOTAL: all of it, one after the other;
- FIRST: collectives before the first computation;
- LEAD: computation up to the next collective;
- TRAIL: collectives after the last computation;
- TAIL: computation after the last collective;
- NUM_FIRST, NUM_LATER: how many collectives there are before, and after, the first computation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled, inlined

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

TOTAL, FIRST, LEAD, TRAIL, TAIL, NUM_FIRST, NUM_LATER = range(7)
PASS = 7

# Columns of ``op_seconds``/``op_counts`` and of ``row_seconds``/``row_counts``.
FORWARD_S, BACKWARD_S, AFTER_FORWARD, SETTLING = range(4)
BEFORE_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD = range(3)

_MIX = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing.


@compiled
def _compute(found: Floats, seconds: float) -> None:
    found[TOTAL] += seconds
    found[TRAIL] = 0.0
    found[TAIL] += seconds
    if found[NUM_LATER] == 0:
        found[LEAD] += seconds


@compiled
def _communicate(found: Floats, seconds: float, count: int, computed: bool) -> None:
    if count > 0:
        found[TOTAL] += seconds
        found[TRAIL] += seconds
        found[TAIL] = 0.0
        if computed:
            found[NUM_LATER] += count
        else:
            found[FIRST] += seconds
            found[NUM_FIRST] += count


@compiled
def _row(first: int, index: int, row_offsets: Ints, row_limits: Ints) -> int:
    row = row_offsets[index]
    while first > row_limits[row]:
        row += 1
    return row


@compiled
def _forward(
    found: Floats,
    first: int,
    low: int,
    high: int,
    computed: bool,
    op_seconds: Floats,
    op_counts: Ints,
    row_seconds: Floats,
    row_counts: Ints,
    row_offsets: Ints,
    row_limits: Ints,
) -> bool:
    """Add the forward pass of operators ``[low, high)`` of the stage that begins at ``first``."""
    for index in range(low, high):
        row = _row(first, index, row_offsets, row_limits)
        _communicate(found, row_seconds[row, BEFORE_FORWARD], row_counts[row, BEFORE_FORWARD], computed)
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
    last_reader: Ints,
) -> Floats:
    """Return forward and backward of stages: float64[S, 2, PASS].

    Args:
        firsts, stops: int64[S]. Operators ``[first, stop)`` of each stage.
        tables: int64[S]. Which table (tensor degree, samples, place) holds for it.
        recompute: bool[S]. Repeated layers are recomputed.
        stops_early: The tail of a segment that nothing saved needs is not.
        op_seconds, op_counts: [tables, N, 4].
        row_seconds, row_counts: [tables, rows, 3].
        row_offsets, row_limits, segment_first, segment_stop, first_saver, last_reader: See ``ModelShape``.
    """
    result = np.zeros((len(firsts), 2, PASS))
    for stage in range(len(firsts)):
        first, stop, table = firsts[stage], stops[stage], tables[stage]
        seconds, counts = op_seconds[table], op_counts[table]
        around_s, around = row_seconds[table], row_counts[table]
        forward, backward = result[stage, 0], result[stage, 1]
        _forward(
            forward, first, first, stop, False, seconds, counts, around_s, around, row_offsets, row_limits
        )
        for index in range(first, stop):
            if counts[index, SETTLING] > 0 and last_reader[index] >= stop:
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
                    computed,
                    seconds,
                    counts,
                    around_s,
                    around,
                    row_offsets,
                    row_limits,
                )
            row = _row(first, index, row_offsets, row_limits)
            _communicate(backward, around_s[row, BEFORE_BACKWARD], around[row, BEFORE_BACKWARD], computed)
            _compute(backward, seconds[index, BACKWARD_S])
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
            word = np.uint64((tensor_ids[tensor] * 64 + sent[at]) * 64 + received[at])
            key = (key ^ word) * _MIX
            key ^= key >> np.uint64(29)
            at += 1
        for column in range(degrees.shape[1]):
            key = (key ^ np.uint64(degrees[number, column])) * _MIX
            key ^= key >> np.uint64(29)
        keys[number] = key
    return keys, sent, received


@inlined
def _is_due(
    stage: int, goes_forward: bool, microbatch: int, low: int, high: int, forwards: Ints, backwards: Ints
) -> bool:
    """Return whether the neighbour that a pass waits for has done it."""
    if goes_forward:
        return stage == low or forwards[stage - 1] > microbatch
    return stage == high - 1 or backwards[stage + 1] > microbatch


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
    device, or stands for devices that behave alike.

    Args:
        plan_stages: int64[P + 1]. Stages of each plan.
        num_microbatches: int64[P].
        warmups: int64[S]. Forwards before the first backward (GPipe: all).
        blocking: A stage goes on only when what it sent has arrived.
        stage_units: int64[S + 1]. Units of each stage.
        group_sizes: int64[S]. Units that take part in one collective; neighbours.
        passes: float64[U, 2, PASS].
        channel_offsets: int64[2 S + 1]. Channels from stage s forward (row 2 s) and backward (row 2 s + 1).
        channel_sources, channel_targets: Units, counted from the first of their stage.
        channel_seconds: Seconds of one transfer alone.
    """
    result = np.zeros(len(num_microbatches))
    for plan in range(len(num_microbatches)):
        low, high = plan_stages[plan], plan_stages[plan + 1]
        m = num_microbatches[plan]
        base = stage_units[low]
        units = stage_units[high] - base
        channel_base = channel_offsets[2 * low]
        channel_free = np.zeros(channel_offsets[2 * high] - channel_base)
        received = np.zeros((2, units, m))
        computed = np.zeros(units)  # End of the last computation of each unit, ...
        communicated = np.zeros(units)  # ... of its last collective, ...
        held = np.zeros(units)  # ... and of what its last pass sent, where it waits for that.
        ends = np.zeros(units)
        forwards = np.zeros(high, np.int64)
        backwards = np.zeros(high, np.int64)
        left = 2 * m * (high - low)
        latest = 0.0
        downwards = True
        moved = True
        while left > 0 and moved:
            moved = False
            for turn in range(high - low):
                stage = low + turn if downwards else high - 1 - turn
                while backwards[stage] < m:
                    done = forwards[stage]
                    goes_forward = done < m and done < warmups[stage] + backwards[stage]
                    microbatch = done if goes_forward else backwards[stage]
                    if not _is_due(stage, goes_forward, microbatch, low, high, forwards, backwards):
                        break
                    moved = True
                    left -= 1
                    way = 0 if goes_forward else 1
                    size = group_sizes[stage]
                    for group in range(stage_units[stage] - base, stage_units[stage + 1] - base, size):
                        members = range(group, group + size)
                        one = passes[base + group, way]
                        if one[NUM_FIRST] > 0:
                            begin = 0.0
                            for unit in members:
                                ready = max(received[way, unit, microbatch], held[unit])
                                begin = max(begin, ready, communicated[unit])
                            end_first = begin + one[FIRST]
                            for unit in members:
                                ends[unit] = max(end_first, computed[unit]) + one[LEAD]
                                communicated[unit] = end_first
                        else:
                            for unit in members:
                                ready = max(received[way, unit, microbatch], held[unit])
                                ends[unit] = max(ready, computed[unit]) + one[LEAD]
                        if one[NUM_LATER] > 0:
                            begin = 0.0
                            for unit in members:
                                begin = max(begin, ends[unit], communicated[unit])
                            end = begin + (one[TOTAL] - one[FIRST] - one[LEAD])
                            for unit in members:
                                computed[unit] = end - one[TRAIL]
                                communicated[unit] = end - one[TAIL]
                                ends[unit] = end
                        else:
                            for unit in members:
                                computed[unit] = ends[unit]
                        for unit in members:
                            held[unit] = 0.0
                            latest = max(latest, ends[unit])
                    if goes_forward:
                        forwards[stage] += 1
                        other = stage_units[stage + 1] - base
                    else:
                        backwards[stage] += 1
                        other = stage_units[max(stage - 1, low)] - base
                    own = stage_units[stage] - base
                    for channel in range(channel_offsets[2 * stage + way], channel_offsets[2 * stage + way + 1]):
                        source, target = own + channel_sources[channel], other + channel_targets[channel]
                        arrived = max(ends[source], channel_free[channel - channel_base]) + channel_seconds[channel]
                        channel_free[channel - channel_base] = arrived
                        received[way, target, microbatch] = max(received[way, target, microbatch], arrived)
                        if blocking:
                            held[source] = max(held[source], arrived)
            downwards = not downwards
        result[plan] = latest if left == 0 else np.nan
    return result
