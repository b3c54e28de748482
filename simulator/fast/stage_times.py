"""Compiled: seconds of one stage for a microbatch, and of what it does once per iteration, from sums in tables."""

from __future__ import annotations

from typing import NamedTuple

from simulator.closed_forms.overlap_time import SendingRules, after_head_start_s
from simulator.closed_forms.passes_time import HostRules, PassWork, gradients_s, stage_passes_s
from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT_LAG, LESS, UP, WEIGHT
from simulator.compiled_cache import inlined
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
    FORWARD_HOST_S,
    FORWARD_S,
    GPIPE,
    INCOMPLETE,
    LARGE,
    LAST,
    LAUNCHING,
    MAX_PENDING,
    MIXED_GATHERS,
    PARTED_S,
    PENDING,
    REDUCED,
    TENSORS,
    TOO_MANY_GATHERS,
    UNSUITED,
    UPDATED,
    ZB_H1,
    BesideRules,
    Floats,
    Ints,
    PassRules,
    PlanColumns,
    StepRules,
    Structure,
    TimeTables,
)
from simulator.fast.gathers import UnitGathers, add_gathers
from simulator.fast.neighbours import PassSums, Unlike, add_unlike
from simulator.fast.overlap import left_of_units_s, stage_sent
from simulator.fast.parameters import Synchronised, add_parameters
from simulator.fast.pipeline import weights_s
from simulator.fast.prices import channels_s
from simulator.fast.recompute import recomputed_s
from simulator.fast.runs import find_tables
from simulator.fast.step import refreshed_s

_stage_passes_s, _gradients_s = inlined(stage_passes_s), inlined(gradients_s)
_after_head_start_s = inlined(after_head_start_s)


class StageRoom(NamedTuple):
    """Room for one stage.

    Attributes:
        unlike, synchronised, pending: What its runs add up.
        copied: float64[COPIED]. Copies of gradients.
        added_s: float64[.]. Additions of gradients, from column ``ADDED_S`` on.
        gather_s: float64[2]. Gathers of the root, and of the other units, once.
        in_shards: int64[T]. As ``TimeTables.in_shards``, of tensors that cross into it; PENDING where not known yet.
    """

    unlike: Unlike
    synchronised: Synchronised
    pending: UnitGathers
    copied: Floats
    added_s: Floats
    gather_s: Floats
    in_shards: Ints


class StageTimes(NamedTuple):
    """Results, per stage of all plans.

    Attributes:
        once_s: float64[3, S]. What comes once per iteration, as ``step_time.phases_s`` has it.
        launched_s: float64[S, LAUNCHED].
        rows_s: float64[S, NUM_COLUMNS]. As ``stage_rows`` has them.
        stage_s: float64[S]. Seconds of a microbatch.
    """

    once_s: Floats
    launched_s: Floats
    rows_s: Floats
    stage_s: Floats


class RunSums(NamedTuple):
    """What the runs of a stage add up to, beside what they leave in ``StageRoom``.

    Attributes:
        state: DONE, INCOMPLETE, or what is wrong with them.
        passes: Of a microbatch.
        num_unlike: How many operators have neighbours in another run or stage.
        num_buckets, num_large, num_tensors: Of its parameters; see ``overlap.stage_sent``.
        is_mixed: Some of them are gathered before use, and some not.
        in_forward: By ZeRO-1 or 2, beside the first forward pass.
    """

    state: int
    passes: PassSums
    num_unlike: int
    num_buckets: float
    num_large: float
    num_tensors: float
    is_mixed: bool
    in_forward: bool


