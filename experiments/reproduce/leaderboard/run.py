"""``leaderboard``: a sweep over the problem set, resumable, and what its table says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from datafiles.writer import write_text_atomically
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.leaderboard.causes import losses
from experiments.reproduce.leaderboard.figures import convergence, heat_map, mean_times
from experiments.reproduce.leaderboard.plans import boxes, pictures
from experiments.reproduce.leaderboard.problems import NamedProblem, load_problems, sweep_text
from experiments.reproduce.leaderboard.table import per_problem, ranking, with_problems
from experiments.reproduce.swept import swept
from searchers.registry import searcher_names

EVALUATIONS = 300
QUICK_EVALUATIONS = 40
SEEDS = 3
STOCHASTIC = ("random", "flexflow-mcmc", "aceso")
LEFT_OUT = ("exhaustive",)
"""Searches its own tiny space to the end, by design."""


def run(context: Context) -> Report:
    """Make the runs that are missing, and tabulate all."""
    frame, problems, folder = searched(context, _searchers(context))
    order = ranking(frame, context.seed)
    names = list(order["searcher"])
    causes = losses(frame, folder / "plans")
    wide = per_problem(frame).reindex(names).reset_index()
    solved = order["solved"].max()
    failures = frame[frame["status"] != "ok"][["problem", "searcher", "status", "reason"]]
    crashed = int((frame["status"] == "failed").sum())
    columns = ["problem", "searcher", "seed", "status", "iteration_time_s", "relative_time", "evaluations", "plan"]
    return Report(
        tables={
            "ranking": order,
            "relative_times": wide,
            "causes": causes,
            "failures": failures,
            "search_times": _search_times(frame),
            "runs": frame[columns],
        },
        figures={
            "heat_map": heat_map(frame, names),
            "mean_times": mean_times(order),
            "convergence": convergence(_histories(frame, folder)),
            "best_plans": boxes(frame, folder / "plans"),
            **pictures(frame, folder / "plans"),
        },
        verdicts=[
            Verdict(
                "every searcher runs on every problem, or says itself what it cannot express",
                "no run ends with an error",
                f"{len(frame) - crashed} of {len(frame)} runs ended as they should; at most {solved} problems solved",
                crashed == 0,
            )
        ],
        notes=[
            f"Budget: {EVALUATIONS if not context.quick else QUICK_EVALUATIONS} evaluations each (a run repeats to the "
            "last bit); seconds of search are reported, not limited, and stand in a table of their own.",
            "Each searcher optimises its own paper's objective; its plans are simulated in its order until one fits.",
            *(f"{problem.name}: {problem.source}" for problem in problems),
        ],
    )


def _searchers(context: Context) -> tuple[str, ...]:
    own = tuple(_brought(context, reference) for reference in context.searchers)
    return (*(name for name in searcher_names() if name not in LEFT_OUT), *own)


def _brought(context: Context, reference: str) -> str:
    """Return a user's searcher as a name beside the sweep's spec, where its file is copied to."""
    file_name, _, class_name = reference.rpartition(".py:")
    path = Path(f"{file_name}.py")
    if not class_name or not path.is_file():
        raise ValueError(f"a searcher of one's own must be path/to/file.py:Class, got {reference!r}")
    write_text_atomically(context.scratch / path.name, path.read_text(encoding="utf-8"))
    return f"{path.name}:{class_name}"


def searched(
    context: Context, searchers: tuple[str, ...], *, objective: str = "paper", evaluations: int | None = None
) -> tuple[pd.DataFrame, tuple[NamedProblem, ...], Path]:
    """Return the rows of all runs, the problems, and the sweep's folder; finished runs are kept."""
    problems = tuple(problem for problem in load_problems() if problem.quick or not context.quick)
    text = sweep_text(
        problems,
        searchers,
        evaluations=evaluations or (QUICK_EVALUATIONS if context.quick else EVALUATIONS),
        stochastic=STOCHASTIC,
        seeds=1 if context.quick else SEEDS,
        seed=context.seed,
        objective=objective,
    )
    sweep = swept(context, "leaderboard", text)
    return with_problems(sweep.table(), problems), problems, sweep.folder.path


def _search_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Return seconds of search per searcher: they depend on the machine, so they stand apart."""
    return frame.groupby("searcher", sort=False)["search_s"].agg(["median", "max"]).reset_index()


def _histories(frame: pd.DataFrame, folder: Path) -> dict[str, Sequence[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for searcher, run_key in zip(frame["searcher"], frame["run"], strict=True):
        history = json.loads((folder / "runs" / f"{run_key}.json").read_text()).get("history", [])
        if history:
            last = history[-1][2]
            found.setdefault(str(searcher), []).extend((int(step[1]), float(step[2]) / last) for step in history)
    return {name: sorted(steps) for name, steps in found.items()}
