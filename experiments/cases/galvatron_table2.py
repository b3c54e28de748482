"""Galvatron-BMW's Table II: pure strategies on eight RTX TITANs, throughput and out-of-memory cells.

The cards have 24 GB; the 8 to 20 GB of the table are budgets of Galvatron's planner, which adds up model states,
activations and 1 GiB of context: its released constants give the printed largest batch in 125 of 128 cells of the
pure strategies. So a cell is compared with live bytes; the allocator replay would find more cells full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from pathlib import Path

from datafiles.tables import load_table
from experiments.cases.case import (
    PRINTED,
    Case,
    Measured,
    Skipped,
    problem_of,
    stages_of_layers,
    uniform,
)
from simulator.plan import Plan
from simulator.problem import Problem

GROUP = "galvatron-table2"
SOURCE = "Galvatron-BMW (TKDE), Table II"
NUM_GPUS = 8
SMALLEST_BATCH = 8
"""The paper steps the batch by eight: a cell that says OOM did not fit eight samples."""

HALF_LAYER, CAP = 0.5, 1.3
"""Tolerance and cap of the memory-balanced pipeline split in Galvatron's released code."""


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield one case per cell; nothing is read from ``data``."""
    table = load_table(
        PRINTED / "galvatron_table2.csv",
        integers=("row", "memory_gb", "global_batch"),
        floats=("throughput_samples_per_s",),
    )
    for row in table:
        throughput = row["throughput_samples_per_s"]
        batch = row["global_batch"] or SMALLEST_BATCH
        strategy, model = row["strategy"], row["model"]
        microbatches = num_microbatches(model, batch) if strategy == "gpipe" else 1
        whole_batch = microbatches * ceil(batch / microbatches)
        yield Case(
            row_id=f"galvatron_table2.csv#{row['row']}",
            groups=(GROUP, f"{GROUP}-{strategy}"),
            problem=problem_of(
                model=model,
                cluster=f"titan-rtx-pcie:1x{NUM_GPUS}",
                runtime="galvatron-v1",
                global_batch=whole_batch,
                memory_limit_bytes=row["memory_gb"] << 30,
            ),
            plan=_plan(strategy, whole_batch, microbatches),
            measured=Measured(
                iteration_time_s=batch / throughput if throughput else None,
                out_of_memory=throughput is None,
                limits_live_bytes=True,
            ),
            source=SOURCE,
            rivals=f"{model} in {row['memory_gb']} GB" if throughput else None,
            rival_samples=batch,
            features={
                "strategy": strategy, "model": model, "memory GB": row["memory_gb"], "batch": batch,
            },
        )  # fmt: skip


def num_microbatches(model: str, batch: int) -> int:
    """Return how many microbatches the release's hand tables give eight pipeline stages.

    The tables have fractions (b/8 + 2 for BERT); b is a multiple of eight here, so none arise. Where they do
    not divide the batch, PyTorch cuts unequal microbatches; the plan here has the larger size for all.

    Source:
        Galvatron data README (titan_v1): BERT b/8 + 2; ViT 1 if b = 8 else 2; T5 3 for eight stages.

    >>> num_microbatches("bert-huge-32", 24), num_microbatches("vit-huge-48", 8)
    (5, 1)
    """
    if model.startswith("bert"):
        return batch // 8 + 2
    if model.startswith("vit"):
        return 1 if batch == 8 else 2
    return 3


def _plan(strategy: str, batch: int, microbatches: int) -> Callable[[Problem], Plan]:
    if strategy == "ddp":
        return uniform(dp=NUM_GPUS, microbatch=batch // NUM_GPUS)
    if strategy == "fsdp":
        return uniform(dp=NUM_GPUS, microbatch=batch // NUM_GPUS, zero=3)
    if strategy == "megatron-tp":
        return uniform(tp=NUM_GPUS, microbatch=batch)
    if strategy != "gpipe":
        raise ValueError(f"strategy must be ddp, fsdp, megatron-tp or gpipe, got {strategy!r}")

    def pipeline(problem: Problem) -> Plan:
        return Plan(
            stages=stages_of_layers(problem, memory_balanced(problem), [()] * NUM_GPUS),
            microbatch_size=batch // microbatches,
            num_microbatches=microbatches,
            schedule="gpipe",
        )

    return pipeline


def memory_balanced(problem: Problem) -> list[int]:
    """Return layers per stage as the release splits them: filled from the back up to the mean memory.

    Encoder and decoder layers of T5 weigh differently, so its split is uneven; equal layers split evenly.
    """
    from simulator.costs import CostTables, saved_tensors
    from simulator.uniform import repeated_layers

    costs = CostTables(problem)
    workload = problem.workload
    state_bytes = problem.runtime.state_bytes_per_parameter
    weights = []
    for start, stop in repeated_layers(workload):
        total, seen = 0.0, set()
        for index in range(start, stop):
            cost = costs.operator(index, (), problem.global_batch, problem.gpu_types[0])
            total += state_bytes * cost.num_parameter_elements
            for name, size in saved_tensors(workload, index, cost):
                if name not in seen:
                    seen.add(name)
                    total += size
        weights.append(total)
    if max(weights) - min(weights) < 1e-3 * max(weights):
        base, extra = divmod(len(weights), NUM_GPUS)
        return [base] * (NUM_GPUS - 1) + [base + extra]
    return _filled_from_the_back(weights, NUM_GPUS)


def _filled_from_the_back(weights: list[float], num_stages: int) -> list[int]:
    mean = sum(weights) / num_stages
    counts = [0] * num_stages
    left = len(weights)
    for stage in range(num_stages - 1, 0, -1):
        filled = 0.0
        while left > stage:
            weight = weights[left - 1]
            if counts[stage] and (filled + HALF_LAYER * weight > mean or filled + weight > CAP * mean):
                break
            filled += weight
            counts[stage] += 1
            left -= 1
    counts[0] = left
    return counts
