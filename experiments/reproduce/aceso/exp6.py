"""Exp#6: convergence by the longest chain of primitives."""

from __future__ import annotations

from experiments.reproduce.aceso.convergence import Variant, converged
from experiments.reproduce.aceso.setting import GPT, WIDE_RESNET
from experiments.reproduce.experiment import Context, Report, Verdict

HOPS = (1, 3, 7, 11)
CASES = ((GPT[2], 4), (GPT[4], 8), (WIDE_RESNET[4], 8), (WIDE_RESNET[4], 9))
QUICK = ((GPT[1], 3),)


def run(context: Context) -> Report:
    """Run GPT-3 2.6B and 13B, and Wide-ResNet 13B as printed (quick: GPT-3 1.3B), searching as in the paper."""
    evaluations = 200 if context.quick else 2000
    variants = [
        Variant(setting, stages, f"MaxHops {hops}", {"max_hops": hops}, context.seed, evaluations)
        for setting, stages in (QUICK if context.quick else CASES)
        for hops in HOPS
    ]
    table, figures = converged(context, variants)
    found = []
    for model, own in table.groupby("model", sort=False):
        best = own.set_index("variant")["best_s"]
        found.append((model, float(best["MaxHops 7"] / best.min()), float(best["MaxHops 1"] / best.min())))
    worst = max(seven for _, seven, _ in found)
    verdicts = [
        Verdict(
            "7 hops are a fair choice for every model", "within 2 % of the best of 1, 3, 7 and 11 hops",
            f"at most {worst:.4f} times the best", worst <= 1.02,
        ),
        Verdict(
            "one hop may end in a sub-optimal plan", "at least one model where MaxHops 1 is over 0.5 % off the best",
            "; ".join(f"{name}: {one:.4f} times the best" for name, _, one in found),
            any(one > 1.005 for _, _, one in found),
        ),
    ]  # fmt: skip
    return Report({"hops": table}, figures, verdicts)
