"""Galvatron-BMW's Tables III to VI: sixteen TITANs, and 16, 64 and 32 A100s, by the code of Table II."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from datafiles.tables import load_table
from experiments.cases.case import PRINTED
from experiments.cases.galvatron_table2 import DEEPSPEED, PURE, SEARCHED, Run
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.agreement import ordered_pairs, summary
from experiments.reproduce.galvatron.alpa import ALPA
from experiments.reproduce.galvatron.figures import throughput_bars
from experiments.reproduce.galvatron.grid import Column, Key, Printed, compute, frame_of

TITANS_16, A100S_16, A100S_64 = "titan-rtx-pcie:2x8", "a100-40g-dgx-100g:2x8", "a100-40g-dgx-100g:8x8"
A100S_80GB = "a100-80g-dgx-400g:4x8"
A100_RUNTIME = "galvatron-v1-tf32"
LLM_RUNTIME = "galvatron-v1-bf16"
ALL = (*PURE, DEEPSPEED, *SEARCHED)
BALANCED = ("galvatron-1f1b-mem", "galvatron-1f1b-time", "galvatron-1f1b-bi")
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
    best = sum(_is_fastest(group["samples_per_s"].fillna(0.0).tolist()) for _, group in groups)
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


def _is_fastest(throughputs: list[float]) -> bool:
    return throughputs[-1] > 0 and throughputs[-1] >= 0.98 * max(throughputs)


def printed_table5() -> Mapping[Key, Printed]:
    """Return the paper's cells of Table V."""
    table = load_table(
        PRINTED / "galvatron_table5.csv",
        integers=("row", "memory_gb", "global_batch"),
        floats=("throughput_samples_per_s",),
    )
    return {
        (row["memory_gb"], row["model"], row["strategy"]): Printed(
            row["throughput_samples_per_s"], row["global_batch"], row["partition"]
        )
        for row in table
    }


def table5(context: Context) -> Report:
    """Return partitions and throughputs of balanced pipelines on sixteen A100s."""
    printed = printed_table5()
    models = ("bert-huge-32", "bert-huge-48", "t5-512-4-32", "t5-512-4-48") if not context.quick else ("bert-huge-32",)
    memories = (8, 16) if not context.quick else (8,)
    columns = [
        Column(
            run=Run(model=model, cluster=A100S_16, memory_gb=memory, runtime=A100_RUNTIME),
            strategies=BALANCED,
            batches={name: printed[memory, model, name].batch or 0 for name in BALANCED},
        )
        for memory in memories
        for model in models
    ]
    cells = compute(context, columns)
    frame = frame_of(columns, cells, printed)
    lines = summary(frame)
    same = float(frame["at_paper_batch_difference"].dropna().abs().mean())
    best = float(frame["relative_difference"].dropna().abs().mean())
    wins = sum(
        _is_fastest([value or 0.0 for value in group["samples_per_s"].fillna(0.0)])
        for _, group in frame.groupby(["memory_gb", "model"])
    )
    right, pairs = ordered_pairs(frame)
    verdicts = [
        Verdict(
            "throughput of balanced pipelines",
            "within 15 % on average at the printed batch",
            f"{same:.1%} at the printed batch, {best:.1%} best against best",
            same <= 0.15,
        ),
        Verdict(
            "the bi-objective partition is never behind the others",
            "within 2 % of the fastest in every column",
            f"{wins} of {len(columns)} columns",
            wins == len(columns),
        ),
        Verdict(
            "partitions are ordered as measured",
            "95 % of pairs that differ by more than 15 %",
            f"{right} of {pairs} pairs",
            right >= 0.95 * pairs if pairs else None,
        ),
    ]
    figures = {f"throughput-{memory}gb": throughput_bars(frame[frame["memory_gb"] == memory]) for memory in memories}
    return Report({"summary": lines, "cells": frame}, figures, verdicts, [FULL_TF32])
