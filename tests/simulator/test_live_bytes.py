"""Live bytes over a whole iteration: what pictures and traces of memory show."""

from __future__ import annotations

import re

import numpy as np
import pytest

from simulator.reports.breakdown import device_tasks
from simulator.result import SimulationResult
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem


@pytest.mark.parametrize(
    "shape",
    [dict(pp=2), dict(pp=4), dict(pp=2, recompute="full"), dict(pp=2, chunks=2, schedule="interleaved"),
     dict(pp=2, schedule="zb-h1"), dict(pp=2, schedule="gpipe"), dict(dp=4, zero=3)],
    ids=str,
)  # fmt: skip
def test_live_bytes_are_told_of_the_whole_iteration_and_peak_where_memory_does(shape: dict) -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=64)
    result = simulate(uniform_plan(problem, microbatch=1, **shape), problem)
    for memory in result.memory:
        history = result.live_bytes(memory.device)
        assert history.live_bytes.max() == memory.peak_allocated_bytes
        assert history.times_s[history.live_bytes.argmax()] == memory.peak_time_s
        assert (np.diff(history.times_s) >= 0).all()
        late = history.live_bytes[history.times_s > 0.6 * result.iteration_time_s]
        assert late.max() > 0.5 * (memory.peak_allocated_bytes + history.live_bytes[-1])  # not drained


def _step(result: SimulationResult, device: int) -> tuple[float, float]:
    """Return when a device's optimizer step starts and ends."""
    graph = result.graph
    tasks = device_tasks(graph, device)
    step = [task for task in tasks if graph.causes[graph.cause[task]] == "optimizer"]
    return result.schedule.start_s[step].min(), result.schedule.end_s[step].max()


@pytest.mark.parametrize("leave_out_periods", [False, True])
@pytest.mark.parametrize("shape", [dict(pp=4, recompute="full"), dict(pp=2, dp=2, zero=1)], ids=str)
def test_a_peak_in_the_optimizer_step_is_when_that_runs(shape: dict, leave_out_periods: bool) -> None:
    problem = small_problem("vit", cluster="v100-32g-dgx1:1x4", global_batch=64)
    plan = uniform_plan(problem, microbatch=1, **shape)
    result = simulate(plan, problem, leave_out_periods=leave_out_periods)
    late = [memory for memory in result.memory if memory.peak_where == "the optimizer step"]
    assert late, "no peak is in the optimizer step"
    for memory in late:
        assert memory.peak_time_s == pytest.approx(_step(result, memory.device)[0], rel=1e-9)
        history = result.live_bytes(memory.device)
        assert history.times_s[history.live_bytes.argmax()] == pytest.approx(memory.peak_time_s, rel=1e-9)


def test_memory_changes_during_the_last_backward_pass_to_its_end() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x2", global_batch=4)
    plan = uniform_plan(problem, tp=2, microbatch=4)  # one microbatch, whose backward pass is many tasks
    result = simulate(plan, problem)
    graph, history = result.graph, result.live_bytes(0)
    backward = [task for task in device_tasks(graph, 0) if graph.causes[graph.cause[task]] == "backward"]
    begin_s, end_s = result.schedule.start_s[backward].min(), result.schedule.end_s[backward].max()
    within = (history.times_s > begin_s + 0.5 * (end_s - begin_s)) & (history.times_s < end_s)
    assert within.sum() > 10, "the second half of the last backward pass frees nothing"


@pytest.mark.parametrize("shape", [dict(pp=2, schedule="gpipe"), dict(pp=2, recompute="full"), dict(pp=4)], ids=str)
def test_the_peak_is_dated_to_the_pass_that_it_is_told_of(shape: dict) -> None:
    """``peak_time_s`` lies between the start and the end of the tasks of the stage, pass and microbatch named."""
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=8)
    result = simulate(uniform_plan(problem, microbatch=1, **shape), problem)
    graph, schedule = result.graph, result.schedule
    for memory in result.memory:
        stage, kind, microbatch = re.fullmatch(  # type: ignore[union-attr]
            r"stage (\d+), (forward|backward) of microbatch (\d+)", memory.peak_where
        ).groups()
        of_pass = {"forward": ["forward"], "backward": ["backward", "recompute"]}[kind]
        own = np.isin(np.array(graph.causes)[graph.cause], of_pass)
        own &= (graph.stage == int(stage)) & (graph.microbatch == int(microbatch))
        assert schedule.start_s[own].min() <= memory.peak_time_s <= schedule.end_s[own].max() + 1e-12


def test_live_bytes_of_a_device_that_memory_has_no_entry_of_are_refused() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=8)
    result = simulate(uniform_plan(problem, dp=4, microbatch=1), problem)
    with pytest.raises(ValueError, match="`memory` has an entry of, 0 to 0, got 3"):
        result.live_bytes(3)  # a GPU of the plan, which does what the first does
