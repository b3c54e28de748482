"""Compiled: what stages send beside their passes, for ``overlap_time``, as ``stage_overlap`` has it."""

from __future__ import annotations

from hardware_models.runtime import Runtime
from simulator.closed_forms.host_time import left_s
from simulator.closed_forms.overlap_time import NEXT_TO_NOTHING_BYTES, Sent
from simulator.closed_forms.passes_time import SentHost
from simulator.closed_forms.stage_overlap import copied_bytes
from simulator.closed_forms.stage_units import (
    NO_UNITS,
    ReductionShares,
    StageUnits,
    calls_of_unit,
    level_shares,
    mixed_shares,
    num_whole_reduced,
    unit_level_shares,
    unit_shares,
    with_unit,
)
from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    CALL_S,
    COMMUNICATION_SLOWDOWN,
    COMPUTATION_SLOWDOWN,
    COPY_S_PER_BYTE,
    COPY_START_S,
    ELEMENTS,
    GATHER,
    GATHER_CHANNEL,
    GATHERED_KEYS,
    LAUNCH_S,
    LEVEL,
    LISTING_S,
    MAX_FAMILIES,
    REDUCED_KEYS,
    REDUCTION,
    REST,
    SCATTER,
    SCATTER_DEGREE,
    SHARDED,
    BesideRules,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.parameters import NUM_BYTES, NUM_BYTES_BACK, TIMES, TIMES_BACK, Synchronised
from simulator.fast.prices import channel_s
from simulator.fast.whole_reductions import bucket_shares_of

_calls_of_unit, _left_s, _unit_shares = inlined(calls_of_unit), inlined(left_s), inlined(unit_shares)
_with_unit, _mixed_shares, _level_shares = inlined(with_unit), inlined(mixed_shares), inlined(level_shares)
_num_whole_reduced, _unit_level_shares = inlined(num_whole_reduced), inlined(unit_level_shares)


def beside_rules(runtime: Runtime) -> BesideRules:
    """Return what holds for any plan under a runtime."""
    return BesideRules(
        prefetches=runtime.prefetches_gathers,
        waits_for_gathers="gather" in runtime.host_waits,
        waits_for_whole=runtime.copies_gradients,
        lists=runtime.parameter_calls_above is not None,
        by_unit=runtime.reduces_by_unit,
        in_turn=runtime.one_communicator,
        copies_gathered=runtime.copies_gathered,
        gathered_bytes=runtime.gathered_parameter_bytes,
        gradient_bytes=runtime.travelling_gradient_bytes,
        tied_bytes=runtime.gradient_accumulation_bytes,
        whole_copied_bytes=copied_bytes(runtime, scattered=False),
        sharded_copied_bytes=copied_bytes(runtime, scattered=True),
    )


@inlined
def _unit_gathers(
    shape: Structure, tables: TimeTables, plans: PlanColumns, run_tables: Ints, run: int, first: int, stop: int
) -> bool:
    """Return whether a unit gathers parameters before use, or has none.

    Args:
        shape, tables, plans, run_tables: See ``time.estimate_times``.
        run: The first of the unit.
        first, stop: Its operators in the stage.
    """
    families, sums, tied = tables.families, tables.sums, tables.tied
    is_whole, start = False, first
    while start < stop:
        table, ends = run_tables[run], min(stop, plans.run_stops[run])
        for family in range(MAX_FAMILIES):
            if families[table, family, REDUCTION] < 0:
                break
            has = sums[table, ends, ELEMENTS + family] > sums[table, start, ELEMENTS + family]
            for place in range(len(shape.tied)):
                has = has or (start <= shape.tied[place] < ends and tied[table, place, 0] == family)
            if has:
                if families[table, family, GATHER] >= 0:
                    return True
                is_whole = True
        run, start = run + 1, ends
    return not is_whole


