"""``leaderboard-ablations``: the plans of the leaderboard, judged again with effects switched off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.leaderboard.causes import simulated
from experiments.reproduce.leaderboard.run import budget_of, searched, searchers_of
from simulator.fidelity import Fidelity

EFFECTS = ("overlap-slowdown", "contention", "allocator", "host")
SAME = 1.01
WINNERS = ["problem", "without", "winner", "winner_without", "winner_behind"]


def run(context: Context) -> Report:
    """Judge every plan with all effects, and without each."""
    names = searchers_of(context)
    frame, _, folder = searched(context, names, budget=budget_of(context))
    found = frame[frame["plan"].notna()]
    rows = []
    judged: dict[str, list[dict[str, object]]] = {}
    for number, (_, row) in enumerate(found.iterrows()):
        context.say(f"plan {number + 1} of {len(found)}")
        path = folder / "plans" / f"{row['run']}.yaml"
        text = path.read_text(encoding="utf-8")
        if text not in judged:  # searchers, and seeds of one, often find the same plan
            judged[text] = [_judgement(path, effect) for effect in ("none", *EFFECTS)]
        rows += [{"problem": row["problem"], "searcher": row["searcher"], **each} for each in judged[text]]
    return changes(pd.DataFrame(rows))


def changes(frame: pd.DataFrame) -> Report:
    """Return what changes when an effect is left out.

    Args:
        frame: A row per plan and effect left out (``none`` for the full judge): problem, searcher, without,
            iteration_time_s, fits.
    """
    winners = pd.DataFrame([row for effect in EFFECTS for row in _new_winners(frame, effect)], columns=WINNERS)
    changed = list(dict.fromkeys(winners["without"]))
    summary = pd.DataFrame([_changes(frame, effect, list(winners["without"]).count(effect)) for effect in EFFECTS])
    return Report(
        tables={"changes": summary, "winners": winners, "means": _means(frame), "plans": frame},
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


def _judgement(path: Path, effect: str) -> dict[str, object]:
    result = simulated(path, Fidelity() if effect == "none" else Fidelity().without(effect))
    return {"without": effect, "iteration_time_s": result.iteration_time_s, "fits": result.fits}


def _best(frame: pd.DataFrame, effect: str) -> pd.DataFrame:
    """Return the least time of plans that fit, problems as rows and searchers as columns."""
    own = frame[(frame["without"] == effect) & frame["fits"]]
    return own.pivot_table(index="problem", columns="searcher", values="iteration_time_s", aggfunc="min", sort=False)


def _new_winners(frame: pd.DataFrame, effect: str) -> list[dict[str, object]]:
    """Return the problems where the best searcher is clearly behind another once the effect is left out."""
    full, other = _best(frame, "none"), _best(frame, effect)
    found = []
    for problem in full.index.intersection(other.index):
        champion, winner = full.loc[problem].idxmin(), other.loc[problem].idxmin()
        times = other.loc[problem]
        behind = times.get(champion, float("nan")) / times[winner]
        if not behind <= SAME:  # also where the champion's plan no longer fits
            found.append(dict(zip(WINNERS, (problem, effect, champion, winner, behind), strict=True)))
    return found


def _means(frame: pd.DataFrame) -> pd.DataFrame:
    """Return each searcher's geometric mean of time over the problem's best, judged with all effects and without each.

    Over the problems that it solves whatever is left out, so that the columns can be compared.
    """
    tables = {effect: _best(frame, effect) for effect in ("none", *EFFECTS)}
    rows = []
    for searcher in dict.fromkeys(frame["searcher"]):
        if not all(searcher in table for table in tables.values()):
            continue
        solved = set.intersection(*(set(table.index[table[searcher].notna()]) for table in tables.values()))
        problems = [problem for problem in tables["none"].index if problem in solved]
        if not problems:
            continue
        row: dict[str, object] = {"searcher": searcher, "problems": len(problems)}
        for effect, table in tables.items():
            ratios = table.loc[problems, searcher] / table.loc[problems].min(axis=1)
            row["all_effects" if effect == "none" else f"without_{effect}"] = float(np.exp(np.log(ratios).mean()))
        rows.append(row)
    return pd.DataFrame(rows)


def _changes(frame: pd.DataFrame, effect: str, winners_changed: int) -> dict[str, object]:
    full, other = (frame[frame["without"] == which] for which in ("none", effect))
    before, after = _best(frame, "none"), _best(frame, effect)
    orders = []
    for problem in before.index.intersection(after.index):
        both = pd.concat([before.loc[problem], after.loc[problem]], axis=1).dropna()
        if len(both) > 2:
            orders.append(float(both.iloc[:, 0].rank().corr(both.iloc[:, 1].rank())))
    faster = 1 - other["iteration_time_s"].to_numpy() / full["iteration_time_s"].to_numpy()
    return {
        "without": effect,
        "winners_changed": winners_changed,
        "mean_rank_correlation": sum(orders) / len(orders) if orders else None,
        "iteration_time_less_percent": 100 * float(faster.mean()),
        "plans_that_fit_changed": int((other["fits"].to_numpy() != full["fits"].to_numpy()).sum()),
    }
