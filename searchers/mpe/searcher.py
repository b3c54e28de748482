"""MPE: Alpa's search with stage costs that are estimated instead of measured.

Source: Yun and Park, "Fast Performance Prediction for Efficient Distributed DNN Training", IEEE CAL 2023.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.inter_op import Pipeline
from searchers.alpa.meshes import LogicalMesh
from searchers.alpa.oracle import Oracle
from searchers.alpa.searcher import Alpa
from searchers.alpa.stage_table import Lookup
from searchers.base import check_one_of
from searchers.mpe.estimator import Reuse, StageEstimator
from searchers.mpe.holistic import shortest_path
from simulator.costs import cost_tables
from simulator.problem import Problem

PathObjective = Literal["1f1b", "sum"]


class Mpe(Alpa):
    """Alpa's two levels on estimates from single layers and pairs of layers.

    Args:
        path: ``1f1b`` minimises the pipeline's time under its memory (Alpa's objective), ``sum`` the printed sum of
            latencies (Eq. 3), with the memory of one microbatch and at most all devices.
        reuse: See `StageEstimator`.
        options: See `Alpa`.
    """

    name = "mpe"
    paper = "Yun and Park, IEEE CAL 2023"
    edges = True

    def __init__(self, *, path: PathObjective = "1f1b", reuse: Reuse = "unique", **options: Any) -> None:
        super().__init__(**options)
        check_one_of(get_args(PathObjective), path=path)
        check_one_of(get_args(Reuse), reuse=reuse)
        self.path = path
        self.reuse: Reuse = reuse

    def lookup(self, oracle: Oracle, problem: Problem) -> Lookup:
        """Return estimates."""
        return StageEstimator(oracle, cost_tables(problem), self.reuse, self.edges).lookup

    def pipeline(
        self,
        seconds: NDArray[np.float64],
        successors: NDArray[np.int64],
        meshes: list[list[LogicalMesh]],
        num_devices: int,
        num_microbatches: int,
    ) -> Pipeline | None:
        """Return the best stages by the chosen objective."""
        if self.path == "1f1b":
            return super().pipeline(seconds, successors, meshes, num_devices, num_microbatches)
        sizes = np.array([group[0].num_devices for group in meshes])
        return shortest_path(seconds, successors >= 0, sizes, num_devices)


class NaiveEstimator(Mpe):
    """MPE without edges: a stage is the sum of its layers alone."""

    name = "mpe-naive"
    edges = False