@inlined
def _stage_units(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    run: int,
    first: int,
    stop: int,
    is_mixed: bool,
) -> StageUnits:
    """Return the units of a stage.

    Args:
        shape, tables, plans, run_tables, first, stop, is_mixed: See ``stage_sent``.
        run: The first of the stage.
    """
    found, gathers = NO_UNITS, True
    for unit in range(shape.unit_of[first], shape.unit_of[stop - 1] + 1):
        if is_mixed:
            low, high = max(first, shape.unit_first[unit]), min(stop, shape.unit_stop[unit])
            while plans.run_stops[run] <= low:
                run += 1
            gathers = _unit_gathers(shape, tables, plans, run_tables, run, low, high)
        found = _with_unit(found, shape.gathers_of[unit] == 1, gathers)
    return found


@inlined
def left_of_units_s(
    beyond_host_s: Floats, unit_of: Ints, run_stops: Ints, run_tables: Ints, run: int, first: int, stop: int
) -> tuple[float, float]:
    """Return what the device has left of each unit when it was launched, forward and backward, all together.

    Args:
        beyond_host_s, unit_of: Of ``TimeTables`` and of ``Structure``.
        run_stops, run_tables: Of plans.
        run: The first of the stage.
        first, stop: Operators of the stage.
    """
    begin, forward_s, unit_s = run, 0.0, 0.0
    for index in range(first, stop):
        if run_stops[run] <= index:
            run += 1
        own = beyond_host_s[run_tables[run], index]
        unit_s = _left_s(unit_s, own[0], own[1])
        if index + 1 == stop or unit_of[index + 1] != unit_of[index]:
            forward_s, unit_s = forward_s + unit_s, 0.0
    backward_s = 0.0
    for index in range(stop - 1, first - 1, -1):
        while run > begin and run_stops[run - 1] > index:
            run -= 1
        own = beyond_host_s[run_tables[run], index]
        unit_s = _left_s(unit_s, own[2], own[3])
        if index == first or unit_of[index - 1] != unit_of[index]:
            backward_s, unit_s = backward_s + unit_s, 0.0
    return forward_s, backward_s


@inlined
def _level_starts(tables: TimeTables, synchronised: Synchronised) -> tuple[int, int]:
    """Set where each reduction of a stage begins to the first operator of its level; return the first and the last."""
    num_sums, _, sum_table, sum_family, _, starts = synchronised
    front, latest, families = -1, -1, tables.families
    for at in range(num_sums[REDUCED_KEYS]):
        family = families[sum_table[REDUCED_KEYS, at], sum_family[REDUCED_KEYS, at]]
        if family[SCATTER] < 0 and family[REST] < 0:
            continue
        for other in range(num_sums[REDUCED_KEYS]):
            theirs = families[sum_table[REDUCED_KEYS, other], sum_family[REDUCED_KEYS, other]]
            if theirs[LEVEL] == family[LEVEL] and (theirs[SCATTER] >= 0 or theirs[REST] >= 0):
                starts[at] = min(starts[at], starts[other])
        front = starts[at] if front < 0 else min(front, starts[at])
        latest = max(latest, starts[at])
    return front, latest


