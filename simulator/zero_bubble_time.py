"""Closed form of the time of zb-h1: the longest of a few chains of passes through the schedule.

A stage's order after its warm-up consists of *turns*: turn k is I(k), W(k - stage) once there is one, and F(k + depth),
with depth = min(p - stage, m), while there is one. The forward that leaves in turn k is the next stage's in turn k + 1,
and the input gradient of turn k is the stage before's in turn k. So a chain that stays on a stage takes a turn's three
passes each turn; one that goes down the pipeline takes a forward each turn; and one that comes up takes all input
gradients on its way in one turn. For each stage:

- *start*, to the end of I(0): the forwards of its warm-up, once microbatch 0 has come; or microbatch 0 through all
  stages behind and back;
- *turns*: all on the stage; or rounds down to a stage behind and back, which rule where transfers take longer than the
  weight gradients that fill the wait;
- *finish*, to the end of I(m - 1): the stage's own turns, or the last microbatch through all stages behind and back;
- *end*: the weight gradients that it has kept back, or I(m - 1) on up and those of a stage before.

Every such chain is one of the schedule, so none is longer than the iteration. With equal stages and free transfers the
longest is the iteration: m (f + i + w) + (p - 1) max(f + i - w, f, i) for m >= p.

Source: the order that ``simulator.schedules.zero_bubble`` makes; Qi et al., "Zero Bubble Pipeline Parallelism", ICLR
2024, Section 2.2.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Columns of what a microbatch takes in a stage: its forward, input-gradient and weight-gradient pass, and, where it
# computes on meanwhile, what it sends to the next stage and to the one before.
FORWARD, INPUT, WEIGHT, DOWN, UP = range(5)
SPLIT = 5


def zero_bubble_s(each_s: NDArray[np.float64], last_s: NDArray[np.float64], num_microbatches: int) -> float:
    """Return the seconds of the passes of zb-h1.

    Args:
        each_s, last_s: float64[stages, SPLIT]. Seconds of a microbatch that is not the last, and of the last.
        num_microbatches: At least one; ``last_s`` may differ from ``each_s`` from two on.

    >>> equal = np.array([[1.0, 1.0, 1.0, 0.0, 0.0]] * 4)
    >>> zero_bubble_s(equal, equal, 6)  # As drawn in simulator.schedules.zero_bubble.
    21.0
    """
    p, m = len(each_s), num_microbatches
    through, behind, last_tail = 0.0, 0.0, 0.0
    for stage in range(p):
        through += each_s[stage, FORWARD] + each_s[stage, DOWN]
        behind += each_s[stage, INPUT] + each_s[stage, UP]
        last_tail += last_s[stage, FORWARD] + last_s[stage, DOWN] + last_s[stage, INPUT] + last_s[stage, UP]
    longest, end, arrives = 0.0, 0.0, 0.0
    for stage in range(p):
        f, i, w = each_s[stage, FORWARD], each_s[stage, INPUT], each_s[stage, WEIGHT]
        last_f, last_i = last_s[stage, FORWARD], last_s[stage, INPUT]
        depth, kept_back = min(p - stage, m), min(stage + 1, m)
        turns = m - depth  # Those with a forward.
        own_end = (kept_back - 1) * w + last_s[stage, WEIGHT]
        if stage > 0:
            end = max(own_end, last_s[stage, UP] + last_s[stage - 1, INPUT] + end)
        else:
            end = own_end
        # What is behind a stage: gradients of microbatch 0 from there, and the last one down and back.
        behind -= i + each_s[stage, UP]
        last_tail -= last_f + last_i + last_s[stage, UP]
        warm = arrives + depth * f
        if turns == 0:
            warm -= f - last_f
            longest = max(longest, warm + last_tail + last_i + end)
        start = max(warm, through + behind) + i
        own = turns * f + (m - 1) * i + (m - kept_back) * w
        if turns > 0:
            own -= f - last_f
        if m > 1:
            own -= i - last_i
        longest = max(longest, start + own + end)
        if turns > 0:
            rounds_s, spare_s = 0.0, 0.0
            for other in range(stage, p):
                if other > stage:
                    exchange_s = each_s[other - 1, DOWN] + each_s[other, UP]
                    rounds_s += each_s[other, FORWARD] + each_s[other, INPUT] + exchange_s
                    spare_s += each_s[other, WEIGHT] - exchange_s
                    if spare_s >= 0.0:
                        continue
                length = other - stage + 1
                rounds = (turns - 1) // length
                taken = rounds * length
                weights = rounds - min(rounds, -(-stage // length)) + max(0, turns - max(taken, stage))
                steady_s = rounds * rounds_s + (rounds + turns - 1 - taken) * (f + i) + weights * w
                longest = max(longest, start + steady_s + last_f + last_tail + last_i + end)
        last_tail -= last_s[stage, DOWN]
        arrives += f + each_s[stage, DOWN]
    return float(longest)
