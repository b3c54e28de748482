"""``leaderboard``: a sweep over the problem set, resumable, and what its table says."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.leaderboard.causes import losses
from experiments.reproduce.leaderboard.figures import History, convergence, heat_map, mean_times
from experiments.reproduce.leaderboard.plans import boxes, pictures
from experiments.reproduce.leaderboard.problems import NamedProblem, load_problems, sweep_text
from experiments.reproduce.leaderboard.table import per_problem, ranking, with_problems
from experiments.reproduce.swept import record_of, swept
from searchers.registry import file_and_class, files_of, is_file, searcher_class, searcher_names

EVALUATIONS = 300
QUICK_EVALUATIONS = 40
SECONDS = 10
QUICK_SECONDS = 2
SEEDS = 3
STOCHASTIC = ("random", "flexflow-mcmc", "aceso")
"""They have several seeds, and so have searchers of one's own, which may draw too."""
LEFT_OUT = ("exhaustive", "aceso-dp")
"""They search their own space to the end, by design, whatever the budget."""


def run(context: Context) -> Report:
    """Search with a budget of evaluations: make the runs that are missing, and tabulate all."""
    budget = budget_of(context)
    return _report(
        context,
        budget,
        "evaluations",
        f"Budget: {budget} evaluations each (a run repeats to the last bit); seconds of search are reported, not "
        "limited, and stand in a table of their own.",
    )


def run_timed(context: Context) -> Report:
    """Search with a budget of seconds."""
    seconds = QUICK_SECONDS if context.quick else SECONDS
    return _report(
        context,
        f"{seconds}s",
        "seconds",
        f"Budget: {seconds} seconds of search each, on {context.workers or 'all'} workers of one machine, cost tables "
        "apart. A search may end earlier, or later by the evaluation at work. Another machine gives another table.",
    )


def budget_of(context: Context) -> str:
    """Return the evaluations that each search may make."""
    return str(QUICK_EVALUATIONS if context.quick else EVALUATIONS)


def _report(context: Context, budget: str, unit: str, note: str) -> Report:
    frame, problems, folder = searched(context, searchers_of(context), budget=budget)
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
            "search_times": _search_times(frame, folder),
            "runs": frame[columns],
        },
        figures={
            "heat_map": heat_map(frame, names),
            "mean_times": mean_times(order),
            "convergence": convergence(_histories(frame, folder, unit), unit),
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
            note,
            "Each searcher optimises its own paper's objective; its plans are simulated in its order until one fits.",
            *(f"{problem.name}: {problem.source}" for problem in problems),
        ],
    )


def searchers_of(context: Context) -> dict[str, str]:
    """Return all searchers on the leaderboard, as a spec of the sweep refers to them, and their names in tables.

    The user's own come last, as file and class.
    """
    published = (name for name in searcher_names() if name not in LEFT_OUT)
    return {**{name: name for name in published}, **_own(context)}


def _own(context: Context) -> dict[str, str]:
    found: dict[str, str] = {}
    for reference in context.searchers:
        if not is_file(reference):
            raise ValueError(f"a searcher of one's own must be path/to/file.py:Class, got {reference!r}")
        path, class_name = file_and_class(reference)
        made = searcher_class(reference)  # says what is wrong with it, once for all problems
        class_name = class_name or made.__name__
        folder = Path("own") / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
        spelled = f"{folder / path.name}:{class_name}"
        if spelled in found:
            raise ValueError(f"each searcher must be named once, got {reference} again")
        shutil.rmtree(context.scratch / folder, ignore_errors=True)
        for file in files_of(reference):  # a sweep's files lie beside its spec
            copy = context.scratch / folder / file.relative_to(path.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
        named = f"{path.name}:{class_name}"
        found[spelled] = named if named not in found.values() else f"{path}:{class_name}"
    return found


def searched(
    context: Context, searchers: Mapping[str, str], *, budget: str, objective: str = "paper"
) -> tuple[pd.DataFrame, tuple[NamedProblem, ...], Path]:
    """Return the rows of all runs, the problems, and the sweep's folder; finished runs are kept.

    Args:
        context: Of the experiment.
        searchers: From ``searchers_of``.
        budget: As in a sweep.
        objective: As in a sweep.
    """
    own = tuple(spelled for spelled in searchers if is_file(spelled))
    problems = tuple(problem for problem in load_problems() if problem.quick or not context.quick)
    text = sweep_text(
        problems,
        tuple(searchers),
        budget=budget,
        stochastic=(*STOCHASTIC, *own),
        seeds=1 if context.quick else SEEDS,
        seed=context.seed,
        objective=objective,
    )
    sweep = swept(context, "leaderboard", text)
    rows = sweep.table()
    rows["searcher"] = rows["searcher"].map(searchers)
    return with_problems(rows, problems), problems, sweep.folder.path


def _search_times(frame: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Return seconds of search per searcher, which depend on the machine, so they stand apart.

    ``accounted_s`` is what the search would take where its paper compiles and profiles stages on the cluster.
    """
    own = frame[["searcher", "search_s"]].copy()
    own["accounted_s"] = [record_of(folder, run)["counters"].get("estimated_search_s") for run in frame["run"]]
    return (
        own.groupby("searcher", sort=False)
        .agg(median_s=("search_s", "median"), longest_s=("search_s", "max"), accounted_s=("accounted_s", "median"))
        .reset_index()
    )


def _histories(frame: pd.DataFrame, folder: Path, unit: str) -> dict[str, list[History]]:
    """Return the improvements of every run whose plan fits: evaluations or seconds, and time over the best known.

    Between improvements only the searcher's own objective is known: the simulated time of the plan at the end is
    scaled by how much larger the objective was.
    """
    place = {"seconds": 0, "evaluations": 1}[unit]
    found: dict[str, list[History]] = {}
    good = frame[frame["status"] == "ok"]
    for searcher, run, relative in zip(good["searcher"], good["run"], good["relative_time"], strict=True):
        history = record_of(folder, run)["history"]
        if history:  # a searcher of one's own may keep none
            last = history[-1][2]
            found.setdefault(str(searcher), []).append(
                [(float(step[place]), float(relative) * step[2] / last) for step in history]
            )
    return found
