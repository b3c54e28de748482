"""How our cells agree with the paper's: errors, out-of-memory, batches, order and winners."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pandas as pd

CLEAR = 0.15
"""Pairs whose printed throughputs differ by less are not asked for their order."""

SAME = 1e-9
"""Throughputs that differ by less are of the same plan."""


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one line per strategy: mean absolute differences, out-of-memory, batches."""
    rows = []
    for strategy, cells in frame.groupby("strategy", sort=False):
        known = cells["relative_difference"].dropna()
        same = cells["at_paper_batch_difference"].dropna()
        both = cells[cells["batch"].notna() & cells["paper_batch"].notna()]
        neither = cells["batch"].isna() & cells["paper_batch"].isna()
        rows.append(
            {
                "strategy": strategy,
                "cells": len(cells),
                "mean_absolute_difference": known.abs().mean(),
                "bias": known.mean(),
                "mean_absolute_at_paper_batch": same.abs().mean(),
                "bias_at_paper_batch": same.mean(),
                "oom_right": int(cells["oom_agrees"].sum()),
                "batch_equal": int((both["batch"] == both["paper_batch"]).sum() + neither.sum()),
            }
        )
    return pd.DataFrame(rows)


def ordered_pairs(frame: pd.DataFrame) -> tuple[int, int]:
    """Return how many clear pairs of strategies in a column are ordered right, and how many there are.

    Out of memory counts as a throughput of zero; pairs where the paper has two of them are left out.
    """
    right = total = 0
    for _, column in frame.groupby(["memory_gb", "model"]):
        ours = column["samples_per_s"].fillna(0.0).to_numpy()
        theirs = column["paper_samples_per_s"].fillna(0.0).to_numpy()
        for first, second in combinations(range(len(column)), 2):
            high, low = max(theirs[first], theirs[second]), min(theirs[first], theirs[second])
            if high <= 0 or (low > 0 and high / low - 1 <= CLEAR):
                continue
            total += 1
            right += (ours[first] > ours[second]) == (theirs[first] > theirs[second])
    return right, total


def winners(frame: pd.DataFrame) -> tuple[int, int]:
    """Return in how many columns our fastest strategy is (one of) the paper's fastest, and how many there are.

    Strategies for which we find the same plan are equally fast.
    """
    right = total = 0
    for _, column in frame.groupby(["memory_gb", "model"]):
        theirs = column["paper_samples_per_s"].fillna(0.0)
        if theirs.max() <= 0:
            continue
        total += 1
        ours = column["samples_per_s"].fillna(0.0).to_numpy()
        fastest = np.isclose(ours, ours.max(), rtol=SAME, atol=0.0)
        right += bool((theirs.to_numpy()[fastest] == theirs.max()).any())
    return right, total


def calibrated(frame: pd.DataFrame, memory_gb: int) -> pd.DataFrame:
    """Return errors of the other budgets after a factor per strategy and one per model, fitted on one budget.

    Logarithms of printed over ours at the printed batch, least squares; a strategy or model without a cell in
    the fitted budget keeps its factor of one.
    """
    cells = frame[frame["at_paper_batch_difference"].notna()].copy()
    cells["log"] = -np.log1p(cells["at_paper_batch_difference"].astype(float))
    fitted = cells[cells["memory_gb"] == memory_gb]
    names = list(dict.fromkeys([*cells["strategy"], *cells["model"]]))
    places = {name: place for place, name in enumerate(names)}

    def matrix(rows: pd.DataFrame) -> np.ndarray:
        found = np.zeros((len(rows), len(names)))
        for number, (strategy, model) in enumerate(zip(rows["strategy"], rows["model"], strict=True)):
            found[number, places[strategy]] = found[number, places[model]] = 1.0
        return found

    factors = np.linalg.lstsq(matrix(fitted), fitted["log"].to_numpy(), rcond=None)[0]
    others = cells[cells["memory_gb"] != memory_gb].copy()
    left = np.exp(matrix(others) @ factors - others["log"].to_numpy()) - 1
    others["calibrated_difference"] = left
    return pd.DataFrame(_calibrated_lines(others))


def _calibrated_lines(cells: pd.DataFrame) -> Iterator[dict[str, object]]:
    for strategy, own in cells.groupby("strategy", sort=False):
        yield {
            "strategy": strategy,
            "cells": len(own),
            "uncalibrated": own["at_paper_batch_difference"].abs().mean(),
            "calibrated": own["calibrated_difference"].abs().mean(),
        }
