"""Galvatron's variants as searchers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

from searchers.base import LOWERED_BUDGETS, Ledger, Objective, Score, Searcher, SearchResult, cost_tables, estimated
from searchers.budget import Budget
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import SCHEDULES, Options
from searchers.galvatron.pipeline_plan import PipelinePlan
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import from_plan, to_plan
from searchers.galvatron.strategies import DATA, TENSOR
from simulator.plan import Plan
from simulator.problem import Problem

BASE = Options(partition="base", schedule="gpipe", microbatches="table")

@lru_cache(maxsize=4)
def planner_for(problem: Problem, options: Options) -> Planner:
    """Return the planner of a problem, shared by search and scoring."""
    return Planner(problem, options, cost_tables(problem))


class Galvatron(Searcher):
    """Common to all variants: Algorithm 1 or 2 on one batch; Eq. 9 is the objective.

    Args:
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return; besides, the best of each lower budget.
        choices: Fields of `searchers.galvatron.options.Options` that differ from the variant's.
    """

    paper = "Galvatron-BMW, TKDE 2024"
    variant: ClassVar[Options] = Options()

    def __init__(self, *, objective: str | Objective = "paper", keep: int = 5, **choices: Any) -> None:
        super().__init__(objective=objective, keep=keep)
        self.num_whole, self.keep = keep, keep + len(LOWERED_BUDGETS)
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
        found.sort(key=lambda plan: plan.iteration_time_s)
        self._evaluate(ledger, problem, found)
        for share in LOWERED_BUDGETS if found else ():
            budget_bytes = share * found[0].capacity_bytes
            if ledger.spent:
                break
            if found[0].peak_bytes <= budget_bytes:
                continue
            lower = Planner(problem, self.options, budget_bytes=budget_bytes, profiles=planner.profiles)
            best = lower.best(problem.global_batch)
            self._evaluate(ledger, problem, [best] if best is not None else [])
        if ledger.best_objective == float("inf") and not ledger.spent:
            leanest = planner.leanest(problem.global_batch)
            if leanest is None:
                ledger.refuse(f"no strategy cuts {problem.global_batch} samples over {problem.num_devices} devices")
            else:
                self._evaluate(ledger, problem, [leanest])
        return ledger.result()

    def _evaluate(self, ledger: Ledger, problem: Problem, found: list[PipelinePlan]) -> None:
        fitting = 0
        for plan in dict.fromkeys(to_plan(each, problem) for each in found):
            if ledger.spent or fitting >= self.num_whole:
                return
            if ledger.is_legal(plan):
                fitting += ledger.evaluate(plan).fits

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
