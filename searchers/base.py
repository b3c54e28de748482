"""The contract of a searcher, and the ledger that keeps one honest.

A searcher is a class with a `name`, a `paper` and a method `search`. Most of the work around the idea
(scoring, counting, budget, history, the ranking, saying why nothing fits) is in `Ledger`; searchers that
merely list candidates subclass `CandidateSearcher` and write one method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import ClassVar, TypeGuard

import numpy as np

from hardware_models.gpus import DtypeError
from searchers.budget import Budget
from searchers.plan_words import describe_plan
from searchers.scores import OBJECTIVES, Objective, Score, estimated, simulated
from simulator.fast.estimate import compile_ahead
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.validate import validate

GIB = 2**30
LOWERED_BUDGETS = (0.97, 0.93, 0.88)
"""Shares of the memory that are looked at again: what an allocator loses is in no estimate. The best plan within each
comes after the others, unless these are known not to fit."""


@dataclass(frozen=True)
class HistoryEntry:
    """One improvement of the best plan (and the end of the search).

    Attributes:
        wall_s: Seconds since the search began.
        evaluations: Evaluations up to and including this one.
        best_objective: Best objective among plans that fit; seconds per iteration for most searchers.
    """

    wall_s: float
    evaluations: int
    best_objective: float


@dataclass(frozen=True)
class RankedPlan:
    """A plan and the objective that the searcher predicted for it."""

    plan: Plan
    objective: float


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        plans: Best first; at least one.
        history: The best objective over time, for convergence plots.
        counters: What the paper counts (evaluations, plans that did not fit, ...).
        searcher: Name of the searcher.
        seed: Seed it was given.
        wall_s: Seconds the search took.
    """

    plans: tuple[RankedPlan, ...]
    history: tuple[HistoryEntry, ...]
    counters: Mapping[str, int | float]
    searcher: str
    seed: int
    wall_s: float

    @property
    def best(self) -> Plan:
        """The plan the searcher recommends."""
        return self.plans[0].plan


