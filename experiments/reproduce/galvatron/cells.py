"""One cell of the paper's tables: a strategy's throughput within a memory budget.

The budget is the paper's planner's, by its memory model; time is the simulator's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from experiments.cases.galvatron_budget import largest_batch
from experiments.cases.galvatron_table2 import PURE, Run, planner_options
from searchers.galvatron.judged import Judged, judged_exploration, judged_plan
from searchers.plan_words import describe_plan
from simulator.simulate import simulate

FIXED = (*PURE, "deepspeed-3d")
STARTS_FROM = {
    "galvatron-1f1b-mem": "galvatron", "galvatron-1f1b-time": "galvatron", "galvatron-1f1b-bi": "galvatron",
    "galvatron-bmw": "galvatron-base",
}  # fmt: skip
"""Whose result is the incumbent of Algorithm 2: another schedule, and another rule of microbatches."""
GROWTH = 0.12
"""Batches beyond 64 grow by about this share: throughput is flat there."""

TITLES = {
    "ddp": "PyTorch DDP (DP)",
    "megatron-tp": "Megatron (TP)",
    "gpipe": "PyTorch GPipe (PP)",
    "fsdp": "FSDP/ZeRO-3 (SDP)",
    "deepspeed-3d": "DeepSpeed 3D",
    "alpa": "Alpa",
    "galvatron-dp-tp": "Galvatron (DP+TP)",
    "galvatron-dp-pp": "Galvatron (DP+PP)",
    "galvatron": "Galvatron",
    "galvatron-base": "Galvatron-Base",
    "galvatron-1f1b-mem": "Galvatron (1F1B+Mem)",
    "galvatron-1f1b-time": "Galvatron (1F1B+Time)",
    "galvatron-1f1b-bi": "Galvatron (1F1B+Bi-obj)",
    "galvatron-bmw": "Galvatron-BMW",
}


@dataclass(frozen=True)
class Cell:
    """What we find for one strategy, model and memory budget.

    Attributes:
        strategy: Key of TITLES.
        throughput: Simulated samples per second; None if no batch fits.
        batch: Samples per iteration; None if no batch fits.
        estimated: What Galvatron's estimator says of the plan; None for strategies with fixed degrees.
        plan: In words.
        partition: Layers of each stage, "" for a single stage.
        microbatches: Number of microbatches.
        fits: Whether the simulator's allocator replay finds it within the budget, which the paper's planner decided.
    """

    strategy: str
    throughput: float | None = None
    batch: int | None = None
    estimated: float | None = None
    plan: str = ""
    partition: str = ""
    microbatches: int | None = None
    fits: bool | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def fixed_cell(run: Run, strategy: str) -> Cell:
    """Return the largest batch of a strategy with fixed degrees: the paper prints that one."""
    batch = largest_batch(run, strategy)
    return Cell(strategy) if batch is None else _fixed(run, strategy, batch)


def _fixed(run: Run, strategy: str, batch: int) -> Cell:
    problem_of, plan_of = run.fixed(strategy, batch)
    try:
        problem = problem_of()
        plan = plan_of(problem)
        result = simulate(plan, problem, engine="compiled")
    except ValueError:  # these degrees cannot cut the model
        return Cell(strategy)
    return Cell(
        strategy,
        throughput=batch / result.iteration_time_s,
        batch=batch,
        plan=describe_plan(plan),
        microbatches=plan.num_microbatches,
        fits=result.fits,
    )


def searched_cell(run: Run, strategy: str) -> tuple[Cell, Judged | None]:
    """Return the best batch of a searched strategy, and its plan."""
    judged = _explored(run, strategy)
    return _cell(strategy, judged), judged


@lru_cache(maxsize=16)
def _explored(run: Run, strategy: str) -> Judged | None:
    """Return the plan of the best batch, or that of the strategy it starts from if it takes none for better."""
    start = _explored(run, STARTS_FROM[strategy]) if strategy in STARTS_FROM else None
    options = planner_options(strategy, run.num_gpus)
    found = judged_exploration(run.problem, options, growth=GROWTH, profiles=run.profiles)
    return max((each for each in (found, start) if each), key=lambda each: each.found.throughput, default=None)


def at_batch(run: Run, strategy: str, batch: int) -> Cell:
    """Return a strategy's cell at a given batch."""
    if strategy in FIXED:
        return _fixed(run, strategy, batch)
    judged = judged_plan(
        run.problem,
        planner_options(strategy, run.num_gpus),
        lambda planner: planner.best(batch),
        run.profiles,
    )
    return _cell(strategy, judged)


def _cell(strategy: str, judged: Judged | None) -> Cell:
    if judged is None:
        return Cell(strategy)
    stages = judged.found.partition
    return Cell(
        strategy,
        throughput=judged.throughput,
        batch=judged.found.batch,
        estimated=judged.found.throughput,
        plan=describe_plan(judged.plan),
        partition="-".join(map(str, stages)) if len(stages) > 1 else "",
        microbatches=judged.found.num_microbatches,
        fits=judged.result.fits,
    )
