"""Seconds of collectives and transfers that Aceso's tables hold, on the nodes of a cluster where they take longest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hardware_models.crowding import CrowdedGroup, together_s
from simulator.problem import Problem

MIB = float(2**20)
KNOTS_BYTES = tuple(float(2**power) for power in range(10, 33))


def latency_and_slope(problem: Problem, kind: str, members: Sequence[int]) -> tuple[float, float]:
    """Return latency and seconds per byte of a collective between 16 and 256 MiB."""
    low, high = (slowest_s(problem, kind, size * MIB, tuple(members)) for size in (16, 256))
    slope = (high - low) / (240 * MIB)
    return max(0.0, low - slope * 16 * MIB), slope


def per_node_of(problem: Problem) -> int:
    """Return the GPUs of a node that a problem uses."""
    return min(problem.hardware.cluster.devices_per_node, problem.num_devices)


def slowest_s(problem: Problem, kind: str, num_bytes: float, members: tuple[int, ...]) -> float:
    """Return seconds of a collective among GPUs that stand so behind a node's first, on the nodes where it is longest.

    Over several nodes all groups of its stride run at once.
    """
    cluster, hardware = problem.hardware.cluster, problem.hardware
    stride = members[1] - members[0]
    seconds = []
    for start in cluster.unlike_starts(max(members) + stride):
        own, *beside = (tuple(start + gpu + other for gpu in members) for other in range(stride))
        if cluster.node_of(own[0]) == cluster.node_of(own[-1]):
            seconds.append(hardware.collective(kind, num_bytes, own).alone_s)
        else:
            seconds.append(hardware.crowded_collective_s(kind, num_bytes, CrowdedGroup(own, tuple(beside))))
    return float(max(seconds))


def transfer_seconds(problem: Problem, degrees: Sequence[int]) -> NDArray[np.float64]:
    """Return seconds of as many messages at once as a stage has GPUs: float64[2, num_degrees, num_knots].

    Inside a node, and over the border of two; on the nodes where they take longest.
    """
    hardware, last = problem.hardware, problem.num_devices - 1
    cluster, per_node = hardware.cluster, per_node_of(problem)
    met = reversed(list(zip(pairwise(cluster.kind_of_node), cluster.nodes[1:], strict=True)))
    borders = [node.first_device for node in dict(met).values()]
    found = np.zeros((2, len(degrees), len(KNOTS_BYTES)))
    for place, count in enumerate(degrees):
        near = max(1, min(count, per_node // 2))  # stages of one node
        inside = [
            [(gpu, min(gpu + near, last)) for gpu in range(start, start + near)]
            for start in cluster.unlike_starts(min(2 * near, last + 1))
        ]
        across = [
            [(gpu, min(gpu + count, last)) for gpu in range(border - count, border)]
            for border in [each for each in borders if count <= each <= last + 1 - count] or [per_node]
        ]
        for between, choices in enumerate((inside, across)):
            for knot, size in enumerate(KNOTS_BYTES):
                found[between, place, knot] = max(
                    together_s(hardware.transfer(size, *route) for route in routes) for routes in choices
                )
    return found