@inlined
def _add_runs(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    stage: int,
    first: int,
    rules: PassRules,
    beside: BesideRules,
    misses: Ints,
    counts: Ints,
    room: StageRoom,
) -> RunSums:
    """Add up the runs of a stage: passes, operators whose neighbours are unlike, gathers, parameters."""
    state, count = DONE, 0
    gathers, all_gathered, any_sharded, any_stepped = False, True, False, False
    in_parts = plans.reduces_every[plan] != 0 or plans.overlaps[plan] != 0
    forward_s, backward_s, forward_host_s, backward_host_s, parted_s = 0.0, 0.0, 0.0, 0.0, 0.0
    num_buckets, num_large, num_tensors = 0.0, 0.0, 0.0
    num_pending, pending_unit, gathered_bytes = 0, -1, beside.gathered_bytes
    room.gather_s[:] = 0.0
    room.synchronised.num[:] = 0
    room.copied[:] = 0.0
    room.added_s[:] = 0.0
    start = first
    for run in range(plans.run_offsets[stage], plans.run_offsets[stage + 1]):
        ends, sums = plans.run_stops[run], tables.sums[run_tables[run]]
        if sums[ends, UNSUITED] > sums[start, UNSUITED]:
            state = BAD_STRATEGY
            break
        forward_s += sums[ends, FORWARD_S] - sums[start, FORWARD_S]
        backward_s += sums[ends, BACKWARD_S] - sums[start, BACKWARD_S]
        forward_host_s += sums[ends, FORWARD_HOST_S] - sums[start, FORWARD_HOST_S]
        backward_host_s += sums[ends, BACKWARD_HOST_S] - sums[start, BACKWARD_HOST_S]
        parted_s += sums[ends, PARTED_S] - sums[start, PARTED_S]
        for column in range(len(room.added_s)):
            room.added_s[column] += sums[ends, ADDED_S + column] - sums[start, ADDED_S + column]
        num_large += sums[ends, LARGE] - sums[start, LARGE]
        num_tensors += sums[ends, TENSORS] - sums[start, TENSORS]
        count, known, more = add_unlike(
            shape, tables, plans, run_tables, run, start, stage, first, room.in_shards, misses, counts, room.unlike,
            count,
        )
        state = state if known else INCOMPLETE
        forward_s += more.forward_s
        backward_s += more.backward_s
        forward_host_s += more.forward_host_s
        backward_host_s += more.backward_host_s
        parted_s += more.parted_s
        own = add_parameters(
            shape, tables, plans, run_tables, run, start, stage, first, rules.ties_by_use, in_parts, beside,
            room.copied, room.synchronised,
        )
        if not own.any_sharded:
            num_buckets += sums[ends, BUCKETS] - sums[start, BUCKETS]
        gathers, all_gathered = gathers or own.gathers, all_gathered and own.all_gathered
        any_sharded, any_stepped = any_sharded or own.any_sharded, any_stepped or own.any_stepped
        gathered_bytes = rules.parameter_bytes if any_stepped else beside.gathered_bytes
        if own.gathers and own.fits:
            num_pending, pending_unit = add_gathers(
                shape, tables, plans, run_tables, run, start, stage, first,
                plans.reshards[plan] != 0 and not any_stepped, gathered_bytes, room.pending, num_pending, pending_unit,
                room.gather_s,
            )
        if not own.fits or num_pending > MAX_PENDING:
            state = TOO_MANY_GATHERS
            break
        if any_sharded and any_stepped:
            state = MIXED_GATHERS
            break
        start = ends
    if state >= 0:
        pending = room.pending
        room.gather_s[shape.gathers_of[pending_unit] - 1] += channels_s(
            tables, pending.channels, pending.elements, num_pending, gathered_bytes
        )
    passes = PassSums(forward_s, backward_s, forward_host_s, backward_host_s, parted_s)
    return RunSums(
        state, passes, count, num_buckets, num_large, num_tensors, gathers and not all_gathered, any_stepped
    )


@inlined
def _let_leave(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    begin: int,
    first: int,
    stop: int,
    in_shards: Ints,
) -> tuple[float, float]:
    """Note what leaves a stage in shards; return the seconds of device and host of outputs that nothing in it reads."""
    settled_s, settled_host_s = 0.0, 0.0
    for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
        tensor = shape.crossing[place]
        maker = shape.producers[tensor]
        if maker >= first:
            run = begin
            while plans.run_stops[run] <= maker:
                run += 1
            in_shards[tensor] = tables.in_shards[run_tables[run], tensor]
            if shape.readers[shape.reader_offsets[tensor]] >= stop:
                settled_s += tables.settling_s[run_tables[run], tensor, 0]
                settled_host_s += tables.settling_s[run_tables[run], tensor, 1]
    return settled_s, settled_host_s


