"""How our cells agree with the paper's: errors, out-of-memory, batches, order and winners."""

from __future__ import annotations

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


def is_fastest(throughputs: list[float]) -> bool:
    """Return whether the last one is within 2 % of the highest."""
    return throughputs[-1] > 0 and throughputs[-1] >= 0.98 * max(throughputs)
