"""The closed form of 1F1B and GPipe against the engine, which runs the schedule's order, and cases drawn by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.pipeline_time import SCRATCH, one_f_one_b_s
from simulator.closed_forms.stage_rows import FORWARD_LAG, INPUT_LAG, NUM_COLUMNS
from simulator.engines.engine_compiled import run_compiled
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.plan import Plan, Stage
from simulator.problem import Problem
from simulator.schedules.actions import FORWARD
from simulator.schedules.one_f_one_b import warmup_p_a, warmup_p_b
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate_time_s
from simulator.uniform import repeated_layers, uniform_plan
from tests.simulator.graphs import makespan_s, pipeline_graph, plain_shape
from tests.simulator.problems import chain_of_opaque, chain_problem, small_problem

ALONE = Fidelity().without("overlap-slowdown", "contention", "host")
Times = NDArray[np.float64]


def closed_s(times: Times, depths: tuple[int, ...], m: int, link_s: float = 0.0) -> float:
    """Return the closed form for forwards and backwards of stages, and equal transfers between them."""
    rows = np.zeros((len(times), NUM_COLUMNS))
    rows[:, :2] = times
    rows[:-1, 3] = rows[1:, 4] = link_s
    return one_f_one_b_s(rows, rows, np.array(depths), m, np.empty((len(times), SCRATCH)))


def engine_s(times: Times, depths: tuple[int, ...], m: int, link_s: float = 0.0) -> float:
    """Return what the engine says of the schedule's order."""
    gpipe = min(depths) == m
    shape = plain_shape(len(times), m, None if gpipe else depths)
    orders = schedule_named("gpipe" if gpipe else "1f1b").actions(shape)
    pipeline = pipeline_graph(shape, orders, link_s=link_s)
    work_s = pipeline.graph.work_s.copy()
    for (kind, stage, _), task in pipeline.task_of.items():
        work_s[task] = times[stage, 0 if kind == FORWARD else 1]
    return makespan_s(run_compiled(replace(pipeline.graph, work_s=work_s)))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Times, tuple[int, ...], int]:
    """Draw stages, warm-ups that never grow from stage to stage (P_A and P_B among them), and microbatches."""
    p = draw(st.integers(1, 8))
    m = draw(st.integers(1, 24))
    times = draw(st.lists(st.floats(0.1, 4.0), min_size=2 * p, max_size=2 * p))
    any_depths = st.lists(st.integers(1, m), min_size=p, max_size=p).map(lambda depths: tuple(sorted(depths)[::-1]))
    known = st.sampled_from([warmup_p_a(p, m), warmup_p_b(p, m), (m,) * p])
    return np.array(times).reshape(p, 2), draw(st.one_of(known, any_depths)), m


@settings(deadline=None, max_examples=200)
@given(pipelines())
def test_pipelines_with_free_transfers_take_exactly_what_the_engine_says(case) -> None:  # type: ignore[no-untyped-def]
    assert closed_s(*case) == pytest.approx(engine_s(*case), rel=1e-12)


@settings(deadline=None, max_examples=200)
@given(pipelines(), st.floats(0.01, 4.0))
@example((np.array([[1.0, 1.0], [0.5, 0.5]]), (2, 1), 2), 3.0)  # the second transfer waits for the first
@example((np.array([[0.1, 0.1], [0.5, 0.5]]), (9, 2), 24), 4.0)
@example((np.array([[1.0, 0.1], [0.1, 0.1]]), (2, 2), 2), 4.0)  # GPipe: the second transfer back waits, too
def test_pipelines_with_transfers_take_at_most_what_the_engine_says_and_little_less(  # type: ignore[no-untyped-def]
    case, link_s: float
) -> None:
    assert -0.15 < closed_s(*case, link_s) / engine_s(*case, link_s) - 1 < 1e-12


