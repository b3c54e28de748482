"""Collectives whose size is known only when a plan is: their prices as functions of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hardware_models.collectives import collective_flows
from simulator.fast_time import price_s
from simulator.problem import Problem

_PROBES = (1e3, 1e6, 1e9)
"""Sizes at which the lines are held against the hardware model, so that a change there is noticed here."""


class Interner:
    """Numbers for whatever is equal."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}

    def __call__(self, value: object) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


class Channels:
    """Prices of collectives as functions of bytes: the quickest of straight lines, or measured points.

    Attributes:
        lines: ``(channel, latency s, s per byte)``.
        points: ``(channel, bytes, seconds)``, ascending.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self.lines: list[list[tuple[float, float]]] = []
        self.points: list[tuple[tuple[float, float], ...]] = []

    def number(self, collective: str, devices: Sequence[int]) -> int:
        """Return the channel of a collective over devices."""
        members = tuple(sorted(devices))
        key = (collective, members)
        if key not in self._numbers:
            hardware = self.problem.hardware
            self._numbers[key] = len(self.lines)
            found = []
            for flow in collective_flows(hardware.cluster, collective, members):
                for protocol in flow.protocols:
                    s_per_byte = flow.work_s_per_byte / protocol.bandwidth_fraction
                    found.append((protocol.latency_s + flow.fill_bytes * s_per_byte, s_per_byte))
            self.lines.append(found)
            table = hardware.collective_table
            one_node = hardware.cluster.node_of(members[0]) == hardware.cluster.node_of(members[-1])
            known = table.series.get((collective, len(members)), ()) if table is not None and one_node else ()
            self.points.append(tuple(known))
            for num_bytes in _PROBES:
                expected_s = hardware.collective(collective, num_bytes, members).alone_s
                own_s = self.price_s(self._numbers[key], num_bytes)
                assert abs(own_s - expected_s) <= 1e-9 * expected_s, "a collective is the quickest of straight lines"
        return self._numbers[key]

    def price_s(self, channel: int, num_bytes: float) -> float:
        """Return the seconds of a collective of that size alone."""
        lines = np.array(self.lines[channel], dtype=np.float64).reshape(-1, 2)
        points = np.array(self.points[channel], dtype=np.float64).reshape(-1, 2)
        return float(price_s(lines, points, num_bytes))
