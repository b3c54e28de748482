"""Galvatron's variants as searchers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import Any, ClassVar, NamedTuple

from datafiles.words import counted
from searchers.base import LOWERED_BUDGETS, Ledger, Searcher, SearchResult
from searchers.budget import Budget
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import SCHEDULES, Options
from searchers.galvatron.pipeline_plan import ATTEMPTS, PipelinePlan
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import from_plan, to_plan
from searchers.galvatron.strategies import DATA, TENSOR
from searchers.scores import Objective, Score, estimated
from simulator.costs import cost_tables
from simulator.plan import Plan
from simulator.problem import Problem

BASE = Options(partition="base", schedule="gpipe", microbatches="table")

@lru_cache(maxsize=4)
def planner_for(problem: Problem, options: Options) -> Planner:
    """Return the planner of a problem, shared by search and scoring."""
    return Planner(problem, options, cost_tables(problem))


class _Candidate(NamedTuple):
    """A plan to evaluate; of equally fast ones the first found comes first.

    Attributes:
        iteration_time_s, plan: By the planner.
        number: Of those found.
        lowered: How often the budget was, before it was found; ``ATTEMPTS`` if it is not to be lowered.
    """

    iteration_time_s: float
    number: int
    plan: PipelinePlan
    lowered: int


class Galvatron(Searcher):
    """Common to all variants: Algorithm 1 or 2 on one batch; Eq. 9 is the objective.

    Args:
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return; see `searchers.base.Searcher`.
        choices: Fields of `searchers.galvatron.options.Options` that differ from the variant's.
    """

    paper = "Galvatron-BMW, TKDE 2024"
    variant: ClassVar[Options] = Options()

    def __init__(self, *, objective: str | Objective = "paper", keep: int = 5, **choices: Any) -> None:
        super().__init__(objective=objective, keep=keep)
        unknown = set(choices) - set(Options.__dataclass_fields__)
        if unknown:
            known = ", ".join(Options.__dataclass_fields__)
            raise ValueError(f"options of {self.name} are {known}, got {min(unknown)!r}")
        self.options = replace(self.variant, **choices)

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Return the best plans over pipeline degrees, microbatches and partitions. Nothing is random."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        planner = planner_for(problem, self.options)
        found: list[PipelinePlan] = []
        for plan in planner.plans(problem.global_batch):
            found.append(plan)
            if ledger.spent:
                break
        ledger.counters["partitions"] = planner.num_partitions
        ledger.counters["stage_searches"] = sum(each.num_searches for each in planner.searches.values())
        best = self._evaluate(ledger, planner, found)
        for share in LOWERED_BUDGETS:
            if best is None or ledger.spent:
                break
            budget_bytes = share * found[0].capacity_bytes
            if best.peak_bytes <= budget_bytes:
                continue
            lowered = self._under(planner, budget_bytes).best(problem.global_batch)
            if lowered is not None:
                self._score(ledger, to_plan(lowered, problem))
        if ledger.best_objective == float("inf") and not ledger.spent:
            leanest = planner.leanest(problem.global_batch)
            if leanest is None:
                ledger.refuse(
                    f"no strategy cuts {counted(problem.global_batch, 'sample')} over "
                    f"{counted(problem.num_devices, 'device')}"
                )
            else:
                self._score(ledger, to_plan(leanest, problem))
        return ledger.result()

    def _evaluate(self, ledger: Ledger, planner: Planner, found: list[PipelinePlan]) -> PipelinePlan | None:
        """Evaluate plans, the best first, until enough fit; return the first that does, else the best.

        Eq. 2 leaves something out. As long as no plan fits, one that does not calls for those of its degree under a
        budget lower by what was missing, and the first for all pure ones.
        """
        batch, numbers = ledger.problem.global_batch, count()
        queue: list[_Candidate] = []

        def add(plans: Iterable[PipelinePlan], lowered: int) -> None:
            for plan in plans:
                heappush(queue, _Candidate(plan.iteration_time_s, next(numbers), plan, lowered))

        add(found, 0)
        first = queue[0].plan if queue else None
        scores: dict[Plan, Score | None] = {}
        searched: set[tuple[int, int]] = set()
        fitting = 0
        while queue and fitting < self.keep and not ledger.spent:
            _, _, own, lowered = heappop(queue)
            plan = to_plan(own, ledger.problem)
            known = plan in scores
            if fitting and (known or lowered == ATTEMPTS):
                continue
            score = scores[plan] if known else self._score(ledger, plan)
            scores[plan] = score
            if score is None:
                continue
            if score.fits:
                first = own if not fitting else first
                fitting += 1
            elif not fitting and lowered < ATTEMPTS:
                if not searched and not self.options.paper:
                    add(planner.pure(batch, dict.fromkeys(each.partition for each in found)), ATTEMPTS)
                degree = len(own.stages)
                if (degree, lowered) not in searched:
                    searched.add((degree, lowered))
                    budget = own.lowered_budget_bytes(score.peak_bytes - score.capacity_bytes)
                    add(self._under(planner, budget).plans(batch, degree), lowered + 1)
        return first

    def _under(self, planner: Planner, budget_bytes: float) -> Planner:
        return Planner(planner.problem, self.options, budget_bytes=budget_bytes, profiles=planner.profiles)

    @staticmethod
    def _score(ledger: Ledger, plan: Plan) -> Score | None:
        """Return what the objective says of a plan, None if it is not legal."""
        return ledger.evaluate(plan) if ledger.is_legal(plan) else None

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score by Eq. 9 and Eq. 2; plans that are not in Galvatron's words by the shared closed form.

        A plan must also fit by the shared closed form, which counts what Eq. 2 leaves out.
        """
        shared = estimated(plan, problem)
        assessed = assess(plan, problem, self.options)
        if assessed is None:
            return shared
        fullest = max(range(len(assessed.stages)), key=lambda stage: assessed.stages[stage].peak_bytes)
        if assessed.fits and not shared.fits:
            return replace(shared, objective=assessed.iteration_time_s)
        return Score(
            objective=assessed.iteration_time_s,
            fits=assessed.fits,
            peak_bytes=assessed.peak_bytes,
            capacity_bytes=assessed.capacity_bytes,
            where=f"stage {fullest}",
        )


