"""Compiled: plans that say everything operator by operator, as runs of equal strategy and as segments.

Everything compiled here is in this file: numba looks only at a file's own date.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled, inlined

Ints = NDArray[np.int64]

# Bits of a flag: what begins at an operator.
_STAGE, _RUN, _SEGMENT = 1, 2, 4
_WORD = 8


@inlined
def _mark(stage: Any, strategy: Any, segment: Any, flags: NDArray[np.uint8]) -> None:
    """Fill the flags of one plan: one branch-free sweep, which the compiler turns into vector instructions."""
    flags[0] = _STAGE | _RUN | _SEGMENT
    next_stage, next_strategy, next_segment, own = stage[1:], strategy[1:], segment[1:], flags[1:]
    for index in range(len(next_stage)):
        in_stage = np.uint8(stage[index] != next_stage[index])
        in_run = np.uint8(strategy[index] != next_strategy[index])
        in_segment = np.uint8(segment[index] != next_segment[index])
        own[index] = in_stage * np.uint8(7) | in_run * np.uint8(_RUN) | in_segment * np.uint8(_SEGMENT)


@compiled
def runs_of_operators(
    stage: NDArray[Any], strategy: NDArray[Any], segment: NDArray[Any]
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
    """Return stage_offsets, run_offsets, run_stops, strategies, segment_offsets, segment_firsts, segment_stops.

    Args:
        stage, strategy, segment: [P, N] of one integer type; see ``PlanArrays.from_operators``.
    """
    num_plans, count = stage.shape
    flags = np.zeros((count + _WORD - 1) // _WORD * _WORD, np.uint8)
    words = flags.view(np.uint64)
    # Everything that begins somewhere, as operator * 8 + flag. Whether one of a word's eight does, is not branched on.
    marks = np.empty(32 * num_plans + count + _WORD, np.int32)
    mark_offsets = np.zeros(num_plans + 1, np.int64)
    num_marks = 0
    for plan in range(num_plans):
        _mark(stage[plan], strategy[plan], segment[plan], flags)
        if num_marks + count + _WORD > len(marks):
            longer = np.empty(2 * len(marks), np.int32)
            longer[:num_marks] = marks[:num_marks]
            marks = longer
        for word in range(len(words)):
            if words[word] != 0:
                for index in range(word * _WORD, word * _WORD + _WORD):
                    marks[num_marks] = index * _WORD + flags[index]
                    num_marks += flags[index] != 0
        mark_offsets[plan + 1] = num_marks
    num_stages, num_runs, num_segments = 0, 0, 0
    for place in range(num_marks):
        num_stages += marks[place] & _STAGE
        num_runs += marks[place] >> 1 & 1
        num_segments += marks[place] >> 2 & 1
    stage_offsets = np.zeros(num_plans + 1, np.int64)
    run_offsets, segment_offsets = np.zeros(num_stages + 1, np.int64), np.zeros(num_stages + 1, np.int64)
    run_stops, strategies = np.empty(num_runs, np.int64), np.empty(num_runs, np.int64)
    firsts, stops = np.empty(num_segments, np.int64), np.empty(num_segments, np.int64)
    s, r, g = 0, 0, 0  # Stages, runs and segments begun so far.
    for plan in range(num_plans):
        first_run, is_open = r, False
        for place in range(mark_offsets[plan], mark_offsets[plan + 1]):
            index, flag = marks[place] // _WORD, marks[place] % _WORD
            if flag & _STAGE:
                run_offsets[s], segment_offsets[s] = r, g
                s += 1
            if flag & _SEGMENT:
                if is_open:
                    stops[g - 1] = index
                is_open = segment[plan, index] > 0
                if is_open:
                    firsts[g] = index
                    g += 1
            if flag & _RUN:
                if r > first_run:
                    run_stops[r - 1] = index
                strategies[r] = strategy[plan, index]
                r += 1
        run_stops[r - 1] = count
        if is_open:
            stops[g - 1] = count
        stage_offsets[plan + 1] = s
    run_offsets[s], segment_offsets[s] = r, g
    return stage_offsets, run_offsets, run_stops, strategies, segment_offsets, firsts[:g].copy(), stops[:g].copy()
