"""Table II once more, with one memory budget as calibration: what the released profile does not hold is fitted there.

Layers and collectives are measured in the profile; how much they slow each other in a training step is one number of a
profiler's example. So the overlap factor is fitted, on the cells of strategies whose plan is known and has no pipeline.
How many microbatches GPipe ran with is not known either; for that each model has a factor, from its cell of the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.reproduce.experiment import Context
from experiments.reproduce.galvatron.cells import TITLES, at_batch
from experiments.reproduce.galvatron.grid import Column, compute

FITTED_ON = ("ddp", "megatron-tp", "fsdp")
"""Strategies with known plans and no pipeline."""

GPIPE = TITLES["gpipe"]
START, TYPICAL_ERROR = 1.3, 0.03
"""Where the fit starts; log errors beyond the second count less than squared."""


def fitted_overlap(columns: Sequence[Column], frame: pd.DataFrame) -> float:
    """Return the overlap factor with the least error over a budget's cells of FITTED_ON.

    Args:
        columns: Of the budget.
        frame: All cells (`experiments.reproduce.galvatron.grid.frame_of`).
    """
    cells = [
        (column.run, strategy, column.batches[strategy])
        for column in columns
        for strategy in FITTED_ON
        if strategy in column.batches
    ]
    printed = frame.set_index(["memory_gb", "model", "strategy"])["paper_samples_per_s"]
    measured = np.array([printed[run.memory_gb, run.model, TITLES[strategy]] for run, strategy, _ in cells])

    def residuals(factor: NDArray[np.float64]) -> NDArray[np.float64]:
        found = [
            at_batch(replace(run, overlap=float(factor[0])), strategy, batch).throughput
            for run, strategy, batch in cells
        ]
        logs: NDArray[np.float64] = np.log(np.array(found, dtype=np.float64) / measured)
        return logs

    fit = least_squares(
        residuals, [START], bounds=(1.0, 4.0), diff_step=[0.03], loss="soft_l1", f_scale=TYPICAL_ERROR, max_nfev=8
    )
    return float(round(fit.x[0], 3))


def calibrated(
    context: Context, columns: Sequence[Column], frame: pd.DataFrame, memory_gb: int
) -> tuple[float, pd.DataFrame]:
    """Return the overlap factor fitted on one budget, and per strategy the errors of all others with it.

    Throughput at the printed batch; plans are searched anew with the factor.
    """
    factor = fitted_overlap([column for column in columns if column.run.memory_gb == memory_gb], frame)
    anew = [
        Column(run=replace(column.run, overlap=factor), strategies=(), batches=column.batches) for column in columns
    ]
    cells = compute(context, anew)
    found = {
        (column.run.memory_gb, column.run.model, TITLES[strategy]): cell["throughput"]
        for column in anew
        for strategy, cell in cells[column.name]["at_printed_batch"].items()
    }
    return factor, errors(frame, found, memory_gb)


def errors(frame: pd.DataFrame, found: dict[tuple[int, str, str], float | None], memory_gb: int) -> pd.DataFrame:
    """Return per strategy the errors of the budgets other than the calibration's, before and after.

    Args:
        frame: All cells.
        found: Samples per second with the fitted factor, by budget, model and strategy.
        memory_gb: The budget of the calibration; GPipe's factor per model comes from its cells.
    """
    keys = zip(frame["memory_gb"], frame["model"], frame["strategy"], strict=True)
    ours = pd.Series([found.get(key) for key in keys], index=frame.index, dtype=float)
    cells = frame.assign(found=ours).dropna(subset=["found", "paper_samples_per_s"])
    cells["ratio"] = cells["found"] / cells["paper_samples_per_s"]
    pipelines = cells[(cells["strategy"] == GPIPE) & (cells["memory_gb"] == memory_gb)]
    of_model = dict(zip(pipelines["model"], pipelines["ratio"], strict=True))
    others = cells[cells["memory_gb"] != memory_gb]
    lines = []
    for strategy, own in others.groupby("strategy", sort=False):
        ratio = own["ratio"] / (own["model"].map(of_model).fillna(1.0) if strategy == GPIPE else 1.0)
        lines.append(
            {
                "strategy": strategy,
                "cells": len(own),
                "uncalibrated": own["at_paper_batch_difference"].abs().mean(),
                "calibrated": (ratio - 1).abs().mean(),
                "bias": (ratio - 1).mean(),
            }
        )
    return pd.DataFrame(lines)