def assess(plan: Plan, problem: Problem, options: Options | None = None) -> PipelinePlan | None:
    """Return what Galvatron's estimator says of a plan, or None where it has no words for it."""
    options = options or Options()
    if plan.schedule not in SCHEDULES or plan.rotates or (options.time == "released" and plan.schedule != "gpipe"):
        return None
    planner = planner_for(problem, replace(options, schedule=plan.schedule))
    stages = from_plan(plan, planner.profiles.layers)
    if stages is None:
        return None
    search = planner.degree_search(len(stages))
    devices = problem.num_devices // len(stages)
    if search is None or any(strategy.num_devices != devices for _, chosen in stages for strategy in chosen):
        return None
    cut = Cut(plan.num_microbatches, plan.microbatch_size, plan.last_microbatch_size)
    return search.assess(
        [layers for layers, _ in stages], [chosen for _, chosen in stages], plan.global_batch, cut
    )


class GalvatronBMW(Galvatron):
    """Galvatron-BMW: all five dimensions, pipelines balanced in time and memory (Algorithm 2), 1F1B."""

    name = "galvatron-bmw"


class GalvatronFreeMicrobatches(Galvatron):
    """Galvatron-BMW with any number of microbatches that divides the batch, where the release follows a rule."""

    name = "galvatron-bmw-free"
    variant = Options(microbatches="free")


class GalvatronBase(Galvatron):
    """Galvatron-Base: all five dimensions, the release's partition (Algorithm 1), GPipe."""

    name = "galvatron-base"
    variant = BASE


class GalvatronPlain(Galvatron):
    """Galvatron without activation checkpointing (the conference version)."""

    name = "galvatron"
    variant = replace(BASE, checkpoint=False)


class GalvatronDataTensor(Galvatron):
    """Galvatron restricted to data and tensor parallelism."""

    name = "galvatron-dp-tp"
    variant = replace(BASE, checkpoint=False, kinds=(DATA, TENSOR), pipeline=False)


class GalvatronDataPipeline(Galvatron):
    """Galvatron restricted to data and pipeline parallelism."""

    name = "galvatron-dp-pp"
    variant = replace(BASE, checkpoint=False, kinds=(DATA,))


class GalvatronMemoryBalanced(Galvatron):
    """Galvatron (1F1B+Mem): no checkpointing, memory-balanced pipelines."""

    name = "galvatron-1f1b-mem"
    variant = Options(checkpoint=False, partition="memory", microbatches="formula")


class GalvatronTimeBalanced(Galvatron):
    """Galvatron (1F1B+Time): no checkpointing, time-balanced pipelines."""

    name = "galvatron-1f1b-time"
    variant = Options(checkpoint=False, partition="time", microbatches="formula")


class GalvatronBiObjective(Galvatron):
    """Galvatron (1F1B+Bi-obj): BMW without checkpointing."""

    name = "galvatron-1f1b-bi"
    variant = Options(checkpoint=False, microbatches="formula")


VARIANTS: dict[str, type[Galvatron]] = {
    each.name: each
    for each in (
        GalvatronBMW,
        GalvatronFreeMicrobatches,
        GalvatronBase,
        GalvatronPlain,
        GalvatronDataTensor,
        GalvatronDataPipeline,
        GalvatronMemoryBalanced,
        GalvatronTimeBalanced,
        GalvatronBiObjective,
    )
}


def variant_options(name: str) -> Options:
    """Return the options of a variant by its searcher's name.

    >>> variant_options("galvatron-dp-pp").kinds
    ('dp',)
    """
    return VARIANTS[name].variant
