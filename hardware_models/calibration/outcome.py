"""What a calibration made, with every measured point beside what the result says about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hardware_models.calibrated import Calibration, FitRecord


@dataclass(frozen=True)
class Point:
    """One measured value and the model's.

    Attributes:
        group: What is drawn and summed up together.
        measured, predicted: In ``unit``, both positive.
        unit: ``s``, ``B`` or ``B/s``.
    """

    group: str
    measured: float
    predicted: float
    unit: str = "s"


@dataclass(frozen=True)
class Outcome:
    """A calibration, its points, and remarks.

    Attributes:
        calibration: What is written.
        points: For the plot.
        notes: What was left out, and why.
    """

    calibration: Calibration
    points: tuple[Point, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


def fit_record(what: str, how: str, points: Sequence[Point], constants: Mapping[str, float] | None = None) -> FitRecord:
    """Return a line of the summary with the residuals of these points.

    >>> fit_record("x", "fitted", [Point("x", 2.0, 2.2), Point("x", 1.0, 1.0)]).worst
    0.1
    """
    errors = residuals(points)
    return FitRecord(
        what=what,
        how=how,
        num_points=len(points),
        constants=dict(constants or {}),
        median=round(float(np.median(errors)), 6) if len(errors) else None,
        p90=round(float(np.quantile(errors, 0.9)), 6) if len(errors) else None,
        worst=round(float(errors.max()), 6) if len(errors) else None,
    )


def residuals(points: Iterable[Point]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return ``|predicted - measured| / measured``."""
    return np.array([abs(point.predicted - point.measured) / point.measured for point in points], dtype=np.float64)
