"""Measured iterations of plans as a calibration: a profile inferred from them, or constants of their machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from datafiles.words import counted
from experiments.calibrate.fitted_constants import fit_constants
from experiments.calibrate.inferred_parts import profile_of
from experiments.calibrate.inferred_profile import SETTLED, LayersRun, infer
from experiments.calibrate.inferred_ridge import priors
from experiments.calibrate.measured_run import MeasuredRun, doubt, doubt_among
from experiments.fitted_runs import run_digest
from experiments.run_table import PLAN, SECONDS, Common, load_runs
from hardware_models.calibrated import Calibration, FitRecord
from hardware_models.calibration.outcome import Outcome, Point, fit_record
from hardware_models.machine_factors import with_factors

ABOUT, FAR_OFF = 0.1, 3.0
"""Factors nearer to 1 are about the shipped constants; those so many times off it are hard to believe."""
SHAPE = "layers"
"""All runs of a table have layers of one shape: a profile knows roles, not shapes."""


def _far(factors: Mapping[str, float]) -> tuple[str, ...]:
    """Return a word about factors that say more of the table than of the machine."""
    far = [f"{name} {factor:.3g}" for name, factor in factors.items() if not 1 / FAR_OFF <= factor <= FAR_OFF]
    words = (
        f"factors should be between {1 / FAR_OFF:.2g} and {FAR_OFF:g}, got {', '.join(far)}: check the GPU type, the "
        "number of GPUs, the batch and the runtime of the rows"
    )
    return (words,) if far else ()


def measured_runs(table: Path, common: Common | None = None) -> list[MeasuredRun]:
    """Return a run of each plan of a table (`experiments.run_table`), but for those that ran out of memory.

    Raises:
        ValueError: If there are fewer than two, a column or a time is missing, or a plan names a profile.
    """
    found = []
    for case in load_runs(table, common):
        if case.measured.iteration_time_s is None:
            if case.measured.out_of_memory:
                continue
            raise ValueError(f"{table}: every run must have a measured time ({SECONDS}), {case.row_id} has none")
        problem = case.problem()
        name = str(case.features.get(PLAN, case.row_id))
        if problem.spec is not None and problem.spec.profile is not None:
            raise ValueError(
                f"{table}: plans must be made without --profile: factors are on the shipped constants; got one with "
                f"({name})"
            )
        found.append(MeasuredRun(name, problem, case.plan(problem), case.measured.iteration_time_s))
    plans = _one_of_each(found)
    if len(plans) < 2:
        raise ValueError(
            f"{table}: must hold timed runs of at least two plans, got {len(found)} of {len(plans)}; a row again adds "
            "nothing, another microbatch or degree does"
        )
    return plans


def _one_of_each(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Return one run of each plan, with the median of its times: leaving out one of several would leave it in."""
    of_plan: dict[tuple[object, str], list[MeasuredRun]] = {}
    for run in runs:
        problem = run.problem
        runtime = repr(replace(problem.runtime, name="", sources={}))  # Two files may have one name.
        names = problem.workload.fingerprint, problem.hardware.cluster.name, runtime, problem.global_batch
        of_plan.setdefault((names, run.plan.canonical_hash(problem.workload)), []).append(run)
    return [replace(same[0], seconds=float(np.median([run.seconds for run in same]))) for same in of_plan.values()]


def _refuse_far_off(table: Path, ratios: Mapping[str, float]) -> None:
    words = doubt_among(ratios)
    if words is not None:
        raise ValueError(f"{table}: {words}")


