"""``leaderboard-ablations``: the plans of the leaderboard, judged again with effects switched off."""

from __future__ import annotations

import pandas as pd

from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.leaderboard.causes import simulated
from experiments.reproduce.leaderboard.run import LEFT_OUT, budget_of, searched
from searchers.registry import searcher_names
from simulator.fidelity import Fidelity

EFFECTS = ("overlap-slowdown", "contention", "allocator", "host")
SAME = 1.01


def run(context: Context) -> Report:
    """Judge every plan with all effects, and without each."""
    names = tuple(name for name in searcher_names() if name not in LEFT_OUT)
    frame, _, folder = searched(context, names, budget=budget_of(context))
    found = frame[frame["plan"].notna()]
    rows = []
    for number, (_, row) in enumerate(found.iterrows()):
        context.say(f"plan {number + 1} of {len(found)}")
        path = folder / "plans" / f"{row['run']}.yaml"
        for effect in ("none", *EFFECTS):
            result = simulated(path, Fidelity() if effect == "none" else Fidelity().without(effect))
            rows.append(
                {
                    "problem": row["problem"],
                    "searcher": row["searcher"],
                    "without": effect,
                    "iteration_time_s": result.iteration_time_s,
                    "fits": result.fits,
                }
            )
    frame = pd.DataFrame(rows)
    summary = pd.DataFrame([_changes(frame, effect) for effect in EFFECTS])
    changed = summary[summary["winners_changed"] > 0]["without"].tolist()
    return Report(
        tables={"changes": summary, "plans": frame},
        verdicts=[
            Verdict(
                "which searcher wins does not depend on overlap slowdown, contention, the allocator or the host",
                f"on no problem another searcher is best by more than {100 * (SAME - 1):.0f} % without one of them",
                f"winners change without: {', '.join(changed) or 'none'}",
                not changed,
            )
        ],
        notes=["Plans are those found under the searchers' own objectives; only the judge changes."],
    )


def _changes(frame: pd.DataFrame, effect: str) -> dict[str, object]:
    full = frame[frame["without"] == "none"]
    other = frame[frame["without"] == effect]
    winners, orders = 0, []
    for problem in full["problem"].unique():
        a = full[(full["problem"] == problem) & full["fits"]].groupby("searcher")["iteration_time_s"].min()
        b = other[(other["problem"] == problem) & other["fits"]].groupby("searcher")["iteration_time_s"].min()
        if a.empty or b.empty:
            continue
        champion = a.idxmin()
        # Another one wins if the champion is clearly behind once the effect is left out.
        if champion not in b or b[champion] > SAME * b.min():
            winners += 1
        both = a.index.intersection(b.index)
        if len(both) > 2:
            orders.append(float(a[both].rank().corr(b[both].rank())))
    faster = 1 - other["iteration_time_s"].to_numpy() / full["iteration_time_s"].to_numpy()
    return {
        "without": effect,
        "winners_changed": winners,
        "mean_rank_correlation": sum(orders) / len(orders) if orders else None,
        "iteration_time_less_percent": 100 * float(faster.mean()),
        "plans_that_fit_changed": int((other["fits"].to_numpy() != full["fits"].to_numpy()).sum()),
    }
