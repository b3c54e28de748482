"""Table V once more, with the cells of one memory budget as calibration and those of the other reported, both ways.

Two things of the machine are in no released profile of these runs: how quick its host is, and what share of the A100's
TF32 rate products reach. A factor for each is fitted on the cells of one budget, as `windtunnel calibrate runs
--constants host,products` does, and judged on the other. The table prints partitions; so a cell's plan has the
printed partition and batch, and the strategies that our search gives its stages within the budget (else those that need
the least memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from datafiles.tables import load_table
from experiments.calibrate.fitted_constants import fit_constants, log_error
from experiments.calibrate.measured_run import MeasuredRun
from experiments.cases.case import PRINTED
from experiments.cases.galvatron_table2 import Run, planner_options
from experiments.reproduce.experiment import Verdict
from experiments.reproduce.galvatron.cells import TITLES
from experiments.reproduce.galvatron.grid import Key, Printed
from experiments.reproduce.galvatron.machines import A100_RUNTIME, A100S_16
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan

FITTED = ("host", "products")
"""Of `hardware_models.machine_factors.FACTORS`."""

TARGET = 0.15


@dataclass(frozen=True)
class PlannedCell:
    """A printed cell with a plan that has its partition and batch, as a run."""

    key: Key
    printed: Printed
    run: MeasuredRun

    def difference(self, factors: Mapping[str, float]) -> float:
        """Return simulated over printed throughput less 1, with factors on the machine's constants."""
        return float(np.expm1(-log_error(self.run, factors)))


def printed_table5() -> Mapping[Key, Printed]:
    """Return the paper's cells of Table V."""
    table = load_table(
        PRINTED / "galvatron_table5.csv",
        integers=("row", "memory_gb", "global_batch"),
        floats=("throughput_samples_per_s",),
    )
    return {
        (row["memory_gb"], row["model"], row["strategy"]): Printed(
            row["throughput_samples_per_s"], row["global_batch"], row["partition"]
        )
        for row in table
    }


def run_of(model: str, memory_gb: int) -> Run:
    """Return what a cell of the table is about."""
    return Run(model=model, cluster=A100S_16, memory_gb=memory_gb, runtime=A100_RUNTIME)


def planned(key: Key, printed: Printed) -> PlannedCell:
    """Return a cell with a plan of the printed partition."""
    memory_gb, model, strategy = key
    run = run_of(model, memory_gb)
    assert printed.batch is not None, "every cell of the table has a batch"
    partition = tuple(map(int, printed.partition.split("-")))
    problem = run.problem(printed.batch)
    profiles = run.profiles
    planner = Planner(problem, planner_options(strategy, run.num_gpus), profiles=profiles)
    search = planner.searches[len(partition)]
    cuts = planner.cuts(printed.batch, len(partition))
    found = [plan for cut in cuts if (plan := search.plan(partition, printed.batch, cut)) is not None]
    best = min(found, key=lambda plan: plan.iteration_time_s, default=None)
    best = best or search.leanest(partition, printed.batch, cuts[0])
    if best is None:
        raise ValueError(f"no strategy cuts {printed.batch} samples of {model} into stages of {printed.partition}")
    assert printed.throughput is not None, "every cell of the table has a throughput"
    seconds = printed.batch / printed.throughput
    return PlannedCell(key, printed, MeasuredRun(" ".join(map(str, key)), problem, to_plan(best, problem), seconds))


def cluster_factors(say: Callable[[str], None]) -> tuple[tuple[str, float], ...]:
    """Return the factors that all printed cells of the table say of its machine, rounded: other tables take them."""
    say("constants of the A100s, fitted on Table V")
    found = fit_constants([planned(key, value).run for key, value in printed_table5().items()], FITTED).factors
    return tuple((name, round(factor, 3)) for name, factor in found.items())


def calibrated(printed: Mapping[Key, Printed], say: Callable[[str], None]) -> tuple[pd.DataFrame, Verdict]:
    """Return every cell before and after a calibration on the other budget, and the verdict on their means."""
    cells = [planned(key, value) for key, value in printed.items()]
    budgets = sorted({cell.key[0] for cell in cells})
    rows, words = [], []
    for budget in budgets:
        say(f"constants fitted without the cells of {budget} GB")
        factors = fit_constants([cell.run for cell in cells if cell.key[0] != budget], FITTED).factors
        own = [
            {
                "memory_gb": budget,
                "strategy": TITLES[cell.key[2]],
                "model": cell.key[1],
                "partition": cell.printed.partition,
                "batch": cell.printed.batch,
                "paper_samples_per_s": cell.printed.throughput,
                "uncalibrated": cell.difference({}),
                "calibrated": cell.difference(factors),
            }
            for cell in cells
            if cell.key[0] == budget
        ]
        with_factors = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
        words.append(f"{pd.DataFrame(own)['calibrated'].abs().mean():.1%} at {budget} GB with {with_factors}")
        rows += own
    frame = pd.DataFrame(rows)
    means = frame.groupby("memory_gb")["calibrated"].apply(lambda values: values.abs().mean())
    verdict = Verdict(
        "throughput of the printed partitions, calibrated on the other budget's cells",
        f"within {TARGET:.0%} on average in both budgets",
        f"{'; '.join(words)}; {frame['uncalibrated'].abs().mean():.1%} without",
        float(means.max()) <= TARGET,
    )
    return frame, verdict
