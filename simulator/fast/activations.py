"""Compiled: activations that a stage holds, from sums and range maxima in tables; see ``estimate_memory``."""

from __future__ import annotations

from typing import NamedTuple

from simulator.compiled_cache import inlined
from simulator.fast.arrays import ZB_H1, Floats, Ints, PlanColumns, Structure
from simulator.fast.changes import Changes, differ, peak_between
from simulator.fast.kept_tensor import StageRuns
from simulator.fast.memory import (
    AGAIN,
    AGAIN_PEAK,
    AGAIN_SPLIT_PEAK,
    AGAIN_WAIT_PEAK,
    ANEW,
    ANEW_BYTES,
    END_GIVEN,
    FIRST_WORKING_BYTES,
    FOR_WEIGHTS_BYTES,
    FORWARD_BYTES,
    FORWARD_PEAK,
    GATHERED_BYTES,
    INPUT_PASS_BYTES,
    KEPT,
    KEPT_BYTES,
    KEPT_PEAK,
    KEPT_SPLIT_PEAK,
    KEPT_WAIT_PEAK,
    LAST_BYTES,
    PRODUCT,
    STATES,
    STAYS_BYTES,
    TO_MULTIPLY,
    WEIGHT_PASS_BYTES,
    WEIGHTED,
    WHOLE_BYTES,
    WORKING_BYTES,
    MemoryRules,
    MemoryTables,
    Savings,
    longest,
)
from simulator.fast.saved_tensors import Crossing, Pieces, kept_at_ends, save_earlier, unsaved_of_segment
from simulator.fast.segment_ends import hold_ends
from simulator.fast.waiting import wait_for_earlier, wait_for_part, wait_for_ties
from simulator.fast.whole_parts import Parts, fill_parts


class WalkRoom(NamedTuple):
    """Room for the walk over one stage; ``crossing`` is handed on to the next."""

    pieces: Pieces
    crossing: Crossing
    changes: Changes
    whole: Parts


@inlined
def _needed_by_weights(
    tables: MemoryTables, plans: PlanColumns, run_tables: Ints, stage: StageRuns
) -> tuple[float, float, float]:
    """Return what weight gradients of a stage are made in, what they need of activations, and of gradients."""
    product, weighted, to_multiply, start = 0.0, 0.0, 0.0, stage.first
    for run in range(stage.begin, stage.end):
        sums, ends = tables.sums[run_tables[run]], plans.run_stops[run]
        product = max(product, longest(tables.maxima, run_tables[run], PRODUCT, start, ends))
        weighted += sums[ends, WEIGHTED] - sums[start, WEIGHTED]
        to_multiply += sums[ends, TO_MULTIPLY] - sums[start, TO_MULTIPLY]
        start = ends
    return product, weighted, to_multiply


@inlined
def _unmade_bytes(shape: Structure, tied_anew: Floats, whole: Parts, has_whole: bool, made: float, start: int) -> float:
    """Return the bytes of gradients that the first backward pass has not made when it comes to a part.

    Args:
        shape: Of the model.
        tied_anew: Of the stage.
        whole, has_whole: What ZeRO has whole of it, and whether it has any.
        made: Of operators before the part.
        start: Where that begins.
    """
    for place in range(len(shape.tied)):
        made += tied_anew[place] if shape.tied[place] < start else 0.0
    return made + (whole.unmade[shape.part_of[start]] if has_whole else 0.0)


