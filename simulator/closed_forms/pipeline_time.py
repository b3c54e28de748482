"""Closed form of the time of 1F1B and GPipe where stages differ: the longest of a few chains of passes of the schedule.

A stage does its warm-up of ``depth`` forwards, then one backward and one forward in turn, then what is left of the
backwards; GPipe is a warm-up of all m microbatches. Behind a slow stage the others do not count: two stages, the first
of which takes three times as long, and four microbatches (digits: microbatch)::

    stage 0  F0 -- -- F1 -- -- B0 -- -- F2 -- -- B1 -- -- F3 -- -- B2 -- -- B3 -- --
    stage 1  .  .  .  F0 B0 .  F1 B1 .  .  .  .  F2 B2 .  .  .  .  F3 B3 .  .  .  .

A chain starts with microbatch 0, is on one stage for most of the time, and ends with the last microbatch. Per stage:

- *start*, to the end of B(0): its warm-up, which comes at the pace of the slowest forward up to there; or microbatch 0
  through the stages behind and back;
- *turns*, one backward, what occupies the stage behind it (WEIGHT) and one forward each: on the stage; or rounds down
  to a stage behind and back, which advance by the difference of the two depths and one, and rule where transfers take
  long or depths are small;
- *finish*, from the start of F(m - 1): the backwards left, at the pace of the slowest from there up; or microbatch
  m - 1 through the stages behind and back.

Where transfers are slow the whole is at their pace: all forwards down to a stage and its finish, or its start and all
backwards up from there.

Every such chain is one of the schedule, so none is longer than the iteration; where transfers take no time of their
own, nothing lies behind a backward and microbatches are equal, the longest is the iteration (tests; with a smaller last
one it was up to 5 % longer). What each stage does behind its last backward is added as if that ended as late as it can:
up to 8 % too long with such work. With equal stages that is (m + p - 1)(t_f + t_b).

Source: the orders that ``simulator.schedules`` makes; cycles of such orders as in Baccelli et al., "Synchronization and
Linearity", 1992, Section 2.3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT, INPUT_LAG, LESS, ONCE, UP, WEIGHT

SCRATCH = 4
"""Columns of what ``one_f_one_b_s`` works in."""


def one_f_one_b_s(
    each_s: NDArray[np.float64],
    last_s: NDArray[np.float64],
    depths: NDArray[np.int64],
    num_microbatches: int,
    scratch_s: NDArray[np.float64],
    smaller: bool = False,
) -> float:
    """Return the seconds of the passes of 1F1B, or of GPipe.

    Args:
        each_s, last_s: float64[stages, NUM_COLUMNS]. Rows (see ``stage_rows``) of a microbatch that is not the last,
            and of the last; INPUT the whole backward pass.
        depths: int64[stages]. Forwards of each stage before its first backward, as the schedule allows them.
        num_microbatches: At least one.
        scratch_s: float64[stages, SCRATCH] at least, to work in: an allocation takes as long as the rest.
        smaller: Whether ``last_s`` differs from ``each_s``; then there are two microbatches at least.

    As drawn in ``simulator.schedules.one_f_one_b`` and in ``gpipe``:

    >>> equal, scratch = np.array([[1.0, 2.0, *[0.0] * 7]] * 4), np.empty((4, SCRATCH))
    >>> one_f_one_b_s(equal, equal, np.array([4, 3, 2, 1]), 6, scratch)
    27.0
    >>> one_f_one_b_s(equal, equal, np.array([4, 4, 4, 4]), 4, scratch)
    21.0
    """
    p, m = len(each_s), num_microbatches
    # To the end of the warm-up, and of all forwards; from the start of as many last backwards, and of all.
    warm_s, tail_s, all_warm_s, all_tail_s = scratch_s[:, 0], scratch_s[:, 1], scratch_s[:, 2], scratch_s[:, 3]
    # Of all passes and transfers up to a stage: what they take together, and the longest.
    down_s, up_s, longest_down_s, longest_up_s = each_s[0, FORWARD_LAG], 0.0, 0.0, 0.0
    all_up_s = 0.0  # As ``(m - 1) * longest_up_s``, less what the first microbatch lacks until the second takes over.
    rounds_rule = False
    for stage in range(p):
        depth = depths[stage]
        if stage > 0:
            sent_s, returned_s = each_s[stage - 1, DOWN], each_s[stage, UP]
            down_lag_s, up_lag_s = each_s[stage, FORWARD_LAG], each_s[stage - 1, INPUT_LAG]
            takes_time = sent_s + returned_s + down_lag_s + up_lag_s > 0.0
            rounds_rule |= depths[stage - 1] < m and (takes_time or depth == depths[stage - 1])
            down_s += sent_s + down_lag_s
            up_s += returned_s + up_lag_s
            longest_down_s, longest_up_s = max(longest_down_s, sent_s), max(longest_up_s, returned_s)
            all_up_s = max(all_up_s, returned_s + (m - 2) * longest_up_s)
        down_s += each_s[stage, FORWARD]
        up_s += each_s[stage, INPUT]
        longest_down_s = max(longest_down_s, each_s[stage, FORWARD])
        longest_up_s = max(longest_up_s, each_s[stage, INPUT] + each_s[stage, WEIGHT])
        second_s = each_s[stage, INPUT] + each_s[stage, WEIGHT] + (m - 2) * longest_up_s
        all_up_s = max(all_up_s, second_s) - each_s[stage, LESS]
        warm_s[stage] = down_s + (depth - 1) * longest_down_s
        all_warm_s[stage], all_tail_s[stage] = down_s + (m - 1) * longest_down_s, up_s + all_up_s
        tail_s[stage] = all_tail_s[stage] if depth == m else up_s + (depth - 1) * longest_up_s

    # The same with the last microbatch where that differs: up to some stage as the others, from there on as the last.
    down_s, last_down_s, longest_down_s, all_down_s = each_s[0, FORWARD_LAG], 0.0, 0.0, 0.0
    up_s, last_up_s, longest_up_s, turn_up_s, own_up_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for stage in range(p if smaller else 0):
        depth = depths[stage]
        for step in range(0 if stage > 0 else 1, 2):
            # The transfer from the stage before, which is one more stage to the chain, and the pass itself.
            place, column = (stage, FORWARD) if step else (stage - 1, DOWN)
            one_s, last_one_s = each_s[place, column], last_s[place, column]
            lag_s = 0.0 if step else each_s[stage, FORWARD_LAG]
            down_s += one_s + lag_s
            longest_down_s = max(longest_down_s, one_s)
            all_down_s = max(all_down_s, (m - 2) * longest_down_s + down_s - last_down_s)
            last_down_s += last_one_s + lag_s
            one_s, last_one_s = each_s[stage, INPUT if step else UP], last_s[stage, INPUT if step else UP]
            behind_s = each_s[stage, WEIGHT] if step else 0.0
            own_up_s = max(own_up_s, last_up_s + last_one_s + behind_s - up_s)
            lag_s = 0.0 if step or stage == 0 else each_s[stage - 1, INPUT_LAG]
            up_s += one_s + lag_s
            last_up_s += last_one_s + lag_s
            if one_s + behind_s > longest_up_s:
                longest_up_s, turn_up_s = one_s + behind_s, own_up_s
        all_warm_s[stage] = last_down_s + all_down_s
        all_tail_s[stage] = up_s + (m - 2) * longest_up_s + turn_up_s - each_s[stage, LESS]
        tail_s[stage] = up_s + (depth - 2) * longest_up_s + turn_up_s if depth > 1 else last_up_s
        if depth == m:
            warm_s[stage], tail_s[stage] = all_warm_s[stage], all_tail_s[stage]

    found_s, start_s, finish_s = 0.0, 0.0, 0.0
    for stage in range(p - 1, -1, -1):
        depth, behind_s = depths[stage], each_s[stage, WEIGHT]
        turn_s = each_s[stage, FORWARD] + each_s[stage, INPUT] + behind_s
        before_s, after_s = 0.0, 0.0
        if stage < p - 1:
            before_s = start_s + each_s[stage + 1, UP] + each_s[stage, INPUT_LAG]
            after_s = last_s[stage, DOWN] + last_s[stage + 1, FORWARD_LAG] + finish_s
        found_s = max(found_s, all_warm_s[stage] + max(tail_s[stage], after_s))
        start_s = max(warm_s[stage], before_s)
        found_s = max(found_s, start_s + all_tail_s[stage])
        start_s += each_s[stage, INPUT] - each_s[stage, LESS]
        finish_s = last_s[stage, FORWARD] + max(tail_s[stage], after_s)
        turns = m - depth - 1  # Between B(0) and F(m - 1).
        if turns < 0:
            continue
        found_s = max(found_s, start_s + behind_s + turns * turn_s + finish_s)
        if rounds_rule:
            round_s = longest_s = turn_s
            for other in range(stage + 1, p):
                own_s = each_s[other, FORWARD] + each_s[other, INPUT]
                round_s += each_s[other - 1, DOWN] + own_s + each_s[other, UP]
                round_s += each_s[other, FORWARD_LAG] + each_s[other - 1, INPUT_LAG]
                longest_s = max(longest_s, own_s + each_s[other, WEIGHT])
                length = depth - depths[other] + 1
                most_s = turns * round_s  # Times ``length``: a comparison is quicker than a division.
                if round_s > length * longest_s and most_s > length * (found_s - start_s - behind_s - finish_s):
                    rounds = turns // length
                    steady_s = rounds * round_s + (turns - rounds * length) * longest_s
                    found_s = max(found_s, start_s + behind_s + steady_s + finish_s)
    # (With one microbatch nothing is less: LESS is 0.)
    # The last microbatch comes back through the stages one by one, and no stage ends later than that.
    end_s, longest_s = found_s, found_s + last_s[0, WEIGHT] + each_s[0, ONCE]
    for stage in range(1, p):
        end_s -= last_s[stage - 1, INPUT] + last_s[stage - 1, INPUT_LAG] + last_s[stage, UP]
        longest_s = max(longest_s, end_s + last_s[stage, WEIGHT] + each_s[stage, ONCE])
    return float(longest_s)
