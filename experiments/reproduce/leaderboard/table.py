"""From a sweep's rows to the leaderboard: times relative to the best known plan, and intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.reproduce.leaderboard.problems import NamedProblem

RESAMPLES = 2000
KEY = ["model", "cluster", "runtime", "global_batch"]


def with_problems(rows: pd.DataFrame, problems: tuple[NamedProblem, ...]) -> pd.DataFrame:
    """Return the rows with the problem's name, and the time relative to the best plan that fits, of any searcher."""
    names = pd.DataFrame([(*problem.key, problem.name) for problem in problems], columns=[*KEY, "problem"])
    # Memory limits tell apart problems that share all else; names are unique per row of the file.
    frame = rows.merge(names, on=KEY, how="left")
    frame = frame[frame["problem"].notna()].copy()
    good = frame["status"] == "ok"
    best = frame[good].groupby("problem")["iteration_time_s"].min()
    frame["relative_time"] = np.where(
        good, frame["iteration_time_s"].astype(float) / frame["problem"].map(best).astype(float), np.nan
    )
    return frame


def per_problem(frame: pd.DataFrame) -> pd.DataFrame:
    """Return relative times, searchers as rows and problems as columns; medians over seeds, NaN without a plan."""
    return frame.pivot_table(
        index="searcher", columns="problem", values="relative_time", aggfunc="median", sort=False, dropna=False
    )


def ranking(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return one row per searcher, the one with the most problems solved and then the least mean time first.

    The mean is geometric, over the problems that the searcher solved; the interval is the middle 95 % of means over
    problems drawn with replacement.
    """
    wide = per_problem(frame)
    rows = []
    for searcher in dict.fromkeys(frame["searcher"]):
        own = frame[frame["searcher"] == searcher]
        times = wide.loc[searcher].dropna().to_numpy() if searcher in wide.index else np.array([])
        low, high = _interval(times, seed)
        statuses = own.groupby("problem")["status"].agg(lambda values: "ok" if "ok" in set(values) else values.iloc[0])
        rows.append(
            {
                "searcher": searcher,
                "solved": len(times),
                "problems": own["problem"].nunique(),
                "relative_time": float(np.exp(np.log(times).mean())) if len(times) else None,
                "low": low,
                "high": high,
                "best_or_within_1_percent": int((times <= 1.01).sum()),
                "out_of_memory": int((statuses == "out of memory").sum()),
                "no_plan": int((statuses == "no plan").sum()),
                "not_applicable": int((statuses == "not applicable").sum()),
                "failed": int((statuses == "failed").sum()),
                "evaluations": int(own["evaluations"].fillna(0).sum()),
            }
        )
    found = pd.DataFrame(rows)
    return found.sort_values(["solved", "relative_time"], ascending=[False, True], kind="stable").reset_index(drop=True)


def _interval(times: NDArray[np.float64], seed: int) -> tuple[float | None, float | None]:
    if not len(times):
        return None, None
    random = np.random.default_rng(seed)
    drawn = random.integers(len(times), size=(RESAMPLES, len(times)))
    means = np.exp(np.log(times)[drawn].mean(axis=1))
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))