@inlined
def fill_stage(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    stage: int,
    first: int,
    rules: PassRules,
    step_rules: StepRules,
    beside: BesideRules,
    misses: Ints,
    counts: Ints,
    room: StageRoom,
    times: StageTimes,
) -> tuple[int, int, float]:
    """Fill the times of a stage; return where it ends, its state, and the seconds before its first pass."""
    low, high = plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
    schedule, m, every = plans.schedule[plan], plans.num_microbatches[plan], plans.reduces_every[plan] != 0
    begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
    stop, known, in_order = find_tables(
        plans.run_stops, plans.strategies, run_tables, tables.keys, tables.values, begin, end, stage, first,
        tables.placement_shape[plans.placements[stage]], plans.microbatch_size[plan], len(shape.classes), misses,
        counts,
    )  # fmt: skip
    if not in_order:
        return stop, BAD_RUNS, 0.0
    if not known:
        for place in range(shape.crossing_offsets[stop], shape.crossing_offsets[stop + 1]):
            if shape.producers[shape.crossing[place]] >= first:
                room.in_shards[shape.crossing[place]] = PENDING
        return stop, INCOMPLETE, 0.0

    found = _add_runs(
        shape, tables, plans, run_tables, plan, stage, first, rules, beside, misses, counts, room
    )
    if found.state < 0:
        return stop, found.state, 0.0
    splits, pass_host_s = schedule == ZB_H1, rules.pass_host_s
    settled_s, settled_host_s = _let_leave(shape, tables, plans, run_tables, begin, first, stop, room.in_shards)
    alone_s, alone_host_s, less_s, less_host_s = handed_over_s(room.added_s, m == 1, every)
    again_s, again_host_s, in_order = recomputed_s(
        shape, tables, plans, run_tables, stage, first, rules.stops_early, room.unlike, found.num_unlike
    )
    if not in_order:
        return stop, BAD_SEGMENTS, 0.0
    forward_s, forward_host_s = found.passes.forward_s + settled_s, found.passes.forward_host_s + settled_host_s
    backward_s = found.passes.backward_s - alone_s + again_s + (found.passes.parted_s if splits else 0.0)
    backward_host_s = found.passes.backward_host_s - alone_host_s + again_host_s
    forward_host_s += pass_host_s
    backward_host_s += (2 if splits else 1) * pass_host_s

    reshards, overlaps = plans.reshards[plan] != 0 and not found.in_forward, plans.overlaps[plan] != 0
    sent, host, waits = stage_sent(
        shape, tables, plans, run_tables, stage, first, stop, room.synchronised, room.copied, room.gather_s,
        found.is_mixed, every or overlaps, rules.ties_by_use, found.num_buckets, found.num_large, found.num_tensors,
        beside,
    )  # fmt: skip
    times.once_s[UPDATED, stage] = refreshed_s(tables, room.synchronised, rules.parameter_bytes)
    forward_left_s, backward_left_s = 0.0, 0.0
    if beside.waits_for_gathers:
        forward_left_s, backward_left_s = left_of_units_s(
            tables.beyond_host_s, shape.unit_of, plans.run_stops, run_tables, begin, first, stop
        )
    work = PassWork(
        forward_s, backward_s, forward_host_s, backward_host_s, pass_host_s, forward_left_s, backward_left_s
    )
    sending = SendingRules(beside.prefetches, reshards, overlaps, every, waits, beside.in_turn)
    hosts = HostRules(
        step_rules.runs_ahead, rules.waits_to_receive[schedule], beside.waits_for_gathers, schedule == GPIPE,
        high == low + 1, stage == low, m,
    )  # fmt: skip
    rows_s, launched_s = times.rows_s[stage], times.launched_s[stage]
    ran = _stage_passes_s(work, sent, host, sending, hosts)
    rows_s[LESS] = 0.0
    if less_s > 0.0:
        shorter = PassWork(
            forward_s, backward_s - less_s, forward_host_s, backward_host_s - less_host_s, pass_host_s,
            forward_left_s, backward_left_s,
        )  # fmt: skip
        rows_s[LESS] = _gradients_s(ran) - _gradients_s(_stage_passes_s(shorter, sent, host, sending, hosts))
    passes = ran.passes
    launched_s[AHEAD], launched_s[LAUNCHING] = ran.ahead, ran.launching
    launched_s[LAST], launched_s[BEHIND] = ran.last, passes.reduced
    times.once_s[REDUCED, stage] = passes.once
    pass_s = rules.passes_s[schedule] / (3 if splits else 2)
    forward_s, behind_s = passes.forward + pass_s, ran.behind + passes.reduced
    times.stage_s[stage] = forward_s + passes.backward + rules.passes_s[schedule] - pass_s + behind_s
    rows_s[FORWARD], rows_s[WEIGHT] = forward_s, behind_s
    rows_s[DOWN], rows_s[UP] = 0.0, 0.0
    rows_s[FORWARD_LAG], rows_s[INPUT_LAG] = ran.forward_lag, ran.backward_lag
    if splits:
        rows_s[WEIGHT] += pass_s + weights_s(tables, plans, run_tables, stage, first) - alone_s + passes.inline
    first_s = passes.first
    if found.in_forward and stage > low:
        first_s = _after_head_start_s(first_s, sent, work.forward_s, sending.prefetches)
    return stop, found.state, first_s
