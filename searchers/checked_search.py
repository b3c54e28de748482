"""The border to a searcher: it searches, and what it returns is checked, whoever wrote it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

import numpy as np

from searchers.base import HistoryEntry, RankedPlan, Searcher, SearchResult, UnfitResultError
from searchers.budget import Budget
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.validate import validate


def checked_search(searcher: Searcher, problem: Problem, budget: Budget, seed: int) -> SearchResult:
    """Search, and return what is sure to be a result: legal plans, and finite numbers.

    What the searcher prints goes to standard error: standard output is the command's.

    Raises:
        NoFeasiblePlan: If no plan was found that is legal and fits the memory.
        UnfitResultError: If something else came back; says what.
        ValueError: If the searcher does not apply to the problem.
    """
    with redirect_stdout(sys.stderr):
        try:
            found = searcher.search(problem, budget, seed)
        except SystemExit as error:
            raise UnfitResultError(
                f"{searcher.name} must return plans, but it left by sys.exit({error.code})"
            ) from None
    _check(found, searcher.name, problem)
    return found


def _check(found: object, name: str, problem: Problem) -> None:
    if not isinstance(found, SearchResult):
        raise UnfitResultError(
            f"{name} must return a SearchResult (ledger.result() makes one), got {type(found).__name__}"
        )
    if not found.plans:
        raise UnfitResultError(f"{name} must return at least one plan or raise NoFeasiblePlan, got none")
    for rank, ranked in enumerate(found.plans, start=1):
        if not isinstance(ranked, RankedPlan) or not isinstance(ranked.plan, Plan):
            kind = f"a {type(ranked.plan).__name__} in one" if isinstance(ranked, RankedPlan) else type(ranked).__name__
            raise UnfitResultError(f"{name} must return RankedPlans of plans, got {kind} as plan {rank}")
        if not _is_finite(ranked.objective):
            raise UnfitResultError(f"{name} must give finite objectives, got {ranked.objective} for plan {rank}")
        try:
            validate(ranked.plan, problem)
        except ValueError as error:
            raise UnfitResultError(f"{name} must return legal plans; of plan {rank}, {error}") from error
    if not isinstance(found.history, tuple) or not all(isinstance(entry, HistoryEntry) for entry in found.history):
        raise UnfitResultError(f"{name} must return a history of HistoryEntry, got {found.history!r:.100}")
    for entry in found.history:
        if not _is_finite(entry.best_objective):
            raise UnfitResultError(f"{name} must give finite objectives, got {entry.best_objective} in its history")
    if not isinstance(found.counters, Mapping) or not _is_finite(found.wall_s):
        raise UnfitResultError(f"{name} must return counters by name and finite seconds, got {found.counters!r:.100}")
    for counter, count in found.counters.items():
        if not _is_finite(count):
            raise UnfitResultError(f"{name} must count in finite numbers, got {count!r} for {counter!r}")
    if "evaluations" not in found.counters:
        raise UnfitResultError(f"{name} must count its evaluations, got counters {sorted(found.counters)}")


def _is_finite(value: object) -> bool:
    """Return whether a value is a finite number, Python's or NumPy's."""
    return isinstance(value, (int, float, np.number)) and math.isfinite(value)
