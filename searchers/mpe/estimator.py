"""Stage costs composed from single layers and neighbouring pairs (Yun and Park, IEEE CAL 2023, Eq. 1-2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from searchers.alpa.meshes import LogicalMesh
from searchers.alpa.oracle import NOT_LEGAL, Oracle, StageCost
from simulator.costs import CostTables
from workloads.operators import Workload

Reuse = Literal["none", "unique"]


def layer_words(workload: Workload, spans: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """Return one word per layer; equal layers (same operators, shapes, attributes, in order) have the same.

    >>> from workloads.registry import build_workload
    >>> gpt = build_workload("gpt3-350m")
    >>> len(set(layer_words(gpt, gpt.layers)))
    3
    """
    return tuple(
        " ".join(str(signature) for signature in workload.signatures[start:stop]) for start, stop in spans
    )


@dataclass
class StageEstimator:
    """The stage MPE of every mesh, measured when first asked for.

    ``P(i) = R(i, i)`` and ``P(i -> i+1) = R(i, i+1) - R(i, i) - R(i+1, i+1)``; a stage is the sum over its nodes and
    edges, in seconds and in each part of its memory. With ``edges=False`` it is the naive estimator.

    Attributes:
        oracle: What is measured.
        costs: Cost tables, for the layers' words.
        reuse: ``unique`` measures one layer, and one pair, of each kind; ``none`` all of them, as the counts in the
            paper do.
        edges: Whether pairs are measured.
    """

    oracle: Oracle
    costs: CostTables
    reuse: Reuse = "unique"
    edges: bool = True

    def __post_init__(self) -> None:
        words = layer_words(self.costs.problem.workload, self.oracle.spans)
        count = len(words)
        self._node = [words.index(word) if self.reuse == "unique" else i for i, word in enumerate(words)]
        pairs = [(words[i], words[i + 1]) for i in range(count - 1)]
        self._edge = [pairs.index(pair) if self.reuse == "unique" else i for i, pair in enumerate(pairs)]
        self._sums: dict[LogicalMesh, tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], bool]] = {}

    def lookup(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        """Return the estimate for layers ``first`` to ``last``."""
        if mesh not in self._sums:
            self._sums[mesh] = self._measure(mesh)
        sums, legal = self._sums[mesh]
        if not legal:
            return NOT_LEGAL
        # sums[0] holds nodes, sums[1] edges: prefix sums of the parts of a `StageCost`.
        parts = sums.shape[1] // 2
        nodes = sums[last + 1, :parts] - sums[first, :parts]
        edges = sums[last, parts:] - sums[first, parts:]
        # Where operators of a layer reach beyond its neighbours the sum may end below nothing.
        return StageCost(*(max(0.0, float(value)) for value in nodes + edges))

    def _measure(
        self, mesh: LogicalMesh
    ) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float64]], bool]:
        count = len(self.oracle.spans)
        nodes = np.array([self.oracle.measure(mesh, i, i) for i in self._node])
        parts = len(StageCost._fields)
        edges = np.zeros((count, parts))
        legal = bool(np.isfinite(nodes).all())
        if self.edges:
            for i, example in enumerate(self._edge):
                pair = np.array(self.oracle.measure(mesh, example, example + 1))
                edges[i] = pair - nodes[example] - nodes[example + 1] if legal else np.inf
            legal = legal and bool(np.isfinite(edges).all())
        table = np.zeros((count + 1, 2 * parts))
        if legal:
            table[1:, :parts] = np.cumsum(nodes, axis=0)
            table[1:, parts:] = np.cumsum(edges, axis=0)
        return table, legal


def stage_measurements(num_layers: int, num_meshes: int, *, edges: bool = True) -> int:
    """Return the compilations of an estimator without reuse: one per node and edge and mesh.

    >>> stage_measurements(50, 14)
    1386
    """
    return (2 * num_layers - 1 if edges else num_layers) * num_meshes


def all_stage_measurements(num_layers: int, num_meshes: int) -> int:
    """Return the compilations of Alpa: one per stage and mesh.

    >>> all_stage_measurements(50, 14)
    17850
    """
    return num_layers * (num_layers + 1) // 2 * num_meshes
