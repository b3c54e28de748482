"""Convergence of variants of the search on one number of stages: what Exp#5 to Exp#7 plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from datafiles.words import counted
from experiments.reproduce.aceso.setting import PROFILE, Setting, compat_of, curves, paper_search, problem_of
from experiments.reproduce.experiment import Context
from experiments.reproduce.kept import kept_rows
from searchers.aceso.model import PerformanceModel
from searchers.aceso.multihop import Limits, StageCountSearch
from simulator.costs import cost_tables
from simulator.problem import Problem


@dataclass(frozen=True)
class Variant:
    """One curve.

    Attributes:
        setting: What is planned.
        num_stages: Pipeline depth.
        name: Of the curve.
        changes: What differs from the paper's search.
        seed: For random choices.
        evaluations: Budget.
    """

    setting: Setting
    num_stages: int
    name: str
    changes: Mapping[str, Any]
    seed: int
    evaluations: int

    @property
    def model(self) -> str:
        """For tables."""
        return f"{self.setting.model}, {counted(self.num_stages, 'stage')}"

    @property
    def label(self) -> str:
        """Names the row."""
        return f"{self.model}, {self.name}"


@lru_cache(maxsize=1)
def _model(problem: Problem, compat: str) -> PerformanceModel:
    """Return the model, kept since neighbouring rows share it: largest activations are recomputed first (the paper)."""
    return PerformanceModel.of(problem, cost_tables(problem), compat=compat, recompute="largest")


def rows_of(context: Context, variants: Sequence[Variant]) -> Iterator[dict[str, Any]]:
    """Yield one row per variant; its curve is of pairs of evaluations and the best iteration time."""
    for variant in variants:
        options = paper_search(variant.setting, **variant.changes).options
        search = StageCountSearch(variant.num_stages, options, variant.seed)
        model = _model(problem_of(variant.setting, context), compat_of(variant.setting))
        search.run(model, Limits(variant.evaluations, None))
        points = [[float(spent), found] for _, spent, found in search.statistics.improvements]
        best = points[-1][1] if points else None
        within = [spent for spent, found in points if best is not None and found <= best * 1.01]
        hops = search.statistics.hops
        yield {
            "model": variant.model,
            "variant": variant.name,
            "best_s": best,
            "evaluations": search.evaluations,
            "evaluations_to_within_1_percent_of_own_best": within[0] if within else None,
            "iterations_improved": len(hops),
            "iterations_failed": search.statistics.failures,
            "mean_hops": sum(hops) / max(1, len(hops)),
            "curve": [*points, [float(search.evaluations), best]] if points else [],
        }


def converged(context: Context, variants: Sequence[Variant]) -> tuple[pd.DataFrame, dict[str, Figure]]:
    """Return a row per variant and a figure per model."""
    rows = kept_rows(context, variants, rows_of, name=attrgetter("label"), files=PROFILE)
    figures = {}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {row["variant"]: row["curve"] for row in rows if row["model"] == model}
        name = model.replace(", ", "_").replace(" ", "_")
        figures[name] = curves(own, x="evaluations", y="best iteration time (s)", title=model, steps=True)
    return pd.DataFrame([{name: row[name] for name in row if name != "curve"} for row in rows]), figures
