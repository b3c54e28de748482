"""Operators into layers: balanced in FLOPs, with as little as possible crossing between them.

Source: Alpa (OSDI 2022), section 5.2 and appendix; constants of its public code.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled
from workloads.kernels import MemoryBound
from workloads.kinds.base import DTYPE_BYTES, FORWARD, Implementation
from workloads.local import localize
from workloads.operators import Workload

FLOP_TOLERANCE = 0.5
"""A layer may have so much more than its share of FLOPs (alpa.AutoLayerOption's eps, 0.5 to 0.6)."""
MIN_HEAVY = 3
"""Matmuls that a layer must have at least."""


def cluster(
    workload: Workload, num_layers: int, *, tolerance: float = FLOP_TOLERANCE, min_heavy: int = MIN_HEAVY
) -> tuple[tuple[int, int], ...]:
    """Return operator ranges of ``num_layers`` layers.

    Minimises the largest number of bytes that a layer receives from earlier ones; of equals, the least sum; of
    those, the least variance of lengths. A layer has at most ``1 + tolerance`` times its share of FLOPs and at
    least ``min_heavy`` matmuls; where no clustering satisfies that, the tolerance doubles until one does.

    Raises:
        ValueError: If there are fewer matmuls than ``num_layers * min_heavy``.
    """
    flop, is_heavy = _work(workload)
    if num_layers < 1 or is_heavy.sum() < num_layers * min_heavy:
        raise ValueError(
            f"num_layers must be 1 to {int(is_heavy.sum()) // min_heavy} for {workload.name} "
            f"(each layer has at least {min_heavy} of {int(is_heavy.sum())} matmuls), got {num_layers}"
        )
    tensor, reads, tensor_bytes, producer = _reads(workload)
    while True:
        cuts = _cluster(
            flop, is_heavy, tensor, reads, tensor_bytes, producer, num_layers, tolerance, min_heavy
        )
        if len(cuts):
            return tuple((int(a), int(b)) for a, b in pairwise([0, *cuts]))
        tolerance = 2 * tolerance + 0.1


def num_heavy(workload: Workload) -> int:
    """Return how many operators are matmuls, as `cluster` counts them."""
    return int(_work(workload)[1].sum())


def _work(workload: Workload) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    found: dict[int, tuple[float, bool]] = {}
    for index, signature in enumerate(workload.signatures):
        if signature in found:
            continue
        op = workload.operators[index]
        local = localize(
            op.definition, op.attributes, workload.input_shapes(index, 1), [], Implementation(), operator=op.name
        )
        kernels = [kernel for kernel in op.definition.kernels(FORWARD, local) if not isinstance(kernel, MemoryBound)]
        found[signature] = sum(kernel.flop for kernel in kernels), bool(kernels)
    rows = [found[signature] for signature in workload.signatures]
    return np.array([flop for flop, _ in rows]), np.array([heavy for _, heavy in rows])


def _reads(
    workload: Workload,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Return, flat over operators: start of each one's reads, tensors read; and per tensor bytes and producer."""
    names = {name: number for number, name in enumerate(workload.producer)}
    start, reads = [0], []
    for op in workload.operators:
        reads += [names[name] for name in dict.fromkeys(op.inputs) if name in names]
        start.append(len(reads))
    size = DTYPE_BYTES["fp16"]
    tensor_bytes = np.array([float(prod(workload.tensors[name])) * size for name in names])
    producer = np.array([workload.producer[name] for name in names])
    return np.array(start), np.array(reads, dtype=np.int64), tensor_bytes, producer


@compiled
def _cluster(
    flop: NDArray[np.float64],
    is_heavy: NDArray[np.bool_],
    start: NDArray[np.int64],
    reads: NDArray[np.int64],
    tensor_bytes: NDArray[np.float64],
    producer: NDArray[np.int64],
    num_layers: int,
    tolerance: float,
    min_heavy: int,
) -> NDArray[np.int64]:
    """Return the ends of the layers, empty if no clustering is allowed."""
    count = len(flop)
    limit = (1.0 + tolerance) * flop.sum() / num_layers
    ideal = count / num_layers
    worst = np.full((num_layers + 1, count + 1), np.inf)
    total = np.full((num_layers + 1, count + 1), np.inf)
    spread = np.full((num_layers + 1, count + 1), np.inf)
    previous = np.full((num_layers + 1, count + 1), -1, dtype=np.int64)
    worst[0, 0] = total[0, 0] = spread[0, 0] = 0.0
    stamp = np.full(len(tensor_bytes), -1, dtype=np.int64)
    for begin in range(count):
        # Everything that ends at ``begin`` is final: ends only grow.
        received = 0.0
        work = 0.0
        heavy = 0
        for stop in range(begin + 1, count + 1):
            op = stop - 1
            work += flop[op]
            if work > limit and stop > begin + 1:
                break
            heavy += is_heavy[op]
            for slot in range(start[op], start[op + 1]):
                tensor = reads[slot]
                if producer[tensor] < begin and stamp[tensor] != begin:
                    stamp[tensor] = begin
                    received += tensor_bytes[tensor]
            if heavy < min_heavy:
                continue
            deviation = (stop - begin - ideal) ** 2
            for q in range(num_layers):
                if worst[q, begin] == np.inf:
                    continue
                largest = max(worst[q, begin], received)
                whole = total[q, begin] + received
                uneven = spread[q, begin] + deviation
                old = worst[q + 1, stop]
                better = largest < old * (1.0 - 1e-4)
                if not better and largest <= old * (1.0 + 1e-4):
                    before = total[q + 1, stop]
                    better = whole < before * (1.0 - 1e-4) or (
                        whole <= before * (1.0 + 1e-4) and uneven < spread[q + 1, stop]
                    )
                if better:
                    worst[q + 1, stop] = largest
                    total[q + 1, stop] = whole
                    spread[q + 1, stop] = uneven
                    previous[q + 1, stop] = begin
    if worst[num_layers, count] == np.inf:
        return np.zeros(0, dtype=np.int64)
    ends = np.zeros(num_layers, dtype=np.int64)
    stop = count
    for q in range(num_layers, 0, -1):
        ends[q - 1] = stop
        stop = previous[q, stop]
    return ends
