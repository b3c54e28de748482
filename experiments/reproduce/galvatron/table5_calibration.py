"""Table V once more, with the cells of one memory budget as calibration and those of the other reported, both ways.

Three constants of the machine and its software are in no released profile of these runs: what an operator costs the
host forward and backward, and what share of the A100's TF32 rate products reach. They are fitted on the cells of one
budget and judged on the other. The table prints partitions; so a cell's plan has the printed partition and batch, and
the strategies that our search gives its stages within the budget (else those that need the least memory).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.cases.galvatron_table2 import Run, planner_options, profiles_of
from experiments.reproduce.experiment import Verdict
from experiments.reproduce.galvatron.cells import TITLES
from experiments.reproduce.galvatron.grid import Key, Printed
from experiments.reproduce.galvatron.other_tables import A100_RUNTIME, A100S_16
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate

DTYPE = "tf32"
START = (50e-6, 50e-6, 0.7)
"""Where the fit starts: host seconds per operator forward and backward, share of the modelled TF32 rate."""

TYPICAL_ERROR = 0.1
"""Log errors beyond this count less than squared."""

TARGET = 0.15


@dataclass(frozen=True)
class Constants:
    """What is fitted: host seconds per operator, and the share of the modelled rate of matrix products."""

    host_forward_s: float
    host_backward_s: float
    rate: float

    def __str__(self) -> str:
        return (
            f"{self.host_forward_s * 1e6:.0f} and {self.host_backward_s * 1e6:.0f} us an operator forward and "
            f"backward, {self.rate:.2f} of the TF32 rate"
        )


@dataclass(frozen=True)
class PlannedCell:
    """A printed cell with a plan that has its partition and batch."""

    key: Key
    printed: Printed
    problem: Problem
    plan: Plan


def differences(cells: Sequence[PlannedCell], constants: Constants | None) -> NDArray[np.float64]:
    """Return the relative differences of simulated and printed throughput, with the shipped constants if None.

    All cells are of one cluster: prices are kept with its hardware.
    """
    hardware = cells[0].problem.hardware
    if constants is not None:
        hardware = hardware.with_rate(DTYPE, constants.rate)
    found = []
    for cell in cells:
        problem = replace(cell.problem, hardware=hardware)
        if constants is not None:
            host_s = (constants.host_forward_s, constants.host_backward_s)
            problem = replace(problem, runtime=replace(problem.runtime, host_seconds_per_operator=host_s))
        assert cell.printed.throughput is not None, "every cell of the table has a throughput"
        result = simulate(cell.plan, problem, engine="compiled")
        found.append(result.samples_per_s / cell.printed.throughput - 1)
    return np.array(found, dtype=np.float64)


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
    profiles = profiles_of(model, run.cluster, run.runtime)
    planner = Planner(problem, planner_options(strategy, run.num_gpus), profiles=profiles)
    search = planner.searches[len(partition)]
    cuts = planner.cuts(printed.batch, len(partition))
    found = [plan for cut in cuts if (plan := search.plan(partition, printed.batch, cut)) is not None]
    best = min(found, key=lambda plan: plan.iteration_time_s, default=None)
    best = best or search.leanest(partition, printed.batch, cuts[0])
    if best is None:
        raise ValueError(f"no strategy cuts {printed.batch} samples of {model} into stages of {printed.partition}")
    return PlannedCell(key, printed, problem, to_plan(best, problem))


def fitted(cells: Sequence[PlannedCell]) -> Constants:
    """Return the constants with the least error over some cells."""
    start = np.array(START)

    def constants(scaled: NDArray[np.float64]) -> Constants:
        forward_s, backward_s, rate = (np.abs(scaled) * start).tolist()
        return Constants(forward_s, backward_s, rate)

    def residuals(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        logs: NDArray[np.float64] = np.log1p(differences(cells, constants(scaled)))
        return logs

    fit = least_squares(
        residuals, np.ones(3), diff_step=[0.05] * 3, loss="soft_l1", f_scale=TYPICAL_ERROR, max_nfev=8
    )
    return constants(fit.x)


def calibrated(printed: Mapping[Key, Printed], say: Callable[[str], None]) -> tuple[pd.DataFrame, Verdict]:
    """Return every cell before and after a calibration on the other budget, and the verdict on their means."""
    cells = [planned(key, value) for key, value in printed.items()]
    budgets = sorted({cell.key[0] for cell in cells})
    rows, words, means = [], [], []
    for budget in budgets:
        say(f"constants fitted without the cells of {budget} GB")
        own = [cell for cell in cells if cell.key[0] == budget]
        constants = fitted([cell for cell in cells if cell.key[0] != budget])
        before, after = differences(own, None), differences(own, constants)
        means.append(float(np.abs(after).mean()))
        words.append(f"{means[-1]:.1%} at {budget} GB with {constants}")
        rows += [
            {
                "memory_gb": budget,
                "strategy": TITLES[cell.key[2]],
                "model": cell.key[1],
                "partition": cell.printed.partition,
                "batch": cell.printed.batch,
                "paper_samples_per_s": cell.printed.throughput,
                "uncalibrated": plain,
                "calibrated": difference,
            }
            for cell, plain, difference in zip(own, before.tolist(), after.tolist(), strict=True)
        ]
    frame = pd.DataFrame(rows)
    verdict = Verdict(
        "throughput of the printed partitions, calibrated on the other budget's cells",
        f"within {TARGET:.0%} on average in both budgets",
        f"{'; '.join(words)}; {frame['uncalibrated'].abs().mean():.1%} without",
        max(means) <= TARGET,
    )
    return frame, verdict
