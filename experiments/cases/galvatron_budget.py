"""What fits a memory budget of Galvatron's tables: decided by the memory model of the release's planner.

The paper's batches are multiples of eight, and a strategy with fixed degrees is printed at its largest one, not at its
fastest: TP of ViT-Huge-32 is printed with 88 samples at 20 GB (16.11 samples/s), slower than with 72 at 16 GB (16.81).
"""

from __future__ import annotations

from functools import lru_cache

from experiments.cases.galvatron_table2 import (
    DEEPSPEED,
    PIPELINED,
    Run,
    num_microbatches,
    planner_options,
)
from searchers.galvatron.microbatches import chunked
from searchers.galvatron.partitions import base_partition
from searchers.galvatron.pipeline_plan import split
from searchers.galvatron.planner import Planner
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Level, Strategy

STEP = 8
"""The paper's batches are multiples of eight (but a few of Swin's)."""

LARGEST = 1 << 14
"""Samples; no strategy with fixed degrees goes beyond."""


def within_budget(run: Run, strategy: str, batch: int) -> bool:
    """Return whether the release's planner lets a strategy with fixed degrees run that many samples."""
    num_gpus = run.num_gpus
    num_stages, levels = {
        "ddp": (1, (Level(DATA, num_gpus),)),
        "fsdp": (1, (Level(SHARDED, num_gpus),)),
        "megatron-tp": (1, (Level(TENSOR, num_gpus),)),
        "gpipe": (num_gpus, ()),
        DEEPSPEED: (2, (Level(DATA, num_gpus // 4), Level(TENSOR, 2))),
    }[strategy]
    search = _planner(run).degree_search(num_stages)
    if search is None:
        return False
    parts = num_microbatches(run.model, batch, strategy, num_gpus) if strategy in PIPELINED else 1
    cut = chunked(batch, parts)
    stages = split(search.layers, base_partition(search, cut, counts_outside=False))
    plan = search.assess(stages, [[Strategy(levels)] * len(stage) for stage in stages], batch, cut)
    return plan is not None and plan.fits


def largest_batch(run: Run, strategy: str) -> int | None:
    """Return the largest batch of a strategy with fixed degrees, None if not even the smallest fits."""
    step = max(STEP, run.num_gpus) if strategy in ("ddp", "fsdp") else STEP
    high = 1
    while high * step <= LARGEST and within_budget(run, strategy, high * step):
        high *= 2
    low = high // 2
    while high - low > 1 and low:
        middle = (low + high) // 2
        low, high = (middle, high) if within_budget(run, strategy, middle * step) else (low, middle)
    return low * step or None


@lru_cache(maxsize=8)
def _planner(run: Run) -> Planner:
    return Planner(
        run.problem(STEP),
        planner_options("galvatron-base", run.num_gpus),
        profiles=run.profiles,
    )
