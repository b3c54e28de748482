"""What searches ask for, counted where they ask."""

from __future__ import annotations

from typing import Literal

from searchers.alpa.intra_op import IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, all_logical_meshes
from searchers.alpa.oracle import CostModelOracle, SearchCost
from searchers.mpe.estimator import Reuse, StageEstimator
from simulator.costs import cost_tables
from simulator.problem import Problem, ProblemSpec

Asker = Literal["alpa", "alpa, full mesh for the whole model only", "mpe", "mpe, unique layers", "naive"]


def problem_named(model: str, cluster: str, global_batch: int = 64, runtime: str = "alpa") -> Problem:
    """Return a problem from names."""
    return ProblemSpec(model=model, cluster=cluster, runtime=runtime, global_batch=global_batch).load()


def search_cost(problem: Problem, compile_s_per_layer: float = 1.0) -> SearchCost:
    """Return empty books for a search on the problem's cluster."""
    return SearchCost(
        compile_s_per_layer, num_hosts=problem.hardware.cluster.num_nodes, num_devices=problem.num_devices
    )


def oracle_of(problem: Problem, microbatch: int) -> CostModelOracle:
    """Return the cost model as oracle, one layer per block, embedding and head layers of their own."""
    return CostModelOracle(
        cost_tables(problem),
        problem.workload.layers,
        microbatch,
        problem.global_batch // microbatch,
        IntraOpOptions(),
        search_cost(problem),
    )


def ask(asker: Asker, oracle: CostModelOracle) -> SearchCost:
    """Ask the oracle what a searcher would, on every mesh, and return what that cost."""
    cluster = oracle.costs.problem.hardware.cluster
    count = len(oracle.spans)
    for mesh in all_logical_meshes(cluster):
        if asker.startswith("alpa"):
            whole_only = asker != "alpa" and mesh.num_devices == cluster.num_devices
            for first, last in _stages(count):
                if not whole_only or (first, last) == (0, count - 1):
                    oracle.measure(mesh, first, last)
        else:
            _estimate(asker, oracle, mesh, count)
    return oracle.cost


def _stages(count: int) -> list[tuple[int, int]]:
    return [(first, last) for first in range(count) for last in range(first, count)]


def _estimate(asker: Asker, oracle: CostModelOracle, mesh: LogicalMesh, count: int) -> None:
    reuse: Reuse = "unique" if asker == "mpe, unique layers" else "none"
    StageEstimator(oracle, oracle.costs, reuse, edges=asker != "naive").lookup(mesh, 0, count - 1)
