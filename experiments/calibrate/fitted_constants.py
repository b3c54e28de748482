"""Constants of a machine from whole iterations: a few factors that explain what runs of any plans took.

Each run's time is predicted with the machine's constants times a factor each (`hardware_models.machine_factors`). The
logs of the factors that make predictions and measurements meet are estimated by Gauss-Newton steps with a normal prior
around 0, so that a factor on which no run depends stays 1; runs far off count less than squared. The prior's width
is chosen by what it says of each run from all others: residuals of the linearised model are then ``e / (1 - h)``, with
``h`` from the diagonal of the hat matrix. No width, which keeps the shipped constants, is among the choices, and stands
where the others do not do better in the end. Width and weights have seen the runs that they leave out, so what is said
of these is a little too good; runs held back altogether say more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from experiments.calibrate.measured_run import MeasuredRun, doubt
from hardware_models.machine_factors import with_factors
from simulator.problem import Problem

Vector = NDArray[np.float64]

WIDTHS, NOISE = (0.0, 0.03, 0.1, 0.3, 1.0), 0.05
"""Of the log of a rate's factor, to choose among, for runs that no factor explains to better than the noise. Only their
ratio counts: the widest stands also for runs that repeat to a hundredth."""
WIDER = {"host": 2.0, "overlap": 2.0}
"""Rates are known to some thirty per cent, what a host and an overlap cost to a factor of two or so."""
REPEATS_TO, MOSTLY_PRIOR = 0.01, 0.5
"""Runs of one plan differ by about so much; a factor that keeps so much of its prior's width is not determined."""
STEP = 0.05
"""By how much a factor's log is moved to see what runs make of it."""
MAX_ROUNDS, MAX_HALVINGS, SETTLED, LARGEST_STEP = 8, 4, 2e-3, 0.5

ErrorsAt = Callable[[NDArray[np.float64], str], NDArray[np.float64]]


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


def log_error(run: MeasuredRun, factors: Mapping[str, float]) -> float:
    """Return log(predicted / measured) of a run with factors on the machine's constants."""
    return float(np.log(run.simulated_s(moved(run.problem, factors)) / run.seconds))


