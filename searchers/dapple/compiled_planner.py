"""DAPPLE's dynamic program, compiled: formula 4 with the latency of `searchers.dapple.formula`.

A state is (j, g): the first j layers are planned on the GPUs of placement state g, the rest is one last stage
on all other GPUs. Its value is the latency L of that pipeline; the best way to each state is kept. From a
state, the last stage is split: layers [j, k) go to new GPUs by a placement policy.

With the corrected pivot rule L is the largest L(Q), so (M - 1)(F + B) of any stage is a lower bound of L and of
everything made from it, as is the work of the layers left over the GPUs left; what cannot beat the best
pipeline found so far is not followed. With the printed rule nothing is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HARDWARE, RELEASED = 0.0, 1.0
ROOT = -1


@compiled
def transfer_line(sources: Ints, targets: Ints, rates: Floats) -> tuple[float, float]:
    """Return latency and seconds per byte of a transfer between two sets given by GPUs per machine.

    Every replica of the sender holds an equal part in device order, so does every replica of the receiver.
    """
    machines = len(sources)
    num_sources, num_targets = 0, 0
    for x in range(machines):
        num_sources += sources[x]
        num_targets += targets[x]
    if rates[0] == RELEASED:
        homes = 0
        remote = 0
        for x in range(machines):
            homes += targets[x] > 0
        for x in range(machines):
            if targets[x] == 0:
                remote += sources[x]
        if homes > 1:
            return 0.0, 1.0 / rates[3]
        if remote > 0:
            return 0.0, remote / num_sources / rates[2]
        return 0.0, 1.0 / rates[1]
    worst = 0.0
    crosses = False
    inside = 0.0
    from_start, to_start = 0.0, 0.0
    for x in range(machines):
        held, wanted = sources[x] / num_sources, targets[x] / num_targets
        low, high = max(from_start, to_start), min(from_start + held, to_start + wanted)
        local = max(0.0, high - low)
        leaving, coming = held - local, wanted - local
        if max(leaving, coming) > 1e-12:
            crosses = True
            worst = max(worst, leaving / rates[3], coming / rates[3], 1.0 / max(num_sources, num_targets) / rates[2])
        if local > 1e-12:
            inside = max(inside, local / min(sources[x], targets[x]) / rates[1])
        from_start += held
        to_start += wanted
    return (rates[5] if crosses else rates[4]), max(worst, inside)


@compiled
def find_pivot(forward: Floats, backward: Floats, count: int, microbatches: int, corrected: bool) -> int:
    """Return the pivot by Algorithm 1 in one pass."""
    pivot = count - 1
    between = 0.0  # stages from the one after the candidate up to the one before the pivot
    for s in range(count - 2, -1, -1):
        own = (microbatches - 1) * (forward[s] + backward[s])
        other = (microbatches - 1) * (forward[pivot] + backward[pivot]) + between
        if corrected:
            other += forward[pivot] + backward[pivot]
        if own > other:
            pivot = s
            between = 0.0
        else:
            between += forward[s] + backward[s]
    return pivot


@compiled
def latency(
    forward: Floats,
    backward: Floats,
    all_reduce: Floats,
    count: int,
    microbatches: int,
    corrected_pivot: bool,
    corrected_ending: bool,
) -> float:
    """Return L of formula 2 for the first ``count`` expanded stages."""
    pivot = find_pivot(forward, backward, count, microbatches, corrected_pivot)
    warm_up = 0.0
    for s in range(pivot + 1):
        warm_up += forward[s]
    end = 0.0
    shift = 0.0
    for s in range(pivot, -1, -1):
        shift += backward[s]
        end = max(end, all_reduce[s] + shift)
    shift = 0.0 if corrected_ending else -backward[pivot]
    for s in range(pivot + 1, count):
        if corrected_ending:
            end = max(end, all_reduce[s] + shift)
            shift -= backward[s]
        else:
            shift -= backward[s]
            end = max(end, all_reduce[s] + shift)
    total: float = warm_up + (microbatches - 1) * (forward[pivot] + backward[pivot]) + end
    return total


@compiled
def _slice(microbatch: int, replicas: int, whole: bool) -> float:
    return float(-(-microbatch // replicas)) if whole else microbatch / replicas


@compiled
def plan(
    forward: Floats,
    backward: Floats,
    gradient_bytes: Floats,
    state_bytes: Floats,
    saved: Floats,
    kept: Floats,
    boundary: Floats,
    microbatch: int,
    microbatches: int,
    whole: bool,
    most: int,
    states: Ints,
    offsets: Ints,
    successors: Ints,
    taken_line: Floats,
    rest_line: Floats,
    sizes: Ints,
    rates: Floats,
    capacity: float,
    twice: bool,
    corrected_pivot: bool,
    corrected_ending: bool,
    one_stage: bool,
    max_stages: int,
    bound: float,
) -> tuple[float, int, int, Floats, Ints, Ints, Ints]:
    """Fill the table.

    Args:
        forward, backward: float64[n + 1]. Prefix sums of seconds per sample.
        gradient_bytes, state_bytes: float64[n + 1]. Prefix sums of what is reduced, and of model states.
        saved, kept: float64[n + 1]. Prefix sums per sample: what each layer keeps once, and per microbatch in
            flight (with recomputation ``kept`` is 0: only what enters a stage stays).
        boundary: float64[n + 1]. Bytes per sample over a cut before layer j.
        microbatch, microbatches: Samples, and M.
        whole: Slices are whole samples (the largest counts); else even parts.
        most: Replicas of a stage at most.
        states: int64[g, machines]. GPUs used.
        offsets, successors: Successors of state g are ``successors[offsets[g]:offsets[g + 1]]``.
        taken_line: float64[len(successors), 2]. All-reduce line of the GPUs taken.
        rest_line: float64[g, 2]. All-reduce line of the GPUs that are left.
        sizes: int64[machines].
        rates: See `CommunicationCosts.rates`.
        capacity: Bytes per GPU.
        twice: Warm-up P_B: 2(S - i) - 1 microbatches in flight instead of S - i.
        corrected_pivot, corrected_ending: Rules.
        one_stage: The plan of one stage competes; else it is only where all others begin.
        max_stages: Stages at most.
        bound: An upper bound of the optimum known beforehand; infinity for none.

    Returns:
        Best latency, and its state (j, g), -1 if nothing fits; the values float64[n, g]; and, for the way back,
        the layer and the state before, and the number of stages before the last, each int64[n, g].
    """
    n = len(forward) - 1
    num_states, machines = states.shape
    values = np.full((n, num_states), np.inf)
    from_layer = np.full((n, num_states), ROOT, dtype=np.int64)
    from_state = np.full((n, num_states), ROOT, dtype=np.int64)
    depth = np.zeros((n, num_states), dtype=np.int64)
    used = np.zeros(num_states, dtype=np.int64)
    for g in range(num_states):
        for x in range(machines):
            used[g] += states[g, x]
    total = 0
    for x in range(machines):
        total += sizes[x]
    size = 2 * total + 2
    f, b, a = np.zeros(size), np.zeros(size), np.zeros(size)
    static, flight = np.zeros(total + 1), np.zeros(total + 1)
    chain_layer, chain_state = np.zeros(total + 2, dtype=np.int64), np.zeros(total + 2, dtype=np.int64)
    taken, rest = np.zeros(machines, dtype=np.int64), np.zeros(machines, dtype=np.int64)
    before = np.zeros(machines, dtype=np.int64)
    best, best_layer, best_state = bound, -1, -1

    # The plan of one stage.
    part = _slice(microbatch, total, whole)
    memory = state_bytes[n] + part * (saved[n] + kept[n])
    if one_stage and total <= most:
        f[0], b[0] = forward[n] * part, backward[n] * part
        a[0] = rest_line[0, 0] + rest_line[0, 1] * gradient_bytes[n] if total > 1 else 0.0
        values[0, 0] = latency(f, b, a, 1, microbatches, corrected_pivot, corrected_ending)
        if memory <= capacity and values[0, 0] <= best:
            best, best_layer, best_state = values[0, 0], 0, 0
    else:
        values[0, 0] = 1e300  # not a plan itself, but where all others begin

    for j in range(n):
        for g in range(num_states):
            if values[j, g] == np.inf or depth[j, g] + 1 >= max_stages:
                continue
            # The planned stages, first to last.
            count = depth[j, g]
            layer, state = j, g
            for position in range(count, -1, -1):
                chain_layer[position], chain_state[position] = layer, state
                layer, state = from_layer[layer, state], from_state[layer, state]
            viable = True
            for position in range(count):
                low, high = chain_layer[position], chain_layer[position + 1]
                replicas = used[chain_state[position + 1]] - used[chain_state[position]]
                part = _slice(microbatch, replicas, whole)
                for x in range(machines):
                    taken[x] = states[chain_state[position + 1], x] - states[chain_state[position], x]
                if position > 0:
                    lag, slope = transfer_line(before, taken, rates)
                    f[2 * position - 1] = lag + slope * boundary[low] * microbatch if boundary[low] > 0 else 0.0
                    b[2 * position - 1], a[2 * position - 1] = f[2 * position - 1], 0.0
                f[2 * position] = (forward[high] - forward[low]) * part
                b[2 * position] = (backward[high] - backward[low]) * part
                edge = -1
                for e in range(offsets[chain_state[position]], offsets[chain_state[position] + 1]):
                    if successors[e] == chain_state[position + 1]:
                        edge = e
                reduced = gradient_bytes[high] - gradient_bytes[low]
                alone = replicas == 1 or reduced <= 0
                a[2 * position] = 0.0 if alone else taken_line[edge, 0] + taken_line[edge, 1] * reduced
                static[position] = state_bytes[high] - state_bytes[low] + part * (saved[high] - saved[low])
                flight[position] = part * (kept[high] - kept[low] + boundary[low])
                before[:] = taken
            # Split the last stage.
            floor = 0.0
            for position in range(2 * count - 1 if count else 0):
                floor = max(floor, (microbatches - 1) * (f[position] + b[position]))
            if corrected_pivot and floor >= best:
                continue
            for e in range(offsets[g], offsets[g + 1]):
                after = successors[e]
                replicas = used[after] - used[g]
                left = total - used[after]
                if replicas > most:
                    continue
                for x in range(machines):
                    taken[x] = states[after, x] - states[g, x]
                    rest[x] = sizes[x] - states[after, x]
                part, rest_part = _slice(microbatch, replicas, whole), _slice(microbatch, left, whole)
                end = 2 * count
                if count:
                    lag, slope = transfer_line(before, taken, rates)
                    f[end - 1] = lag + slope * boundary[j] * microbatch if boundary[j] > 0 else 0.0
                    b[end - 1], a[end - 1] = f[end - 1], 0.0
                    if corrected_pivot and (microbatches - 1) * 2 * f[end - 1] >= best:
                        continue
                lag, slope = transfer_line(taken, rest, rates)
                for k in range(j + 1, n):
                    f[end] = (forward[k] - forward[j]) * part
                    b[end] = (backward[k] - backward[j]) * part
                    if corrected_pivot and (microbatches - 1) * (f[end] + b[end]) >= best:
                        break
                    if corrected_pivot:
                        work = (forward[n] - forward[k] + backward[n] - backward[k]) * microbatch
                        if (microbatches - 1) * work / left >= best:
                            continue
                    reduced = gradient_bytes[k] - gradient_bytes[j]
                    a[end] = taken_line[e, 0] + taken_line[e, 1] * reduced if replicas > 1 and reduced > 0 else 0.0
                    static[count] = state_bytes[k] - state_bytes[j] + part * (saved[k] - saved[j])
                    flight[count] = part * (kept[k] - kept[j] + boundary[j])
                    viable = True
                    for position in range(count + 1):
                        ahead = count + 2 - position
                        depth_in = 2 * ahead - 1 if twice else ahead
                        depth_in = min(depth_in, microbatches)
                        if static[position] + depth_in * flight[position] > capacity:
                            viable = False
                            break
                    if not viable:
                        break
                    f[end + 1] = lag + slope * boundary[k] * microbatch if boundary[k] > 0 else 0.0
                    b[end + 1], a[end + 1] = f[end + 1], 0.0
                    f[end + 2] = (forward[n] - forward[k]) * rest_part
                    b[end + 2] = (backward[n] - backward[k]) * rest_part
                    reduced = gradient_bytes[n] - gradient_bytes[k]
                    a[end + 2] = (
                        rest_line[after, 0] + rest_line[after, 1] * reduced if left > 1 and reduced > 0 else 0.0
                    )
                    value = latency(f, b, a, end + 3, microbatches, corrected_pivot, corrected_ending)
                    if value < values[k, after]:
                        values[k, after] = value
                        from_layer[k, after], from_state[k, after] = j, g
                        depth[k, after] = count + 1
                        memory = state_bytes[n] - state_bytes[k]
                        memory += rest_part * (saved[n] - saved[k] + kept[n] - kept[k] + boundary[k])
                        if value < best and memory <= capacity and left <= most:
                            best, best_layer, best_state = value, k, after
    return best, best_layer, best_state, values, from_layer, from_state, depth
