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
    members: Ints, times: Floats, per_microbatch: Floats, fixed: Floats, counts: Ints, in_flight: int, memory: float
) -> tuple[float, Ints]:
    """Choose one implementation per layer: the fastest everywhere if that fits, else cheap ones where they cost least.

    Args:
        members: int64[n]. Layers of the stage.
        times, per_microbatch, fixed: float64[layers, choices].
        counts: int64[layers]. Choices of each layer.
        in_flight: Microbatches.
        memory: Bytes.

    Returns:
        Seconds of the stage, infinite if nothing fits, and the choice of each member int64[n].
    """
    count = len(members)
    chosen = np.zeros(count, dtype=np.int64)
    total, used = 0.0, 0.0
    for position in range(count):
        layer = members[position]
        for choice in range(1, counts[layer]):
            if times[layer, choice] < times[layer, chosen[position]]:
                chosen[position] = choice
        total += times[layer, chosen[position]]
        used += per_microbatch[layer, chosen[position]] * in_flight + fixed[layer, chosen[position]]
    while used > memory:
        best, best_position, best_choice = np.inf, -1, -1
        for position in range(count):
            layer, now = members[position], chosen[position]
            for choice in range(counts[layer]):
                saved = (per_microbatch[layer, now] - per_microbatch[layer, choice]) * in_flight
                saved += fixed[layer, now] - fixed[layer, choice]
                if saved > 0:
                    ratio = (times[layer, choice] - times[layer, now]) / saved
                    if ratio < best:
                        best, best_position, best_choice = ratio, position, choice
        if best_position < 0:
            return np.inf, chosen
        layer, now = members[best_position], chosen[best_position]
        used -= (per_microbatch[layer, now] - per_microbatch[layer, best_choice]) * in_flight
        used -= fixed[layer, now] - fixed[layer, best_choice]
        total += times[layer, best_choice] - times[layer, now]
        chosen[best_position] = best_choice
    return total, chosen


@compiled
def stage_times(
    offsets: Ints,
    members: Ints,
    times: Floats,
    per_microbatch: Floats,
    fixed: Floats,
    counts: Ints,
    most: int,
    memory: float,
) -> Floats:
    """Return the time of every stage for 1 to ``most`` microbatches in flight: float64[stages, most + 1]."""
    num_stages = len(offsets) - 1
    found = np.full((num_stages, most + 1), np.inf)
    for stage in range(num_stages):
        own = members[offsets[stage] : offsets[stage + 1]]
        for in_flight in range(1, most + 1):
            found[stage, in_flight], _ = choose_implementations(
                own, times, per_microbatch, fixed, counts, in_flight, memory
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
