"""The model as DAPPLE's planner sees it: layers in a row, with costs per sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from searchers.layers import LayerTables, blocks
from simulator.costs import CostTables
from simulator.problem import Problem

Floats = NDArray[np.float64]
GRANULARITIES = ("layers", "blocks", "operators")


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers in a row. Prefix sums have one element more than there are layers; all float64[n + 1].

    Attributes:
        spans: Operator range of each layer.
        forward_s, backward_s: Prefix sums of seconds per sample.
        parameters: Prefix sums of parameter elements.
        saved_bytes: Prefix sums of bytes kept from forward to backward, per sample.
        boundary_bytes: Bytes per sample that cross a cut before layer j (0 at both ends).
        ties: Shared weights: the layer of each operator that has one, ascending, and its elements.
    """

    spans: tuple[tuple[int, int], ...]
    forward_s: Floats
    backward_s: Floats
    parameters: Floats
    saved_bytes: Floats
    boundary_bytes: Floats
    ties: tuple[tuple[tuple[int, ...], float], ...] = ()

    def tied_parameters(self, first: int, last: int) -> float:
        """Return elements that layers ``[first, last)`` count again, as an earlier one of them has the weight."""
        return sum(
            size * max(0, sum(first <= layer < last for layer in layers) - 1) for layers, size in self.ties
        )

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.spans)

    def operators(self, first: int, last: int) -> tuple[int, int]:
        """Return the operator range of layers ``[first, last)``."""
        return self.spans[first][0], self.spans[last - 1][1]


def layer_spans(problem: Problem, granularity: str) -> tuple[tuple[int, int], ...]:
    """Return what counts as a layer.

    Args:
        problem: Gives the workload.
        granularity: ``layers`` (the workload's), ``blocks`` (repeated layers, the rest joined to them) or
            ``operators``.

    Raises:
        ValueError: If the granularity is unknown.
    """
    workload = problem.workload
    if granularity == "layers":
        return workload.layers
    if granularity == "blocks":
        return blocks(workload)
    if granularity == "operators":
        return tuple((index, index + 1) for index in range(len(workload)))
    raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")


def build_chain(costs: CostTables, spans: Sequence[tuple[int, int]], samples: int) -> Chain:
    """Return the chain, from costs of ``samples`` samples on one device, taken as linear in the samples.

    Raises:
        ValueError: If the cluster has several types of GPU: DAPPLE plans for equal ones.
    """
    types = set(costs.problem.gpu_types)
    if len(types) > 1:
        raise ValueError(f"DAPPLE plans for equal GPUs, got {', '.join(sorted(types))}; use one type")
    found = LayerTables(costs, tuple(spans)).layers((), samples, costs.problem.gpu_types[0])

    def prefix(values: Floats) -> Floats:
        return np.concatenate([[0.0], np.cumsum(values)])

    boundary = np.concatenate([[0.0], found.boundary_bytes / samples])
    boundary[-1] = 0.0
    return Chain(
        spans=tuple(spans),
        forward_s=prefix(found.forward_s / samples),
        backward_s=prefix(found.backward_s / samples),
        parameters=prefix(found.parameter_elements),
        saved_bytes=prefix(found.saved_bytes / samples),
        boundary_bytes=boundary,
        ties=_shared(costs.problem, spans),
    )


def _shared(problem: Problem, spans: Sequence[tuple[int, int]]) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Return the weights that operators share, unless the runtime reduces them for each."""
    if problem.runtime.reduces_ties_by_use:
        return ()
    layers: dict[str, list[int]] = {}
    sizes: dict[str, float] = {}
    for layer, (start, stop) in enumerate(spans):
        for index in range(start, stop):
            for parameter in problem.workload.parameters(index):
                if parameter.tie is not None:
                    layers.setdefault(parameter.tie, []).append(layer)
                    sizes[parameter.tie] = float(np.prod(parameter.shape))
    return tuple((tuple(own), sizes[tie]) for tie, own in layers.items() if len(own) > 1)


def cuts_of(chain: Chain, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the layers at which operator ranges of consecutive stages begin and end.

    Raises:
        ValueError: If the ranges are not consecutive or cut a layer.
    """
    begins = {start: index for index, (start, _) in enumerate(chain.spans)}
    if any(a[1] != b[0] for a, b in pairwise(ranges)) or any(start not in begins for start, _ in ranges):
        raise ValueError(f"stages must be consecutive ranges of whole layers, got {list(ranges)[:8]}")
    return (*(begins[start] for start, _ in ranges), chain.num_layers)
