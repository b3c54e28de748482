"""Compiled: what comes once per iteration of plans, from sums in tables: collectives and the optimizer's step.

And what the lowering says of device types for the step.
"""

from __future__ import annotations

import numpy as np

from simulator.closed_forms.stage_rows import WEIGHT
from simulator.closed_forms.step_time import host_goes_on, phases_s, step_s, waited_s
from simulator.compiled_cache import inlined
from simulator.costs import CostTables
from simulator.fast.arrays import (
    AHEAD,
    BEHIND,
    COMMUNICATION_SLOWDOWN,
    COMPUTATION_SLOWDOWN,
    COPY_S_PER_BYTE,
    COPY_START_S,
    FLOOR_S,
    GPIPE,
    INTERLEAVED,
    LAST,
    LAUNCH_S,
    LAUNCHING,
    NORM,
    PASS_S_PER_BYTE,
    PASS_START_S,
    PASSED,
    PASSED_BYTES,
    RATES,
    REBUILT,
    REBUILT_S,
    REDUCED,
    REFRESH_CHANNEL,
    REFRESHED_KEYS,
    STEP_COLUMNS,
    STEPPED,
    TENSORS,
    TOUCHED_BYTES,
    UPDATE_S_PER_BYTE,
    UPDATED,
    ZB_H1,
    Floats,
    Ints,
    Keys,
    PlanColumns,
    StepRules,
    Structure,
    TimeTables,
)
from simulator.fast.parameters import Synchronised
from simulator.fast.prices import channel_s, mixed, wanted
from simulator.lowering.copies import copying_s
from simulator.lowering.step import adam_launches, gradient_pass_s, has_norm, num_launches, passes_gradients

_step_s, _phases_s, _waited_s = inlined(step_s), inlined(phases_s), inlined(waited_s)
_num_launches = inlined(num_launches)
_NORM_KEY = np.uint64(0xC2B2AE3D27D4EB4F)
_PROBES = (0.0, 1e4, 1e6, 3e8, 7e10)


def step_rules(costs: CostTables) -> StepRules:
    """Return what holds for the step of any plan."""
    runtime = costs.problem.runtime
    return StepRules(
        has_norm=has_norm(runtime),
        waits="optimizer" in runtime.host_waits,
        runs_ahead=runtime.host_runs_ahead,
        goes_on=host_goes_on(runtime),
        launches=adam_launches(runtime),
    )


def step_rates(costs: CostTables, gpu_type: str) -> Floats:
    """Return what a step takes a device type: float64[RATES]."""
    rates, hardware = np.zeros(RATES), costs.problem.hardware
    if passes_gradients(costs.problem.runtime):
        most, half = (gradient_pass_s(costs, gpu_type, num_bytes) for num_bytes in (2e11, 1e11))
        rates[FLOOR_S] = hardware.gpu(gpu_type).kernel_floor_s
        rates[PASS_S_PER_BYTE] = (most - half) / 1e11
        rates[PASS_START_S] = 2 * half - most
        for num_bytes in _PROBES:
            expected_s = gradient_pass_s(costs, gpu_type, num_bytes)
            own_s = max(rates[FLOOR_S], rates[PASS_START_S] + num_bytes * rates[PASS_S_PER_BYTE])
            assert abs(own_s - expected_s) <= 1e-9 * expected_s, "a pass over memory is a straight line above a floor"
    rates[UPDATE_S_PER_BYTE] = hardware.optimizer_step_s(gpu_type, 1.0)
    rates[LAUNCH_S], rates[REBUILT_S] = costs.launch_s(gpu_type), costs.entry_s(gpu_type)
    rates[[COMPUTATION_SLOWDOWN, COMMUNICATION_SLOWDOWN]] = hardware.overlap_slowdown(gpu_type)
    rates[[COPY_START_S, COPY_S_PER_BYTE]] = copying_s(costs, gpu_type)
    return rates


@inlined
def refreshed_s(tables: TimeTables, synchronised: Synchronised, parameter_bytes: float) -> float:
    """Return the seconds in which a stage gathers its parameters after the step.

    Args:
        tables: See ``time.estimate_times``.
        synchronised: Parameters of the stage.
        parameter_bytes: Of one parameter.
    """
    found_s = 0.0
    for at in range(synchronised.num[REFRESHED_KEYS]):
        table, family = synchronised.tables[REFRESHED_KEYS, at], synchronised.families[REFRESHED_KEYS, at]
        channel = tables.families[table, family, REFRESH_CHANNEL]
        found_s += channel_s(tables, channel, synchronised.elements[REFRESHED_KEYS, at] * parameter_bytes)
    return found_s


@inlined
def find_norm(
    placements: Ints, low: int, high: int, plan: int, keys: Keys, values: Ints, misses: Ints, counts: Ints
) -> int:
    """Return the number of the norm of gradients that all ranks of a plan agree on, or PENDING.

    Args:
        placements: Of all stages.
        low, high: Those of the plan.
        plan, keys, values, misses, counts: See ``time.estimate_times``.
    """
    key = _NORM_KEY
    for stage in range(low, high):
        key = mixed(key, placements[stage])
    return wanted(keys, values, key, misses, counts, NORM, plan, low)