def _digests(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    return tuple(run_digest(run.problem, run.plan) for run in runs)


def constants(
    table: Path,
    names: Sequence[str],
    progress: Callable[[str], None] | None = None,
    common: Common | None = None,
) -> Outcome:
    """Return the calibration with a machine's constants times the factors that explain a table of runs.

    Args:
        table: As for `runs`; plans may be of any models.
        names: What may move (`hardware_models.machine_factors.FACTORS`).
        progress: Called with what is done, in words.
        common: What all rows have in common.

    Raises:
        ValueError: As `measured_runs`, or if runs are not of one machine.
    """
    found = measured_runs(table, common)
    clusters = {run.name: run.problem.hardware.cluster for run in found}
    presets = {name: tuple(sorted({node.preset for node in cluster.nodes})) for name, cluster in clusters.items()}
    if len(set(presets.values())) > 1:
        some = {preset: name for name, preset in presets.items()}
        words = ", ".join(f"{' and '.join(preset)} ({name})" for preset, name in some.items())
        raise ValueError(f"{table}: runs must be of one kind of machine, got {words}; make a table for each")
    fitted = fit_constants(found, names, progress)
    _refuse_far_off(
        table, {run.name: 1.0 / (1.0 + float(error)) for run, error in zip(found, fitted.before, strict=True)}
    )
    source = f"fitted to runs of {counted(len(found), 'plan')} of {table.name}"
    factors = {name: round(factor, 4) for name, factor in fitted.factors.items()}
    points = [
        Point("iterations", run.seconds, run.seconds * (1 + float(error)))
        for run, error in zip(found, fitted.after, strict=True)
    ]
    sets = (("before", fitted.before), ("left out", fitted.left_out))
    before, left_out = ([Point(what, 1.0, 1.0 + float(error)) for error in errors] for what, errors in sets)
    fits = (
        fit_record("iterations, shipped constants", "checked", before),
        fit_record("iterations, fitted constants", "fitted", points),
        fit_record("iterations, each left out of the fit", "interpolated", left_out),
        FitRecord("factors on the machine's constants", "fitted", len(found), factors),
    )
    known = [
        f"{name} {factors[name]:.2f} +- {np.expm1(fitted.deviations[name]):.0%}"
        for name in names
        if name not in fitted.undetermined
    ]
    notes: tuple[str, ...] = (f"factors: {', '.join(known)}",) if known else ()
    if not fitted.width:
        notes = ("no factors predict left-out runs better than the shipped constants: these stay, leave --profile out",)
    elif fitted.undetermined:
        moved = [f"{name} {factors[name]:.2f}" for name in fitted.undetermined if abs(factors[name] - 1) >= ABOUT]
        kept = [name for name in fitted.undetermined if abs(factors[name] - 1) < ABOUT]
        notes += (f"the runs hardly depend on {', '.join(kept)}: about the shipped constants",) if kept else ()
        notes += (f"the runs do not tell these factors well, use with care: {', '.join(moved)}",) if moved else ()
    notes += _far(factors)
    calibration = with_factors(found[0].problem.hardware.cluster, factors, source)
    return Outcome(replace(calibration, fits=fits, fitted_on=_digests(found)), tuple(points), notes)


def runs(table: Path, common: Common | None = None) -> Outcome:
    """Return the calibration that a table of runs gives.

    Args:
        table: CSV of runs (`experiments.run_table`) that were timed.
        common: What all rows have in common.

    Raises:
        ValueError: As `measured_runs`, or if operators of one profile role differ.
    """
    found = [LayersRun(run.name, run.problem, run.plan, run.seconds, SHAPE) for run in measured_runs(table, common)]
    placed = [(run.problem, run.plan) for run in found]
    source = f"inferred from runs of {counted(len(found), 'plan')} of {table.name}"
    ones = dict.fromkeys((part for run in found for part in run.parts()), 1.0)
    profile_of(placed, SHAPE, ones, source)  # refuses plans of unlike layers before anything is simulated
    before = [Point("before", run.seconds, run.predicted_s({})) for run in found]
    if (words := doubt([point.measured / point.predicted for point in before])) is not None:
        raise ValueError(words)
    _refuse_far_off(
        table, {run.name: point.measured / point.predicted for run, point in zip(found, before, strict=True)}
    )
    inferred = infer(found, priors())
    known = any(inferred.prior.widths.values())
    profile = profile_of(placed, SHAPE, inferred.factors, source) if known else None
    points = [
        Point("iterations", run.seconds, run.seconds * (1 + float(error)))
        for run, error in zip(found, inferred.errors, strict=True)
    ]
    left_out = [Point("left out", 1.0, 1.0 + float(error)) for error in inferred.left_out_errors]
    factors = {
        f"{part.block} tp {part.tensor_size} x {part.samples}": round(factor, 4)
        for part, factor in sorted(inferred.factors.items())
    }
    fits = (
        fit_record("iterations, shipped model against measured", "checked", before),
        fit_record("iterations, inferred profile", "fitted", points),
        fit_record("iterations, each left out of the profile", "interpolated", left_out),
        FitRecord("factors on operators before, in, after layers", "fitted", len(found), factors),
    )
    widths = ", ".join(f"{name} {width:g}" for name, width in inferred.prior.widths.items() if width)
    deviations = np.array([abs(factor - 1) for factor in inferred.factors.values()])
    notes: tuple[str, ...] = (
        f"widths of the prior: {widths} (noise {inferred.prior.noise:g}); factors are off 1 by {deviations.mean():.1%}",
        "tensor-parallel degrees that no run has, and microbatches outside the range, have the factors of the nearest",
    )
    notes += _far(factors)
    if not known:
        notes = ("no factors predict left-out runs better than the shipped model: it stays, leave --profile out",)
    if inferred.unsettled >= SETTLED:
        notes += (f"shares did not settle: sums and simulator differ by up to {inferred.unsettled:.1%} of a run",)
    calibration = Calibration(source=source, operators=profile, fits=fits, fitted_on=_digests(found))
    return Outcome(calibration, tuple(points), notes)
