"""Where to cut a model into pipeline stages: by memory, by time, and one layer from a slow stage to its neighbour.

Source: Galvatron-BMW (TKDE 2024), section IV-B, Eq. 6 and 7. The filling from the back is the release's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from searchers.galvatron.degree_costs import DegreeCosts
from searchers.galvatron.layer_profiles import Layer
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.pipeline_costs import in_flight
from searchers.galvatron.pipeline_plan import Partition
from searchers.galvatron.strategies import SHARDED, TENSOR, Strategy

HALF_LAYER, CAP = 0.5, 1.3
"""Tolerance and cap of the release's filling."""


def even(num_layers: int, num_stages: int) -> Partition:
    """Return equal stages; what is left over goes to the last.

    >>> even(10, 4)
    (2, 2, 2, 4)
    """
    base, extra = divmod(num_layers, num_stages)
    return (base,) * (num_stages - 1) + (base + extra,)


def filled_from_the_back(weights: Sequence[float], num_stages: int, outside: float = 0.0) -> Partition:
    """Return stages filled from the last to the mean weight: half a layer of tolerance, at most 1.3 times it.

    Args:
        weights: Of the layers.
        num_stages: P.
        outside: What the first stage has besides; it counts in the mean.

    >>> filled_from_the_back([1.0] * 4 + [2.0] * 4, 2), filled_from_the_back([1.0] * 4 + [2.0] * 4, 2, outside=4.0)
    ((5, 3), (4, 4))
    """
    mean = (sum(weights) + outside) / num_stages
    counts = [0] * num_stages
    left = len(weights)
    for stage in range(num_stages - 1, 0, -1):
        filled = 0.0
        while left > stage:
            weight = weights[left - 1]
            if counts[stage] and (filled + HALF_LAYER * weight > mean or filled + weight > CAP * mean):
                break
            filled += weight
            counts[stage] += 1
            left -= 1
    counts[0] = left
    return tuple(counts)


def least_maximum(loads: NDArray[np.float64]) -> Partition:
    """Return the partition whose heaviest stage is lightest, exactly.

    Among equals, later stages are lighter.

    Args:
        loads: float64[num_stages, num_layers]: what a layer weighs in each stage.

    >>> least_maximum(np.array([[2.0] * 6, [1.0] * 6]))
    (2, 4)
    """
    found = least_maximum_within(loads, np.zeros_like(loads), 0.0)
    assert found is not None, "nothing is above the limit"
    return found


def least_maximum_within(loads: NDArray[np.float64], limited: NDArray[np.float64], limit: float) -> Partition | None:
    """Return that partition among those without a stage above ``limit`` in another weight, None if there is none.

    >>> ones = np.ones((2, 6))
    >>> least_maximum_within(ones, np.array([[2.0] * 6, [1.0] * 6]), 4.0)
    (2, 4)
    """
    num_stages, num_layers = loads.shape
    zero = np.zeros((num_stages, 1))
    prefix, other = (np.concatenate([zero, weight.cumsum(axis=1)], axis=1) for weight in (loads, limited))
    heaviest = np.full((num_stages, num_layers + 1), np.inf)
    cut = np.zeros((num_stages, num_layers + 1), dtype=int)
    heaviest[0] = np.where(other[0] <= limit, prefix[0], np.inf)
    heaviest[0, 0] = np.inf
    for stage in range(1, num_stages):
        for stop in range(stage + 1, num_layers + 1):
            own = prefix[stage, stop] - prefix[stage, stage:stop]
            own[other[stage, stop] - other[stage, stage:stop] > limit] = np.inf
            worst = np.maximum(heaviest[stage - 1, stage:stop], own)
            place = len(worst) - 1 - int(np.argmin(worst[::-1]))
            heaviest[stage, stop], cut[stage, stop] = worst[place], stage + place
    if heaviest[-1, -1] == np.inf:
        return None
    counts = []
    stop = num_layers
    for stage in range(num_stages - 1, 0, -1):
        counts.append(stop - int(cut[stage, stop]))
        stop = int(cut[stage, stop])
    return tuple(reversed([*counts, stop]))


def initial_strategy(degree: DegreeCosts, samples: int) -> Strategy | None:
    """Return the strategy that partitions are first weighed with: sharded data parallel where samples allow.

    Where a microbatch has too few samples, the one with the highest data degree; no checkpointing.
    """
    usable = [
        strategy
        for strategy in degree.strategies
        if not strategy.checkpoint
        and all(
            degree.estimator.layer(layer, strategy, samples, accumulates=False, held_ties=frozenset())
            for layer in degree.estimator.profiles.examples
        )
    ]
    return max(
        usable, key=lambda strategy: (strategy.data, strategy.degree(SHARDED), -strategy.degree(TENSOR)), default=None
    )