@inlined
def hold_activations(
    shape: Structure,
    savings: Savings,
    tables: MemoryTables,
    plans: PlanColumns,
    run_tables: Ints,
    rules: MemoryRules,
    plan: int,
    stage: StageRuns,
    gives_back: bool,
    tied_anew: Floats,
    room: WalkRoom,
    held: Floats,
) -> None:
    """Fill the columns of activations for a stage, piece by piece (``saved_tensors``).

    Args:
        shape, savings, tables, plans, run_tables, rules: See ``peaks.estimate_peaks``.
        plan, stage: The plan's number, and its stage.
        gives_back: In the last backward pass, which gives back what stays gathered.
        tied_anew: float64[O]. Of the stage, as ``hold_states`` fills it.
        room: To work in.
        held: float64[HELD]. Result; has what ``hold_states`` fills.
    """
    pieces, crossing, changes, whole = room
    maxima, all_sums, first, stop = tables.maxima, tables.sums, stage.first, stage.stop
    sharded = plans.reduces_every[plan] != 0 or (plans.num_microbatches[plan] == 1 and plans.overlaps[plan] != 0)
    product, weighted, to_multiply = _needed_by_weights(tables, plans, run_tables, stage)
    # What weight gradients of the operators behind need, where they come later.
    splits, weights_behind = plans.schedule[plan] == ZB_H1, weighted + to_multiply
    # What ZeRO has whole, by part; of the part at hand, gradients that are made behind the piece at hand.
    has_whole, in_root, end_bytes, gradients = held[WHOLE_BYTES] > 0.0, 0.0, 0.0, 0.0
    parted, gathers, gathers_forward, behind_part = False, 0.0, 0.0, 0.0
    if has_whole:
        in_root, end_bytes, gradients = fill_parts(
            shape, tables, plans, run_tables, stage, plans.reshards[plan] != 0, gives_back, sharded,
            held[STAYS_BYTES], rules, tied_anew, whole,
        )  # fmt: skip
        parted = sharded and rules.waits
    # Gradients that the first backward pass makes: of operators so far, and all that it has not made when the part at
    # hand works.
    makes_anew, made, unmade = held[ANEW_BYTES] > 0.0, 0.0, 0.0
    # What stays up to the piece at hand, of its segment apart; the most of the segment, or piece, and of all; the same
    # in a first backward pass, and where weight gradients come later.
    kept, inside, again, most_forward = 0.0, 0.0, 0.0, 0.0
    highest, highest_first, highest_split, most, most_first, most_split = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    segment, last_segment = plans.segment_offsets[stage.number], plans.segment_offsets[stage.number + 1]
    run, num_pieces, start = stage.begin, 0, first
    while start < stop:
        while plans.run_stops[run] <= start:
            run += 1
        ends = plans.run_stops[run]
        segment_first, following = -1, stop
        if segment < last_segment:
            following = plans.segment_firsts[segment]
            if following <= start:
                segment_first, following = following, plans.segment_stops[segment]
            ends = min(ends, following)
        in_segment = segment_first >= 0
        table, part = run_tables[run], shape.part_of[start]
        sums = all_sums[table]
        begins_part = start == first or start == shape.part_first[part]
        if makes_anew:
            ends = min(ends, shape.part_stop[part])
            if begins_part:
                unmade = _unmade_bytes(shape, tied_anew, whole, has_whole, made, start)
        begins_part = begins_part and has_whole
        beside = 0.0
        if has_whole:
            ends = min(ends, shape.part_stop[part])
            beside, gathers, gathers_forward = whole.beside[part], whole.gathers[part], whole.forward[part]
            behind_part = whole.scattered[part] if begins_part else behind_part
        pieces.first[num_pieces], pieces.run[num_pieces], pieces.segment[num_pieces] = start, run, segment_first
        num_pieces += 1
        if makes_anew:
            made += sums[ends, STATES + ANEW + sharded]
            made -= sums[start, STATES + ANEW + sharded]
        summed = AGAIN if in_segment else KEPT
        own = sums[ends, summed] - sums[start, summed]
        more, entered, num_changes = save_earlier(
            shape, savings, tables, plans, run_tables, rules, stage, crossing, pieces, num_pieces - 1, ends, changes
        )
        own += more
        so_far = inside if in_segment else kept
        before = so_far - sums[start, summed]
        if not in_segment:
            # Forward no gradients wait, nor does ZeRO hold any.
            forward = before + gathers_forward + peak_between(
                maxima, table, FORWARD_PEAK, start, ends, changes, num_changes
            )
            highest, highest_first = max(highest, forward), max(highest_first, forward)
            highest_split = max(highest_split, forward)
            most_forward = max(most_forward, forward)
        begun_bytes, num_changes = wait_for_earlier(
            shape, tables, plans, run_tables, stage, crossing.in_shards, run, start, begins_part, changes, num_changes
        )
        holds = rules.holds_ends and not splits
        if in_segment and ends == following and not holds:
            made_here = shape.input_producers[shape.input_offsets[ends - 1]] >= segment_first
            given = sums[ends, END_GIVEN] - sums[ends - 1, END_GIVEN] if made_here else 0.0
            num_changes = differ(changes, num_changes, ends - 1, given)
        if splits:
            weights_behind += sums[start, WEIGHTED] + sums[start, TO_MULTIPLY]
            split_kind = AGAIN_SPLIT_PEAK if in_segment else KEPT_SPLIT_PEAK
            peak = peak_between(maxima, table, split_kind, start, ends, changes, num_changes)
            highest_split = max(highest_split, before + peak + weights_behind + gathers)
            weights_behind -= sums[ends, WEIGHTED] + sums[ends, TO_MULTIPLY]
        held_bytes = 0.0
        if in_segment and holds:
            held_bytes, num_changes = hold_ends(
                shape, savings, tables, plans, run_tables, stage, (segment_first, following), start, ends, changes,
                num_changes,
            )  # fmt: skip
        if begins_part and whole.joining[part] != 0.0:
            joining = so_far + begun_bytes + held_bytes + whole.joining[part]
            highest = max(highest, joining)
            highest_first = max(highest_first, joining + held[ANEW_BYTES] - unmade)
        num_changes = wait_for_ties(
            shape, tables, plans, run_tables, stage, sharded, start, ends, changes, num_changes
        )
        peak_kind = AGAIN_PEAK if in_segment else KEPT_PEAK
        if parted:
            peak_kind = AGAIN_WAIT_PEAK if in_segment else KEPT_WAIT_PEAK
            behind_part, waits_bytes, num_changes = wait_for_part(
                shape, tables, plans, run_tables, stage, run, start, ends, rules.waiting, behind_part, changes,
                num_changes,
            )  # fmt: skip
            beside += waits_bytes
        peak = peak_between(maxima, table, peak_kind, start, ends, changes, num_changes)
        highest = max(highest, before + peak + beside)
        highest_first = max(highest_first, before + peak + beside + held[ANEW_BYTES] - unmade)
        kept += entered
        if in_segment:
            inside += own
        else:
            kept += own
        if in_segment and ends == following:
            kept += unsaved_of_segment(
                shape, savings, tables, plans, run_tables, stage, crossing, pieces, num_pieces, ends
            )
        if ends in (stop, following):
            beneath = kept if in_segment else 0.0
            most, most_first = max(most, highest + beneath), max(most_first, highest_first + beneath)
            most_split = max(most_split, highest_split + beneath)
            again += inside
            inside, highest, highest_first, highest_split = 0.0, 0.0, 0.0, 0.0
            segment += in_segment
        start = ends

    ends_bytes = kept_at_ends(
        shape, savings, tables, plans, run_tables, rules.keeps_outputs, stage, crossing, pieces, num_pieces
    )
    kept += ends_bytes
    held[KEPT_BYTES], held[WORKING_BYTES] = kept, most + ends_bytes - kept
    held[FIRST_WORKING_BYTES] = most_first + ends_bytes - kept if makes_anew else most + ends_bytes - kept
    held[LAST_BYTES], held[GATHERED_BYTES] = end_bytes, in_root
    held[FOR_WEIGHTS_BYTES] = min(weighted, kept + again) + to_multiply
    held[INPUT_PASS_BYTES] = most_split + ends_bytes - kept
    held[WEIGHT_PASS_BYTES] = product + gradients
    held[FORWARD_BYTES] = most_forward + ends_bytes
