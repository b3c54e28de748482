"""What a searcher may return, and what becomes of the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from numpy.random import Generator

from searchers.base import CandidateSearcher, HistoryEntry, Ledger, RankedPlan, Searcher, SearchResult
from searchers.budget import Budget
from searchers.checked_search import UnfitResultError, checked_search
from searchers.registry import searcher_named
from searchers.scores import estimated
from simulator.plan import Plan
from simulator.problem import Problem
from tests.simulator.problems import small_problem

Change = Callable[[SearchResult], object]


class Spoiled(Searcher):
    """Megatron's grid, whose result is changed."""

    name = "spoiled"

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        found = searcher_named("megatron-grid").search(problem, budget or Budget(), seed)
        print("a word of the searcher")
        return self.change(found)  # type: ignore[return-value]


def leave(found: SearchResult) -> object:
    sys.exit(0)


def with_a_microbatch_too_many(found: SearchResult) -> SearchResult:
    plan = replace(found.best, num_microbatches=found.best.num_microbatches + 1)
    return replace(found, plans=(RankedPlan(plan, 1.0),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: None, r"must return a SearchResult \(ledger.result\(\) makes one\), got NoneType"),
        (lambda found: replace(found, plans=()), "must return at least one plan or raise NoFeasiblePlan, got none"),
        (lambda found: replace(found, plans=(found.best,)), "must return RankedPlans of plans, got Plan as plan 1"),
        (
            lambda found: replace(found, plans=(RankedPlan(found.best, float("nan")),)),
            "must give finite objectives, got nan for plan 1",
        ),
        (with_a_microbatch_too_many, "must return legal plans; of plan 1, the plan is not legal"),
        (
            lambda found: replace(found, history=(HistoryEntry(0.0, 1, float("inf")),)),
            "must give finite objectives, got inf in its history",
        ),
        (
            lambda found: replace(found, counters={"evaluations": float("inf")}),
            "must count in finite numbers, got inf for 'evaluations'",
        ),
        (lambda found: replace(found, counters={}), "must count its evaluations"),
        (
            lambda found: replace(found, plans=(RankedPlan(None, 1.0),)),
            "must return RankedPlans of plans, got a NoneType in",
        ),
        (
            lambda found: replace(found, plans=(RankedPlan(found.best, "1"),)),
            "must give finite objectives, got 1 for plan 1",
        ),
        (lambda found: replace(found, history=None), "must return a history of HistoryEntry, got None"),
        (lambda found: replace(found, counters=None), "must return counters by name"),
        (lambda found: replace(found, wall_s=float("nan")), "must return counters by name and finite seconds"),
        (leave, r"must return plans, but it left by sys.exit\(0\)"),
    ],
)
def test_what_is_no_result_is_refused_in_words(change: Change, message: str) -> None:
    problem = small_problem("gpt", global_batch=16)
    with pytest.raises(UnfitResultError, match=f"^spoiled {message}"):
        checked_search(Spoiled(change), problem, Budget(evaluations=50), 0)


def test_a_result_comes_back_as_it_is_and_standard_output_stays_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = small_problem("gpt", global_batch=16)
    found = checked_search(Spoiled(lambda found: found), problem, Budget(evaluations=50), 0)
    assert found.plans and found.searcher == "megatron-grid"
    assert capsys.readouterr().out == ""


def test_a_plan_that_fits_is_scored_by_a_finite_number() -> None:
    searcher = searcher_named(
        "megatron-grid", objective=lambda plan, problem: replace(estimated(plan, problem), objective=float("nan"))
    )
    with pytest.raises(ValueError, match="megatron-grid must score plans that fit by a finite number, got nan for "):
        searcher.search(small_problem("gpt", global_batch=16), Budget(evaluations=50))


def test_candidates_must_be_plans_and_scores_must_be_scores() -> None:
    class Careless(CandidateSearcher):
        name, paper = "careless", "none"

        def candidates(self, problem: Problem, random: Generator, ledger: Ledger) -> Iterator[Plan]:
            yield None  # type: ignore[misc]

    problem = small_problem("gpt", global_batch=16)
    with pytest.raises(UnfitResultError, match=r"^careless must yield plans as candidates, got NoneType$"):
        checked_search(Careless(), problem, Budget(evaluations=5), 0)
    scored: Any = lambda plan, problem: 1.0  # noqa: E731
    with pytest.raises(UnfitResultError, match=r"^megatron-grid must score plans by a Score .*, got float$"):
        checked_search(searcher_named("megatron-grid", objective=scored), problem, Budget(evaluations=5), 0)
