"""Compiled: iteration times of plans given as runs of equal strategy, from sums in tables.

The cost of a plan grows with its runs and recomputed segments, not with its operators. What a plan needs that
no table holds yet is noted and looked for again once it has been worked out (``estimate``).

The loop over runs stays in one piece: with what it does for neighbours and parameters in functions, inlined
or pasted, batches took 1.4 to 1.8 times as long.
"""

from __future__ import annotations

import numpy as np

from simulator.closed_forms import (
    breadth_first_time,
    host_time,
    interleaved_time,
    overlap_time,
    passes_time,
    pipeline_time,
    stage_rows,
    step_time,
    zero_bubble_time,
)
from simulator.closed_forms.overlap_time import SendingRules
from simulator.closed_forms.passes_time import HostRules, PassWork, gradients_s, stage_passes_s
from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT_LAG, LESS, NUM_COLUMNS, UP, WEIGHT
from simulator.compiled_cache import compiled_with, inlined
from simulator.fast import (
    additions,
    arrays,
    boundaries,
    gathers,
    overlap,
    pipeline,
    prices,
    recompute,
    regather,
    runs,
    step,
    ties,
)
from simulator.fast.additions import handed_over_s
from simulator.fast.arrays import (
    ADDED_S,
    AHEAD,
    BACKWARD_HOST_S,
    BACKWARD_S,
    BAD_RUNS,
    BAD_SEGMENTS,
    BAD_STRATEGY,
    BEHIND,
    BUCKETS,
    DONE,
    ELEMENTS,
    FORWARD_HOST_S,
    FORWARD_S,
    GATHER,
    GPIPE,
    INCOMPLETE,
    LARGE,
    LAST,
    LAUNCHED,
    LAUNCHING,
    MAX_FAMILIES,
    MAX_PENDING,
    PENDING,
    REDUCED,
    REDUCTION,
    REFRESH,
    REST,
    ROW,
    SCATTER,
    TENSORS,
    TOO_MANY_GATHERS,
    UNSUITED,
    UPDATED,
    ZB_H1,
    BesideRules,
    Floats,
    Ints,
    PlanColumns,
    StepRules,
    Structure,
    TimeTables,
)
from simulator.fast.boundaries import add_transfers, key_of_arrivals
from simulator.fast.gathers import add_gathers
from simulator.fast.overlap import COPIED, add_copies, left_of_units_s, stage_sent
from simulator.fast.pipeline import add_passes, weights_s
from simulator.fast.prices import channels_s, mixed, wanted
from simulator.fast.recompute import recomputed_s
from simulator.fast.regather import add_regathers
from simulator.fast.runs import find_tables
from simulator.fast.step import add_steps, find_norm, refreshed_s
from simulator.fast.ties import tied_elements, tied_s
from simulator.lowering import step as lowering_step

_stage_passes_s, _gradients_s = inlined(stage_passes_s), inlined(gradients_s)
_ROW_KEY = np.uint64(0xAEF17502108EF2D9)


