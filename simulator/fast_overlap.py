"""Compiled: what stages send beside their passes, for ``overlap_time``, as ``stage_overlap`` has it."""

from __future__ import annotations

from hardware_models.runtime import Runtime
from simulator.compiled_cache import inlined
from simulator.fast_arrays import (
    COMMUNICATION_SLOWDOWN,
    COMPUTATION_SLOWDOWN,
    ELEMENTS,
    MAX_FAMILIES,
    REDUCTION,
    REST,
    SCATTER,
    BesideRules,
    Floats,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast_step import collectives_s
from simulator.overlap_time import Sent, bucket_shares, unit_shares
from simulator.stage_overlap import bucket_elements

_bucket_shares, _unit_shares = inlined(bucket_shares), inlined(unit_shares)


def beside_rules(runtime: Runtime) -> BesideRules:
    """Return what holds for any plan under a runtime."""
    return BesideRules(runtime.prefetches_gathers, runtime.copies_gradients, bucket_elements(runtime))


@inlined
def _slowdowns(tables: TimeTables, placement: int) -> tuple[float, float]:
    """Return the largest factors of overlap of the types of a placement."""
    computation, communication = 1.0, 1.0
    for gpu_type in range(len(tables.step_rates)):
        if tables.placement_types[placement] >> gpu_type & 1:
            computation = max(computation, tables.step_rates[gpu_type, COMPUTATION_SLOWDOWN])
            communication = max(communication, tables.step_rates[gpu_type, COMMUNICATION_SLOWDOWN])
    return computation, communication


@inlined
def _num_layers(shape: Structure, first: int, stop: int) -> tuple[int, int]:
    """Return how many layers of a stage are gathered for each pass, and how many for the forward pass alone."""
    each, once = 0, 0
    for layer in range(shape.layer_of[first], shape.layer_of[stop - 1] + 1):
        if shape.gathers_of[layer] == 1:
            once += 1
        else:
            each += 1
    return each, once


@inlined
def _is_whole(tables: TimeTables, num_sums: Ints, sum_table: Ints, sum_family: Ints) -> bool:
    """Return whether a stage reduces gradients of whole parameters; arguments as for ``fast_step.collectives_s``."""
    families, found = tables.families, False
    for at in range(num_sums[0]):
        table, family = sum_table[0, at], sum_family[0, at]
        found = found or (families[table, family, SCATTER] < 0 and families[table, family, REST] >= 0)
    return found


@inlined
def _tied_elements(
    places: Ints,
    tied: Ints,
    families: Ints,
    run_stops: Ints,
    run_tables: Ints,
    run: int,
    place: int,
    stop: int,
    by_use: bool,
) -> float:
    """Return elements of a tied parameter, which no operator before has, that replicas reduce.

    Args:
        places, tied, families: Of ``Structure.tied`` and of tables.
        run_stops, run_tables: Of plans.
        run: The parameter's.
        place: Which of ``places`` it is.
        stop: Where its stage ends.
        by_use: If whole, it counts for each operator of the stage that has it in this layout.
    """
    table = run_tables[run]
    family = families[table, tied[table, place, 0]]
    own = float(tied[table, place, 1])
    if family[SCATTER] < 0 and family[REST] < 0:
        return 0.0
    elements = own
    if by_use and family[SCATTER] < 0:
        for later in range(place + 1, len(places)):
            if places[later] < stop:
                while run_stops[run] <= places[later]:
                    run += 1
                if tied[run_tables[run], later, 2] == tied[table, place, 2]:
                    elements += own
    return elements


@inlined
def _gradient_shares(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: int,
    first: int,
    stop: int,
    num_sums: Ints,
    sum_table: Ints,
    sum_family: Ints,
    sum_elements: Floats,
    bucket_elements: float,
    is_sharded: bool,
    ties_by_use: bool,
    root_share: float,
) -> tuple[float, float, float]:
    """Return in how many parts a stage reduces its gradients, and ``first_share`` and ``last_share`` of ``Sent``.

    Args:
        shape, tables, plans, run_tables, stage: See ``fast_time.estimate_times``.
        first, stop: Operators of the stage.
        num_sums, sum_table, sum_family, sum_elements: See ``fast_step.collectives_s``.
        ties_by_use: See ``fast_time.estimate_times``.
        bucket_elements, is_sharded, root_share: See ``bucket_shares`` and ``unit_shares``.
    """
    if is_sharded:
        each, once = _num_layers(shape, first, stop)
        return _unit_shares(each, once, shape.gathers_of[shape.layer_of[first]] == 1, root_share)
    families, sums, stops = tables.families, tables.sums, plans.run_stops  # In inner loops no call that is given many.
    total, begun = 0.0, 0.0
    for at in range(num_sums[0]):
        table, family = sum_table[0, at], sum_family[0, at]
        if families[table, family, SCATTER] >= 0 or families[table, family, REST] >= 0:
            total += sum_elements[0, at]
    run, index = plans.run_offsets[stage], first
    while index < stop and begun <= 0.0:
        while stops[run] <= index:
            run += 1
        table = run_tables[run]
        for family in range(MAX_FAMILIES):
            if families[table, family, REDUCTION] < 0:
                break
            if families[table, family, SCATTER] >= 0 or families[table, family, REST] >= 0:
                begun += sums[table, index + 1, ELEMENTS + family] - sums[table, index, ELEMENTS + family]
        for place in range(len(shape.tied)):
            if shape.tied[place] == index:
                begun += _tied_elements(
                    shape.tied, tables.tied, families, stops, run_tables, run, place, stop, ties_by_use
                )
        index += 1
    return _bucket_shares(total, bucket_elements, begun)


@inlined
def sent_by(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    plan: int,
    stage: int,
    first: int,
    stop: int,
    num_sums: Ints,
    sum_table: Ints,
    sum_family: Ints,
    sum_elements: Floats,
    gather_s: Floats,
    is_sharded: bool,
    ties_by_use: bool,
    gradient_bytes: float,
    parameter_bytes: float,
    rules: BesideRules,
) -> tuple[Sent, float, bool]:
    """Return what a stage sends beside its passes, the seconds of refreshing its parameters, and whether passes wait.

    Args:
        shape, tables, plans, run_tables, ties_by_use, rules: See ``fast_time.estimate_times``.
        plan, stage, first, stop: The stage, of which plan, and its operators.
        num_sums, sum_table, sum_family, sum_elements, gradient_bytes, parameter_bytes: See ``fast_step.collectives_s``.
        gather_s: float64[2]. ``root_s`` and ``gathered_s`` of ``Sent``.
        is_sharded: The stage has parameters that are gathered.
    """
    root_s, gathered_s = gather_s[0], gather_s[1]
    every, overlaps = plans.reduces_every[plan] != 0, plans.overlaps[plan] != 0
    parts, first_share, last_share, layer_share, slowed, slowed_sent, waits = 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, False
    if num_sums[0] > 0 and (every or overlaps):
        root_share = root_s / (root_s + gathered_s) if root_s > 0.0 else 0.0
        parts, first_share, last_share = _gradient_shares(
            shape, tables, plans, run_tables, stage, first, stop, num_sums, sum_table, sum_family, sum_elements,
            rules.bucket_elements, is_sharded, ties_by_use, root_share,
        )
        waits = rules.waits_for_whole and _is_whole(tables, num_sums, sum_table, sum_family)
    reduced_s, refresh_s = collectives_s(
        tables, num_sums, sum_table, sum_family, sum_elements, parts, gradient_bytes, parameter_bytes
    )
    if gathered_s > 0.0:
        layer_share = 1.0 / max(1, _num_layers(shape, first, stop)[0])
    if gathered_s > 0.0 or overlaps:
        slowed, slowed_sent = _slowdowns(tables, plans.placements[stage])
    sent = Sent(root_s, gathered_s, reduced_s, layer_share, first_share, last_share, slowed, slowed_sent)
    return sent, refresh_s, waits
