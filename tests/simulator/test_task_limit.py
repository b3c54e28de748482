"""A plan that comes to more tasks than fit is refused before anything large is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering import task_limit
from simulator.lowering.lower import lower
from simulator.plan import Plan
from simulator.plan_file import MAX_MICROBATCHES, save_plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.experiments.commands import run
from tests.simulator.problems import small_problem

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2)]


def long_plan(schedule: str, chunks: int, num_microbatches: int) -> tuple[Plan, Problem]:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x8", global_batch=2 * num_microbatches)
    return uniform_plan(problem, pp=2, tp=2, dp=2, zero=1, schedule=schedule, chunks=chunks), problem


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_a_million_microbatches_are_refused_at_once(schedule: str, chunks: int) -> None:
    plan, problem = long_plan(schedule, chunks, MAX_MICROBATCHES)
    with pytest.raises(ValueError, match=r"at most 20,000,000 tasks, got .* for 1,000,000 microbatches in . stages"):
        simulate(plan, problem)


def test_a_million_microbatches_that_repeat_themselves_are_not() -> None:
    found = []
    for count in (1_000, 2_000, MAX_MICROBATCHES):
        problem = small_problem("gpt", global_batch=count)
        found.append(simulate_time_s(uniform_plan(problem, pp=4), problem))
    some, more, most = found
    assert most == pytest.approx(some + (MAX_MICROBATCHES // 1_000 - 1) * (more - some), rel=1e-6)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_few_microbatches_tell_how_many_tasks_many_come_to(
    schedule: str, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, problem = long_plan(schedule, chunks, 2500)
    canonical, costs = validate(plan, problem), CostTables(problem)
    num_tasks = lower(canonical, costs, Fidelity()).graph.num_tasks
    monkeypatch.setattr(task_limit, "MAX_TASKS", num_tasks * 101 // 100)
    assert lower(canonical, costs, Fidelity()).graph.num_tasks == num_tasks
    monkeypatch.setattr(task_limit, "MAX_TASKS", num_tasks * 99 // 100)
    with pytest.raises(ValueError, match="2,500 microbatches"):
        lower(canonical, costs, Fidelity())


def test_few_microbatches_are_counted_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, problem = long_plan("1f1b", 1, 16)
    monkeypatch.setattr(task_limit, "MAX_TASKS", 100)
    with pytest.raises(ValueError, match="at most 100 tasks"):
        simulate(plan, problem)


def test_a_warm_up_deeper_than_the_few_is_no_hindrance() -> None:
    plan, problem = long_plan("1f1b", 1, MAX_MICROBATCHES)
    with pytest.raises(ValueError, match="at most 20,000,000 tasks"):
        simulate(replace(plan, warmup=(400_000, 300_000)), problem)


def test_the_command_line_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x8", "megatron-lm-2021", MAX_MICROBATCHES)
    save_plan(tmp_path / "plan.yaml", spec, uniform_plan(spec.load(), pp=8))
    code, out, error = run(capsys, "simulate", tmp_path / "plan.yaml")
    assert (code, out) == (2, "") and "at most 20,000,000 tasks" in error