def weigh(degree: DegreeCosts, cut: Cut) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return what layers weigh in memory (float64[P, L], bytes) and in time (float64[P, L], seconds)."""
    samples = cut.samples
    strategy = initial_strategy(degree, samples)
    if strategy is None:
        return None
    memory = np.zeros((degree.num_stages, len(degree.layers)))
    seconds = np.zeros_like(memory)
    kinds = np.array([layer.kind for layer in degree.layers])
    held = np.array(
        [in_flight(degree.options.schedule, stage, degree.num_stages, cut.parts) for stage in range(degree.num_stages)]
    )
    for layer in degree.estimator.profiles.examples:
        cost = degree.estimator.layer(layer, strategy, samples, accumulates=cut.parts > 1, held_ties=frozenset())
        assert cost is not None, "checked for every kind"
        seconds[:, kinds == layer.kind] = cost.step_s
        memory[:, kinds == layer.kind] = (held * cost.forward_bytes + cost.state_bytes)[:, None]
    return memory, seconds


def with_outside(degree: DegreeCosts, cut: Cut, memory: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the memory of layers with what the release charges stages, not layers, for embedding and head."""
    whole = memory.copy()
    whole[0, 0] += degree.outside_bytes(0, cut)
    whole[-1, -1] += degree.outside_bytes(degree.num_stages - 1, cut)
    return whole


def base_partition(degree: DegreeCosts, cut: Cut, *, counts_outside: bool = True) -> Partition:
    """Return the release's: equal layers evenly, others filled from the back by memory.

    Args:
        degree: What plans of the pipeline degree cost.
        cut: Microbatches.
        counts_outside: Embedding and head count in the mean memory, where the release's model charges the first stage
            with both (one node). The plans shipped for eight GPUs are cut so, those for sixteen are not.
    """
    weighed = weigh(degree, cut)
    if weighed is None:
        return even(len(degree.layers), degree.num_stages)
    memory = weighed[0][0]
    cores = [_core_signature(degree, layer) for layer in degree.layers]
    lightest: dict[object, float] = {}
    for core, weight in zip(cores, memory, strict=True):
        lightest[core] = min(float(weight), lightest.get(core, np.inf))
    weights = [lightest[core] for core in cores]
    if max(weights) - min(weights) < 1e-3 * max(weights):
        return even(len(weights), degree.num_stages)
    released = degree.estimator.released
    outside = degree.outside_bytes(0, cut) if counts_outside and released and released.charges_first else 0.0
    return filled_from_the_back(weights, degree.num_stages, outside)


def _core_signature(degree: DegreeCosts, layer: Layer) -> tuple[int, ...]:
    return tuple(degree.estimator.problem.workload.signatures[layer.core[0] : layer.core[1]])


def neighbours(partition: Partition, slowest: int) -> Iterator[Partition]:
    """Yield the partitions in which the slowest stage hands a boundary layer to a neighbour.

    >>> list(neighbours((3, 4, 3), 1))
    [(4, 3, 3), (3, 3, 4)]
    """
    if partition[slowest] < 2:
        return
    for other in (slowest - 1, slowest + 1):
        if 0 <= other < len(partition):
            changed = list(partition)
            changed[slowest] -= 1
            changed[other] += 1
            yield tuple(changed)


def between(first: Partition, last: Partition, count: int) -> Iterator[Partition]:
    """Yield partitions evenly spaced between two: every cut moves a share of its way.

    >>> list(between((2, 4, 6), (4, 4, 4), 1))
    [(3, 4, 5)]
    """
    start, stop = np.cumsum(first)[:-1], np.cumsum(last)[:-1]
    total = sum(first)
    for number in range(1, count + 1):
        cuts = np.rint(start + (stop - start) * number / (count + 1)).astype(int)
        found = tuple(int(size) for size in np.diff([0, *cuts, total]))
        if min(found) >= 1 and found not in (first, last):
            yield found


def quickest_within_memory(
    memory: NDArray[np.float64], seconds: NDArray[np.float64], first: Partition, last: Partition, count: int
) -> Iterator[Partition]:
    """Yield the most time-balanced partitions under limits of memory, evenly spaced between those of two partitions.

    Args:
        memory, seconds: What layers weigh, float64[num_stages, num_layers].
        first, last: The memory- and the time-balanced partition.
        count: Limits.
    """
    lightest, most = _heaviest(memory, first), _heaviest(memory, last)
    for number in range(1, count + 1):
        limit = lightest + (most - lightest) * number / (count + 1)
        found = least_maximum_within(seconds, memory, limit)
        if found is not None and found not in (first, last):
            yield found


def _heaviest(loads: NDArray[np.float64], partition: Partition) -> float:
    """Return what the heaviest stage of a partition weighs."""
    stops = np.cumsum(partition)
    return max(float(row[stop - size : stop].sum()) for row, size, stop in zip(loads, partition, stops, strict=True))
