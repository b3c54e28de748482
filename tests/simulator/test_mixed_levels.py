"""Stages whose layers have unlike ZeRO levels: their estimates against the simulator and the compiled estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from simulator.closed_forms.estimate import estimate
from simulator.fast.estimate import FastEstimator
from simulator.plan import Axis, Plan
from simulator.problem import ProblemSpec
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import repeated_layers, uniform_plan

ORDERS: dict[str, Callable[[int, int], bool]] = {
    "eight in front": lambda layer, count: layer < 8,
    "half": lambda layer, count: 2 * layer < count,
    "three quarters": lambda layer, count: 4 * layer < 3 * count,
    "every second": lambda layer, count: layer % 2 == 0,
    "every third": lambda layer, count: layer % 3 == 0,
}
"""Which layers have the first level, by number and how many there are."""

Setting = tuple[str, str, str]
ETHERNET: Setting = ("llama2-7b", "p3.8xlarge:2x4", "megatron-lm-2021")
TIED: Setting = ("gpt3-1.3b", "p3.8xlarge:2x4", "megatron-deepspeed")
FSDP: Setting = ("llama2-7b", "a100-80g-dgx-100g:2x4", "pytorch-fsdp2")


@lru_cache
def estimator(setting: Setting) -> FastEstimator:
    return FastEstimator(ProblemSpec(*setting, 64).load())


def mixed_plan(setting: Setting, levels: tuple[int, int], order: str, **words) -> Plan:  # type: ignore[no-untyped-def]
    """Return the uniform plan of these words, but for the ZeRO level of each layer, which goes on to the next one."""
    problem, picks = estimator(setting).problem, ORDERS[order]
    layers = repeated_layers(problem.workload)
    level_at = {start: levels[not picks(number, len(layers))] for number, (start, _) in enumerate(layers)}
    by_operator, level = [], levels[not picks(0, len(layers))]
    for index in range(len(problem.workload)):
        level = level_at.get(index, level)
        by_operator.append(level)
    stages, plan = [], uniform_plan(problem, zero=3, **words)
    for stage in plan.stages:
        ((start, stop),), ((_, sharding),) = stage.operators, stage.shardings
        runs = [
            (1, tuple(axis._replace(zero=level) if axis.split == "batch" else axis for axis in sharding))
            for level in by_operator[start:stop]
        ]
        stages.append(replace(stage, shardings=tuple(runs)))
    return replace(plan, stages=tuple(stages))


def error(setting: Setting, plan: Plan) -> float:
    """Return the estimate's error; the compiled one is the same."""
    found = estimator(setting)
    estimated_s = estimate(plan, found.problem, found.costs).iteration_time_s
    assert found.estimate(plan).iteration_time_s == pytest.approx(estimated_s, rel=1e-11)
    return estimated_s / simulate_time_s(plan, found.problem, costs=found.costs) - 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("levels", [(0, 3), (3, 0), (1, 3), (3, 2)])
@pytest.mark.parametrize("microbatch", [8, 16])
@pytest.mark.parametrize("setting", [ETHERNET, TIED, FSDP], ids=["ethernet", "tied", "fsdp"])
def test_gathers_of_some_layers_hide_behind_the_layers_before_them(setting, microbatch, levels, order) -> None:
    """Where nothing of them hid, such plans were up to 43 % too slow, slower than either level alone."""
    plan = mixed_plan(setting, levels, order, tp=4, dp=2, microbatch=microbatch, gradient_reduction="last")
    assert error(setting, plan) == pytest.approx(0, abs=0.03)


@pytest.mark.parametrize("microbatch", [8, 32])
@pytest.mark.parametrize("order", ["eight in front", "half", "every second"])
@pytest.mark.parametrize("levels", [(0, 1), (2, 0), (0, 2)])
@pytest.mark.parametrize("setting", [ETHERNET, FSDP], ids=["ethernet", "fsdp"])
def test_gradients_of_each_level_are_reduced_when_they_are_all_there(setting, levels, order, microbatch) -> None:
    """Where all counted as reduced with the stage's first layer, such plans were up to 8.6 % too slow."""
    words = dict(tp=4, dp=2, microbatch=microbatch, gradient_reduction="last", overlap_gradient_sync=True)
    assert error(setting, mixed_plan(setting, levels, order, **words)) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("levels", [(0, 0), (0, 3), (3, 0), (0, 2)])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("runtime", ["pytorch-fsdp2", "composer-fsdp", "hetu-galvatron"])
