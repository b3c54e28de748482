"""The closed form of zb-h1 against the engine, which runs the schedule's own order, and against cases drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.stage_rows import FORWARD_LAG, INPUT_LAG, NUM_COLUMNS
from simulator.closed_forms.zero_bubble_time import zero_bubble_s
from simulator.engines.engine_compiled import run_compiled
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.schedules.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.graphs import makespan_s, pipeline_graph, plain_shape
from tests.simulator.problems import small_problem

ALONE = Fidelity().without("overlap-slowdown", "contention", "host")
COLUMN = {FORWARD: 0, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 2}


def stages(times: NDArray[np.float64], link_s: float = 0.0) -> NDArray[np.float64]:
    """Return rows for the closed form: three passes of each stage, and transfers between neighbours."""
    rows = np.zeros((len(times), NUM_COLUMNS))
    rows[:, :3] = times
    rows[:-1, 3] = rows[1:, 4] = link_s
    return rows


def engine_s(times: NDArray[np.float64], last: NDArray[np.float64], m: int, link_s: float = 0.0) -> float:
    """Return what the engine says of the schedule's order."""
    shape = plain_shape(len(times), m)
    pipeline = pipeline_graph(shape, schedule_named("zb-h1").actions(shape), link_s=link_s)
    work_s = pipeline.graph.work_s.copy()
    for (kind, stage, microbatch), task in pipeline.task_of.items():
        work_s[task] = (last if microbatch == m - 1 else times)[stage, COLUMN[kind]]
    return makespan_s(run_compiled(replace(pipeline.graph, work_s=work_s)))


def simulated_s(plan: Plan, problem: Problem) -> float:
    return simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 17, 32])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("parts", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 2, 2), (1, 1, 2), (2, 1.5, 1.25), (1, 3, 2)])
def test_equal_stages_take_what_the_engine_says(p: int, m: int, parts: tuple[float, float, float]) -> None:
    times = np.array([parts] * p)
    found_s = zero_bubble_s(stages(times), stages(times), m)
    assert found_s == engine_s(times, times, m)
    if m >= p:
        f, i, w = parts
        assert found_s == m * (f + i + w) + (p - 1) * max(f + i - w, f, i)


def test_transfers_that_take_longer_than_weight_gradients_are_waited_for() -> None:
    """Two stages, three microbatches, every pass one second, every transfer two (digits: microbatch)::

    stage 0  F0 F1 .  .  .  .  .  I0 W0 F2 I1 W1 .  .  .  .  I2 W2
    stage 1  .  .  .  F0 I0 F1 I1 W0 .  .  .  .  F2 I2 W1 W2 .  .
    """
    times = np.ones((2, 3))
    rows = stages(times, 2.0)
    assert zero_bubble_s(rows, rows, 3) == engine_s(times, times, 3, 2.0) == 18.0


def test_a_slow_stage_hides_what_is_behind_it() -> None:
    """The first of three stages takes five seconds a pass, the others one: nothing waits but those others."""
    times = np.array([[5.0] * 3, [1.0] * 3, [1.0] * 3])
    rows = stages(times)
    assert zero_bubble_s(rows, rows, 6) == engine_s(times, times, 6) == 6 * 15.0


@pytest.mark.parametrize("seed", range(150))
def test_any_stages_transfers_and_last_microbatches_take_what_the_engine_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    p = int(random.integers(1, 9))
    m = int(random.integers(1, 4 * p + 1))
    base = random.choice([0.5, 1.0, 1.5, 2.0], 3)
    times = base * (1 + random.choice([0.1, 0.6]) * random.uniform(-1, 1, (p, 3)))
    last = times * random.uniform(0.1, 1)
    link_s = float(random.choice([0.0, 0.3, 1.0, 4.0]))
    found_s = zero_bubble_s(stages(times, link_s), stages(last, link_s), m)
    assert found_s == pytest.approx(engine_s(times, last, m, link_s), rel=1e-12)


def test_a_pass_that_begins_late_is_a_transfer_that_takes_so_long_where_links_are_free() -> None:
    times = np.ones((4, 3))
    rows = stages(times)
    rows[1:, FORWARD_LAG] = rows[:-1, INPUT_LAG] = 0.4
    assert zero_bubble_s(rows, rows, 9) == pytest.approx(engine_s(times, times, 9, 0.4), rel=1e-12)


@pytest.mark.parametrize(
    ("cluster", "runtime"),
    [
        ("a100-80g-dgx:1x4", "megatron-lm-2021"),
        ("a100-80g-dgx:1x4", "pytorch-fsdp2"),
        ("v100-1gpu-10g:4x1", "megatron-lm-2021"),  # what was sent is waited for
        ("v100-1gpu-10g:4x1", "windtunnel-executor-fp32"),
    ],
)
@pytest.mark.parametrize("shape", [dict(pp=2), dict(pp=4), dict(pp=4, recompute="full")], ids=str)
def test_plans_take_what_the_simulator_says(cluster: str, runtime: str, shape: dict[str, object]) -> None:
    problem = small_problem("gpt", cluster=cluster, runtime=runtime, global_batch=8)
    plan = uniform_plan(problem, schedule="zb-h1", **shape)  # type: ignore[arg-type]
    expected_s, time_s = simulated_s(plan, problem), estimate(plan, problem).iteration_time_s
    assert time_s == pytest.approx(expected_s, rel=0.04)
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(time_s, rel=1e-11)


@pytest.mark.parametrize("runtime", ["megatron-lm-2021", "windtunnel-executor-fp32"])
def test_plans_with_a_smaller_last_microbatch_take_what_the_simulator_says(runtime: str) -> None:
    problem = small_problem("gpt", cluster="v100-1gpu-10g:4x1", runtime=runtime, global_batch=29)
    plan = uniform_plan(problem, pp=4, microbatch=4, schedule="zb-h1", smaller_last=True)
    assert plan.last_microbatch_size == 1
    assert estimate(plan, problem).iteration_time_s == pytest.approx(simulated_s(plan, problem), rel=0.04)


def test_an_operator_that_its_neighbours_strategy_does_not_suit_has_weight_gradients_too() -> None:
    """A fast table of one strategy has no row for it, but its weight gradients depend on itself alone."""
    problem = small_problem("vit", cluster="v100-32g-dgx1:2x4", global_batch=24)
    tensor, sequence = (Axis("tensor", 2),), (Axis("tensor_sequence", 2),)
    stages = (
        Stage(((0, 33),), (4, 5), ((33, tensor),)),
        Stage(((33, 51),), (6, 7), ((1, sequence), (17, tensor))),
    )
    plan = Plan(stages, 4, 6, schedule="zb-h1")
    expected_s = estimate(plan, problem).iteration_time_s
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(expected_s, rel=1e-11)
