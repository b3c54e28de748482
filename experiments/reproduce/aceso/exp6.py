"""Exp#6: convergence by the longest chain of primitives."""

from __future__ import annotations

import pandas as pd

from experiments.reproduce.aceso.convergence import converged
from experiments.reproduce.aceso.setting import GPT, curves, problem_of, searched
from experiments.reproduce.experiment import Context, Report, Verdict
from searchers.aceso.multihop import SearchOptions

HOPS = (1, 3, 7, 11)


def run(context: Context) -> Report:
    """Run GPT-3 2.6B with 4 stages and 13B with 8 (quick: 1.3B with 3), with the paper's argument choices."""
    frames, figures, found = [], {}, []
    for setting, stages in ((GPT[1], 3),) if context.quick else ((GPT[2], 4), (GPT[4], 8)):
        context.say(setting.label)
        searcher, _ = searched(problem_of(setting, context), 10, borders="relay", recompute="largest")
        variants = {
            f"MaxHops {hops}": (
                SearchOptions(max_hops=hops, balances=False, breadth=1, uniform_starts=False), context.seed
            )
            for hops in HOPS
        }
        model = searcher.model(problem_of(setting, context))
        table, series, _ = converged(model, stages, variants, 200 if context.quick else 1000)
        table.insert(0, "model", f"{setting.model}, {stages} stages")
        frames.append(table)
        figures[f"hops_{setting.model}"] = curves(
            series, x="evaluations", y="best iteration time (s)", title=f"{setting.label}, {stages} stages", steps=True
        )
        best = table.set_index("variant")["best_s"]
        found.append((setting.model, float(best["MaxHops 7"] / best.min()), float(best["MaxHops 1"] / best.min())))
    worst = max(seven for _, seven, _ in found)
    verdicts = [
        Verdict(
            "7 hops are a fair choice for every model", "within 2 % of the best of 1, 3, 7 and 11 hops",
            f"at most {worst:.4f} times the best", worst <= 1.02,
        ),
        Verdict(
            "one hop may end in a sub-optimal plan", "at least one model where MaxHops 1 is over 0.5 % off the best",
            ", ".join(f"{name} {one:.4f}" for name, _, one in found), any(one > 1.005 for _, _, one in found),
        ),
    ]  # fmt: skip
    return Report({"hops": pd.concat(frames, ignore_index=True)}, figures, verdicts)
