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
from simulator.overlap_time import bucket_shares, unit_shares
from simulator.stage_overlap import bucket_elements, gathers_ahead

_bucket_shares, _unit_shares = inlined(bucket_shares), inlined(unit_shares)


def beside_rules(runtime: Runtime) -> BesideRules:
    """Return what holds for any plan under a runtime."""
    return BesideRules(gathers_ahead(runtime), runtime.copies_gradients, bucket_elements(runtime))


@inlined
def slowed_layers(
    layer_of: Ints, gathers_of: Ints, rates: Floats, types: int, first: int, stop: int
) -> tuple[float, float, float]:
    """Return ``layer_share`` of a stage as ``Sent`` has it, and its slowdowns: the largest of its types.

    Args:
        layer_of, gathers_of: See ``Structure``.
        rates: ``TimeTables.step_rates``.
        types, first, stop: Bits of the stage's device types, and its operators.
    """
    computation, communication = 1.0, 1.0
    for gpu_type in range(len(rates)):
        if types >> gpu_type & 1:
            computation = max(computation, rates[gpu_type, COMPUTATION_SLOWDOWN])
            communication = max(communication, rates[gpu_type, COMMUNICATION_SLOWDOWN])
    return 1.0 / max(1, _num_layers(layer_of, gathers_of, first, stop)[0]), computation, communication


@inlined
def _num_layers(layer_of: Ints, gathers_of: Ints, first: int, stop: int) -> tuple[int, int]:
    """Return how many layers of a stage are gathered for each pass, and how many for the forward pass alone."""
    each, once = 0, 0
    for layer in range(layer_of[first], layer_of[stop - 1] + 1):
        if gathers_of[layer] == 1:
            once += 1
        else:
            each += 1
    return each, once


@inlined
def _reduced_tie(
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
def gradient_shares(
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
    gather_s: Floats,
    is_sharded: bool,
    ties_by_use: bool,
    rules: BesideRules,
) -> tuple[float, float, float, bool]:
    """Return in how many parts a stage reduces its gradients, both their shares in ``Sent``, and whether passes wait.

    Args:
        shape, tables, plans, run_tables, stage: See ``fast_time.estimate_times``.
        first, stop: Operators of the stage.
        num_sums, sum_table, sum_family, sum_elements: See ``fast_step.collectives_s``.
        gather_s: float64[2]. ``root_s`` and ``gathered_s`` of ``Sent``.
        is_sharded: Parameters of all its operators are gathered.
        ties_by_use, rules: See ``fast_time.estimate_times``.
    """
    families, sums, stops = tables.families, tables.sums, plans.run_stops  # In inner loops no call that is given many.
    total, begun, waits = 0.0, 0.0, False
    for at in range(num_sums[0]):
        table, family = sum_table[0, at], sum_family[0, at]
        if families[table, family, SCATTER] >= 0 or families[table, family, REST] >= 0:
            total += sum_elements[0, at]
            waits = waits or (rules.waits_for_whole and families[table, family, SCATTER] < 0)
    if is_sharded:
        each, once = _num_layers(shape.layer_of, shape.gathers_of, first, stop)
        root_share = gather_s[0] / (gather_s[0] + gather_s[1]) if gather_s[0] > 0.0 else 0.0
        parts, first_share, last_share = _unit_shares(
            each, once, shape.gathers_of[shape.layer_of[first]] == 1, root_share
        )
        return parts, first_share, last_share, waits
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
                begun += _reduced_tie(
                    shape.tied, tables.tied, families, stops, run_tables, run, place, stop, ties_by_use
                )
        index += 1
    parts, first_share, last_share = _bucket_shares(total, rules.bucket_elements, begun)
    return parts, first_share, last_share, waits
