"""One cell of the paper's tables: the best throughput of a strategy within a memory budget, judged by the simulator."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from experiments.cases.galvatron_table2 import PURE, Run, profiles_of
from searchers.galvatron.judged import Judged, judged_exploration, judged_plan
from searchers.galvatron.options import Options
from searchers.galvatron.searcher import variant_options
from searchers.plan_words import describe_plan
from simulator.simulate import simulate

FIXED = (*PURE, "deepspeed-3d")
STEP = 8
"""The paper's batches are multiples of eight (but a few of Swin's)."""

GROWTH = 0.12
"""Batches beyond 64 grow by about this share: throughput is flat there."""

LARGEST = 1 << 14
"""Samples; no strategy with fixed degrees goes beyond."""

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
    """

    strategy: str
    throughput: float | None = None
    batch: int | None = None
    estimated: float | None = None
    plan: str = ""
    partition: str = ""
    microbatches: int | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def fixed_cell(run: Run, strategy: str) -> Cell:
    """Return the best batch of a strategy with fixed degrees: doubled while it fits, then bisected."""
    step = max(STEP, run.num_gpus) if strategy in ("ddp", "fsdp") else STEP
    found: dict[int, Cell | None] = {}

    def fits(number: int) -> bool:
        found[number] = _fixed(run, strategy, number * step)
        return found[number] is not None

    high = 1
    while high * step <= LARGEST and fits(high):
        high *= 2
    low = high // 2
    while high - low > 1 and low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    best = max((cell for cell in found.values() if cell), key=lambda cell: cell.throughput or 0.0, default=None)
    return best or Cell(strategy)


def _fixed(run: Run, strategy: str, batch: int) -> Cell | None:
    problem_of, plan_of = run.fixed(strategy, batch)
    try:
        problem = problem_of()
        plan = plan_of(problem)
        result = simulate(plan, problem, engine="compiled")
    except ValueError:  # these degrees cannot cut the model
        return None
    if not result.fits:
        return None
    return Cell(
        strategy,
        throughput=batch / result.iteration_time_s,
        batch=batch,
        plan=describe_plan(plan),
        microbatches=plan.num_microbatches,
    )


def searched_cell(run: Run, strategy: str) -> tuple[Cell, Judged | None]:
    """Return the best batch of a searched strategy, and its plan."""
    judged = judged_exploration(
        run.problem,
        options_of(strategy),
        growth=GROWTH,
        profiles=profiles_of(run.model, run.cluster, run.runtime),
    )
    return _cell(strategy, judged), judged


def at_batch(run: Run, strategy: str, batch: int) -> Cell:
    """Return a strategy's cell at a given batch."""
    if strategy in FIXED:
        return _fixed(run, strategy, batch) or Cell(strategy)
    judged = judged_plan(
        run.problem,
        options_of(strategy),
        lambda planner: planner.best(batch),
        profiles_of(run.model, run.cluster, run.runtime),
    )
    return _cell(strategy, judged)


def options_of(strategy: str) -> Options:
    """Return a variant's options with the release's padding of microbatches."""
    return replace(variant_options(strategy), pads_batch=True)


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
    )