@inlined
def stage_sent(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: int,
    first: int,
    stop: int,
    synchronised: Synchronised,
    copied: Floats,
    gather_s: Floats,
    is_mixed: bool,
    in_parts: bool,
    ties_by_use: bool,
    num_buckets: float,
    num_large: float,
    num_tensors: float,
    rules: BesideRules,
) -> tuple[Sent, SentHost, bool]:
    """Return what a stage sends, what launching that takes its host, and whether passes wait for reductions.

    Args:
        shape, tables, plans, run_tables, stage: See ``time.estimate_times``.
        first, stop: Operators of the stage.
        synchronised: Its parameters.
        copied: float64[COPIED]. What ``add_copies`` has added.
        gather_s: float64[2]. Gathers of the root, and of the other units, each in one call.
        is_mixed: Some of its parameters are gathered before use, and some not.
        in_parts: Gradients are reduced as they are made.
        ties_by_use: See ``PassRules``.
        rules: What else holds for any plan.
        num_buckets, num_large, num_tensors: Of its parameters but for tied ones: buckets that gradients fill which
            ZeRO-3 does not shard, those that are gathered by calls of their own, all.
    """
    families, rates, hosts_s = tables.families, tables.step_rates, tables.channel_hosts_s
    num_sums, _, sum_table, sum_family, sum_elements, starts = synchronised
    types = tables.placement_types[plans.placements[stage]]
    computation, communication, start_s, s_per_byte, launch_s = 1.0, 1.0, 0.0, 0.0, 0.0
    for gpu_type in range(len(rates)):
        if types >> gpu_type & 1:
            computation = max(computation, rates[gpu_type, COMPUTATION_SLOWDOWN])
            communication = max(communication, rates[gpu_type, COMMUNICATION_SLOWDOWN])
            start_s = max(start_s, rates[gpu_type, COPY_START_S])
            s_per_byte = max(s_per_byte, rates[gpu_type, COPY_S_PER_BYTE])
            launch_s = max(launch_s, rates[gpu_type, LAUNCH_S])
    units = _stage_units(shape, tables, plans, run_tables, plans.run_offsets[stage], first, stop, is_mixed)
    each, once = units.gathered_others, units.gathered_root

    root_s, others_s = gather_s[0], gather_s[1]
    root_share, unit_share, gathered_share, gathered_copied_s, gather_host_s, latency_s = 0.0, 1.0, 1.0, 0.0, 0.0, 0.0
    if root_s + others_s > 0.0:
        gathered, more_s = 0.0, 0.0
        for at in range(num_sums[GATHERED_KEYS]):
            gathered += sum_elements[GATHERED_KEYS, at]
        for at in range(num_sums[GATHERED_KEYS]):
            table, family = sum_table[GATHERED_KEYS, at], sum_family[GATHERED_KEYS, at]
            channel = families[table, family, GATHER_CHANNEL]
            calls = _calls_of_unit(each + once, num_large, sum_elements[GATHERED_KEYS, at] / gathered)
            call_s = channel_s(tables, channel, NEXT_TO_NOTHING_BYTES)
            more_s += (calls - 1.0) * call_s
            latency_s += each * calls * call_s
            gather_host_s += calls * (hosts_s[channel, CALL_S] + launch_s)
            if rules.lists:
                gather_host_s += calls * hosts_s[channel, LISTING_S]
        share = root_s / (root_s + others_s)
        if rules.copies_gathered:
            gathered_copied_s = (each + once) * start_s + 2.0 * gathered * rules.gathered_bytes * s_per_byte
            gather_host_s += launch_s
        root_copied_s = share * gathered_copied_s
        gathered_copied_s = (1.0 - share) * gathered_copied_s
        root_s, others_s = root_s + once * more_s, others_s + each * more_s
        if root_s > 0.0:
            root_share = root_s / (root_s + others_s)
        if others_s > 0.0:
            unit_share, gathered_share = 1.0 / max(1, units.num_others), each / units.num_others
    else:
        root_copied_s = 0.0

    total, whole, waits = 0.0, 0.0, False
    for at in range(num_sums[REDUCED_KEYS]):
        table, family = sum_table[REDUCED_KEYS, at], sum_family[REDUCED_KEYS, at]
        if families[table, family, SCATTER] >= 0 or families[table, family, REST] >= 0:
            total += sum_elements[REDUCED_KEYS, at]
            if families[table, family, SHARDED] <= 0:
                whole += sum_elements[REDUCED_KEYS, at]
            waits = waits or (rules.waits_for_whole and families[table, family, SCATTER] < 0)
    by_unit, buckets, shares = 1.0, 1.0, ReductionShares(1.0, 1.0, 0.0, 1.0)
    first_of_whole, last_of_whole, last_of_units, front, latest = 1.0, 1.0, 1.0, 0, 0
    if total > 0.0 and in_parts:
        if whole > 0.0:
            if rules.by_unit:
                num_buckets = _num_whole_reduced(units, whole < total)
            buckets, first_of_whole, last_of_whole = bucket_shares_of(
                shape, tables, plans, run_tables, stage, first, stop, whole, num_buckets, ties_by_use, rules.by_unit
            )
            shares = ReductionShares(first_of_whole, last_of_whole, 0.0, 1.0)
            if whole >= total and (buckets <= 1.0 or rules.by_unit):
                front, latest = _level_starts(tables, synchronised)
        if whole < total:
            begins_in_root = shape.gathers_of[shape.unit_of[first]] == 1
            by_unit, first_of_units, last_of_units = _unit_shares(each, once, begins_in_root, root_share)
            shares = ReductionShares(first_of_units, last_of_units, 0.0, 1.0)
    reduced_s, reduced_host_s, reduced_latency_s, whole_s, front_s, of_front = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for at in range(num_sums[REDUCED_KEYS]):
        table, family = sum_table[REDUCED_KEYS, at], sum_family[REDUCED_KEYS, at]
        if families[table, family, SCATTER] < 0 and families[table, family, REST] < 0:
            continue
        elements, is_sharded, own_parts = sum_elements[REDUCED_KEYS, at], families[table, family, SHARDED] > 0, 1.0
        is_listed = rules.lists and in_parts and is_sharded
        if in_parts:
            own_parts = by_unit if is_sharded else max(1.0, buckets * elements / whole)
        if is_listed:
            own_parts = max(own_parts, num_tensors * elements / total)
        left = elements * rules.gradient_bytes
        of_front += elements if latest > front and starts[at] == front else 0.0
        for step in range(2):
            channel = families[table, family, REST if step else SCATTER]
            if channel >= 0:
                own_s = own_parts * channel_s(tables, channel, left / own_parts)
                reduced_s += own_s
                whole_s += 0.0 if is_sharded else own_s
                front_s += own_s if latest > front and starts[at] == front else 0.0
                if others_s > 0.0 and not rules.in_turn:  # Else nobody asks.
                    reduced_latency_s += own_parts * channel_s(tables, channel, NEXT_TO_NOTHING_BYTES)
                reduced_host_s += own_parts * (hosts_s[channel, CALL_S] + launch_s)
                if is_listed:
                    reduced_host_s += own_parts * hosts_s[channel, LISTING_S]
                if not step:
                    left /= families[table, family, SCATTER_DEGREE]
    if latest > front and rules.by_unit:
        before = (latest - first) / (stop - first)
        shares = _unit_level_shares(shares, buckets, before, front_s / reduced_s, of_front / total)
    elif latest > front:
        shares = _level_shares(latest - first, stop - first, front_s / reduced_s)
    if in_parts and whole < total and units.num_whole > 0:
        shares = _mixed_shares(units, last_of_units, first_of_whole, last_of_whole, whole_s / reduced_s)
    copied_s = copied[TIMES] * num_tensors * start_s + copied[NUM_BYTES] * s_per_byte
    copied_back_s = copied[TIMES_BACK] * num_tensors * start_s + copied[NUM_BYTES_BACK] * s_per_byte
    reduced_host_s += (copied[TIMES] + copied[TIMES_BACK]) * num_tensors * launch_s
    if rules.in_turn:
        latency_s = 0.0
    sent = Sent(
        root_s, others_s, root_copied_s, gathered_copied_s, reduced_s, copied_s, copied_back_s, unit_share,
        shares.first_share, shares.last_share, computation, communication, latency_s, reduced_latency_s, gathered_share,
        units.others_before > 0, units.others_behind > 0, shares.late_share, shares.late_left,
    )  # fmt: skip
    return sent, SentHost((each + once) * gather_host_s, each * gather_host_s, reduced_host_s), waits
