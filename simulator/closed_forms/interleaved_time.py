"""The time of the interleaved schedule, exactly: its order pass by pass, without operators.

There is no closed form: ranks wait for each other in ways that change with every run of microbatches. So each rank does
its passes in the order of the schedule, each as soon as what it needs has come.

Source: the order that ``simulator.schedules.interleaved`` makes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.stage_rows import DOWN, FORWARD, FORWARD_LAG, INPUT, INPUT_LAG, LESS, ONCE, UP, WEIGHT

NEVER_S = np.inf


def interleaved_s(
    each_s: NDArray[np.float64],
    last_s: NDArray[np.float64],
    num_ranks: int,
    num_microbatches: int,
    blocking: bool,
) -> float:
    """Return the seconds of the passes of all microbatches.

    Args:
        each_s, last_s: float64[stages, NUM_COLUMNS]. Rows (see ``stage_rows``) of a microbatch that is not the last,
            and of the last; INPUT the whole backward pass; transfers apart even where they block.
        num_ranks: Stage s is on rank s mod ``num_ranks``.
        num_microbatches: A multiple of ``num_ranks``.
        blocking: A rank goes on only when what it sent has arrived; what a forward pass sends leaves with what the
            backward pass right after it sends.

    As drawn in ``simulator.schedules.interleaved``, and m (t_f + t_b) + (p - 1) (t_f + t_b) / v:

    >>> drawn = np.array([[1.0, 2.0, *[0.0] * 7]] * 4)
    >>> interleaved_s(drawn, drawn, 2, 4, False), 4 * (2.0 + 4.0) + 1 * (2.0 + 4.0) / 2
    (27.0, 27.0)
    """
    p, m, num_stages = num_ranks, num_microbatches, len(each_s)
    num_chunks = num_stages // p
    run, total = p * num_chunks, m * num_chunks
    # When what a pass needs has come.
    forward_at_s, backward_at_s = np.full((num_stages, m), NEVER_S), np.full((num_stages, m), NEVER_S)
    forward_at_s[0] = 0.0
    rank_free_s, link_free_s, places = np.zeros(p), np.zeros(p), np.zeros(p, np.int64)
    # Of a rank whose forward pass sends with the backward pass after it: that pass's stage, or -1.
    held_stages, held_microbatches = np.full(p, -1), np.zeros(p, np.int64)
    left = 2 * total * p
    while left > 0:
        for rank in range(p):
            warmup = 2 * (p - rank - 1) + (num_chunks - 1) * p
            if num_chunks == 1:
                warmup = p - rank - 1
            if m == p and num_chunks > 1:
                warmup = total
            warmup = min(warmup, total)
            while places[rank] < 2 * total:
                place = places[rank]
                steady = place - warmup
                paired = 0 <= steady < 2 * (total - warmup)
                is_forward = place < warmup or (paired and steady % 2 == 0)
                index = place
                if paired:
                    index = warmup + steady // 2 if is_forward else steady // 2
                elif not is_forward:
                    index = place - total
                group, rest = index // run, index % run
                chunk, microbatch = rest // p, group * p + rest % p
                stage = (chunk if is_forward else num_chunks - 1 - chunk) * p + rank
                came_s = forward_at_s[stage, microbatch] if is_forward else backward_at_s[stage, microbatch]
                if came_s == NEVER_S:
                    break
                own_s = last_s[stage] if microbatch == m - 1 else each_s[stage]
                if is_forward:
                    end_s = max(rank_free_s[rank], came_s + own_s[FORWARD_LAG]) + own_s[FORWARD]
                else:
                    lag_s = own_s[INPUT_LAG] if stage + 1 < num_stages else 0.0
                    end_s = max(rank_free_s[rank], came_s + lag_s) + own_s[INPUT]
                    if microbatch == 0:
                        end_s -= own_s[LESS]
                behind_s = 0.0 if is_forward else own_s[WEIGHT]
                rank_free_s[rank] = end_s + behind_s
                places[rank] += 1
                left -= 1
                waits = blocking and paired and num_chunks > 1
                if is_forward and waits and stage + 1 < num_stages:
                    held_stages[rank], held_microbatches[rank] = stage, microbatch
                    continue
                link_s = max(end_s, link_free_s[rank])
                if not is_forward and held_stages[rank] >= 0:
                    behind, number = held_stages[rank], held_microbatches[rank]
                    link_s += last_s[behind, DOWN] if number == m - 1 else each_s[behind, DOWN]
                    forward_at_s[behind + 1, number] = link_s
                    held_stages[rank] = -1
                if is_forward and stage + 1 < num_stages:
                    link_s += own_s[DOWN]
                    forward_at_s[stage + 1, microbatch] = link_s
                elif is_forward:
                    backward_at_s[stage, microbatch] = end_s
                elif stage > 0:
                    link_s += own_s[UP]
                    backward_at_s[stage - 1, microbatch] = link_s
                link_free_s[rank] = link_s
                if blocking:
                    rank_free_s[rank] = link_s + behind_s
    for stage in range(num_stages):
        rank_free_s[stage % p] += each_s[stage, ONCE]
    return float(rank_free_s.max())