class NoFeasiblePlan(ValueError):  # noqa: N818 (the name is part of the design)
    """The search ended without a plan. The message says which constraint failed, and how close it was.

    Attributes:
        searcher: Name of the searcher.
        message: What it says, without that name.
        closest: Score of the plan that came closest to fitting; None if no plan was even legal.
        closest_plan: That plan.
    """

    def __init__(
        self, searcher: str, message: str, closest: Score | None = None, closest_plan: Plan | None = None
    ) -> None:
        self.searcher = searcher
        self.message = message
        self.closest = closest
        self.closest_plan = closest_plan
        super().__init__(f"{searcher}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        """Return how another process makes it again."""
        return type(self), (self.searcher, self.message, self.closest, self.closest_plan)


class UnfitResultError(ValueError):
    """A searcher did not give what the contract asks for."""


def is_refusal(error: BaseException) -> TypeGuard[ValueError]:
    """Return whether a searcher said by an error that it does not apply: by a plain ValueError; others are accidents.

    So does the error of the cost tables, which every searcher asks, where the devices lack a dtype.

    >>> is_refusal(ValueError("needs four devices")), is_refusal(DtypeError("bf16", known=("fp16",)))
    (True, True)
    >>> is_refusal(UnfitResultError("no plan came back"))
    False
    """
    return type(error) in (ValueError, DtypeError)


def check_objective(name: str) -> None:
    """Raise ValueError unless there is an objective of that name."""
    check_one_of(OBJECTIVES, objective=name)


def check_least(least: float, **options: float | None) -> None:
    """Raise ValueError unless each option is a finite number of at least so much; None, where allowed, is none.

    >>> check_least(1, max_microbatch=0)
    Traceback (most recent call last):
    ValueError: max_microbatch must be at least 1, got 0
    """
    for name, value in options.items():
        if value is not None and not (value >= least and isfinite(value)):
            raise ValueError(f"{name} must be at least {least:g}, got {value}")


def check_one_of(allowed: Collection[object], **options: object) -> None:
    """Raise ValueError unless each option is one of ``allowed``.

    >>> check_one_of(("a", "b"), solver="c")
    Traceback (most recent call last):
    ValueError: solver must be one of a, b, got 'c'
    """
    for name, value in options.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


class Searcher(ABC):
    """Looks for a good plan in its own way.

    Args:
        objective: ``"paper"`` for the objective of the searcher's own paper, ``"simulator"`` for a full
            simulation of every candidate, or a function of plan and problem.
        keep: How many of the best plans to return; besides, the best within each of ``LOWERED_BUDGETS``.

    Attributes:
        ledger: The books of the latest search that opened any: what is left of a search that is interrupted.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    ledger: Ledger | None = None

    def __init__(self, *, objective: str | Objective = "paper", keep: int = 5) -> None:
        if isinstance(objective, str):
            check_objective(objective)
        check_least(1, keep=keep)
        self.objective = objective
        self.keep = keep

    @abstractmethod
    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Return the best plans found.

        Args:
            problem: What to plan for.
            budget: What may be spent; None for no limit.
            seed: Makes the search repeatable: with a budget in evaluations, same seed, same plan.

        Raises:
            NoFeasiblePlan: If no plan was found that is legal and fits the memory.
            ValueError: If the searcher does not apply to the problem.
        """

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score a plan as the searcher's own paper does; by default the closed form on the cost tables."""
        return estimated(plan, problem)

    def score(self, plan: Plan, problem: Problem) -> Score:
        """Score a plan by the objective chosen in the constructor."""
        if callable(self.objective):
            return self.objective(plan, problem)
        if self.objective == "simulator":
            return simulated(plan, problem)
        return self.paper_objective(plan, problem)


@dataclass
class Ledger:
    """The books of one search: scores plans, spends the budget, keeps the best and the nearest misses.

    Attributes:
        searcher: Whose search it is; gives the objective.
        problem: What is planned for.
        budget: What may be spent.
        seed: For the record.
        counters: Free for the searcher to add to.
    """

    searcher: Searcher
    problem: Problem
    budget: Budget = field(default_factory=Budget)
    seed: int = 0
    counters: dict[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.searcher.ledger = self
        if self.searcher.objective == "paper":  # Of a paper's own objective the memory is the estimate's.
            compile_ahead(self.problem)
        self.clock = self.budget.start()
        self._best: list[RankedPlan] = []
        self._spares: dict[float, RankedPlan] = {}
        self._history: list[HistoryEntry] = []
        self._seen: dict[Plan, float] = {}
        self._closest: tuple[float, Score, Plan] | None = None
        self._first_refusal: str | None = None
        self._chosen: Plan | None = None

    @property
    def spent(self) -> bool:
        """Whether the budget allows no further evaluation."""
        return self.clock.spent

    @property
    def best_objective(self) -> float:
        """Best objective so far among plans that fit; infinity before the first."""
        return self._best[0].objective if self._best else float("inf")

    def count(self, name: str, amount: int | float = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + amount

    def refuse(self, reason: object) -> None:
        """Note a combination that is no legal plan, and why."""
        self.count("illegal")
        self._first_refusal = self._first_refusal or str(reason)

    def is_legal(self, plan: Plan) -> bool:
        """Return whether a plan is legal; if it is not, note why."""
        try:
            validate(plan, self.problem)
        except ValueError as error:
            self.refuse(error)
            return False
        return True

    def evaluate(self, plan: Plan) -> Score:
        """Score a plan (one evaluation) and remember it."""
        # Not `spent`: time may run out between the searcher's question and this.
        assert not self.clock.all_evaluated, "ask ledger.spent before each evaluation"
        score = self.searcher.score(plan, self.problem)
        self.clock.evaluations += 1
        if not isinstance(score, Score):
            raise UnfitResultError(
                f"{self.searcher.name} must score plans by a Score of searchers.scores, got {type(score).__name__}"
            )
        if score.fits and not isfinite(score.objective):
            raise UnfitResultError(
                f"{self.searcher.name} must score plans that fit by a finite number, got {score.objective} for "
                f"{describe_plan(plan, self.problem.workload)}"
            )
        if not score.fits:
            self.count("out_of_memory")
            excess = score.peak_bytes - score.capacity_bytes
            if self._closest is None or excess < self._closest[0]:
                self._closest = (excess, score, plan)
        elif plan not in self._seen:
            improved = score.objective < self.best_objective
            self._seen[plan] = score.objective
            for share in LOWERED_BUDGETS:
                within = score.peak_bytes <= share * score.capacity_bytes
                if within and (share not in self._spares or score.objective < self._spares[share].objective):
                    self._spares[share] = RankedPlan(plan, score.objective)
            if not self._is_among_best(plan, score.objective):
                # Stable: of equals, the first found stays ahead, so that the result does not depend on hashing.
                self._best.append(RankedPlan(plan, score.objective))
                self._best.sort(key=lambda ranked: ranked.objective)
                del self._best[self.searcher.keep :]
            if improved:
                self._record()
        return score

    def _is_among_best(self, plan: Plan, objective: float) -> bool:
        """Return whether one of the best plans means the same, and is no better or worse."""
        equals = [ranked.plan for ranked in self._best if ranked.objective == objective]
        return bool(equals) and self._meaning(plan) in map(self._meaning, equals)

    def _meaning(self, plan: Plan) -> Plan:
        """Return a plan that those share which differ in spelling, or in how gradients of one replica are reduced."""
        canonical = plan.canonical(self.problem.workload)
        splits = {axis.split for stage in canonical.stages for _, own in stage.shardings for axis in own}
        if any(split == "batch" or "sequence" in split for split in splits):  # Gradients are partial sums.
            return canonical
        return replace(canonical, gradient_reduction="last", overlap_gradient_sync=True)

    def choose(self, plan: Plan) -> None:
        """Recommend a plan that fits by a rule of the paper, whether or not its objective is the best."""
        assert plan in self._seen, "only an evaluated plan that fits can be chosen"
        self._chosen = plan

    def _record(self) -> None:
        self._history.append(HistoryEntry(self.clock.wall_s, self.clock.evaluations, self.best_objective))

    def result(self) -> SearchResult:
        """Close the books.

        Raises:
            NoFeasiblePlan: If no evaluated plan fits.
        """
        if not self._best:
            raise self._no_feasible_plan()
        self._record()
        plans = self._best
        if self._chosen is not None:
            chosen = RankedPlan(self._chosen, self._seen[self._chosen])
            others = [ranked for ranked in self._best if ranked.plan != self._chosen]
            plans = [chosen, *others][: self.searcher.keep]
        spares = (self._spares[share] for share in LOWERED_BUDGETS if share in self._spares)
        return SearchResult(
            plans=tuple(dict.fromkeys((*plans, *spares))),
            history=tuple(self._history),
            counters={"evaluations": self.clock.evaluations, **self.counters},
            searcher=self.searcher.name,
            seed=self.seed,
            wall_s=self.clock.wall_s,
        )

    def _no_feasible_plan(self) -> NoFeasiblePlan:
        tried = self.clock.evaluations
        if self._closest is None:
            reason = self._first_refusal or ("the budget ended first" if self.spent else "the space is empty")
            return NoFeasiblePlan(self.searcher.name, f"no legal plan; {reason}")
        _, score, plan = self._closest
        within = f" within {self.budget}" if self.spent else ""
        plans = "the only plan does not fit" if tried == 1 else f"none of {tried} plans fits"
        return NoFeasiblePlan(
            self.searcher.name,
            f"out of memory: {plans} in memory{within}; the closest needs {score.peak_bytes / GIB:.1f} of "
            f"{max(0.0, score.capacity_bytes) / GIB:.1f} GiB at {score.where} "
            f"({describe_plan(plan, self.problem.workload)})",
            closest=score,
            closest_plan=plan,
        )


class CandidateSearcher(Searcher):
    """A searcher that lists candidates; each legal one is scored, in order, until the list or budget ends.

    Attributes:
        always_legal: Candidates are legal by construction and need no check.
    """

    always_legal: ClassVar[bool] = False

    @abstractmethod
    def candidates(self, problem: Problem, random: np.random.Generator, ledger: Ledger) -> Iterator[Plan]:
        """Yield plans to score.

        Args:
            problem: What to plan for.
            random: Seeded generator; the only source of chance.
            ledger: For ``ledger.refuse(reason)`` on combinations that are not legal, and for counters.
        """

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Score the candidates and return the best."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        for plan in self.candidates(problem, np.random.default_rng(seed), ledger):
            if ledger.spent:
                break
            if not isinstance(plan, Plan):
                raise UnfitResultError(f"{self.name} must yield plans as candidates, got {type(plan).__name__}")
            if self.always_legal or ledger.is_legal(plan):
                ledger.evaluate(plan)
        return ledger.result()