@compiled_with(
    additions,
    arrays,
    prices,
    ties,
    boundaries,
    gathers,
    overlap,
    recompute,
    regather,
    runs,
    step,
    pipeline,
    breadth_first_time,
    host_time,
    interleaved_time,
    overlap_time,
    passes_time,
    pipeline_time,
    stage_rows,
    step_time,
    zero_bubble_time,
    lowering_step,
)
def estimate_times(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    chosen: Ints,
    stops_early: bool,
    ties_by_use: bool,
    regathers: bool,
    blocking: bool,
    parameter_bytes: float,
    passes_s: Floats,
    pass_host_s: float,
    waits_to_receive: bool,
    rules: StepRules,
    beside: BesideRules,
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
        regathers: Units that are computed again whole are gathered once more.
        blocking: A stage goes on only when what it sent has arrived.
        parameter_bytes: Per element, as refreshed.
        passes_s: By schedule, what the passes of a microbatch through a stage add that nothing hides.
        pass_host_s: What a pass takes a host that runs ahead.
        waits_to_receive: Such a host waits for what a pass receives.
        rules: Of the optimizer's step.
        beside: Of what is sent beside passes.
        iteration_s, stage_s, run_tables: Results, per plan, stage and run.
        states: Per plan: DONE, INCOMPLETE, or what is wrong with it.
        misses: int64[., 4]. Kind, slot in the hash table, and where it is needed: table (run, stage), row
            (operator, stage), boundary (stage, plan), reduction of a tied weight
            (place in ``Structure.tied``, stage; or -1 - plan for all that hold it), norm (plan).
        counts: int64[1]. How many misses there are.
    """
    num_operators = len(shape.classes)
    over_op = np.empty(num_operators, np.int64)
    over_row = np.empty(num_operators, np.int64)
    over_s = np.empty((num_operators, 2), np.float64)
    pend_key = np.empty(MAX_PENDING, np.int64)
    pend_channel = np.empty(MAX_PENDING, np.int64)
    pend_elements = np.empty(MAX_PENDING, np.float64)
    sum_key = np.empty((3, MAX_PENDING), np.int64)
    sum_table = np.empty((3, MAX_PENDING), np.int64)
    sum_family = np.empty((3, MAX_PENDING), np.int64)
    sum_elements = np.empty((3, MAX_PENDING), np.float64)
    num_sums = np.zeros(3, np.int64)
    copied = np.zeros(COPIED)
    added_s = np.zeros(ELEMENTS - ADDED_S)
    gather_s = np.zeros(2)  # Of the root, and of the other units, once.
    once_s = np.zeros((3, len(stage_s)))
    launched_s = np.zeros((len(stage_s), LAUNCHED))
    ties_s, norms_s = np.zeros(len(iteration_s)), np.zeros(len(iteration_s))
    rows_s = np.empty((len(stage_s), NUM_COLUMNS), np.float64)
    in_shards = np.zeros(len(shape.producers), np.int64)  # As ``TimeTables.in_shards``; PENDING where not known yet.
    for plan in chosen:
        low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
        m, size = plans.num_microbatches[plan], plans.microbatch_size[plan]
        only_one, every = m == 1, plans.reduces_every[plan] != 0
        state, first, first_s = DONE, 0, 0.0
        splits = plans.schedule[plan] == ZB_H1
        for stage in range(low, high):
            begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
            stop, known, in_order = find_tables(
                plans.run_stops, plans.strategies, run_tables, tables.keys, tables.values, begin, end, stage, first,
                tables.placement_shape[plans.placements[stage]], size, num_operators, misses, counts,
            )
            if not in_order:
                state = BAD_RUNS
                break
            if not known:
                state = INCOMPLETE
                for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
                    if shape.producers[shape.crossing[place]] >= first:
                        in_shards[shape.crossing[place]] = PENDING
                first = stop
                continue

            # Runs: passes, operators whose neighbours are in another run or stage, gathers, parameters.
            pass_s = passes_s[plans.schedule[plan]] / (3 if splits else 2)
            forward_s, seconds = 0.0, 0.0
            is_sharded = True
            gather_s[:] = 0.0
            forward_host_s, backward_host_s = pass_host_s, (2 if splits else 1) * pass_host_s
            num_over, num_pending, pending_unit, num_buckets = 0, 0, -1, 0.0
            num_sums[:] = 0
            copied[:] = 0.0
            num_large, num_tensors = 0.0, 0.0
            added_s[:] = 0.0
            start = first
            for run in range(begin, end):
                table, ends = run_tables[run], plans.run_stops[run]
                sums = tables.sums[table]
                if sums[ends, UNSUITED] > sums[start, UNSUITED]:
                    state = BAD_STRATEGY
                    break
                forward_s += sums[ends, FORWARD_S] - sums[start, FORWARD_S]
                seconds += sums[ends, BACKWARD_S] - sums[start, BACKWARD_S]
                forward_host_s += sums[ends, FORWARD_HOST_S] - sums[start, FORWARD_HOST_S]
                backward_host_s += sums[ends, BACKWARD_HOST_S] - sums[start, BACKWARD_HOST_S]
                for column in range(len(added_s)):
                    added_s[column] += sums[ends, ADDED_S + column] - sums[start, ADDED_S + column]
                num_buckets += sums[ends, BUCKETS] - sums[start, BUCKETS]
                num_large += sums[ends, LARGE] - sums[start, LARGE]
                num_tensors += sums[ends, TENSORS] - sums[start, TENSORS]
                for place in range(shape.touched_offsets[start], shape.touched_offsets[start + 1]):
                    index = shape.touched[place]
                    if index >= ends:
                        break
                    key = mixed(mixed(_ROW_KEY, shape.classes[index]), tables.aliases[table])
                    other = begin
                    for near in range(shape.neighbour_offsets[index], shape.neighbour_offsets[index + 1]):
                        neighbour = shape.neighbours[near]
                        word = 0
                        if neighbour >= first:
                            while plans.run_stops[other] <= neighbour:
                                other += 1
                            word = tables.aliases[run_tables[other]] + 1
                        key = mixed(key, word)
                    key, known = key_of_arrivals(shape, key, index, first, in_shards)
                    if not known:
                        state = INCOMPLETE
                        continue
                    row = wanted(tables.keys, tables.values, key, misses, counts, ROW, index, stage)
                    if row < 0:
                        state = INCOMPLETE
                        continue
                    unlike, alike, behind = tables.rows[row], sums[index], sums[index + 1]
                    over_op[num_over], over_row[num_over] = index, row
                    over_s[num_over, 0] = unlike[0, 0] - (behind[FORWARD_S] - alike[FORWARD_S])
                    over_s[num_over, 1] = unlike[0, 1] - (behind[FORWARD_HOST_S] - alike[FORWARD_HOST_S])
                    forward_s += over_s[num_over, 0]
                    forward_host_s += over_s[num_over, 1]
                    seconds += unlike[1, 0] - (behind[BACKWARD_S] - alike[BACKWARD_S])
                    backward_host_s += unlike[1, 1] - (behind[BACKWARD_HOST_S] - alike[BACKWARD_HOST_S])
                    num_over += 1
                families = tables.families[table]
                gathers = False
                for family in range(MAX_FAMILIES):
                    if families[family, REDUCTION] < 0:
                        break
                    elements = sums[ends, ELEMENTS + family] - sums[start, ELEMENTS + family]
                    by_use = ties_by_use and families[family, REFRESH] < 0 and families[family, GATHER] < 0
                    elements += tied_elements(
                        shape, tables, plans, run_tables, table, family, first, begin, start, ends, by_use
                    )
                    gathers = gathers or families[family, GATHER] >= 0
                    if elements > 0:
                        is_sharded = is_sharded and families[family, GATHER] >= 0
                        if families[family, SCATTER] >= 0 or families[family, REST] >= 0:
                            add_copies(families[family], elements, beside, copied)
                        for way in range(3):
                            own_key = families[family, (REDUCTION, REFRESH, GATHER)[way]]
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
                if gathers:
                    num_pending, pending_unit = add_gathers(
                        shape, tables, plans, run_tables, table, first, begin, start, ends, plans.reshards[plan] != 0,
                        beside.gathered_bytes, pend_key, pend_channel, pend_elements, num_pending, pending_unit,
                        gather_s,
                    )
                    if num_pending > MAX_PENDING:
                        state = TOO_MANY_GATHERS
                        break
                start = ends
            if state < 0:
                break
            gather_s[shape.gathers_of[pending_unit] - 1] += channels_s(
                tables, pend_channel, pend_elements, num_pending, beside.gathered_bytes
            )

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
                        forward_s += tables.settling_s[run_tables[other], tensor, 0]
                        forward_host_s += tables.settling_s[run_tables[other], tensor, 1]

            alone_s, alone_host_s, less_s, less_host_s = handed_over_s(added_s, only_one, every)
            seconds -= alone_s
            backward_host_s -= alone_host_s

            again_s, again_host_s, in_order = recomputed_s(
                shape, tables, plans, run_tables, stage, first, stops_early, over_op, over_row, over_s, num_over
            )
            if not in_order:
                state = BAD_SEGMENTS
                break
            seconds += again_s
            backward_host_s += again_host_s

            reshards, overlaps = plans.reshards[plan] != 0, plans.overlaps[plan] != 0
            sent, host, waits = stage_sent(
                shape, tables, plans, run_tables, stage, first, stop, num_sums, sum_table, sum_family, sum_elements,
                copied, gather_s, is_sharded, every or overlaps, ties_by_use, num_buckets, num_large, num_tensors,
                beside,
            )
            once_s[UPDATED, stage] = refreshed_s(
                tables, num_sums, sum_table, sum_family, sum_elements, parameter_bytes
            )
            forward_left_s, backward_left_s = 0.0, 0.0
            if beside.waits_for_gathers:
                forward_left_s, backward_left_s = left_of_units_s(
                    tables.beyond_host_s, shape.unit_of, plans.run_stops, run_tables, begin, first, stop
                )
            apart = plans.schedule[plan] == GPIPE
            work = PassWork(
                forward_s, seconds, forward_host_s, backward_host_s, pass_host_s, forward_left_s, backward_left_s
            )
            sending = SendingRules(beside.prefetches and is_sharded, reshards, overlaps, every, waits)
            hosts = HostRules(
                rules.runs_ahead, waits_to_receive, beside.waits_for_gathers, apart, high == low + 1, stage == low, m
            )
            found = _stage_passes_s(work, sent, host, sending, hosts)
            rows_s[stage, LESS] = 0.0
            if less_s > 0.0:
                shorter = PassWork(
                    forward_s, seconds - less_s, forward_host_s, backward_host_s - less_host_s, pass_host_s,
                    forward_left_s, backward_left_s,
                )
                first_passes = _stage_passes_s(shorter, sent, host, sending, hosts)
                rows_s[stage, LESS] = _gradients_s(found) - _gradients_s(first_passes)
            passes = found.passes
            launched_s[stage, AHEAD], launched_s[stage, LAUNCHING] = found.ahead, found.launching
            launched_s[stage, LAST], launched_s[stage, BEHIND] = found.last, passes.reduced
            first_s += passes.first
            once_s[REDUCED, stage] = passes.once
            forward_s, behind_s = passes.forward + pass_s, found.behind + passes.reduced
            stage_s[stage] = forward_s + passes.backward + passes_s[plans.schedule[plan]] - pass_s + behind_s
            rows_s[stage, FORWARD], rows_s[stage, WEIGHT] = forward_s, behind_s
            rows_s[stage, DOWN], rows_s[stage, UP] = 0.0, 0.0
            rows_s[stage, FORWARD_LAG], rows_s[stage, INPUT_LAG] = found.forward_lag, found.backward_lag
            if splits:
                weight_s = weights_s(tables, plans, run_tables, stage, first) - alone_s
                rows_s[stage, WEIGHT] += pass_s + weight_s + passes.inline
            first = stop
        if state >= 0 and first != num_operators:
            state = BAD_RUNS
        if state != DONE:
            states[plan] = state
            iteration_s[plan] = np.nan
            if state < 0:
                continue

        if regathers and plans.reshards[plan] and state == DONE:
            add_regathers(shape, tables, plans, run_tables, plan, beside.gathered_bytes, stage_s)
        if not add_transfers(shape, tables, plans, run_tables, in_shards, plan, stage_s, rows_s, misses, counts):
            state = INCOMPLETE
        ties_s[plan], known = tied_s(shape, tables, plans, run_tables, plan, beside.gradient_bytes, misses, counts)
        if not known:
            state = INCOMPLETE
        if rules.has_norm:
            norm = find_norm(plans.placements, low, high, plan, tables.keys, tables.values, misses, counts)
            norms_s[plan], known = tables.norms_s[norm] if norm >= 0 else 0.0, norm >= 0
            if not known:
                state = INCOMPLETE
        states[plan] = state
        if state != DONE:
            iteration_s[plan] = np.nan
            continue

        iteration_s[plan] = first_s + ties_s[plan] + norms_s[plan]
    add_steps(
        shape, tables, plans, run_tables, chosen, states, rules, ties_s, norms_s, launched_s, stage_s, rows_s, once_s
    )
    add_passes(plans, chosen, states, stage_s, once_s, rows_s, blocking, iteration_s)
