"""One level of PipeDream's dynamic program, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@compiled
def _replicated(time: float, weights: float, members: int, inner: int, bandwidth: float, released: bool) -> float:
    if released:
        return (time + 4.0 * (members - 1) * weights / (bandwidth * members) / inner) / members
    return max(time, 2.0 * (members - 1) * weights / (bandwidth * members)) / members


@compiled
def solve_level(
    times: Floats,
    weights: Floats,
    activations: Floats,
    output_bytes: Floats,
    before: Flags,
    size: int,
    inner: int,
    bandwidth: float,
    released: bool,
    transfers: bool,
    fewer: bool,
    memory: float,
    top: bool,
    table_of: Ints,
) -> tuple[Floats, Ints, Ints, Ints]:
    """Solve all ranges of states (the top level: those from the first state on) for 1 to ``size`` members.

    Args:
        times: float64[tables, s + 1, s]. Time of states i..j on one member.
        weights, activations: float64[s + 1, s]. Bytes in states i..j.
        output_bytes: float64[s]. Bytes over a cut behind each state.
        before: bool[s, s]. Order of the states.
        size, inner: Members of this level and of the one below.
        bandwidth: Bytes per second between members.
        released, transfers, fewer: See `PipeDreamOptions`.
        memory: Bytes that a member may stash.
        top: Whether only i = 0 is needed.
        table_of: int64[size + 1]. By the members that run a stage, the table of times; -1 where so many may not.

    Returns:
        Times float64[s + 1, s, size]; the state before the last stage (-1: one stage), the members before it and
        those of the last stage, each int64[s + 1, s, size].
    """
    count = len(output_bytes)
    best = np.full((count + 1, count, size), np.inf)
    split = np.full((count + 1, count, size), -1, dtype=np.int64)
    members_before = np.zeros((count + 1, count, size), dtype=np.int64)
    replicas = np.ones((count + 1, count, size), dtype=np.int64)
    last_i = 1 if top else count
    # The first stage's gradients are shared out over the level below, in the released optimizer.
    for i in range(last_i):
        for j in range(i, count):
            for m in range(1, size + 1):
                stage_s = times[table_of[m], i, j] if table_of[m] >= 0 else np.inf
                stash = np.ceil((size - m) / m) * (activations[i, j] + weights[i, j])
                if stash > memory or stage_s == np.inf:
                    continue
                best[i, j, m - 1] = _replicated(stage_s, weights[i, j], m, inner, bandwidth, released)
                replicas[i, j, m - 1] = m
    for i in range(last_i):
        for m in range(2, size + 1):
            for j in range(i + 1, count):
                value = best[i, j, m - 1]
                if fewer and best[i, j, m - 2] < value:
                    value = best[i, j, m - 2]
                    split[i, j, m - 1] = split[i, j, m - 2]
                    members_before[i, j, m - 1] = members_before[i, j, m - 2]
                    replicas[i, j, m - 1] = replicas[i, j, m - 2]
                for k in range(i, j):
                    if not before[j, k] or (i > 0 and not before[k, i - 1]):
                        continue
                    stage_bytes = weights[k + 1, j]
                    for own in range(1, m):
                        prefix = best[i, k, m - own - 1]
                        if prefix >= value:
                            continue
                        stage_s = times[table_of[own], k + 1, j] if table_of[own] >= 0 else np.inf
                        stash = np.ceil((size - m) / own) * (activations[k + 1, j] + stage_bytes)
                        if stash > memory or stage_s == np.inf:
                            continue
                        time = max(prefix, _replicated(stage_s, stage_bytes, own, 1, bandwidth, released))
                        if transfers:
                            time = max(time, 2.0 * output_bytes[k] / (bandwidth * own))
                            if j < count - 1:
                                time = max(time, 2.0 * output_bytes[j] / (bandwidth * own))
                        if time < value:
                            value = time
                            split[i, j, m - 1] = k
                            members_before[i, j, m - 1] = m - own
                            replicas[i, j, m - 1] = own
                best[i, j, m - 1] = value
    return best, split, members_before, replicas
