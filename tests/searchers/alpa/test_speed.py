"""Alpa's parts are as quick as they are said to be, in yardsticks (about a tenth of a second each)."""

from __future__ import annotations

import numpy as np
import pytest

from searchers.alpa.elimination import solve
from searchers.alpa.inter_op import best_pipeline
from searchers.alpa.intra_op import IntraOp, IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, Submesh
from searchers.alpa.stage_costs import StageSolver
from simulator.costs import cost_tables
from simulator.problem import ProblemSpec
from tests.benchmarks.measuring import yardsticks

pytestmark = pytest.mark.measured

BLOCKS = 48


def intra_op() -> IntraOp:
    """Return the problem of GPT-2 1.5B (48 blocks) on two rows of four, operators priced."""
    problem = ProblemSpec(model="gpt2-1.5b", cluster="v100-32g-dgx1:1x8", runtime="alpa", global_batch=64).load()
    mesh = LogicalMesh(Submesh(1, 8), 2, 4, batch_forced=True)
    return IntraOp(cost_tables(problem), mesh, 8, 8, IntraOpOptions())


def test_48_blocks_are_solved_in_a_fraction_of_a_second() -> None:
    problem = intra_op()
    spans = problem.costs.problem.workload.layers[1 : BLOCKS + 1]
    graph = problem.graph(spans[0][0], spans[-1][1])
    assert yardsticks(lambda: solve(graph)) < 1.5  # 0.5 when written


def test_all_stages_of_48_layers_on_a_mesh_take_a_fraction_of_a_second() -> None:
    problem = intra_op()
    spans = problem.costs.problem.workload.layers[1 : BLOCKS + 1]
    found = StageSolver(problem, spans).all_stages()
    assert np.isfinite(found.seconds).sum() == BLOCKS * (BLOCKS + 1) // 2 == 1_176
    assert yardsticks(lambda: StageSolver(problem, spans).all_stages(), repeats=5) < 1.5  # 1.0 when written


@pytest.mark.parametrize(("layers", "devices", "limit"), [(50, 8, 1.5), (50, 64, 20)])
def test_stages_of_50_layers_are_chosen_in_a_second(layers: int, devices: int, limit: float) -> None:
    """On a table in which splitting is worth while and layers differ, so that many trade-offs are visited.

    0.25 and 4 yardsticks when written.
    """
    random = np.random.default_rng(0)
    sizes = np.array([1 << power for power in range(devices.bit_length())])
    work = random.uniform(0.5, 1.5, layers)
    ends = np.concatenate([[0.0], np.cumsum(work)])
    whole = ends[np.newaxis, 1:] - ends[:-1, np.newaxis]
    speed = sizes**0.9
    configs = random.uniform(0.9, 1.1, (layers, layers, len(sizes), 5))
    seconds = np.where(whole > 0, whole, np.inf)[:, :, np.newaxis, np.newaxis] / speed[:, np.newaxis] * configs
    successors = np.full(seconds.shape, 1 << 20, dtype=np.int64)
    best_pipeline(seconds[:4, :4], successors[:4, :4], sizes, devices, 2)  # compiled before the clock starts
    found = best_pipeline(seconds, successors, sizes, devices, 64)
    assert found is not None and found.solved > 10
    assert yardsticks(lambda: best_pipeline(seconds, successors, sizes, devices, 64)) < limit
