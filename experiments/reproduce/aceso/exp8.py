"""Exp#8 and Exp#9: predicted time and memory beside measured, by Aceso's model and by the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import pandas as pd

from experiments.cases import aceso as cases
from experiments.cases.case import Case, Skipped
from experiments.reproduce.aceso.setting import PROFILE, bars, simulated
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.kept import kept_rows
from searchers.aceso.configuration import from_plan
from searchers.aceso.model import PerformanceModel
from simulator.costs import cost_tables
from simulator.validate import validate

GROUPS = (cases.CERTAIN, cases.LIKELY)
FILES = (*PROFILE, "aceso_v100/measured_e2e.csv", "aceso_v100/reference_plans.json")
# Of the artifact's own predictions, Figures 15 and 16.
PAPER_TIME, PAPER_MEMORY = 0.0270, 0.1426
AXES = {"s": "iteration time, s", "mib": "peak memory, MiB"}


def compared(context: Context) -> pd.DataFrame:
    """Return a row per measured run whose plan is known or likely: measured, and predicted three ways."""
    context.data_file("aceso_v100/ops.csv.gz")
    found = [
        case for case in cases.cases(context.data) if not isinstance(case, Skipped) and set(case.groups) & set(GROUPS)
    ]
    if context.quick:
        found = [case for case in found if case.features["model"] in ("1_3B", "500M")]
    return pd.DataFrame(kept_rows(context, found, _rows_of, name=attrgetter("row_id"), files=FILES))


def _rows_of(context: Context, found: Sequence[Case]) -> Iterator[dict[str, object]]:
    for case in found:
        yield _row(case)


def _row(case: Case) -> dict[str, object]:
    problem = case.problem()
    plan = validate(case.plan(problem), problem)
    configuration = from_plan(plan, problem)
    prices = {
        compat: PerformanceModel.of(problem, cost_tables(problem), compat=compat).price(configuration)
        for compat in ("paper", "release")
    }
    result = simulated(plan, problem)
    row: dict[str, object] = {
        "run": case.row_id.rpartition("#")[2],
        "plan_is": "certain" if cases.CERTAIN in case.groups else "likely",
        "measured_s": case.measured.iteration_time_s,
        **{f"{name}_model_s": price.iteration_s for name, price in prices.items()},
        "simulated_s": result.iteration_time_s,
    }
    if case.measured.peak_bytes is not None:
        peak = max(memory.peak_reserved_bytes for memory in result.memory)
        row |= {
            "measured_mib": case.measured.peak_bytes / 2**20,
            **{f"{name}_model_mib": price.memory_bytes / 2**20 for name, price in prices.items()},
            "simulated_mib": peak / 2**20,
        }
    return row


def _report(table: pd.DataFrame, unit: str, paper: float, what: str) -> Report:
    names = (f"paper_model_{unit}", f"release_model_{unit}", f"simulated_{unit}")
    measured = table[f"measured_{unit}"]
    for name in names:
        table[f"{name}_error"] = table[name] / measured - 1
    means = {name: float(table[f"{name}_error"].abs().mean()) for name in names}
    verdict = Verdict(
        f"Aceso's model predicts {what} within {paper:.2%} on average (GPT-3)",
        "mean absolute error of the paper's model, as implemented here, at most 1.5 times that",
        ", ".join(f"{name.removesuffix('_' + unit)} {error:.2%}" for name, error in means.items()),
        means[names[0]] <= 1.5 * paper,
    )
    series = {
        name.removesuffix(f"_{unit}"): [float(value) for value in table[name]] for name in (f"measured_{unit}", *names)
    }
    figure = bars([str(run) for run in table["run"]], series, y=AXES[unit], title=what)
    notes = ["Which plans were measured is known for GPT-3 1.3B's Aceso plan only; the others are likely."]
    return Report({what: table}, {what: figure}, [verdict], notes)


def run(context: Context) -> Report:
    """Compare iteration times."""
    return _report(compared(context), "s", PAPER_TIME, "time")


def run_memory(context: Context) -> Report:
    """Compare peak memory, of the runs that have it."""
    table = compared(context)
    return _report(table[table["measured_mib"].notna()].reset_index(drop=True), "mib", PAPER_MEMORY, "memory")
