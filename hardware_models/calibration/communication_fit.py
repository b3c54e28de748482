"""From measured collectives and transfers to a table, a law per series, and the constants of a preset's links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hardware_models.calibrated import FitRecord
from hardware_models.calibration.link_fit import fit_links
from hardware_models.calibration.outcome import Point, fit_record
from hardware_models.calibration.series_fit import fit_series
from hardware_models.collective_table import CollectiveTable, Row, leave_one_size_out
from hardware_models.links import LinkType, NetworkType

LINKS = "links of the preset"
FAR_OFF = 10.0
"""Rates over the preset's, or below them, that speak of another machine or other units."""


@dataclass(frozen=True)
class CommunicationParts:
    """Parts of a calibration.

    Attributes:
        table: All rows.
        links, network: Of the preset, where one was named.
        fits: Per collective the table's interpolation, per series its law, and the links.
        points: Of the laws and of the links.
        notes: What the rows do not tell, and what they tell that is hard to believe.
    """

    table: CollectiveTable
    links: LinkType | None
    network: NetworkType | None
    fits: tuple[FitRecord, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()


def communication_parts(rows: Sequence[Row], source: str, preset: str | None) -> CommunicationParts:
    """Return everything that measured rows give.

    Args:
        rows: Of a collective table.
        source: For the table and fitted constants.
        preset: Cluster preset they were measured on, to fit its links; None for the table alone.

    Raises:
        ValueError: If a row is impossible, or the preset unknown or too small.
    """
    table = CollectiveTable.from_rows(rows, source)
    fits, points, notes = _interpolation(table), list[Point](), list[str]()
    for (kind, shape), series in table.series.items():
        if len(series) < 2:
            continue
        law = fit_series(series)
        sizes, measured = np.array(series).T
        predicted = law.seconds(sizes)
        if not law.knows_rate(sizes, measured):
            notes.append(f"times of {kind}, {shape} must grow with size to have a rate, got none: measure larger ones")
        own = [Point(f"{kind} law", seconds, float(p)) for (_, seconds), p in zip(series, predicted, strict=True)]
        fits.append(fit_record(f"{kind}, {shape}", "fitted", own, law.constants()))
        points += own
    links = network = None
    if preset is not None:
        found = fit_links(preset, table.rows(), source)
        links, network = found.links, found.network
        own = [Point(LINKS, row[3], p) for row, p in zip(found.used, found.predicted_s, strict=True)]
        fits.append(fit_record(f"{LINKS} {preset}", "fitted", own, found.constants))
        points += own
        notes += [*far_rates(preset, found.constants), *found.notes]
    return CommunicationParts(table, links, network, tuple(fits), tuple(points), tuple(notes))


def far_rates(preset: str, constants: Mapping[str, float]) -> list[str]:
    """Return which fitted rates are so far from the preset's that rows are of another machine or in other units."""
    return [
        f"{name} must be near the preset's, got {value:.3g} times {preset}: check --cluster, and that sizes are in "
        "bytes and times in seconds"
        for name, value in constants.items()
        if name.endswith("rate") and not 1 / FAR_OFF <= value <= FAR_OFF
    ]


def _interpolation(table: CollectiveTable) -> list[FitRecord]:
    """Return per collective how far off the table is at a size that it does not hold."""
    left_out: dict[str, list[Point]] = {}
    for kind, _, _, measured, predicted in leave_one_size_out(table):
        left_out.setdefault(kind, []).append(Point(kind, measured, predicted))
    return [fit_record(f"{kind}, table, each size left out", "interpolated", own) for kind, own in left_out.items()]
