"""Constants of a machine from whole iterations: a few factors that explain what runs of any plans took.

Each run's time is predicted with the machine's constants times a factor each (`hardware_models.machine_factors`). The
logs of the factors that make predictions and measurements meet are estimated by Gauss-Newton steps with a normal prior
around 0, so that a factor on which no run depends stays 1; runs far off count less than squared. The prior's width
is chosen by what it says of each run from all others: residuals of the linearised model are then ``e / (1 - h)``, with
``h`` from the diagonal of the hat matrix. No width, which keeps the shipped constants, is among the choices, and stands
where the others do not do better in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experiments.accuracy import fastest_engine
from hardware_models.machine_factors import with_factors
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate

Vector = NDArray[np.float64]

WIDTHS, NOISE = (0.0, 0.03, 0.1, 0.3, 1.0), 0.05
"""Of the log of a rate's factor, to choose among, for runs that no factor explains to better than the noise. Only their
ratio counts: the widest stands also for runs that repeat to a hundredth."""
WIDER = {"launch": 2.0, "overlap": 2.0}
"""Rates are known to some thirty per cent, what a launch and an overlap cost to a factor of two or so."""
REPEATS_TO, MOSTLY_PRIOR = 0.01, 0.5
"""Runs of one plan differ by about so much; a factor that keeps so much of its prior's width is not determined."""
STEP = 0.05
"""By how much a factor's log is moved to see what runs make of it."""
MAX_ROUNDS, SETTLED, LARGEST_STEP = 8, 2e-3, 0.5


@dataclass(frozen=True)
class Measured:
    """A measured iteration.

    Attributes:
        name: Row or file.
        problem: What was run, on the shipped constants.
        plan: How.
        seconds: Measured iteration time.
    """

    name: str
    problem: Problem
    plan: Plan
    seconds: float

    def log_error(self, factors: Mapping[str, float]) -> float:
        """Return log(predicted / measured) with factors on the machine's constants."""
        own = moved(self.problem, factors)
        return float(np.log(simulate(self.plan, own, engine=fastest_engine()).iteration_time_s / self.seconds))


@dataclass(frozen=True)
class FittedConstants:
    """Factors fitted to runs.

    Attributes:
        factors: By name.
        deviations: Standard deviation of each factor's log, given how far runs are from the fit.
        undetermined: Factors that the runs say little about: most of their prior is left.
        width: Of the prior that was chosen; 0 keeps the shipped constants.
        before, after: Signed relative errors of the runs without and with the factors: float64[runs].
        left_out: Likewise, each predicted from all others.
    """

    factors: Mapping[str, float]
    deviations: Mapping[str, float]
    undetermined: tuple[str, ...]
    width: float
    before: Vector
    after: Vector
    left_out: Vector


def moved(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Return the problem on hardware with its constants times factors."""
    if all(factor == 1 for factor in factors.values()):
        return problem
    cluster = problem.hardware.cluster
    return replace(problem, hardware=with_factors(cluster, factors, "factors").hardware(cluster))


def fit_constants(
    runs: Sequence[Measured], names: Sequence[str], progress: Callable[[str], None] | None = None
) -> FittedConstants:
    """Return the factors that explain runs, under the prior that predicts left-out runs best.

    Args:
        runs: At least two.
        names: Factors to fit, of `hardware_models.machine_factors.FACTORS`.
        progress: Called before each simulation with what is done, in words.

    Raises:
        ValueError: If there are fewer than two runs, or no name.
    """
    if len(runs) < 2 or not names:
        raise ValueError(f"at least two runs and one constant must be given, got {len(runs)} and {len(names)}")

    def errors_at(logs: Vector, what: str) -> Vector:
        factors = dict(zip(names, np.exp(logs).tolist(), strict=True))
        found = []
        for number, run in enumerate(runs, start=1):
            if progress is not None:
                progress(f"{what}, run {number} of {len(runs)}")
            found.append(run.log_error(factors))
        return np.array(found)

    relative = np.array([WIDER.get(name, 1.0) for name in names])
    logs = np.zeros(len(names))
    before = errors = errors_at(logs, "shipped constants")
    width, left_out, slopes = 0.0, before, np.zeros((len(runs), len(names)))
    for round_ in range(1, MAX_ROUNDS + 1):
        for column, name in enumerate(names):
            step = np.zeros(len(names))
            step[column] = STEP
            slopes[:, column] = (errors_at(logs + step, f"round {round_}, {name}") - errors) / STEP
        weights = 1 / np.sqrt(1 + (errors / NOISE) ** 2)
        width, target, left_out = _best(slopes, errors - slopes @ logs, weights, relative)
        step = np.clip(target - logs, -LARGEST_STEP, LARGEST_STEP)
        logs = logs + step
        errors = errors_at(logs, f"round {round_}") if step.any() else errors
        if np.abs(step).max() < SETTLED:
            break
    if np.abs(left_out).mean() >= np.abs(before).mean():
        width, logs, errors, left_out = 0.0, np.zeros(len(names)), before, before
    deviations = np.zeros(len(names))
    if width:
        noise = max(REPEATS_TO, float(np.sqrt(np.mean(errors**2))))
        precision = slopes.T @ slopes / noise**2 + np.diag((width * relative) ** -2.0)
        deviations = np.sqrt(np.diag(np.linalg.inv(precision)))
    return FittedConstants(
        factors=dict(zip(names, np.exp(logs).tolist(), strict=True)),
        deviations=dict(zip(names, deviations.tolist(), strict=True)),
        undetermined=tuple(
            name
            for name, deviation, wide in zip(names, deviations, width * relative, strict=True)
            if deviation >= MOSTLY_PRIOR * wide
        ),
        width=width,
        before=np.expm1(before),
        after=np.expm1(errors),
        left_out=np.expm1(left_out),
    )


def _best(slopes: Vector, at_zero: Vector, weights: Vector, relative: Vector) -> tuple[float, Vector, Vector]:
    """Return the width with the least mean absolute error of left-out runs, its estimate, and these errors.

    Args:
        slopes: float64[runs, factors]. What a run's log error gains with a factor's log.
        at_zero: float64[runs]. Log errors where all factors are 1, by the slopes.
        weights: float64[runs]. Of squared errors.
        relative: float64[factors]. Width of each factor's prior over that of a rate.
    """
    found = []
    weighted = slopes.T * weights
    for width in WIDTHS:
        estimate, left_out = np.zeros(slopes.shape[1]), at_zero
        if width:
            solved = np.linalg.solve(weighted @ slopes + np.diag((NOISE / (width * relative)) ** 2), weighted)
            estimate = -solved @ at_zero
            hat = np.einsum("ij,ji->i", slopes, solved)
            left_out = (at_zero + slopes @ estimate) / (1 - hat)
        found.append((float(np.abs(left_out).mean()), width, estimate, left_out))
    _, width, estimate, left_out = min(found, key=lambda each: each[0])
    return width, estimate, left_out
