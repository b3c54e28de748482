"""Aceso as a searcher."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import ClassVar, NamedTuple

from datafiles.words import counted
from searchers.aceso.configuration import to_plan
from searchers.aceso.equation_searcher import EquationSearcher, score_of
from searchers.aceso.multihop import SearchOptions, StageCountSearch
from searchers.aceso.stage_counts import Round, search_stage_counts, stage_counts_of
from searchers.aceso.warm_up import warm_up
from searchers.base import (
    GIB,
    LOWERED_BUDGETS,
    HistoryEntry,
    Ledger,
    NoFeasiblePlan,
    RankedPlan,
    SearchResult,
    check_least,
)
from searchers.budget import Budget
from searchers.plan_words import describe_plan
from searchers.scores import Objective, estimated
from simulator.compiled_cache import moment_s
from simulator.costs import cost_tables
from simulator.fast.estimate import compile_ahead
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.validate import validate

DEFAULT_BUDGET = Budget(evaluations=2000)
JUDGED_FACTOR = 3
WORTH_PROCESSES_S = 2.0
"""From this budget on, starting processes pays."""


class _Began(NamedTuple):
    """When a search began: by the clock that its processes share, and by the one that compiling stops."""

    counter_s: float
    moment_s: float

    @property
    def passed_s(self) -> float:
        """Seconds since then, but for those of compiling."""
        return moment_s() - self.moment_s


class Aceso(EquationSearcher):
    """Aceso: alleviates one bottleneck at a time by primitives that trade resources, for every stage count.

    Args:
        compat: ``paper`` for the paper's performance model on the shared cost tables; ``release`` for what the
            public code computes from its profile.
        max_hops: Longest chain of primitives in one iteration.
        heuristic_2: Order primitives by Heuristic 2; else at random.
        borders: How inc/dec-op# choose their arguments: ``all`` borders at once to where the pipeline is fastest,
            attached to every primitive, or ``relay``: the paper's.
        recompute: How recomputed operators are chosen: ``cheapest``, ``largest`` (the paper's) or ``worth``.
        initial: Start configuration: ``balanced``, ``imbalance-op`` or ``imbalance-gpu``.
        uniform_starts: Begin with the same stages at every uniform degree and microbatch too (the paper does not).
        exchanges: Let degrees inside a stage trade places as one primitive; the paper's partners are other stages.
        iteration_evaluations: After so many evaluations an iteration counts as failed; None for no limit (the paper).
        fine_tunes: Tune degrees and partitions inside stages.
        breadth: Argument choices of one primitive priced in full.
        largest_samples: Largest samples per GPU and microbatch (the paper's model); None for the largest that Aceso
            profiled: 8 of text, 64 of images.
        stage_counts: Pipeline depths; all by default.
        races: Drop the worse half of the stage counts round by round.
        judge: The best so many plans are simulated, and the fastest comes first; where none of them fits there, so are
            those found that leave more memory. After a budget's seconds the first that fits is the last. 0: none.
        workers: Processes; None for all cores where the budget is long enough. One in a process of a pool (a sweep's).
        objective, keep: As every searcher.
    """

    name: ClassVar[str] = "aceso"
    paper: ClassVar[str] = (
        "Liu et al., Aceso: Efficient Parallel DNN Training through Iterative Bottleneck Alleviation, EuroSys 2024"
    )

    def __init__(
        self,
        *,
        compat: str = "paper",
        max_hops: int = 7,
        heuristic_2: bool = True,
        borders: str = "all",
        recompute: str = "cheapest",
        initial: str = "balanced",
        uniform_starts: bool = True,
        exchanges: bool = True,
        iteration_evaluations: int | None = 120,
        fine_tunes: bool = True,
        breadth: int = 3,
        largest_samples: int | None = None,
        stage_counts: tuple[int, ...] | None = None,
        races: bool = True,
        judge: int = 3,
        workers: int | None = None,
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(
            compat=compat, recompute=recompute, largest_samples=largest_samples, objective=objective, keep=keep
        )
        if borders not in ("all", "relay"):
            raise ValueError(f"borders must be all or relay, got {borders!r}")
        check_least(0, judge=judge)
        check_least(
            1,
            max_hops=max_hops,
            breadth=breadth,
            largest_samples=largest_samples,
            iteration_evaluations=iteration_evaluations,
            workers=workers,
        )
        self.stage_counts = stage_counts
        self.races = races
        self.judge = judge
        self.workers = workers
        self.options = SearchOptions(
            max_hops=max_hops,
            heuristic_2=heuristic_2,
            balances=borders == "all",
            breadth=breadth,
            initial=initial,
            uniform_starts=uniform_starts,
            exchanges=exchanges,
            iteration_evaluations=iteration_evaluations,
            fine_tunes=fine_tunes,
        )
        self.searches: list[StageCountSearch] = []

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Search every stage count within the budget (2,000 evaluations if None) and return the best plans.

        Raises:
            NoFeasiblePlan: If no configuration was found that fits.
            ValueError: If an option does not suit the problem.
        """
        warm_up()
        if self.compat == "paper":
            compile_ahead(problem)
        began = _Began(time.perf_counter(), moment_s())
        budget = budget or DEFAULT_BUDGET
        model = self.model(problem)
        counts = stage_counts_of(model)
        if self.stage_counts is not None:
            counts = [count for count in counts if count in self.stage_counts]
        if not counts:
            devices = counted(problem.num_devices, "device")
            raise NoFeasiblePlan(self.name, f"no legal plan; {devices} cannot be dealt to stages")
        if budget.evaluations is not None:
            counts = sorted(counts, key=lambda count: (count != min(counts), count))
        left = budget
        if budget.seconds is not None:
            left = Budget(max(1e-9, budget.seconds - began.passed_s), budget.evaluations)
        self.searches = [StageCountSearch(count, self.options, seed) for count in counts]
        self.ledger = None
        try:
            rounds = search_stage_counts(
                model, self.searches, left, workers=self._processes(budget), races=self.races
            )
        except KeyboardInterrupt:
            self._keep(problem, seed)
            raise
        return self._result(problem, rounds, began, seed, budget)

    def _keep(self, problem: Problem, seed: int) -> None:
        """Book what an interrupted search has found: of processes, what they had at the end of the last round."""
        ledger = Ledger(self, problem, seed=seed)
        for each in self._ranked(problem, None):
            ledger.evaluate(each.plan)

    def _processes(self, budget: Budget) -> int:
        if multiprocessing.parent_process() is not None:
            return 1  # It can have no pool, and the others have the cores.
        if self.workers is not None:
            return self.workers
        long = budget.seconds is not None and budget.seconds >= WORTH_PROCESSES_S
        return (os.cpu_count() or 1) if long else 1

    def _result(
        self,
        problem: Problem,
        rounds: list[Round],
        began: _Began,
        seed: int,
        budget: Budget,
    ) -> SearchResult:
        evaluations = sum(search.evaluations for search in self.searches)
        counters = {**self._counters(), "evaluations": evaluations, "rounds": len(rounds)}
        end_s = None if budget.seconds is None else began.moment_s + budget.seconds
        found = (self._ranked(problem, end_s, share) for share in (1.0, *LOWERED_BUDGETS))
        ranked = next((plans for plans in found if plans), [])
        if not ranked:
            raise self._nothing(problem, evaluations)
        if self.judge:
            ranked, fits = self._judged(ranked, problem, end_s)
            for share in LOWERED_BUDGETS:
                lower = [] if fits else [each for each in self._ranked(problem, end_s, share) if each not in ranked]
                if lower:
                    lower, fits = self._judged(lower, problem, end_s)
                    ranked = [*lower, *ranked] if fits else ranked
        ranked = ranked[: self.keep]
        history = self._history(rounds, began, evaluations, min(plan.objective for plan in ranked))
        return SearchResult(tuple(ranked), history, counters, self.name, seed, history[-1].wall_s)

    def _ranked(self, problem: Problem, end_s: float | None, share: float = 1.0) -> list[RankedPlan]:
        """Return the best plans that are legal and fit a share of their limit; after ``end_s`` the first is enough."""
        wanted = max(self.keep, JUDGED_FACTOR * self.judge)
        configurations = [item for search in self.searches for item in search.top(4 * wanted, share)]
        configurations.sort(key=lambda item: item[1].iteration_s)
        ranked: dict[Plan, RankedPlan] = {}
        for configuration, price in configurations:
            late = end_s is not None and moment_s() > end_s
            if len(ranked) >= wanted or (late and ranked):
                break
            plan = validate(to_plan(configuration, price.flags, problem), problem)
            if plan in ranked:
                continue
            score = self.score(plan, problem)
            if not score.fits or (self.compat == "paper" and not estimated(plan, problem).fits):
                continue
            ranked[plan] = RankedPlan(plan, score.objective)
        return sorted(ranked.values(), key=lambda each: each.objective)[:wanted]

    def _judged(
        self, ranked: list[RankedPlan], problem: Problem, end_s: float | None
    ) -> tuple[list[RankedPlan], bool]:
        """Return the plans with the one first that simulates fastest, of those that fit there, and whether one does.

        Plans are simulated in order until ``judge`` fit (after ``end_s`` one), at most three times ``judge``.
        """
        verdicts: list[tuple[bool, float, int]] = []
        for place, each in enumerate(ranked[: JUDGED_FACTOR * self.judge]):
            found = simulate(each.plan, problem, costs=cost_tables(problem), engine="compiled")
            verdicts.append((not found.fits, found.iteration_time_s, place))
            late = end_s is not None and moment_s() > end_s
            if sum(not misses for misses, _, _ in verdicts) >= (1 if late else self.judge):
                break
        misses, _, best = min(verdicts)
        return [ranked[best], *(each for place, each in enumerate(ranked) if place != best)], not misses

    def _history(
        self, rounds: list[Round], began: _Began, evaluations: int, best: float
    ) -> tuple[HistoryEntry, ...]:
        """Return the best iteration time over time, and over what all stage counts had spent by then."""
        told = [
            (moment, place, spent, found)
            for place, search in enumerate(self.searches)
            for moment, spent, found in (
                *search.statistics.improvements,
                *((moment, spent, float("inf")) for moment, spent in search.statistics.ends),
            )
        ]
        entries: list[HistoryEntry] = []
        spent_of = [0] * len(self.searches)
        for moment, place, spent, found in sorted(told):
            spent_of[place] = spent
            if found < (entries[-1].best_objective if entries else float("inf")):
                entries.append(HistoryEntry(moment - began.counter_s, sum(spent_of), max(found, best)))
        end_s = max(began.passed_s, entries[-1].wall_s if entries else 0.0)
        return (*entries, HistoryEntry(end_s, evaluations, best))

    def _counters(self) -> dict[str, int | float]:
        statistics = [search.statistics for search in self.searches]
        tried = [number for each in statistics for number in each.bottlenecks_tried]
        hops = [number for each in statistics for number in each.hops]
        counters: dict[str, int | float] = {
            "stage_counts": len(self.searches),
            "stages_priced": sum(search.stages_priced for search in self.searches),
            "iterations_improved": len(tried),
            "iterations_failed": sum(each.failures for each in statistics),
            "first_bottleneck_right": sum(number == 1 for number in tried),
            "more_than_one_hop": sum(number > 1 for number in hops),
        }
        return counters

    def _nothing(self, problem: Problem, evaluations: int) -> NoFeasiblePlan:
        closest = min(
            (search.best for search in self.searches if search.best is not None),
            key=lambda found: found[1].memory_bytes - found[1].limit_bytes,
            default=None,
        )
        if closest is None:
            return NoFeasiblePlan(self.name, "no legal plan; the budget ended first")
        configuration, price = closest
        plan = to_plan(configuration, price.flags, problem)
        return NoFeasiblePlan(
            self.name,
            f"out of memory: none of {counted(evaluations, 'configuration fits', 'configurations fits')} in memory; "
            f"the closest needs {price.memory_bytes / GIB:.1f} of {max(0.0, price.limit_bytes) / GIB:.1f} GiB "
            f"({describe_plan(plan)})",
            closest=score_of(price),
            closest_plan=plan,
        )
