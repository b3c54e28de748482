"""The first microbatch's gradients are handed over, later ones are added (batches: ``test_batch``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from simulator.closed_forms.breadth_first_time import breadth_first_s
from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.interleaved_time import interleaved_s
from simulator.closed_forms.pipeline_time import SCRATCH, one_f_one_b_s
from simulator.closed_forms.stage_rows import INPUT, LESS, NUM_COLUMNS
from simulator.closed_forms.zero_bubble_time import zero_bubble_s
from simulator.engines.engine_compiled import run_compiled
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.problem import Problem
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PipelineShape
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.graphs import interleaved_shape, makespan_s, pipeline_graph, plain_shape
from tests.simulator.problems import small_problem

ALONE = Fidelity().without("overlap-slowdown", "host")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")


def closed_s(rows: NDArray[np.float64], shape: PipelineShape, schedule: str) -> float:
    m = shape.num_microbatches
    if schedule == "zb-h1":
        return zero_bubble_s(rows, rows, m)
    if schedule == "interleaved":
        return interleaved_s(rows, rows, max(shape.rank_of_stage) + 1, m, False)
    depths = [m if schedule == "gpipe" else min(len(rows) - stage, m) for stage in range(len(rows))]
    return one_f_one_b_s(rows, rows, np.array(depths), m, np.empty((len(rows), SCRATCH)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(30))
def test_pipelines_take_what_the_engine_says(seed: int, schedule: str) -> None:
    random = np.random.default_rng(seed)
    p = int(random.integers(1, 6)) + (schedule == "interleaved")
    chunks = int(random.integers(1, 4)) if schedule == "interleaved" else 1
    m = p * int(random.integers(1, 4)) if schedule == "interleaved" else int(random.integers(2, 12))
    rows = np.zeros((p * chunks, NUM_COLUMNS))
    rows[:, : 3 if schedule == "zb-h1" else 2] = random.uniform(0.5, 2.0, (p * chunks, 3 if schedule == "zb-h1" else 2))
    rows[:, LESS] = random.uniform(0.0, 0.5, p * chunks)
    shape = interleaved_shape(p, chunks, m) if schedule == "interleaved" else plain_shape(p, m)
    pipeline = pipeline_graph(shape, schedule_named(schedule).actions(shape))
    work_s = pipeline.graph.work_s.copy()
    column = {FORWARD: 0, BACKWARD: INPUT, BACKWARD_INPUT: INPUT, BACKWARD_WEIGHT: 2}
    for (kind, stage, microbatch), task in pipeline.task_of.items():
        makes_gradients = kind in (BACKWARD, BACKWARD_WEIGHT)
        work_s[task] = rows[stage, column[kind]] - (rows[stage, LESS] if makes_gradients and microbatch == 0 else 0.0)
    expected_s = makespan_s(run_compiled(replace(pipeline.graph, work_s=work_s)))
    found_s = closed_s(rows, shape, schedule)
    if schedule == "1f1b":  # A chain that leaves a stage with the second microbatch is not followed.
        assert expected_s - rows[:, LESS].sum() <= found_s <= expected_s * (1 + 1e-12)
    else:
        assert found_s == pytest.approx(expected_s, rel=1e-12)


def test_gpipe_on_shared_devices_takes_what_the_engine_says() -> None:
    rows = np.zeros((4, NUM_COLUMNS))
    rows[:, :2], rows[:, LESS] = (1.0, 2.0), 0.5
    ranks = np.array([0, 1, 0, 1])
    # As drawn in ``breadth_first_time``: of the last stage's first gradients on, all passes but theirs are waited for.
    assert breadth_first_s(rows, rows, ranks, 2) == 15.0 - 0.5


def handing(problem: Problem, *, over: bool) -> Problem:
    """Return a problem whose gradients are handed over in the first microbatch, or are added there too."""
    return replace(problem, runtime=replace(problem.runtime, hands_over_gradients=over))


@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_one_device_lacks_the_additions_of_one_microbatch(num_microbatches: int) -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x1", runtime="pytorch-ddp", global_batch=num_microbatches)
    plan = uniform_plan(problem, microbatch=1)
    assert problem.runtime.hands_over_gradients
    none = replace(problem, runtime=replace(problem.runtime, adds_gradients=False))
    never_s, later_s, always_s = (
        simulate_time_s(plan, each, engine="compiled", fidelity=ALONE)
        for each in (none, problem, handing(problem, over=False))
    )
    each_s = (always_s - never_s) / num_microbatches
    # A kernel per parameter, which reads two gradients of four bytes and writes one.
    count = problem.workload.num_parameters
    assert each_s > 12 * count / 2040e9  # What an A100's memory could do at most.
    assert later_s - never_s == pytest.approx((num_microbatches - 1) * each_s, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "microbatch"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2), ("interleaved", 1), ("zb-h1", 1)]
)
@pytest.mark.parametrize("runtime", ["pytorch-ddp", "windtunnel-executor-fp32", "megatron-deepspeed-2020"])
def test_closed_forms_say_by_how_much(runtime: str, schedule: str, microbatch: int) -> None:
    found = small_problem("gpt", cluster="a100-80g-dgx:1x2", runtime=runtime, global_batch=4)
    chunks = 2 if schedule == "interleaved" else 1
    plan = uniform_plan(found, pp=2, chunks=chunks, schedule=schedule, microbatch=microbatch)
    less_s = []
    for over in (False, True):
        problem = handing(found, over=over)
        time_s = estimate(plan, problem).iteration_time_s
        assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(time_s, rel=1e-11)
        less_s.append((simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE), time_s))
    simulated_s, closed_form_s = (before - after for before, after in zip(*less_s, strict=True))
    assert simulated_s > 0
    assert closed_form_s == pytest.approx(simulated_s, rel=1e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_zero_scatters_in_each_pass_is_added_to_nothing(zero: int) -> None:
    found = small_problem("gpt", cluster="a100-80g-dgx:1x2", runtime="windtunnel-executor-fp32", global_batch=8)
    plan = uniform_plan(found, dp=2, zero=zero, microbatch=2, gradient_reduction="every")
    none = replace(found, runtime=replace(found.runtime, adds_gradients=False))
    with_s, without_s = (
        simulate_time_s(plan, each, engine="compiled", fidelity=ALONE) for each in (found, none)
    )
    assert (with_s == without_s) == (zero > 0)
    assert FastEstimator(found).estimate(plan).iteration_time_s == pytest.approx(
        estimate(plan, found).iteration_time_s, rel=1e-11
    )
