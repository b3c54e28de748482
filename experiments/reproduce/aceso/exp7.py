"""Exp#7: convergence from three initial configurations."""

from __future__ import annotations

from experiments.reproduce.aceso.convergence import Variant, converged
from experiments.reproduce.aceso.setting import GPT
from experiments.reproduce.experiment import Context, Report, Verdict
from searchers.aceso.initial import INITIALS

SIMILAR = 0.03
CASES = ((GPT[2], 4), (GPT[3], 8))
QUICK = ((GPT[1], 3),)


def run(context: Context) -> Report:
    """Run GPT-3 2.6B and 6.7B (quick: 1.3B, 3 stages) from each start, with the paper's argument choices."""
    evaluations = 200 if context.quick else 2000
    variants = [
        Variant(setting, stages, kind, {"initial": kind}, context.seed, evaluations)
        for setting, stages in (QUICK if context.quick else CASES)
        for kind in INITIALS
    ]
    table, figures = converged(context, variants)
    found = table.groupby("model", sort=False)["best_s"]
    spreads = found.max() / found.min() - 1
    verdict = Verdict(
        "different starts converge to similar configurations", "best times within 3 % of each other",
        "; ".join(f"{model}: {spread:.2%}" for model, spread in spreads.items()), bool(spreads.max() <= SIMILAR),
    )  # fmt: skip
    return Report({"starts": table}, figures, [verdict])
