"""Convergence of variants of the search on one number of stages: what Exp#5 to Exp#7 plot."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from searchers.aceso.model import PerformanceModel
from searchers.aceso.multihop import Limits, SearchOptions, StageCountSearch


def converged(
    model: PerformanceModel,
    num_stages: int,
    variants: Mapping[str, tuple[SearchOptions, int]],
    evaluations: int,
) -> tuple[pd.DataFrame, dict[str, list[tuple[float, float]]], dict[str, StageCountSearch]]:
    """Run variants with the same number of evaluations.

    Args:
        model: Prices.
        num_stages: Pipeline depth.
        variants: Options and seed by name.
        evaluations: Budget of each.

    Returns:
        A row per variant, its curve ``(evaluations, best iteration time)``, and the searches.
    """
    rows, series, searches = [], {}, {}
    for name, (options, seed) in variants.items():
        search = StageCountSearch(num_stages, options, seed).run(model, Limits(evaluations, None))
        points = [(float(spent), found) for _, spent, found in search.statistics.improvements]
        best = points[-1][1] if points else float("nan")
        within = [spent for spent, found in points if found <= best * 1.01]
        rows.append(
            {
                "variant": name,
                "best_s": best,
                "evaluations": search.evaluations,
                "evaluations_to_within_1_percent_of_own_best": within[0] if within else float("nan"),
                "iterations_improved": len(search.statistics.hops),
                "mean_hops": sum(search.statistics.hops) / max(1, len(search.statistics.hops)),
            }
        )
        series[name] = [*points, (float(search.evaluations), best)] if points else []
        searches[name] = search
    return pd.DataFrame(rows), series, searches
