"""Collectives whose size is known only when a plan is: their prices as functions of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hardware_models.collectives import collective_flows
from hardware_models.group_shapes import shape_of, slots_by_node
from simulator.costs import CostTables
from simulator.fast_time import price_s

_PROBES = (1e3, 1e6, 1e9)
"""Sizes at which the lines are held against the hardware model, so that a change there is noticed here."""


_ANY_SIZE = 1e18
"""Bytes above what any table measures: it answers for every group that it has a series of."""


class MeasuredSeriesError(ValueError):
    """A measured series does not give the time of a collective as a function of bytes as it is needed here."""


class Interner:
    """Numbers for whatever is equal."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}

    def __call__(self, value: object) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


class Channels:
    """Prices of collectives as functions of bytes: the quickest of straight lines, or measured points.

    A channel that stands for unlike groups goes on in the next one: the slowest of them rules.

    Attributes:
        lines: ``(channel, latency s, s per byte)``.
        points: ``(channel, bytes, seconds)``, ascending.
        goes_on: Per channel, whether the next one belongs to it.
    """

    def __init__(self, costs: CostTables) -> None:
        self.costs = costs
        self.problem = costs.problem
        self._numbers: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}
        self.lines: list[list[tuple[float, float]]] = []
        self.points: list[tuple[tuple[float, float], ...]] = []
        self.goes_on: list[bool] = []

    def number(self, collective: str, groups: Sequence[Sequence[int]]) -> int:
        """Return the channel of a collective over groups of devices.

        Raises:
            MeasuredSeriesError: If it was only measured with several groups at once, or its launch delays it.
        """
        key = (collective, tuple(tuple(sorted(group)) for group in groups))
        if key not in self._numbers:
            priced = [self._priced(collective, members) for members in key[1]]
            self._numbers[key] = len(self.lines)
            for place, (lines, points) in enumerate(priced):
                self.lines.append(lines)
                self.points.append(points)
                self.goes_on.append(place + 1 < len(priced))
            for num_bytes in _PROBES:
                expected_s = max(
                    self.problem.hardware.collective(collective, num_bytes, members).alone_s
                    + self.costs.collective_delay_s(members)
                    for members in key[1]
                )
                own_s = self.price_s(self._numbers[key], num_bytes)
                assert abs(own_s - expected_s) <= 1e-9 * expected_s, "a collective is the quickest of straight lines"
        return self._numbers[key]

    def _priced(
        self, collective: str, members: tuple[int, ...]
    ) -> tuple[list[tuple[float, float]], tuple[tuple[float, float], ...]]:
        """Return the lines and the points of a collective over one group."""
        points = self._measured(collective, members)
        delay_s = self.costs.collective_delay_s(members)
        if points and delay_s:
            raise MeasuredSeriesError(
                "the fast estimate adds what launching a collective costs to a modelled time only, but the host of "
                f"runtime {self.problem.runtime.name} never runs ahead and {collective} is measured; use estimate"
            )
        found = []
        for flow in collective_flows(self.problem.hardware.cluster, collective, members):
            for protocol in flow.protocols:
                s_per_byte = flow.work_s_per_byte / protocol.bandwidth_fraction
                found.append((protocol.latency_s + flow.fill_bytes * s_per_byte + delay_s, s_per_byte))
        return found, points

    def _measured(self, collective: str, members: tuple[int, ...]) -> tuple[tuple[float, float], ...]:
        """Return the measured points that the hardware model would use, chosen by the table itself."""
        hardware = self.problem.hardware
        table, shape = hardware.collective_table, shape_of(hardware.cluster, members)
        if table is None or shape is None or len(members) < 2:
            return ()
        nodes = slots_by_node(hardware.cluster, members)
        alike = all(hardware.cluster.nodes[node].links.kind != "mesh" for node in nodes)
        found = table.find(collective, shape, _ANY_SIZE, any_stride=alike)
        if found is None:
            return ()
        if found.shape.groups_per_node > 1:
            raise MeasuredSeriesError(
                f"collectives must have been measured one group at a time, got {collective} over {found.shape} "
                f"({table.source}); use estimate for plans that need it"
            )
        return tuple(table.series[collective, found.shape])

    def price_s(self, channel: int, num_bytes: float) -> float:
        """Return the seconds of a collective of that size alone."""
        lines = np.array(self.lines[channel], dtype=np.float64).reshape(-1, 2)
        points = np.array(self.points[channel], dtype=np.float64).reshape(-1, 2)
        own_s = float(price_s(lines, points, num_bytes))
        return max(own_s, self.price_s(channel + 1, num_bytes)) if self.goes_on[channel] else own_s