def moved(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Return the problem on hardware with its constants times factors."""
    if all(factor == 1 for factor in factors.values()):
        return problem
    cluster = problem.hardware.cluster
    return replace(problem, hardware=with_factors(cluster, factors, "factors").hardware(cluster))


def fit_constants(
    runs: Sequence[MeasuredRun], names: Sequence[str], progress: Callable[[str], None] | None = None
) -> FittedConstants:
    """Return the factors that explain runs, under the prior that predicts left-out runs best.

    Args:
        runs: At least two.
        names: Factors to fit, of `hardware_models.machine_factors.FACTORS`.
        progress: Called before each simulation with what is done, in words.

    Raises:
        ValueError: If there are fewer than two runs, no name, or times in no unit of seconds.
    """
    if len(runs) < 2 or not names:
        raise ValueError(f"at least two runs and one constant must be given, got {len(runs)} and {len(names)}")

    def errors_at(logs: Vector, what: str) -> Vector:
        factors = dict(zip(names, np.exp(logs).tolist(), strict=True))
        found = []
        for number, run in enumerate(runs, start=1):
            if progress is not None:
                progress(f"{what}, run {number} of {len(runs)}")
            found.append(log_error(run, factors))
        return np.array(found)

    relative = np.array([WIDER.get(name, 1.0) for name in names])
    logs = np.zeros(len(names))
    before = errors = errors_at(logs, "shipped constants")
    if (words := doubt(np.exp(-before).tolist())) is not None:
        raise ValueError(words)
    width, slopes = 0.0, np.zeros((len(runs), len(names)))
    for round_ in range(1, MAX_ROUNDS + 1):
        slopes = _slopes(errors_at, names, logs, errors, f"round {round_}")
        width, target = _best(slopes, errors - slopes @ logs, _weights(errors), relative)
        if not width:
            break
        step, moved_on = np.clip(target - logs, -LARGEST_STEP, LARGEST_STEP), False
        for _ in range(MAX_HALVINGS):
            tried = errors_at(logs + step, f"round {round_}")
            if _cost(tried, logs + step, width * relative) < _cost(errors, logs, width * relative):
                logs, errors, moved_on = logs + step, tried, True
                break
            step = step / 2
        if not moved_on or np.abs(step).max() < SETTLED:
            break
    precision = _precision(slopes, _weights(errors), width * relative) if width else np.eye(len(names))
    hat = np.einsum("ij,ji->i", slopes, np.linalg.solve(precision, slopes.T * _weights(errors)))
    left_out = errors / (1 - hat) if width else before
    if not width or np.abs(left_out).mean() >= np.abs(before).mean():
        width, logs, errors, left_out = 0.0, np.zeros(len(names)), before, before
    # What the fit takes up of the runs' scatter is not left in their errors.
    taken = hat.sum() if width else 0.0
    noise = max(REPEATS_TO, float(np.sqrt((_weights(errors) * errors**2).sum() / (len(runs) - taken))))
    deviations = noise * np.sqrt(np.diag(np.linalg.inv(precision))) if width else np.zeros(len(names))
    wide = noise / NOISE * width * relative
    return FittedConstants(
        factors=dict(zip(names, np.exp(logs).tolist(), strict=True)),
        deviations=dict(zip(names, deviations.tolist(), strict=True)),
        undetermined=tuple(
            name for name, own, prior in zip(names, deviations, wide, strict=True) if own >= MOSTLY_PRIOR * prior
        ),
        width=width,
        before=np.expm1(before),
        after=np.expm1(errors),
        left_out=np.expm1(left_out),
    )


def _slopes(errors_at: ErrorsAt, names: Sequence[str], logs: Vector, errors: Vector, what: str) -> Vector:
    """Return what runs' log errors gain with each factor's log; below where it has an end (a share of a peak)."""
    found = np.zeros((len(errors), len(names)))
    for column, name in enumerate(names):
        for step in (STEP, -STEP):
            moved_logs = logs.copy()
            moved_logs[column] += step
            found[:, column] = (errors_at(moved_logs, f"{what}, {name}") - errors) / step
            if found[:, column].any():
                break
    return found


def _weights(errors: Vector) -> Vector:
    """Return the weights of squared errors that make runs far off count less."""
    weights: Vector = 1 / np.sqrt(1 + (errors / NOISE) ** 2)
    return weights


def _cost(errors: Vector, logs: Vector, widths: Vector) -> float:
    """Return what is made small: errors, squared up to the noise and linear beyond, and the distance from the prior."""
    return float(2 * (np.sqrt(1 + (errors / NOISE) ** 2) - 1).sum() + ((logs / widths) ** 2).sum())


def _precision(slopes: Vector, weights: Vector, widths: Vector) -> Vector:
    precision: Vector = (slopes.T * weights) @ slopes + np.diag((NOISE / widths) ** 2)
    return precision


def _best(slopes: Vector, at_zero: Vector, weights: Vector, relative: Vector) -> tuple[float, Vector]:
    """Return the width with the least mean absolute error of left-out runs under these slopes, and its estimate.

    Args:
        slopes: float64[runs, factors]. What a run's log error gains with a factor's log.
        at_zero: float64[runs]. Log errors where all factors are 1, by the slopes.
        weights: float64[runs]. Of squared errors.
        relative: float64[factors]. Width of each factor's prior over that of a rate.
    """
    found = []
    for width in WIDTHS:
        estimate, left_out = np.zeros(slopes.shape[1]), at_zero
        if width:
            solved = np.linalg.solve(_precision(slopes, weights, width * relative), slopes.T * weights)
            estimate = -solved @ at_zero
            left_out = (at_zero + slopes @ estimate) / (1 - np.einsum("ij,ji->i", slopes, solved))
        found.append((float(np.abs(left_out).mean()), width, estimate))
    _, width, estimate = min(found, key=lambda each: each[0])
    return width, estimate
