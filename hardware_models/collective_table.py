"""Measured collectives and transfers of one machine: what the link model is replaced by where known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, log

from hardware_models.communication import Communication

MAX_LATENCY_SHARE = 0.9
"""A measured time below the modelled latency still leaves some work, so that shares mean something."""


@dataclass(frozen=True)
class CollectiveTable:
    """Times by collective, group size and message size.

    Attributes:
        series: ``(collective, group size)`` to ``(bytes, seconds)`` points of ascending size. Collectives
            as in ``HardwareModel.collective``, and ``transfer_intra_node`` / ``transfer_inter_node``.
        source: Where it was measured.
    """

    series: Mapping[tuple[str, int], tuple[tuple[float, float], ...]]
    source: str

    def __hash__(self) -> int:
        return hash((self.source, len(self.series)))

    @classmethod
    def from_rows(cls, rows: Iterable[tuple[str, int, float, float]], source: str) -> CollectiveTable:
        """Build a table from ``(collective, group size, bytes, seconds)``; repeated keys keep the minimum."""
        best: dict[tuple[str, int], dict[float, float]] = {}
        for kind, group_size, num_bytes, seconds in rows:
            if not (num_bytes > 0 and 0 < seconds < float("inf")):
                raise ValueError(
                    f"{source}: {kind} over {group_size} must have positive size and finite time, "
                    f"got {num_bytes} bytes and {seconds} s; remove the row"
                )
            points = best.setdefault((kind, group_size), {})
            points[num_bytes] = min(seconds, points.get(num_bytes, seconds))
        return cls({key: tuple(sorted(points.items())) for key, points in best.items()}, source)

    def lookup(self, kind: str, group_size: int, num_bytes: float) -> tuple[float, str] | None:
        """Return ``(seconds, "measured" or "interpolated")``, or None where the table says nothing.

        Between sizes the time is interpolated in logarithms. Above the largest size the last bandwidth
        holds; below the smallest, its time is an upper bound and nothing is said.
        """
        points = self.series.get((kind, group_size))
        if not points or num_bytes < points[0][0]:
            return None
        index = bisect_left(points, (num_bytes, 0.0))
        if index == len(points):
            size, seconds = points[-1]
            return seconds * num_bytes / size, "interpolated"
        size, seconds = points[index]
        if size == num_bytes:
            return seconds, "measured"
        size_below, seconds_below = points[index - 1]
        part = log(num_bytes / size_below) / log(size / size_below)
        return exp(log(seconds_below) + part * log(seconds / seconds_below)), "interpolated"

    def refine(self, kind: str, group_size: int, num_bytes: float, modelled: Communication) -> Communication:
        """Return the modelled cost with its time replaced by the measured one, if there is one."""
        found = self.lookup(kind, group_size, num_bytes)
        if found is None:
            return modelled
        seconds, source = found
        latency = min(modelled.latency_s, MAX_LATENCY_SHARE * seconds)
        return Communication(
            latency_s=latency, work_s=seconds - latency, shares=modelled.shares, source=source
        )
