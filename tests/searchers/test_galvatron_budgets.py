"""Galvatron's searchers where a plan fits by Eq. 2 and not by whoever judges it: lower budgets, pure strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from searchers.base import LOWERED_BUDGETS
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.partitions import even
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from searchers.galvatron.searcher import Galvatron, GalvatronBMW, variant_options
from searchers.registry import searcher_named
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from tests.searchers.galvatron_problems import titan
from tests.searchers.tiny import tiny_problem
from workloads.registry import build_workload


def test_plans_of_lower_budgets_come_after_those_that_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator loses is in no estimate: here it takes the plans that fill memory to the last step."""
    problem = titan("vit-huge-48", 64, 12)
    times = []
    for shares in ((), LOWERED_BUDGETS):
        monkeypatch.setattr("searchers.galvatron.searcher.LOWERED_BUDGETS", shares)
        plans = searcher_named("galvatron-base").search(problem).plans
        results = [simulate(each.plan, problem) for each in plans]
        times.append(next(result.iteration_time_s for result in results if result.fits))
    assert times[1] < 0.95 * times[0]


@pytest.mark.parametrize("shift", [-1, 0, 1, 2])
def test_every_lower_budget_that_the_best_plan_exceeds_is_searched(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem(2)
    planner_of = Planner
    best = planner_of(problem, GalvatronBMW.variant).best(problem.global_batch)
    assert best is not None
    share = best.peak_bytes / best.capacity_bytes
    shares = tuple(share * (1 + 0.01 * (step - shift - 0.5)) for step in range(3))
    budgets = []

    def planner_under(*positional: object, **named: object) -> Planner:
        budgets.append(named["budget_bytes"])
        return planner_of(*positional, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("searchers.galvatron.searcher.LOWERED_BUDGETS", shares)
    monkeypatch.setattr("searchers.galvatron.searcher.planner_for", lambda *both: planner_of(*both))
    monkeypatch.setattr("searchers.galvatron.searcher.Planner", planner_under)
    GalvatronBMW().search(problem)
    assert budgets == [each * best.capacity_bytes for each in shares if each < share]


SMALL: dict[str, tuple[str, dict[str, int]]] = {
    "xlnet": ("xlnet-large", {"layers": 2}),
    "gpt": ("gpt3-350m", {"layers": 3, "hidden": 512, "heads": 8, "seq_len": 512}),
}


def small(model: str, cluster: str, runtime: str, batch: int, memory_mib: float) -> Problem:
    name, overrides = SMALL[model]
    problem = ProblemSpec(name, cluster, runtime, batch, memory_limit_bytes=int(memory_mib * 2**20)).load()
    attention = problem.runtime.attention
    return replace(problem, workload=build_workload(name, attention=attention, overrides=overrides))


@pytest.mark.parametrize(
    ("searcher", "model", "cluster", "runtime", "batch", "limits_mib"),
    [
        ("galvatron", "xlnet", "p3.8xlarge:1x4", "megatron-lm-2021-fp32", 8, (1826.4, 2000, 2100, 2386.2)),
        ("galvatron-base", "xlnet", "p3.8xlarge:1x4", "galvatron-v1", 12, (2447.1, 3215.8)),
        ("galvatron-bmw", "gpt", "v100-32g-dgx1:1x4", "alpa", 4, (1138.6, 1352.5)),
        ("galvatron-bmw-free", "gpt", "v100-32g-dgx1:1x4", "alpa", 4, (1177.1, 1416.9)),
    ],
)
def test_more_memory_never_loses_a_plan_that_the_closed_form_lets_fit(
    searcher: str, model: str, cluster: str, runtime: str, batch: int, limits_mib: Sequence[float]
) -> None:
    """Where Eq. 2 let a degree's plan fit and the closed form did not, the degree was lost: up to twice as slow."""
    found = [
        searcher_named(searcher).search(small(model, cluster, runtime, batch, limit)).plans[0].objective
        for limit in limits_mib
    ]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("limit_mib", [2100, 2386.2, 3000])
@pytest.mark.parametrize("searcher", ["galvatron", "galvatron-base", "galvatron-bmw"])
def test_no_pure_strategy_that_the_objective_lets_fit_is_better(searcher: str, limit_mib: float) -> None:
    problem = small("xlnet", "p3.8xlarge:1x4", "megatron-lm-2021-fp32", 8, limit_mib)
    own = searcher_named(searcher)
    assert isinstance(own, Galvatron)
    planner, pure = Planner(problem, own.options), []
    for partition in {plan.partition for plan in planner.plans(8)}:
        search = planner.searches[len(partition)]
        for cut in search.rule_cuts(8):
            pure += search.pure(partition, 8, cut)
    scores = [own.score(to_plan(plan, problem), problem) for plan in pure if plan.fits]
    best_s = min(score.objective for score in scores if score.fits)
    assert own.search(problem).plans[0].objective <= best_s * (1 + 1e-12)


@pytest.mark.parametrize("variant", ["galvatron-base", "galvatron-bmw"])
@pytest.mark.parametrize("model", ["bert-huge-32", "t5-large-32", "swin-huge-32"])
@pytest.mark.parametrize(("memory", "outside"), [("shapes", "layers"), ("released", "data")])
def test_pure_plans_that_are_left_out_are_slower_or_need_more(
    variant: str, model: str, memory: str, outside: str
) -> None:
    """Whatever bounds a plan of one strategy from below must be below it: tied weights, a smaller last microbatch."""
    options = replace(variant_options(variant), unequal_microbatches=True, memory=memory, outside=outside)
    planner = Planner(titan(model, 24, 12), options)
    count = 0
    for search in planner.searches.values():
        partition = even(len(search.layers), search.num_stages)
        for cut in search.rule_cuts(24):
            whole = search.pure(partition, 24, cut)
            for plan in whole:
                below_s, most_bytes = plan.iteration_time_s * (1 + 1e-12), plan.peak_bytes
                left = search.pure(partition, 24, cut, below_s=below_s, most_bytes=most_bytes)
                assert plan in left
                count += len(left) < len(whole)
    assert count


@pytest.mark.parametrize(("parts", "samples"), [(1, 4), (8, 1)])
def test_strategies_that_cannot_be_had_are_left_out_without_a_warning(parts: int, samples: int) -> None:
    """Infinity times nothing: a single microbatch, and fewer samples than most strategies have replicas."""
    search = Planner(titan("bert-huge-32", 8, 8), variant_options("galvatron-base")).searches[1]
    with np.errstate(all="raise"):
        whole = (len(search.layers),)
        found = search.pure(whole, parts * samples, Cut(parts, samples), below_s=1e9, most_bytes=1e12)
    assert {plan.stages[0].chosen[0].data for plan in found} == {degree for degree in (1, 2, 4, 8) if degree <= samples}
