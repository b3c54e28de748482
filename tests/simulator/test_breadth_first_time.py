"""The time of GPipe where stages share devices, against the engine, which runs the schedule's own order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from simulator.closed_forms.breadth_first_time import breadth_first_s
from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.stage_rows import NUM_COLUMNS
from simulator.engines.engine_compiled import run_compiled
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.schedules.actions import FORWARD, PipelineShape
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.graphs import makespan_s, pipeline_graph
from tests.simulator.problems import small_problem

ALONE = Fidelity().without("overlap-slowdown", "host")


def rows(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rows for ``breadth_first_s``: two passes of each stage, and no transfers."""
    return np.hstack([times, np.zeros((len(times), NUM_COLUMNS - 2))])


def on_two_devices(problem: Problem, ranks: tuple[int, ...], size: int, count: int, last: int | None) -> Plan:
    """Return a plan of GPipe with four stages on two devices."""
    plan = uniform_plan(problem, schedule="interleaved", pp=2, chunks=2)
    stages = (replace(stage, devices=(rank,)) for stage, rank in zip(plan.stages, ranks, strict=True))
    return Plan(tuple(stages), size, count, schedule="gpipe", last_microbatch_size=last)


@pytest.mark.parametrize("seed", range(40))
def test_any_stages_on_any_ranks_take_what_the_engine_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, m = int(random.integers(1, 9)), int(random.integers(1, 9))
    drawn = random.integers(0, int(random.integers(1, count + 1)), count)
    ranks = np.array([list(dict.fromkeys(drawn)).index(rank) for rank in drawn])
    times = random.uniform(0.2, 2.0, (count, 2))
    last = times * random.uniform(0.2, 1.0)
    shape = PipelineShape(count, m, tuple(ranks.tolist()))
    pipeline = pipeline_graph(shape, schedule_named("gpipe").actions(shape))
    work_s = pipeline.graph.work_s.copy()
    for (kind, stage, microbatch), task in pipeline.task_of.items():
        work_s[task] = (last if microbatch == m - 1 else times)[stage, 0 if kind == FORWARD else 1]
    expected_s = makespan_s(run_compiled(replace(pipeline.graph, work_s=work_s)))
    assert breadth_first_s(rows(times), rows(last), ranks, m) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("ranks", [(0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize(
    ("cluster", "runtime"),
    [
        ("v100-32g-dgx1:1x2", "megatron-lm-2021"),
        ("v100-1gpu-10g:2x1", "megatron-lm-2021"),  # what was sent is waited for
        ("v100-1gpu-10g:2x1", "windtunnel-executor-fp32"),
    ],
)
def test_plans_take_what_the_simulator_says(cluster: str, runtime: str, ranks: tuple[int, ...]) -> None:
    problem = small_problem("gpt", cluster=cluster, runtime=runtime, global_batch=16)
    for size, count, last in ((1, 16, None), (16, 1, None), (6, 3, 4)):
        plan = on_two_devices(problem, ranks, size, count, last)
        expected_s = simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)
        time_s = estimate(plan, problem).iteration_time_s
        assert time_s == pytest.approx(expected_s, rel=0.03)
        if last is None:
            assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(time_s, rel=1e-11)


@pytest.mark.parametrize(("pp", "chunks", "dp"), [(2, 2, 2), (1, 2, 4), (1, 4, 2)])
def test_replicas_that_take_turns_have_all_stages_of_their_rank(pp: int, chunks: int, dp: int) -> None:
    problem = small_problem("gpt", cluster=f"v100-32g-dgx1:1x{pp * dp}", global_batch=32)
    plan = uniform_plan(problem, schedule="interleaved", pp=pp, dp=dp, chunks=chunks)
    turns = dict(replica_assignment="round_robin", microbatch_size=1, num_microbatches=32)
    plan = replace(plan, schedule="gpipe", **turns)  # type: ignore[arg-type]
    expected_s = simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)
    assert estimate(plan, problem).iteration_time_s == pytest.approx(expected_s, rel=0.01)
