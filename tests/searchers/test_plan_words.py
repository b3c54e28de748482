"""A plan in a few words: equal plans have the same, plans that differ in their cuts do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from searchers.plan_words import describe_plan
from simulator.plan import Axis, Plan
from simulator.problem import Problem
from simulator.uniform import repeated_layers, uniform_plan
from tests.simulator.problems import small_problem


@pytest.fixture(scope="module")
def problem() -> Problem:
    return small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=16)  # four layers


def cut(plan: Plan, *places: int) -> Plan:
    """Return a pipeline of the same degrees that is cut before other operators."""
    bounds = [0, *places, plan.stages[-1].operators[-1][1]]
    stages = [
        replace(stage, operators=((start, stop),), shardings=((stop - start, stage.shardings[0][1]),))
        for stage, start, stop in zip(plan.stages, bounds, bounds[1:], strict=False)
    ]
    return replace(plan, stages=tuple(stages))


def test_uneven_pipelines_say_how_many_layers_each_stage_has(problem: Problem) -> None:
    even, layers = uniform_plan(problem, pp=2), repeated_layers(problem.workload)
    assert describe_plan(even, problem.workload) == "pp 2, microbatch 1 x 16"
    assert describe_plan(cut(even, layers[1][0]), problem.workload) == "pp 2, layers 1|3, microbatch 1 x 16"
    middle = sum(layers[2]) // 2
    assert describe_plan(cut(even, middle), problem.workload) == "pp 2, layers 2.5|1.5, microbatch 1 x 16"


def test_a_plan_whose_layers_are_sharded_unlike_says_so(problem: Problem) -> None:
    plan = uniform_plan(problem, dp=4, zero=3)
    count = len(problem.workload)
    shardings = ((count - 5, (Axis("batch", 4, 3),)), (5, (Axis("batch", 4),)))
    unlike = replace(plan, stages=(replace(plan.stages[0], shardings=shardings),))
    assert describe_plan(plan) == "dp 4 ZeRO-3, microbatch 4 x 4"
    assert describe_plan(unlike) == "dp 4 ZeRO-3, ZeRO mixed by operator, microbatch 4 x 4"


def test_all_spellings_of_a_plan_have_the_same_words(problem: Problem) -> None:
    plan = uniform_plan(problem, pp=4)
    spellings = [(Axis("batch", 1, 3), Axis("tensor", 1)), (Axis("tensor", 1),), ()]
    stages = [
        replace(stage, shardings=((2, spellings[number % 3]), (stage.num_operators() - 2, spellings[number % 2])))
        for number, stage in enumerate(plan.stages)
    ]
    spelled = replace(plan, stages=tuple(stages))
    assert spelled.canonical_hash(problem.workload) == plan.canonical_hash(problem.workload)
    assert describe_plan(spelled, problem.workload) == "pp 4, microbatch 1 x 16"


def test_axes_that_are_one_are_no_mixture(problem: Problem) -> None:
    plan = uniform_plan(problem, dp=4)
    (stage,) = plan.stages
    halves = (Axis("batch", 2), Axis("batch", 2))
    apart = replace(stage, shardings=((2, halves), (stage.num_operators() - 2, (Axis("batch", 4),))))
    assert describe_plan(replace(plan, stages=(apart,)), problem.workload) == "dp 4, microbatch 4 x 4"
