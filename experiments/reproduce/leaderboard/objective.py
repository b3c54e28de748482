"""``leaderboard-objective``: what searchers find with the simulator as objective, beside their own formulas."""

from __future__ import annotations

import numpy as np
import pandas as pd

from datafiles.words import counted
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.leaderboard.run import searched, searchers_of

EVALUATIONS = "40"
"""A simulation costs a hundred times a formula, so the budget is smaller, for both sides."""


def run(context: Context) -> Report:
    """Search twice with the same budget, once per objective."""
    names = searchers_of(context)
    own, _, _ = searched(context, names, budget=EVALUATIONS)
    simulator, _, _ = searched(context, names, budget=EVALUATIONS, objective="simulator")
    key = ["problem", "searcher", "seed"]
    both = own.merge(simulator, on=key, suffixes=("_own", "_simulator"))
    good = (both["status_own"] == "ok") & (both["status_simulator"] == "ok")
    both["simulator_over_own"] = np.where(
        good, both["iteration_time_s_simulator"].astype(float) / both["iteration_time_s_own"].astype(float), np.nan
    )
    summary = (
        both.groupby("searcher", sort=False)["simulator_over_own"].agg(["count", "median", "min", "max"]).reset_index()
    )
    ratios = both["simulator_over_own"].dropna()
    columns = [*key, "status_own", "status_simulator", "iteration_time_s_own", "iteration_time_s_simulator",
               "simulator_over_own"]  # fmt: skip
    return Report(
        tables={"by_searcher": summary, "runs": pd.DataFrame(both[columns])},
        verdicts=[
            Verdict(
                "searching with the simulator gives plans at least as good as searching with a formula",
                "median ratio of iteration times at most 1, and at most 5 % of the pairs worse by over 1 %",
                f"median {ratios.median():.3f}; {100 * (ratios > 1.01).mean():.0f} % worse, "
                f"{100 * (ratios < 0.99).mean():.0f} % better by over 1 % of {counted(len(ratios), 'pair')}",
                bool(ratios.median() <= 1 and (ratios > 1.01).mean() <= 0.05) if len(ratios) else None,
            )
        ],
        notes=[f"{EVALUATIONS} evaluations on both sides."],
    )