def test_fsdp_reduces_unit_by_unit_whatever_it_shards(runtime: str, tp: int, levels: tuple[int, int]) -> None:
    """NO_SHARD's hook all-reduces a module when its backward pass is through; all went in one, behind the last pass."""
    setting = ("llama2-7b", "a100-80g-dgx-100g:2x4", runtime)
    words = dict(tp=tp, dp=8 // tp, microbatch=8, gradient_reduction="last", overlap_gradient_sync=True)
    plan, found = mixed_plan(setting, levels, "half", **words), estimator(setting)
    assert error(setting, plan) == pytest.approx(0, abs=0.012)
    graph = simulate(plan, found.problem, costs=found.costs).graph
    reductions = int((graph.cause == graph.causes.index("gradient sync")).sum())
    layers = len(repeated_layers(found.problem.workload))
    assert layers + 1 <= reductions <= layers + 3
    at_once = replace(found.problem, runtime=replace(found.problem.runtime, reduces_by_unit=False))
    assert simulate_time_s(plan, at_once) > simulate_time_s(plan, found.problem)


@pytest.mark.parametrize("levels", [(0, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize(
    "words",
    [
        dict(tp=1, pp=2, dp=4, microbatch=2),
        dict(tp=2, pp=2, dp=2, microbatch=4, recompute="full"),
        dict(tp=2, dp=4, microbatch=4, recompute="full"),
        dict(tp=2, dp=4, microbatch=4, gradient_reduction="every"),
    ],
    ids=["pipeline", "recomputed pipeline", "recomputed", "every"],
)
@pytest.mark.parametrize(
    "setting",
    [
        ("gpt3-1.3b", "v100-32g-dgx1:1x8", "megatron-lm-2021"),
        ("bert-huge-32", "a100-80g-dgx:1x8", "composer-fsdp"),
        ("vit-huge-32", "a100-80g-dgx:1x8", "galvatron-v1"),
        ("t5-770m", "h100-dgx:1x8", "hetu-galvatron"),
    ],
    ids=["gpt", "bert", "vit", "t5"],
)
def test_and_in_other_plans(setting, words, levels, request) -> None:
    if setting[0] == "t5-770m" and "pp" in words and "recompute" not in words and levels[1] == 3:
        reason = "two stages of T5 on H100s: the estimate is 4.0 and 4.2 % too long"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    assert error(setting, mixed_plan(setting, levels, "three quarters", **words)) == pytest.approx(0, abs=0.035)


def test_a_mix_takes_longer_than_its_quicker_level_and_less_than_the_slower_one() -> None:
    found = estimator(ETHERNET)
    seconds = {
        (a, b): found.estimate(
            mixed_plan(ETHERNET, (a, b), "eight in front", tp=4, dp=2, microbatch=16, gradient_reduction="last")
        ).iteration_time_s
        for a, b in ((0, 0), (3, 3), (0, 3))
    }
    assert seconds[3, 3] < seconds[0, 3] < seconds[0, 0]


@pytest.mark.parametrize("levels", [(0, 3), (2, 3), (3, 1), (0, 1)])
@pytest.mark.parametrize("runtime", ["deepspeed-zero3-2021", "megatron-core-2024", "pytorch-ddp", "megatron-deepspeed"])
@pytest.mark.parametrize("reduction", ["last", "every"])
def test_cuts_within_layers_and_reductions_under_way_are_the_same_in_both(runtime, levels, reduction) -> None:
    setting = ("gpt3-350m", "a100-80g-dgx:1x8", runtime)
    found = estimator(setting)
    count, sharding = len(found.problem.workload), (Axis("batch", 8),)
    plan = uniform_plan(found.problem, dp=8, microbatch=2, gradient_reduction=reduction, overlap_gradient_sync=True)
    first, second = ((sharding[0]._replace(zero=level),) for level in levels)
    runs = ((7, second), (40, first), (count // 2 - 47, second), (count - count // 2, first))
    plan = replace(plan, stages=(replace(plan.stages[0], shardings=runs),))
    if runtime == "megatron-core-2024" and levels in ((2, 3), (3, 1)):
        with pytest.raises(ValueError, match="must have no parameters of ZeRO-3"):
            found.estimate(plan)
        return
    estimated_s = estimate(plan, found.problem, found.costs).iteration_time_s
    assert found.estimate(plan).iteration_time_s == pytest.approx(estimated_s, rel=1e-11)
