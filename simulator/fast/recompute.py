"""Compiled: what operators take that a stage computes again, from sums in tables."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import (
    AGAIN_HOST_S,
    AGAIN_S,
    COPIED,
    COPIES_PART,
    FORWARD_HOST_S,
    FORWARD_S,
    OF_INPUTS,
    Ints,
    PlanColumns,
    Structure,
    TimeTables,
)
from simulator.fast.neighbours import Unlike


@inlined
def recomputed_s(
    shape: Structure,
    tables: TimeTables,
    plans: PlanColumns,
    run_tables: Ints,
    stage: int,
    first: int,
    stops_early: bool,
    unlike: Unlike,
    num_unlike: int,
) -> tuple[float, float, bool]:
    """Return the seconds of device and host of a stage's recomputed segments, without what enters them.

    False if segments are not in order or leave the stage.

    Args:
        shape, tables, plans, run_tables: See ``time.estimate_times``.
        stops_early: See ``PassRules``.
        stage, first: The stage and its first operator.
        unlike, num_unlike: Operators of it with neighbours in another run or stage.
    """
    over_op, over_row, over_s = unlike
    begin, end = plans.run_offsets[stage], plans.run_offsets[stage + 1]
    stop = plans.run_stops[end - 1]
    seconds, host_s = 0.0, 0.0
    previous, run, over = first, begin, 0
    for segment in range(plans.segment_offsets[stage], plans.segment_offsets[stage + 1]):
        a, b = plans.segment_firsts[segment], plans.segment_stops[segment]
        if a < previous or b <= a or b > stop:
            return 0.0, 0.0, False
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
                own = tables.has_private[run_tables[other], tail - 1]
                for near in range(num_unlike):
                    if over_op[near] == tail - 1:
                        copies = tables.rows[over_row[near], COPIES_PART, 0] > 0.0
                        own = own % COPIED + (COPIED if copies else 0)
                if own or shape.first_saver[tail - 1] < b:
                    break
                tail -= 1
        other, place = run, a
        while place < tail:
            ends = min(tail, plans.run_stops[other])
            sums = tables.sums[run_tables[other]]
            seconds += sums[ends, FORWARD_S] - sums[place, FORWARD_S] + sums[ends, AGAIN_S] - sums[place, AGAIN_S]
            host_s += sums[ends, FORWARD_HOST_S] - sums[place, FORWARD_HOST_S]
            host_s += sums[ends, AGAIN_HOST_S] - sums[place, AGAIN_HOST_S]
            place = ends
            other += 1
        while over < num_unlike and over_op[over] < a:
            over += 1
        at = over
        while at < num_unlike and over_op[at] < tail:
            seconds += over_s[at, 0]
            host_s += over_s[at, 1]
            at += 1
        at, other = over, run
        for place in range(shape.touched_offsets[a], shape.touched_offsets[a + 1]):
            index = shape.touched[place]
            if index >= tail:
                break
            while at < num_unlike and over_op[at] < index:
                at += 1
            while plans.run_stops[other] <= index:
                other += 1
            base = shape.input_offsets[index]
            for number in range(base, shape.input_offsets[index + 1]):
                if shape.input_producers[number] < a:
                    if at < num_unlike and over_op[at] == index:
                        seconds -= tables.rows[over_row[at], OF_INPUTS + number - base, 0]
                        host_s -= tables.rows[over_row[at], OF_INPUTS + number - base, 1]
                    else:
                        seconds -= tables.entering_s[run_tables[other], number, 0]
                        host_s -= tables.entering_s[run_tables[other], number, 1]
    return seconds, host_s, True
