"""Galvatron-BMW's Tables III, IV and VI: sixteen TITANs, and 16, 64 and 32 A100s, by the code of Table II."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.cases.galvatron_table2 import DEEPSPEED, PURE, SEARCHED, Run
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.alpa import ALPA
from experiments.reproduce.galvatron.figures import throughput_bars
from experiments.reproduce.galvatron.grid import Column, compute, frame_of

TITANS_16, A100S_16, A100S_64 = "titan-rtx-pcie:2x8", "a100-40g-dgx-100g:2x8", "a100-40g-dgx-100g:8x8"
A100S_80GB = "a100-80g-dgx-400g:4x8"
A100_RUNTIME = "galvatron-v1-tf32"
LLM_RUNTIME = "galvatron-v1-bf16"
ALL = (*PURE, DEEPSPEED, *SEARCHED)
SIXTEEN_GPU_MODELS = (
    "bert-huge-32", "bert-huge-48", "vit-huge-32", "vit-huge-48", "t5-512-4-32", "t5-512-4-48"
)  # fmt: skip
NO_FIGURES = "The paper's figures of this table are not in the repository; budgets and models follow its text."
ALPA_NOTE = (
    "Alpa: our searcher, without recomputation, states whole or sharded for the whole model, as the text says of it; "
    "microbatches of up to one sample a device."
)
FULL_TF32 = (
    "Matrix products run in TF32, PyTorch's default of the time: the printed speeds are above the A100's fp32 peak."
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
    columns = [Column(run=run, strategies=strategies, batches={}) for run in runs]
    cells = compute(context, columns)
    frame = frame_of(columns, cells, {})
    frame.insert(0, "cluster", [column.run.cluster for column in columns for _ in column.strategies])
    groups = list(frame.groupby(["cluster", "memory_gb", "model"], sort=False))
    best = sum(is_fastest(group["samples_per_s"].fillna(0.0).tolist()) for _, group in groups)
    figures = {
        f"throughput-{str(cluster).replace(':', '-')}-{memory}gb": throughput_bars(part)
        for (cluster, memory), part in frame.groupby(["cluster", "memory_gb"], sort=False)
    }
    verdict = Verdict(
        "Galvatron-BMW is the fastest strategy",
        "in every column, within 2 %",
        f"{best} of {len(groups)} columns",
        best == len(groups),
    )
    return Report({"cells": frame}, figures, [verdict], notes)


def is_fastest(throughputs: list[float]) -> bool:
    """Return whether the last one is within 2 % of the highest."""
    return throughputs[-1] > 0 and throughputs[-1] >= 0.98 * max(throughputs)
