"""Piper's dynamic program and its choice of implementations, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@compiled
def choose_implementations(
    layers: Ints,
    numbers: Ints,
    times: Floats,
    per_microbatch: Floats,
    fixed: Floats,
    counts: Ints,
    in_flight: int,
    memory: float,
) -> tuple[float, Ints]:
    """Choose implementations: the fastest everywhere if that fits, else cheap ones where they cost least.

    Args:
        layers: int64[n]. Layers of the stage, of equal ones one is enough.
        numbers: int64[n]. How many layers of the stage are like it.
        times, per_microbatch, fixed: float64[layers, choices].
        counts: int64[layers]. Choices of each layer.
        in_flight: Microbatches.
        memory: Bytes.

    Returns:
        Seconds of the stage, infinite if nothing fits, and how many layers take each choice, int64[n, choices].
    """
    held = np.zeros((len(layers), times.shape[1]), dtype=np.int64)
    total, used = 0.0, 0.0
    for place in range(len(layers)):
        layer, fastest = layers[place], 0
        for choice in range(1, counts[layer]):
            if times[layer, choice] < times[layer, fastest]:
                fastest = choice
        if numbers[place] > 0:
            held[place, fastest] = numbers[place]
            total += numbers[place] * times[layer, fastest]
            used += numbers[place] * (per_microbatch[layer, fastest] * in_flight + fixed[layer, fastest])
    while used > memory:
        best, best_saved, best_place, best_now, best_choice = np.inf, 0.0, -1, -1, -1
        for place in range(len(layers)):
            layer = layers[place]
            for now in range(counts[layer]):
                if held[place, now] == 0:
                    continue
                for choice in range(counts[layer]):
                    saved = (per_microbatch[layer, now] - per_microbatch[layer, choice]) * in_flight
                    saved += fixed[layer, now] - fixed[layer, choice]
                    if saved > 0:
                        ratio = (times[layer, choice] - times[layer, now]) / saved
                        if ratio < best:
                            best, best_saved = ratio, saved
                            best_place, best_now, best_choice = place, now, choice
        if best_place < 0:
            return np.inf, held
        layer = layers[best_place]
        # As many at once as are needed, unless a layer that has moved would move again before the next.
        moved = min(held[best_place, best_now], max(1, int(np.ceil((used - memory) / best_saved))))
        for choice in range(counts[layer]):
            saved = (per_microbatch[layer, best_choice] - per_microbatch[layer, choice]) * in_flight
            saved += fixed[layer, best_choice] - fixed[layer, choice]
            if saved > 0 and (times[layer, choice] - times[layer, best_choice]) / saved < best:
                moved = 1
        held[best_place, best_now] -= moved
        held[best_place, best_choice] += moved
        used -= moved * best_saved
        total += moved * (times[layer, best_choice] - times[layer, best_now])
    return total, held


@compiled
def stage_times(
    from_ideal: Ints,
    to_ideal: Ints,
    kinds_held: Ints,
    examples: Ints,
    times: Floats,
    per_microbatch: Floats,
    fixed: Floats,
    counts: Ints,
    most: int,
    memory: Floats,
) -> Floats:
    """Return the time of every stage for 1 to ``most`` microbatches in flight: float64[stages, most + 1].

    Args:
        from_ideal, to_ideal: int64[stages]. Nested down-sets; a stage is the difference.
        kinds_held: int64[num_ideals, kinds]. How many layers of each kind a down-set has; equal layers are of one.
        examples: int64[kinds]. One layer of each kind.
        times, per_microbatch, fixed, counts: As in `choose_implementations`.
        most: Microbatches in flight at most.
        memory: float64[stages]. Bytes.
    """
    num_stages = len(from_ideal)
    found = np.full((num_stages, most + 1), np.inf)
    for stage in range(num_stages):
        numbers = kinds_held[to_ideal[stage]] - kinds_held[from_ideal[stage]]
        for in_flight in range(1, most + 1):
            found[stage, in_flight], _ = choose_implementations(
                examples, numbers, times, per_microbatch, fixed, counts, in_flight, memory[stage]
            )
            if found[stage, in_flight] == np.inf:
                break
    return found


@compiled
def fill(
    num_ideals: int,
    from_ideal: Ints,
    to_ideal: Ints,
    first_pair: Ints,
    degree: Ints,
    replicas: Ints,
    table: Ints,
    times: Floats,
    extra: Floats,
    num_devices: int,
    most: int,
    bound: float,
) -> Floats:
    """Fill the table of bottlenecks.

    Args:
        num_ideals: Down-sets, sorted by size.
        from_ideal, to_ideal: int64[pairs]. Nested down-sets, sorted by ``from_ideal``; a stage is the difference.
        first_pair: int64[num_ideals + 1]. Where each ``from_ideal`` begins.
        degree, replicas, table: int64[choices]. Tensor and data degree, and which table of times.
        times: float64[tables, pairs, most + 1]. Seconds by microbatches in flight.
        extra: float64[choices, pairs]. Communication seconds per microbatch.
        num_devices: K.
        most: Sum of data degrees at most.
        bound: Stages slower than this are left out.

    Returns:
        float64[num_ideals, most + 1, K + 1]: the slowest stage after a down-set, with stages whose data degrees
        add up to s on k devices.
    """
    value = np.full((num_ideals, most + 1, num_devices + 1), np.inf)
    value[num_ideals - 1, 0, 0] = 0.0
    for ideal in range(num_ideals - 2, -1, -1):
        for pair in range(first_pair[ideal], first_pair[ideal + 1]):
            after = to_ideal[pair]
            for choice in range(len(degree)):
                d = replicas[choice]
                devices = degree[choice] * d
                cost = extra[choice, pair]
                if cost > bound or devices > num_devices:
                    continue
                for s in range(d, most + 1):
                    load = times[table[choice], pair, -(-s // d)] / d + cost
                    if load > bound:
                        break
                    target, source = value[ideal, s], value[after, s - d]
                    for k in range(devices, num_devices + 1):
                        slowest = max(source[k - devices], load)
                        if slowest < target[k]:
                            target[k] = slowest
    return value