@inlined
def _fill_work(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: int,
    first: int,
    work: Floats,
) -> int:
    """Write what a stage's step does as ``StepWork`` has it, and return the stage's last operator, plus one."""
    begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
    work[:] = 0.0
    start = first
    for run in range(begin, end):
        table, ends = run_tables[run], plans.run_stops[run]
        work[0] += tables.sums[table, ends, PASSED_BYTES] - tables.sums[table, start, PASSED_BYTES]
        work[1] += tables.sums[table, ends, TOUCHED_BYTES] - tables.sums[table, start, TOUCHED_BYTES]
        work[2] += tables.sums[table, ends, TENSORS] - tables.sums[table, start, TENSORS]
        work[3] += tables.sums[table, ends, STEPPED] - tables.sums[table, start, STEPPED]
        work[4] += tables.sums[table, ends, REBUILT] - tables.sums[table, start, REBUILT]
        start = ends
    # What is tied counts once for each of its layouts.
    run = begin
    for place in range(len(shape.tied)):
        index = shape.tied[place]
        if first <= index < start:
            while plans.run_stops[run] <= index:
                run += 1
            table, other, again = run_tables[run], begin, False
            for before in range(place):
                user = shape.tied[before]
                if user >= first:
                    while plans.run_stops[other] <= user:
                        other += 1
                    again = again or tables.tied[run_tables[other], before, 2] == tables.tied[table, place, 2]
            if not again:
                for column in range(STEP_COLUMNS):
                    work[column] += tables.tied_work[table, place, column]
    return int(start)


@inlined
def _has_own_ranks(plans: PlanColumns, plan: int) -> bool:
    """Return whether no stage shares its devices with another."""
    low, high, schedule = plans.stage_offsets[plan], plans.stage_offsets[plan + 1], plans.schedule[plan]
    for stage in range(low, high):
        for other in range(low, stage):
            if plans.placements[stage] == plans.placements[other]:
                return False
    return bool(schedule != INTERLEAVED)


@inlined
def add_step(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    rules: StepRules,
    ties_s: float,
    norm_s: float,
    launched_s: Floats,
    stage_s: Floats,
    rows_s: Floats,
    once_s: Floats,
    work: Floats,
) -> None:
    """Add the step to what comes once per iteration of a plan.

    Args:
        shape, tables, plans, run_tables: See ``time.estimate_times``.
        plan, rules: Its number, and what holds for any.
        ties_s, norm_s: Of summing tied weights, and of the norm over all ranks; 0 for none.
        launched_s: float64[stages, LAUNCHED]. Of each stage.
        stage_s, rows_s: See ``pipeline.passes_of_plan_s``, before it.
        once_s: float64[3, stages]. Of each phase; so far of collectives.
        work: float64[STEP_COLUMNS]. To work in.
    """
    first, low, high = 0, plans.stage_offsets[plan], plans.stage_offsets[plan + 1]
    goes_on = rules.goes_on and high > low + 1
    has_own = goes_on and _has_own_ranks(plans, plan)
    for stage in range(low, high):
        first = _fill_work(shape, tables, plans, run_tables, stage, first, work)
        pass_s, update_s, launch_s, rebuilt_s = 0.0, 0.0, 0.0, 0.0
        types = tables.placement_types[plans.placements[stage]]
        for gpu_type in range(len(tables.step_rates)):
            if types >> gpu_type & 1:
                rates = tables.step_rates[gpu_type]
                pass_s = max(pass_s, rates[FLOOR_S], rates[PASS_START_S] + work[0] * rates[PASS_S_PER_BYTE])
                update_s = max(update_s, work[1] * rates[UPDATE_S_PER_BYTE])
                launch_s = max(launch_s, rates[LAUNCH_S])
                rebuilt_s = max(rebuilt_s, plans.num_microbatches[plan] * work[4] * rates[REBUILT_S])
        num_kernels = _num_launches(rules.launches, work[3], work[1])
        waits = rules.waits and norm_s > 0
        ahead_s, reduced_s = launched_s[stage, AHEAD], once_s[REDUCED, stage]
        if has_own:
            weight_s = rows_s[stage, WEIGHT] if plans.schedule[plan] == ZB_H1 else 0.0
            apart, m = plans.schedule[plan] == GPIPE, plans.num_microbatches[plan]
            ahead_s += _waited_s(rows_s[low:high], stage_s[low:high], stage - low, m, apart, weight_s)
        if not goes_on or has_own:  # Else nobody knows how long its stage waits.
            ahead_s -= launched_s[stage, LAUNCHING]
            reduced_s = max(reduced_s, launched_s[stage, LAST] - ahead_s)
        ahead_s += launched_s[stage, BEHIND] + reduced_s
        passed_s, updated_s = _step_s(pass_s, update_s, num_kernels, launch_s, ahead_s, rules.runs_ahead, waits)
        updated_s += rebuilt_s
        once_s[REDUCED, stage], once_s[PASSED, stage], once_s[UPDATED, stage] = _phases_s(
            reduced_s, once_s[PASSED, stage] + passed_s, once_s[UPDATED, stage] + updated_s, ties_s > 0, norm_s > 0
        )
