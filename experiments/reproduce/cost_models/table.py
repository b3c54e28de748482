"""``cost-models``: how far the models that searchers minimise are from the simulator, and whether they rank alike."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd
from matplotlib.figure import Figure

from experiments.reproduce.cost_models.prices import OWN_MEMORY, PROBLEMS, QUICK, SEARCHERS, priced
from experiments.reproduce.experiment import Context, Report


def run(context: Context) -> Report:
    """Price a grid of plans by every searcher's own model and by the simulator."""
    rows = []
    for problem in QUICK if context.quick else PROBLEMS:
        context.say(", ".join(problem))
        rows += [
            {**asdict(each), "time_error_pct": 100 * each.time_error, "memory_error_pct": 100 * each.memory_error}
            for each in priced(*problem)
        ]
    plans = pd.DataFrame(rows)
    return Report(
        tables={"cost_models": _summary(plans), "plans": plans},
        figures={"cost_models": _figure(plans)},
        notes=[
            "Errors are of the searcher's figure against the simulated one: mean absolute, then the range.",
            "The rank correlation is Spearman's over the plans of a problem, mean over problems.",
            "PipeDream and Piper minimise the slowest stage in steady state: filling the pipeline is no part of it.",
        ],
    )


def _summary(plans: pd.DataFrame) -> pd.DataFrame:
    found = []
    for searcher in SEARCHERS:
        own = plans[plans["searcher"] == searcher]
        ranks = [
            each["own_s"].corr(each["simulated_s"], method="spearman")
            for _, each in own.groupby(["model", "cluster"])
        ]
        row = {
            "searcher": searcher,
            "plans": len(own),
            "time_mean_abs_error_pct": own["time_error_pct"].abs().mean(),
            "time_least_pct": own["time_error_pct"].min(),
            "time_most_pct": own["time_error_pct"].max(),
            "rank_correlation": sum(ranks) / len(ranks),
        }
        if searcher in OWN_MEMORY:
            row |= {
                "memory_mean_abs_error_pct": own["memory_error_pct"].abs().mean(),
                "memory_least_pct": own["memory_error_pct"].min(),
                "memory_most_pct": own["memory_error_pct"].max(),
            }
        found.append(row)
    return pd.DataFrame(found)


def _figure(plans: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    sides = figure.subplots(1, 2)
    for axes, column, names in zip(
        sides, ("time_error_pct", "memory_error_pct"), (SEARCHERS, OWN_MEMORY), strict=True
    ):
        axes.boxplot([plans[plans["searcher"] == name][column] for name in names], whis=(0, 100))
        axes.set_xticks(range(1, len(names) + 1), names, rotation=40, ha="right")
        axes.axhline(0, linewidth=0.8, color="grey")
    sides[0].set_ylabel("time, error against the simulator (%)")
    sides[1].set_ylabel("peak memory, error (%)")
    return figure
