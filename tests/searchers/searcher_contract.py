"""What every searcher must keep. Subclass, name the searcher, and run pytest.

Example:
    class TestMine(SearcherContract):
        searcher = "path/to/mine.py:Mine"
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import pytest

from searchers.base import NoFeasiblePlan, Searcher, SearchResult
from searchers.budget import Budget
from searchers.exhaustive import Exhaustive
from searchers.registry import searcher_named
from searchers.space import LayerSpace
from simulator.closed_forms.estimate import estimate
from simulator.problem import Problem
from simulator.validate import validate
from tests.searchers.tiny import tiny_problem

ENOUGH = Budget(evaluations=40)


class SearcherContract:
    """The tests; `searcher` is a registered name or ``path.py:Class``.

    Attributes:
        searcher: What is tested.
        options: Arguments of its constructor.
        num_devices: Of the tiny problem; some strategies need more than the default.
    """

    searcher: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    num_devices: ClassVar[int] = 2

    def make(self) -> Searcher:
        """Return a fresh searcher."""
        return searcher_named(self.searcher, **self.options)

    @pytest.fixture
    def problem(self) -> Problem:
        """Return the tiny problem."""
        return tiny_problem(self.num_devices)

    @pytest.fixture
    def found(self, problem: Problem) -> SearchResult:
        """Return what the searcher finds on it."""
        return self.make().search(problem, ENOUGH, seed=1)

    def test_every_plan_is_legal_and_fits(self, problem: Problem, found: SearchResult) -> None:
        for ranked in found.plans:
            validate(ranked.plan, problem)
            assert estimate(ranked.plan, problem).fits

    def test_plans_are_distinct_and_the_history_ends_at_the_best(self, found: SearchResult) -> None:
        plans = [ranked.plan for ranked in found.plans]
        assert len(set(plans)) == len(plans)
        assert found.history[-1].best_objective == min(ranked.objective for ranked in found.plans)

    def test_history_only_improves(self, found: SearchResult) -> None:
        entries = list(found.history)
        assert entries
        for before, after in pairwise(entries):
            assert after.best_objective <= before.best_objective
            assert after.evaluations >= before.evaluations
            assert after.wall_s >= before.wall_s

    def test_same_seed_gives_the_same_plans(self, problem: Problem, found: SearchResult) -> None:
        again = self.make().search(problem, ENOUGH, seed=1)
        assert [ranked.plan for ranked in again.plans] == [ranked.plan for ranked in found.plans]

    @pytest.mark.parametrize("evaluations", [1, 3, 10])
    def test_the_budget_is_kept(self, problem: Problem, evaluations: int) -> None:
        try:
            found = self.make().search(problem, Budget(evaluations=evaluations))
        except NoFeasiblePlan:
            return
        assert 1 <= found.counters["evaluations"] <= evaluations

    def test_it_stops_when_time_is_up(self, problem: Problem) -> None:
        try:
            found = self.make().search(problem, Budget(seconds=1e-9))
        except NoFeasiblePlan:
            return
        assert found.counters["evaluations"] <= 1

    def test_the_objective_is_what_it_says_of_its_plan(self, problem: Problem, found: SearchResult) -> None:
        searcher = self.make()
        for ranked in found.plans:
            assert ranked.objective == searcher.score(ranked.plan, problem).objective

    def test_it_is_never_better_than_exhaustive_search_in_the_same_space(
        self, problem: Problem, found: SearchResult
    ) -> None:
        space = LayerSpace(problem)
        best = Exhaustive().search(problem).plans[0].objective
        for ranked in found.plans:
            if space.contains(ranked.plan):
                assert estimate(ranked.plan, problem).iteration_time_s >= best * (1 - 1e-12)

    def test_without_memory_it_says_what_failed_and_how_close_it_came(self) -> None:
        with pytest.raises(NoFeasiblePlan, match=r"memory.*GiB") as caught:
            self.make().search(tiny_problem(self.num_devices, 4, 10**9), ENOUGH)
        assert caught.value.closest is not None
        assert caught.value.closest.peak_bytes > caught.value.closest.capacity_bytes

    def test_it_says_where_it_comes_from(self) -> None:
        searcher = self.make()
        assert searcher.name
        assert searcher.paper
        assert type(searcher).__doc__
