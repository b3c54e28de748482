"""Exp#7: convergence from three initial configurations."""

from __future__ import annotations

import pandas as pd

from experiments.reproduce.aceso.convergence import converged
from experiments.reproduce.aceso.setting import GPT, curves, problem_of, searched
from experiments.reproduce.experiment import Context, Report, Verdict
from searchers.aceso.initial import INITIALS
from searchers.aceso.multihop import SearchOptions

SIMILAR = 0.03


def run(context: Context) -> Report:
    """Run GPT-3 2.6B and 6.7B (quick: 1.3B, 3 stages) from each start, with the paper's argument choices."""
    frames, figures, spreads = [], {}, []
    for setting, stages in ((GPT[1], 3),) if context.quick else ((GPT[2], 4), (GPT[3], 8)):
        context.say(setting.label)
        searcher, _ = searched(problem_of(setting, context), 10, borders="relay", recompute="largest")
        variants = {
            kind: (SearchOptions(initial=kind, balances=False, breadth=1, uniform_starts=False), context.seed)
            for kind in INITIALS
        }
        model = searcher.model(problem_of(setting, context))
        table, series, _ = converged(model, stages, variants, 200 if context.quick else 1000)
        table.insert(0, "model", f"{setting.model}, {stages} stages")
        frames.append(table)
        figures[f"starts_{setting.model}"] = curves(
            series, x="evaluations", y="best iteration time (s)", title=f"{setting.label}, {stages} stages", steps=True
        )
        spreads.append(float(table["best_s"].max() / table["best_s"].min() - 1))
    verdict = Verdict(
        "different starts converge to similar configurations", "best times within 3 % of each other",
        ", ".join(f"{spread:.2%}" for spread in spreads), bool(max(spreads) <= SIMILAR),
    )  # fmt: skip
    return Report({"starts": pd.concat(frames, ignore_index=True)}, figures, [verdict])
