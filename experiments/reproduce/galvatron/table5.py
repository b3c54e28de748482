"""Galvatron-BMW's Table V: memory-, time- and bi-objectively balanced pipelines on sixteen A100s."""

from __future__ import annotations

from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.agreement import is_fastest, ordered_pairs, summary
from experiments.reproduce.galvatron.figures import throughput_bars
from experiments.reproduce.galvatron.grid import Column, compute, frame_of
from experiments.reproduce.galvatron.machines import FULL_TF32
from experiments.reproduce.galvatron.table5_calibration import calibrated, printed_table5, run_of

BALANCED = ("galvatron-1f1b-mem", "galvatron-1f1b-time", "galvatron-1f1b-bi")


def run(context: Context) -> Report:
    """Return partitions and throughputs of balanced pipelines on sixteen A100s."""
    printed = printed_table5()
    models = ("bert-huge-32", "bert-huge-48", "t5-512-4-32", "t5-512-4-48") if not context.quick else ("bert-huge-32",)
    memories = (8, 16) if not context.quick else (8,)
    columns = [
        Column(
            run=run_of(model, memory),
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
        is_fastest([value or 0.0 for value in group["samples_per_s"].fillna(0.0)])
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
    tables = {"summary": lines, "cells": frame}
    if len(memories) > 1:
        tables["calibrated"], verdict = calibrated(printed, context.say)
        verdicts.append(verdict)
    figures = {f"throughput-{memory}gb": throughput_bars(frame[frame["memory_gb"] == memory]) for memory in memories}
    return Report(tables, figures, verdicts, [FULL_TF32])