@pytest.mark.parametrize("depths", [(4, 3, 2, 1), (7, 5, 3, 1), (9, 9, 9, 9)])
def test_a_pass_that_begins_late_is_a_transfer_that_takes_so_long(depths: tuple[int, ...]) -> None:
    """Where links are free; fourfold 1F1B of nine microbatches there and back, its warm-ups, and GPipe."""
    times = np.array([[1.0, 2.0]] * 4)
    rows = np.zeros((4, NUM_COLUMNS))
    rows[:, :2] = times
    rows[1:, FORWARD_LAG] = rows[:-1, INPUT_LAG] = 0.4
    found_s = one_f_one_b_s(rows, rows, np.array(depths), 9, np.empty((4, SCRATCH)))
    assert found_s == pytest.approx(engine_s(times, depths, 9, 0.4), rel=1e-12)


def test_transfers_that_are_waited_for_are_in_the_mean_within_half_a_per_cent() -> None:
    random = np.random.default_rng(7)
    errors = []
    for _ in range(150):
        p = int(random.integers(2, 9))
        m = int(random.integers(1, 4 * p + 1))
        times = np.array([1.0, 2.0]) * (1 + 0.5 * random.uniform(-1, 1, (p, 2)))
        link_s = random.uniform(0, 1.5)
        depths = warmup_p_a(p, m)
        errors.append(closed_s(times, depths, m, link_s) / engine_s(times, depths, m, link_s) - 1)
    assert -0.005 < np.mean(errors) <= 0.0


def test_nothing_counts_behind_a_slow_first_stage() -> None:
    """As drawn in ``simulator.closed_forms.pipeline_time``, and longer: the others end while the first computes."""
    times = np.array([[3.0, 3.0], [1.0, 1.0]])
    assert closed_s(times, (2, 1), 4) == engine_s(times, (2, 1), 4) == 4 * (3.0 + 3.0)
    slow = np.array([[4.0, 8.0], [1.0, 2.0], [1.0, 2.0]])
    assert closed_s(slow, (3, 2, 1), 9) == engine_s(slow, (3, 2, 1), 9) == 9 * (4.0 + 8.0)


def test_a_slower_stage_behind_is_waited_for() -> None:
    """Two microbatches, and then three of which each goes there and back before the next (digits: microbatch)::

    stage 0  F0 F1 .  .  .  .  B0 -- .  .  .  .  B1 --
    stage 1  .  F0 -- B0 -- -- F1 -- B1 -- -- .  .  .
    """
    times = np.array([[1.0, 2.0], [2.0, 3.0]])
    assert closed_s(times, (2, 1), 2) == engine_s(times, (2, 1), 2) == 1.0 + 2 * (2.0 + 3.0) + 2.0
    assert closed_s(times, (1, 1), 3) == engine_s(times, (1, 1), 3) == 3 * 8.0


def test_a_slow_last_stage_is_waited_for_on_the_way_in_and_out() -> None:
    times = np.array([[1.0, 2.0], [1.0, 2.0], [4.0, 8.0]])
    assert closed_s(times, (3, 2, 1), 6) == engine_s(times, (3, 2, 1), 6) == 2 * 1.0 + 6 * 12.0 + 2 * 2.0


def test_each_way_of_gpipe_has_its_own_slowest_stage() -> None:
    """The first stage is the slowest forward, the second backward: five passes of either, and one of the others."""
    times = np.array([[3.0, 1.0], [1.0, 4.0], [1.0, 1.0]])
    assert closed_s(times, (5,) * 3, 5) == engine_s(times, (5,) * 3, 5) == (5 * 3 + 2.0) + (1.0 + 5 * 4 + 1.0)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_equal_stages_take_the_ideal_time(p: int, m: int) -> None:
    times = np.array([[1.0, 2.0]] * p)
    for depths in (warmup_p_a(p, m), warmup_p_b(p, m), (m,) * p):
        assert closed_s(times, depths, m) == (m + p - 1) * 3.0


