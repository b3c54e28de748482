"""Compiled: iteration times of plans given as runs of equal strategy, from sums in tables.

The cost of a plan grows with its runs and recomputed segments, not with its operators. What a plan needs that
no table holds yet is noted and looked for again once it has been worked out (``fast_estimate``).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator import fast_arrays
from simulator.compiled_cache import compiled_with, inlined
from simulator.fast_arrays import (
    BACKWARD_S,
    BAD_RUNS,
    BAD_SEGMENTS,
    BAD_STRATEGY,
    BOUNDARY,
    DONE,
    ELEMENTS,
    FORWARD_S,
    GATHER,
    GATHER_CHANNEL,
    GATHER_S,
    INCOMPLETE,
    LATENCY_S,
    MAX_FAMILIES,
    PENDING,
    REDUCTION,
    REFRESH,
    REFRESH_CHANNEL,
    REST,
    ROW,
    S_PER_BYTE,
    SCATTER,
    SCATTER_DEGREE,
    START_S,
    STRETCH,
    TABLE,
    TIE,
    TOO_MANY_GATHERS,
    UNSUITED,
    Floats,
    Ints,
    Keys,
    PlanColumns,
    Structure,
    TimeTables,
)

MAX_PENDING = 64
MAX_LATENCY_SHARE = 0.9
"""Of a measured time, as in ``collective_table``."""

_MIX = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing.
_SHIFT = np.uint64(29)
_ONE, _NONE = np.uint64(1), np.uint64(0)
_TABLE_KEY = np.uint64(0xD1B54A32D192ED03)
_ROW_KEY = np.uint64(0xAEF17502108EF2D9)
_BOUNDARY_KEY = np.uint64(0xF1357AEA2E62A9C5)
_TIE_KEY = np.uint64(0x9FB21C651E98DF25)
_SHARDS_KEY = np.uint64(0xA24BAED4963EE407)


@inlined
def _price(
    lines: Floats, line: int, line_end: int, points: Floats, point: int, point_end: int, num_bytes: float
) -> float:
    if num_bytes <= 0.0:
        return 0.0
    alone_s, best = np.inf, line
    for option in range(line, line_end):
        option_s = lines[option, START_S] + num_bytes * lines[option, S_PER_BYTE]
        if option_s < alone_s:
            alone_s, best = option_s, option
    latency_s = lines[best, LATENCY_S]
    if point < point_end and num_bytes >= points[point, 0]:
        while point < point_end and points[point, 0] < num_bytes:
            point += 1
        if point == point_end:
            alone_s = points[point - 1, 1] * num_bytes / points[point - 1, 0]
        elif points[point, 0] == num_bytes:
            alone_s = points[point, 1]
        else:
            part = (num_bytes - points[point - 1, 0]) / (points[point, 0] - points[point - 1, 0])
            alone_s = points[point - 1, 1] + part * (points[point, 1] - points[point - 1, 1])
        latency_s = min(latency_s, MAX_LATENCY_SHARE * alone_s)
    return float(alone_s + (alone_s - latency_s) * lines[best, STRETCH])


@compiled_with(fast_arrays)
def price_s(lines: Floats, points: Floats, num_bytes: float) -> float:
    """Return the seconds of a collective beside others: as alone, but for what they stretch its work.

    Alone it is the quickest straight line, or linear between measured points.

    Args:
        lines: float64[., LINE]. See its columns.
        points: float64[., 2]. Bytes and seconds alone, ascending; below the first the lines hold, above the last its
            bandwidth.
        num_bytes: Its size.
    """
    return float(_price(lines, 0, len(lines), points, 0, len(points), num_bytes))


@inlined
def _channel_s(tables: TimeTables, channel: int, num_bytes: float) -> float:
    """Return the seconds of a channel: of its slowest group."""
    slowest = 0.0
    while True:
        line, line_end = tables.line_offsets[channel], tables.line_offsets[channel + 1]
        point, point_end = tables.point_offsets[channel], tables.point_offsets[channel + 1]
        slowest = max(slowest, _price(tables.lines, line, line_end, tables.points, point, point_end, num_bytes))
        if tables.goes_on[channel] == 0:
            break
        channel += 1
    return slowest


@inlined
def _mixed(key: Any, word: Any) -> Any:
    key = (key ^ np.uint64(word)) * _MIX
    return key ^ (key >> _SHIFT)


@inlined
def _wanted(keys: Keys, values: Ints, key: Any, misses: Ints, counts: Ints, kind: int, first: int, second: int) -> int:
    """Return the value of a key, or PENDING after noting what is missing."""
    mask = np.uint64(len(keys) - 1)
    key = key | _ONE
    slot = key >> np.uint64(20) & mask
    while keys[slot] != key and keys[slot] != _NONE:
        slot = (slot + _ONE) & mask
    value = PENDING
    if keys[slot] == key:
        value = values[slot]
    elif counts[0] < len(misses):
        keys[slot] = key
        values[slot] = PENDING
        misses[counts[0], 0], misses[counts[0], 1] = kind, slot
        misses[counts[0], 2], misses[counts[0], 3] = first, second
        counts[0] += 1
    return value


@inlined
def _tied_elements(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    table: int,
    family: int,
    first: int,
    begin: int,
    start: int,
    stop: int,
    by_use: bool,
) -> float:
    """Return elements of tied parameters of ``[start, stop)`` that no operator from ``first`` on has in the layout.

    Args:
        shape, tables, plans, run_tables, table, family: See ``estimate_times``.
        first, begin: First operator that counts, and first run of its stage.
        start, stop: Operators.
        by_use: Those that one before has count too.
    """
    elements = 0.0
    for place in range(len(shape.tied)):
        index = shape.tied[place]
        if start <= index < stop and tables.tied[table, place, 0] == family:
            again = False
            other = begin
            for before in range(place):
                if shape.tied[before] >= first:
                    while plans.run_stops[other] <= shape.tied[before]:
                        other += 1
                    theirs = tables.tied[run_tables[other], before, 2]
                    again = again or theirs == tables.tied[table, place, 2]
            if by_use or not again:
                elements += tables.tied[table, place, 1]
    return elements


@inlined
def _key_of_arrivals(shape: Structure, key: Any, index: int, first: int, in_shards: Ints) -> tuple[Any, bool]:
    """Return a key that knows which inputs of an operator come in shards of the sequence, and whether that is known."""
    known = True
    for number in range(shape.input_offsets[index], shape.input_offsets[index + 1]):
        tensor = shape.input_tensors[number]
        if tensor >= 0 and shape.input_producers[number] < first and in_shards[tensor] != 0:
            known = known and in_shards[tensor] > 0
            key = _mixed(key ^ _SHARDS_KEY, number - shape.input_offsets[index])
    return key, known


@compiled_with(fast_arrays)
def estimate_times(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    chosen: Ints,
    stops_early: bool,
    ties_by_use: bool,
    parameter_bytes: float,
    gathered_bytes: float,
    gradient_bytes: float,
    passes_s: Floats,
    iteration_s: Floats,
    stage_s: Floats,
    run_tables: Ints,
    states: Ints,
    misses: Ints,
    counts: Ints,
) -> None:
    """Fill the times of the chosen plans, as ``estimate`` has them.

    Args:
        shape, tables, plans: See there.
        chosen: Numbers of plans.
        stops_early: The tail of a segment that nothing saved needs is not computed again.
        ties_by_use: A whole weight that several operators of a stage use is reduced for each.
        parameter_bytes, gathered_bytes, gradient_bytes: Per element, as refreshed, as gathered and as reduced.
        passes_s: By schedule, what the passes of a microbatch through a stage add that nothing hides.
        iteration_s, stage_s, run_tables: Results, per plan, stage and run.
        states: Per plan: DONE, INCOMPLETE, or what is wrong with it.
        misses: int64[., 4]. Kind, slot in the hash table, and where it is needed: table (run, stage), row
            (operator, stage), boundary (stage, plan), reduction of a tied weight
            (place in ``Structure.tied``, stage; or -1 - plan for all that hold it).
        counts: int64[1]. How many misses there are.
    """
    num_operators = len(shape.classes)
    num_tied, tied_of = len(shape.tied), tables.tied
    over_op = np.empty(num_operators, np.int64)
    over_row = np.empty(num_operators, np.int64)
    over_s = np.empty(num_operators, np.float64)
    pend_key = np.empty(MAX_PENDING, np.int64)
    pend_channel = np.empty(MAX_PENDING, np.int64)
    pend_elements = np.empty(MAX_PENDING, np.float64)
    sum_key = np.empty((2, MAX_PENDING), np.int64)
    sum_table = np.empty((2, MAX_PENDING), np.int64)
    sum_family = np.empty((2, MAX_PENDING), np.int64)
    sum_elements = np.empty((2, MAX_PENDING), np.float64)
    num_sums = np.zeros(2, np.int64)
    in_shards = np.zeros(len(shape.producers), np.int64)  # As ``TimeTables.in_shards``; PENDING where not known yet.
    for plan in chosen:
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        m, size = plans.num_microbatches[plan], plans.microbatch_size[plan]
        state, first, once_s = DONE, 0, 0.0
        for stage in range(low, high):
            placement = plans.placements[stage]
            begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
            stop = first
            known = True
            for run in range(begin, end):
                if plans.run_stops[run] <= stop or plans.run_stops[run] > num_operators:
                    state = BAD_RUNS
                    break
                stop = plans.run_stops[run]
                key = _mixed(_TABLE_KEY, plans.strategies[run])
                key = _mixed(_mixed(key, tables.placement_shape[placement]), size)
                found = _wanted(tables.keys, tables.values, key, misses, counts, TABLE, run, stage)
                run_tables[run] = found
                known = known and found >= 0
            if begin == end:
                state = BAD_RUNS
            if state < 0:
                break
            if not known:
                state = INCOMPLETE
                for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
                    if shape.producers[shape.crossing[place]] >= first:
                        in_shards[shape.crossing[place]] = PENDING
                first = stop
                continue

            # Runs: passes, operators whose neighbours are in another run or stage, gathers, parameters.
            seconds, gather_s = passes_s[plans.schedule[plan]], 0.0
            num_over, num_pending, pending_layer = 0, 0, -1
            num_sums[0] = num_sums[1] = 0
            start = first
            for run in range(begin, end):
                table, ends = run_tables[run], plans.run_stops[run]
                sums = tables.sums[table]
                if sums[ends, UNSUITED] > sums[start, UNSUITED]:
                    state = BAD_STRATEGY
                    break
                seconds += sums[ends, FORWARD_S] - sums[start, FORWARD_S]
                seconds += sums[ends, BACKWARD_S] - sums[start, BACKWARD_S]
                for place in range(shape.touched_offsets[start], shape.touched_offsets[start + 1]):
                    index = shape.touched[place]
                    if index >= ends:
                        break
                    key = _mixed(_mixed(_ROW_KEY, shape.classes[index]), tables.aliases[table])
                    other = begin
                    for near in range(shape.neighbour_offsets[index], shape.neighbour_offsets[index + 1]):
                        neighbour = shape.neighbours[near]
                        word = 0
                        if neighbour >= first:
                            while plans.run_stops[other] <= neighbour:
                                other += 1
                            word = tables.aliases[run_tables[other]] + 1
                        key = _mixed(key, word)
                    key, known = _key_of_arrivals(shape, key, index, first, in_shards)
                    if not known:
                        state = INCOMPLETE
                        continue
                    row = _wanted(tables.keys, tables.values, key, misses, counts, ROW, index, stage)
                    if row < 0:
                        state = INCOMPLETE
                        continue
                    more_s = tables.rows[row, 0] - (sums[index + 1, FORWARD_S] - sums[index, FORWARD_S])
                    seconds += more_s + tables.rows[row, 1] - (sums[index + 1, BACKWARD_S] - sums[index, BACKWARD_S])
                    over_op[num_over], over_row[num_over], over_s[num_over] = index, row, more_s
                    num_over += 1
                families = tables.families[table]
                gathers = False
                for family in range(MAX_FAMILIES):
                    if families[family, REDUCTION] < 0:
                        break
                    elements = sums[ends, ELEMENTS + family] - sums[start, ELEMENTS + family]
                    by_use = ties_by_use and families[family, REFRESH] < 0 and families[family, GATHER] < 0
                    elements += _tied_elements(
                        shape, tables, plans, run_tables, table, family, first, begin, start, ends, by_use
                    )
                    gathers = gathers or families[family, GATHER] >= 0
                    if elements > 0:
                        for way in range(2):
                            own_key = families[family, REFRESH if way else REDUCTION]
                            if own_key < 0:
                                continue
                            at = 0
                            while at < num_sums[way] and sum_key[way, at] != own_key:
                                at += 1
                            if at == MAX_PENDING:
                                state = TOO_MANY_GATHERS
                                break
                            if at == num_sums[way]:
                                num_sums[way] += 1
                                sum_key[way, at], sum_elements[way, at] = own_key, 0.0
                                sum_table[way, at], sum_family[way, at] = table, family
                            sum_elements[way, at] += elements
                if gathers and plans.reshards[plan]:
                    # Whole layers of the run from sums; parts of layers, and layers with tied parameters, one by one.
                    layer, last_layer = shape.layer_of[start], shape.layer_of[ends - 1]
                    whole_first = layer + (shape.layer_first[layer] < start)
                    whole_last = last_layer - (shape.layer_stop[last_layer] > ends)
                    if whole_first <= whole_last:
                        gather_s += sums[shape.layer_stop[whole_last], GATHER_S]
                        gather_s -= sums[shape.layer_first[whole_first], GATHER_S]
                    place = 0
                    while layer <= last_layer:
                        if whole_first <= layer <= whole_last:
                            # The next layer with a tied parameter, else the end of the whole ones.
                            while place < num_tied and shape.layer_of[shape.tied[place]] < layer:
                                place += 1
                            layer = whole_last + 1
                            if place < num_tied and shape.layer_of[shape.tied[place]] <= whole_last:
                                layer = shape.layer_of[shape.tied[place]]
                            if layer > last_layer:
                                break
                        if layer != pending_layer:
                            for at in range(num_pending):
                                alone_s = _channel_s(tables, pend_channel[at], pend_elements[at] * gathered_bytes)
                                gather_s += shape.gathers_of[pending_layer] * alone_s
                            num_pending, pending_layer = 0, layer
                        a, b = max(start, shape.layer_first[layer]), min(ends, shape.layer_stop[layer])
                        for family in range(MAX_FAMILIES):
                            own_key = families[family, GATHER]
                            if own_key < 0:
                                continue
                            elements = sums[b, ELEMENTS + family] - sums[a, ELEMENTS + family]
                            # Each layer gathers what is tied, but for those that stay gathered: the first of them.
                            since = first if shape.gathers_of[layer] == 1 else max(first, shape.layer_first[layer])
                            elements += _tied_elements(
                                shape, tables, plans, run_tables, table, family, since, begin, a, b, False
                            )
                            if elements > 0:
                                at = 0
                                while at < num_pending and pend_key[at] != own_key:
                                    at += 1
                                if at == MAX_PENDING:
                                    state = TOO_MANY_GATHERS
                                    break
                                if at == num_pending:
                                    num_pending += 1
                                    pend_key[at], pend_elements[at] = own_key, 0.0
                                    pend_channel[at] = families[family, GATHER_CHANNEL]
                                pend_elements[at] += elements
                        layer += 1
                start = ends
            if state < 0:
                break
            for at in range(num_pending):
                alone_s = _channel_s(tables, pend_channel[at], pend_elements[at] * gathered_bytes)
                gather_s += shape.gathers_of[pending_layer] * alone_s
            seconds += gather_s

            # What leaves: in shards of the sequence or not; outputs that nothing in the stage reads.
            for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
                tensor = shape.crossing[place]
                maker = shape.producers[tensor]
                if maker >= first:
                    other = begin
                    while plans.run_stops[other] <= maker:
                        other += 1
                    in_shards[tensor] = tables.in_shards[run_tables[other], tensor]
                    if shape.readers[shape.reader_offsets[tensor]] >= stop:
                        seconds += tables.settling_s[run_tables[other], tensor]

            # Recomputed segments.
            previous, run, over = first, begin, 0
            for segment in range(plans.segment_offsets[stage], plans.segment_offsets[stage + 1]):
                a, b = plans.segment_firsts[segment], plans.segment_stops[segment]
                if a < previous or b <= a or b > stop:
                    state = BAD_SEGMENTS
                    break
                previous = b
                while plans.run_stops[run] <= a:
                    run += 1
                tail = b
                if stops_early:
                    other = run
                    while tail > a:
                        while plans.run_stops[other] < tail and other + 1 < end:
                            other += 1
                        while other > run and plans.run_stops[other - 1] >= tail:
                            other -= 1
                        if tables.has_private[run_tables[other], tail - 1] or shape.first_saver[tail - 1] < b:
                            break
                        tail -= 1
                other, place = run, a
                while place < tail:
                    ends = min(tail, plans.run_stops[other])
                    sums = tables.sums[run_tables[other]]
                    seconds += sums[ends, FORWARD_S] - sums[place, FORWARD_S]
                    place = ends
                    other += 1
                while over < num_over and over_op[over] < a:
                    over += 1
                at = over
                while at < num_over and over_op[at] < tail:
                    seconds += over_s[at]
                    at += 1
                at, other = over, run
                for place in range(shape.touched_offsets[a], shape.touched_offsets[a + 1]):
                    index = shape.touched[place]
                    if index >= tail:
                        break
                    while at < num_over and over_op[at] < index:
                        at += 1
                    while plans.run_stops[other] <= index:
                        other += 1
                    base = shape.input_offsets[index]
                    for number in range(base, shape.input_offsets[index + 1]):
                        if shape.input_producers[number] < a:
                            if at < num_over and over_op[at] == index:
                                seconds -= tables.rows[over_row[at], 2 + number - base]
                            else:
                                seconds -= tables.entering_s[run_tables[other], number]
            if state < 0:
                break

            # Once per iteration (or per microbatch): gradients; and parameters after the step.
            reduced_s, refresh_s = 0.0, 0.0
            for way in range(2):
                for at in range(num_sums[way]):
                    family_row = tables.families[sum_table[way, at], sum_family[way, at]]
                    left = sum_elements[way, at] * (parameter_bytes if way else gradient_bytes)
                    for step in range(1 if way else 2):
                        column = REFRESH_CHANNEL if way else (REST if step else SCATTER)
                        channel = family_row[column]
                        if channel < 0:
                            continue
                        cost_s = _channel_s(tables, channel, left)
                        if way:
                            refresh_s += cost_s
                        else:
                            reduced_s += cost_s
                        if not way and not step:
                            left /= family_row[SCATTER_DEGREE]
            if plans.reduces_every[plan]:
                reduced_s *= m
            once_s = max(once_s, reduced_s + refresh_s)
            stage_s[stage] = seconds
            first = stop
        if state >= 0 and first != num_operators:
            state = BAD_RUNS
        if state != DONE:
            states[plan] = state
            iteration_s[plan] = np.nan
            if state < 0:
                continue

        # Boundaries between stages.
        first = 0
        for stage in range(low, high - 1):
            begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
            last = plans.run_offsets[stage + 2]
            cut, stop = plans.run_stops[end - 1], plans.run_stops[last - 1]
            known = True
            for run in range(begin, last):
                known = known and run_tables[run] >= 0
            for place in range(shape.crossing_offsets[cut], shape.crossing_offsets[cut + 1]):
                known = known and in_shards[shape.crossing[place]] >= 0
            if not known:
                first = cut
                continue
            placement, following = plans.placements[stage], plans.placements[stage + 1]
            key = _mixed(_mixed(_BOUNDARY_KEY, size), tables.placement_form[placement])
            key = _mixed(key, tables.placement_form[following])
            key = _mixed(key, tables.placement_node[following] - tables.placement_node[placement])
            for place in range(shape.crossing_offsets[cut], shape.crossing_offsets[cut + 1]):
                tensor = shape.crossing[place]
                maker = shape.producers[tensor]
                reader = shape.reader_offsets[tensor]
                other = begin
                if maker >= first:
                    while plans.run_stops[other] <= maker:
                        other += 1
                    sent = tables.made[run_tables[other], tensor]
                else:
                    while shape.readers[reader] < first:
                        reader += 1
                    if shape.readers[reader] < cut:
                        while plans.run_stops[other] <= shape.readers[reader]:
                            other += 1
                        sent = tables.read[run_tables[other], reader]
                    else:
                        sent = tables.passed[run_tables[begin], first]
                while shape.readers[reader] < cut:
                    reader += 1
                other = end
                if shape.readers[reader] < stop:
                    while plans.run_stops[other] <= shape.readers[reader]:
                        other += 1
                    received = tables.read[run_tables[other], reader]
                else:
                    received = tables.passed[run_tables[end], cut]
                key = _mixed(_mixed(_mixed(key, 2 * shape.sizes[tensor] + in_shards[tensor]), sent), received)
            number = _wanted(tables.keys, tables.values, key, misses, counts, BOUNDARY, stage, plan)
            if number < 0:
                state = INCOMPLETE
            else:
                stage_s[stage] += tables.boundaries[number, 0] + tables.boundaries[number, 3]
                stage_s[stage + 1] += tables.boundaries[number, 1] + tables.boundaries[number, 2]
            first = cut
        # Tied weights, once per iteration: two layouts of a stage, then over stages.
        for place in range(num_tied):
            is_first = True
            for before in range(place):
                is_first = is_first and shape.ties[before] != shape.ties[place]
            if not is_first:
                continue
            most, inner_s, num_holders, stage, run = 0.0, 0.0, 0, low, plans.run_offsets[low]
            key, last_stage, known = _TIE_KEY, -1, True
            for step in range(2):
                # First the size, then what reduces it: inside stages here, over stages below.
                stage, run, last_stage, layouts, first_layout = low, plans.run_offsets[low], -1, 0, 0
                for other in range(place, num_tied):
                    if shape.ties[other] != shape.ties[place]:
                        continue
                    while plans.run_stops[run] <= shape.tied[other]:
                        run += 1
                    while plans.run_offsets[stage + 1] <= run:
                        stage += 1
                    if run_tables[run] < 0:
                        known = False
                        break
                    table = run_tables[run]
                    layout = tied_of[table, other, 2]
                    if stage != last_stage:
                        layouts, first_layout, last_stage = 1, layout, stage
                        if step:
                            key = _mixed(key, plans.placements[stage])
                            num_holders += 1
                    elif layouts == 1 and layout != first_layout:
                        layouts = 2
                        if step:
                            own_key = _mixed(_TIE_KEY, plans.placements[stage])
                            channel = _wanted(
                                tables.keys, tables.values, own_key, misses, counts, TIE, place, stage
                            )
                            if channel < 0:
                                known = False
                            elif channel > 0:
                                inner_s = max(inner_s, _channel_s(tables, channel - 1, most * gradient_bytes))
                    most = max(most, tied_of[table, other, 1] / tied_of[table, other, 3])
            if known and num_holders > 1:
                channel = _wanted(tables.keys, tables.values, key, misses, counts, TIE, place, -1 - plan)
                if channel < 0:
                    known = False
                elif channel > 0:
                    once_s += _channel_s(tables, channel - 1, most * gradient_bytes)
            if not known:
                state = INCOMPLETE
            once_s += inner_s
        states[plan] = state
        if state != DONE:
            iteration_s[plan] = np.nan
            continue

        # Ranks: stages on one placement follow one another on it.
        total_s, longest_s, num_ranks = 0.0, 0.0, 0
        for stage in range(low, high):
            total_s += stage_s[stage]
            rank_s, is_first = 0.0, True
            for other in range(low, high):
                if plans.placements[other] == plans.placements[stage]:
                    rank_s += stage_s[other]
                    is_first = is_first and other >= stage
            longest_s = max(longest_s, rank_s)
            num_ranks += is_first
        chunks = (high - low) / num_ranks
        fill_s = total_s / chunks
        pipeline_s = (m - 1) * longest_s + fill_s + (chunks - 1) * fill_s / num_ranks
        iteration_s[plan] = pipeline_s + once_s
