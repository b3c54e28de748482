"""Random search: what any cleverer searcher must beat with the same budget."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from searchers.base import CandidateSearcher, Ledger, SearchResult, check_least
from searchers.budget import Budget
from searchers.scores import Objective
from searchers.space import LayerSpace, Point
from simulator.plan import Plan
from simulator.problem import Problem

DEFAULT_EVALUATIONS = 500
"""Evaluations when no budget is given: under a second for most models."""

_MAX_TRIES = 1_000
"""Draws in a row without a new point before the space counts as exhausted."""


class RandomSearch(CandidateSearcher):
    """Scores points of `searchers.space.LayerSpace` drawn without repetition.

    Args:
        max_microbatch: Largest microbatch in samples per replica.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "random"
    paper = "none; the baseline of baselines"
    always_legal = True

    def __init__(
        self, *, max_microbatch: int = 8, objective: str | Objective = "paper", keep: int = 5
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, max_microbatch=max_microbatch)
        self.max_microbatch = max_microbatch

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Score random points until the budget or the space ends."""
        if budget is None or budget == Budget():
            budget = Budget(evaluations=DEFAULT_EVALUATIONS)
        return super().search(problem, budget, seed)

    def candidates(self, problem: Problem, random: np.random.Generator, ledger: Ledger) -> Iterator[Plan]:
        """Yield random points, none twice."""
        space = LayerSpace(problem, max_microbatch=self.max_microbatch)
        seen: set[Point] = set()
        tries = 0
        while tries < _MAX_TRIES and not ledger.spent:
            point = space.sample(random)
            tries += 1
            if point is None or point in seen:
                continue
            tries = 0
            seen.add(point)
            yield space.plan(point)
