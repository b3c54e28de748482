"""Where each searcher's plan loses time against the best known one: the largest change of the critical path."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pandas as pd

from simulator.costs import cost_tables
from simulator.fidelity import Fidelity
from simulator.plan import Plan
from simulator.plan_file import load_plan
from simulator.problem import Problem, ProblemSpec
from simulator.reports.difference import difference
from simulator.result import SimulationResult
from simulator.simulate import simulate


@lru_cache(maxsize=2)
def _problem(spec: ProblemSpec) -> Problem:
    return spec.load()


def loaded(path: Path) -> tuple[Plan, Problem]:
    """Return a plan file's plan and problem; neighbouring calls share the problem."""
    spec, plan = load_plan(path)
    return plan, _problem(spec)


def simulated(path: Path, fidelity: Fidelity | None = None) -> SimulationResult:
    """Return the simulation of a plan file."""
    plan, problem = loaded(path)
    return simulate(plan, problem, fidelity=fidelity, engine="compiled", costs=cost_tables(problem))


def losses(frame: pd.DataFrame, plans: Path) -> pd.DataFrame:
    """Return per run that found a slower plan than the best: the causes that cost it most.

    Args:
        frame: Rows of `table.with_problems`.
        plans: Folder with the plan of each run.
    """
    rows = []
    for problem, own in frame[frame["status"] == "ok"].groupby("problem", sort=False):
        ordered = own.sort_values("iteration_time_s", kind="stable").drop_duplicates("searcher")
        best_row = ordered.iloc[0]
        best = simulated(plans / f"{best_row['run']}.yaml")
        for _, row in ordered.iloc[1:].iterrows():
            if row["relative_time"] < 1.01:
                continue
            found = difference(best, simulated(plans / f"{row['run']}.yaml"), names=("best", str(row["searcher"])))
            worst = sorted(found.time, key=lambda change: -change.difference)[:2]
            rows.append(
                {
                    "problem": problem,
                    "searcher": row["searcher"],
                    "best_searcher": best_row["searcher"],
                    "relative_time": row["relative_time"],
                    "loses_s": row["iteration_time_s"] - best_row["iteration_time_s"],
                    "first_cause": worst[0].cause,
                    "first_cause_s": worst[0].difference,
                    "second_cause": worst[1].cause if len(worst) > 1 else "",
                    "second_cause_s": worst[1].difference if len(worst) > 1 else 0.0,
                }
            )
    return pd.DataFrame(rows)
