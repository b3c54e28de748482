"""Measured iterations of plans as a calibration: a profile inferred from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from datafiles.tables import load_table
from experiments.inferred_parts import profile_of
from experiments.inferred_profile import SETTLED, Run, infer
from experiments.inferred_ridge import priors
from hardware_models.calibrated import Calibration, FitRecord
from hardware_models.calibration.outcome import Outcome, Point, fit_record
from simulator.plan_file import load_plan

PLAN, SECONDS = "plan", "iteration_time_s"
SHAPE = "layers"
"""All runs of a table have layers of one shape: a profile knows roles, not shapes."""


def runs(table: Path) -> Outcome:
    """Return the calibration that a table of runs gives.

    Args:
        table: CSV with the columns ``plan`` (a plan file, relative to the table) and ``iteration_time_s``.

    Raises:
        ValueError: If there are fewer than two runs, a column or a time is missing, or operators of one role differ.
    """
    found = list[Run]()
    for number, row in enumerate(load_table(table, floats=(SECONDS,)), start=1):
        if not row.get(PLAN) or not row[SECONDS] or row[SECONDS] <= 0:
            raise ValueError(f"{table}: row {number} must have a {PLAN} and {SECONDS} above 0, got {row}")
        spec, plan = load_plan(table.parent / row[PLAN])
        found.append(Run(row[PLAN], spec.load(), plan, SHAPE, row[SECONDS]))
    if len(found) < 2:
        raise ValueError(f"{table}: must hold at least two runs, got {len(found)}")
    placed = [(run.problem, run.plan) for run in found]
    source = f"inferred from {len(found)} runs of {table.name}"
    ones = dict.fromkeys((part for run in found for part in run.parts()), 1.0)
    profile_of(placed, SHAPE, ones, source)  # refuses plans of unlike layers before anything is simulated
    inferred = infer(found, priors())
    profile = profile_of(placed, SHAPE, inferred.factors, source)
    before = [Point("before", run.seconds, run.predicted_s({})) for run in found]
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
    widths = ", ".join(f"{name} {width:g}" for name, width in inferred.prior.widths.items() if width) or "none"
    deviations = np.array([abs(factor - 1) for factor in inferred.factors.values()])
    notes: tuple[str, ...] = (
        f"widths of the prior: {widths} (noise {inferred.prior.noise:g}); factors are off 1 by {deviations.mean():.1%}",
        "parts that no run has (other tensor-parallel degrees, microbatches outside the range) keep the model's times",
    )
    if inferred.unsettled >= SETTLED:
        notes += (f"shares did not settle: sums and simulator differ by up to {inferred.unsettled:.1%} of a run",)
    return Outcome(Calibration(source=source, operators=profile, fits=fits), tuple(points), notes)
