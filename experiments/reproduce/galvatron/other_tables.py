"""Galvatron-BMW's Tables III, IV and VI: sixteen TITANs, and 16, 64 and 32 A100s, by the code of Table II."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.cases.galvatron_table2 import DEEPSPEED, PURE, SEARCHED, Run
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.agreement import is_fastest
from experiments.reproduce.galvatron.alpa import ALPA
from experiments.reproduce.galvatron.figures import throughput_bars
from experiments.reproduce.galvatron.grid import Column, compute, frame_of
from experiments.reproduce.galvatron.machines import (
    A100_RUNTIME,
    A100S_16,
    A100S_64,
    A100S_80GB,
    FULL_TF32,
    LLM_RUNTIME,
    TITANS_16,
)
from experiments.reproduce.galvatron.table5_calibration import cluster_factors

ALL = (*PURE, DEEPSPEED, *SEARCHED)
SIXTEEN_GPU_MODELS = (
    "bert-huge-32", "bert-huge-48", "vit-huge-32", "vit-huge-48", "t5-512-4-32", "t5-512-4-48"
)  # fmt: skip
SHIPPED, TABLE5 = "shipped", "Table V"
NO_FIGURES = "The paper's figures of this table are not in the repository; budgets and models follow its text."
CALIBRATED = (
    "The A100s of 40 GB are Table V's machine. Their cells come twice: with the shipped constants, and with factors on "
    "the seconds of its host and the rate of its products ({factors}) that Table V's 24 cells say of it; none of this "
    "table's cells is known here."
)
ALPA_NOTE = (
    "Alpa: our searcher, without recomputation, states whole or sharded for the whole model, as the text says of it; "
    "microbatches of up to one sample a device."
)


def table3(context: Context) -> Report:
    """Return sixteen GPUs of either cluster."""
    models, memories = (SIXTEEN_GPU_MODELS, (8, 16)) if not context.quick else (("bert-huge-32",), (8,))
    runs = [
        Run(model=model, cluster=cluster, memory_gb=memory, runtime=runtime)
        for cluster, runtime in ((TITANS_16, "galvatron-v1"), (A100S_16, A100_RUNTIME))
        for memory in memories
        for model in models
    ]
    return _without_figures(context, runs, (NO_FIGURES, FULL_TF32))


def table4(context: Context) -> Report:
    """Return 64 A100s with models of ten billion parameters."""
    models, memories = (("bert-xhuge", "vit-xhuge"), (16, 32)) if not context.quick else (("vit-xhuge",), (32,))
    runs = [
        Run(model=model, cluster=A100S_64, memory_gb=memory, runtime=A100_RUNTIME)
        for memory in memories
        for model in models
    ]
    return _without_figures(context, runs, (NO_FIGURES, FULL_TF32))


def table6(context: Context) -> Report:
    """Return 32 A100-80GB with GPT-3 of 15, 39 and 65 billion parameters."""
    sizes = ("15b", "39b", "65b") if not context.quick else ("15b",)
    runs = [
        Run(model=f"galvatron-gpt3-{size}", cluster=A100S_80GB, memory_gb=80, runtime=LLM_RUNTIME) for size in sizes
    ]
    notes = (NO_FIGURES, "16-bit training is inferred from the printed activation sizes.", ALPA_NOTE)
    return _without_figures(context, runs, notes, (*PURE, DEEPSPEED, ALPA, *SEARCHED))


def _without_figures(
    context: Context, runs: Sequence[Run], notes: Sequence[str], strategies: tuple[str, ...] = ALL
) -> Report:
    of_table5 = [run for run in runs if run.cluster in (A100S_16, A100S_64)]
    if of_table5:
        factors = cluster_factors(context.say)
        runs = [*runs, *(replace(run, factors=factors) for run in of_table5)]
        words = ", ".join(f"{name} {factor:.2f}" for name, factor in factors)
        notes = [*notes, CALIBRATED.format(factors=words)]
    columns = [Column(run=run, strategies=strategies, batches={}) for run in runs]
    cells = compute(context, columns)
    frame = frame_of(columns, cells, {})
    keys = [(run.cluster, TABLE5 if run.factors else SHIPPED) for run in runs for _ in strategies]
    frame.insert(0, "cluster", [cluster for cluster, _ in keys])
    frame.insert(1, "constants", [constants for _, constants in keys])
    groups = list(frame.groupby(["cluster", "constants", "memory_gb", "model"], sort=False))
    best = sum(is_fastest(group["samples_per_s"].fillna(0.0).tolist()) for _, group in groups)
    figures = {
        "-".join(
            ("throughput", str(cluster).replace(":", "-"), f"{memory}gb", *(["table-v"] * (of == TABLE5)))
        ): throughput_bars(part)
        for (cluster, of, memory), part in frame.groupby(["cluster", "constants", "memory_gb"], sort=False)
    }
    verdict = Verdict(
        "Galvatron-BMW is the fastest strategy",
        "in every column, within 2 %",
        f"{best} of {len(groups)} columns",
        best == len(groups),
    )
    return Report({"cells": frame}, figures, [verdict], notes)