def unequal(problem: Problem, counts: tuple[int, ...], num_microbatches: int, **options: object) -> Plan:
    """Return a pipeline of single devices with so many layers each."""
    layers = repeated_layers(problem.workload)
    cuts = [0, *(layers[sum(counts[: number + 1])][0] for number in range(len(counts) - 1)), len(problem.workload)]
    stages = tuple(
        Stage(((first, stop),), (device,), ((stop - first, ()),))
        for device, (first, stop) in enumerate(pairwise(cuts))
    )
    return Plan(stages, problem.global_batch // num_microbatches, num_microbatches, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cluster", "runtime"),
    [
        ("v100-32g-dgx1:1x4", "megatron-lm-2021"),
        ("v100-1gpu-10g:4x1", "megatron-lm-2021"),  # what was sent is waited for
        ("v100-1gpu-10g:4x1", "windtunnel-executor-fp32"),
    ],
)
@pytest.mark.parametrize("family", ["gpt", "t5"])
@pytest.mark.parametrize("options", [dict(), dict(schedule="gpipe"), dict(warmup=(3, 2, 1))], ids=str)
def test_plans_of_unequal_stages_take_what_the_simulator_says(
    cluster: str, runtime: str, family: str, options: dict[str, object]
) -> None:
    problem = small_problem(family, cluster=cluster, runtime=runtime, global_batch=32)
    fast = FastEstimator(problem)
    for counts in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        plan = unequal(problem, counts, 8, **options)
        expected_s = simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)
        time_s = estimate(plan, problem).iteration_time_s
        assert time_s == pytest.approx(expected_s, rel=0.02)
        assert fast.estimate(plan).iteration_time_s == pytest.approx(time_s, rel=1e-11)


def test_a_smaller_last_microbatch_is_followed_through_unequal_stages() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=29)
    for schedule in ("1f1b", "gpipe"):
        plan = replace(unequal(problem, (2, 1, 1), 8, schedule=schedule), microbatch_size=4, last_microbatch_size=1)
        expected_s = simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)
        assert estimate(plan, problem).iteration_time_s == pytest.approx(expected_s, rel=0.02)


def test_stages_of_gpipe_on_one_device_follow_one_another() -> None:
    problem = chain_problem(chain_of_opaque(4, 1.0, 2.0), num_devices=2, global_batch=4)
    stages = tuple(Stage(((index, index + 1),), (index % 2,), ((1, ()),)) for index in range(4))
    plan = Plan(stages, 1, 4, schedule="gpipe")
    time_s = estimate(plan, problem).iteration_time_s
    assert time_s == pytest.approx(simulate_time_s(plan, problem, fidelity=Fidelity.ideal()), rel=1e-3)
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(time_s, rel=1e-11)


def test_plans_of_equal_stages_take_what_the_simulator_says_whatever_the_runtime_waits_for() -> None:
    for runtime in ("megatron-lm-2021", "windtunnel-executor-fp32"):
        problem = small_problem("gpt", cluster="v100-1gpu-10g:4x1", runtime=runtime, global_batch=8)
        plan = uniform_plan(problem, pp=4)
        expected_s = simulate_time_s(plan, problem, engine="compiled", fidelity=ALONE)
        assert estimate(plan, problem).iteration_time_s == pytest.approx(expected_s, rel=0.02)


def test_a_warm_up_that_waits_for_itself_is_named() -> None:
    """Hosts that wait for what they receive launch a backward's receive behind forwards that it is waited for by."""
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", runtime="megatron-lm-2021", global_batch=16)
    plan = uniform_plan(problem, pp=4, microbatch=1)
    with pytest.raises(ValueError, match=r"warmup \[8, 8, 1, 1\] lets .* leave it out, which is \[4, 3, 2, 1\]"):
        simulate_time_s(replace(plan, warmup=(8, 8, 1, 1)), problem)
    assert simulate_time_s(replace(plan, warmup=(4, 3, 2, 1)), problem) == simulate_time_s(plan, problem)
