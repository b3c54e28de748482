"""Collectives whose size is known only when a plan is: their prices as functions of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from hardware_models import collective_table
from hardware_models.collective_table import growth, inner_of
from hardware_models.crowding import CrowdedGroup, unlike_groups
from simulator.costs import CostTables
from simulator.fast.arrays import LINE
from simulator.fast.prices import MAX_LATENCY_SHARE, price_s

_PROBES = (1e3, 1e6, 1e9)
"""Sizes at which the lines are held against the hardware model, so that a change there is noticed here."""


_ANY_SIZE = 1e18
"""Bytes above what any table measures or any plan sends."""


Line = tuple[float, float, float, float]
"""As in ``price_s``."""

Points = tuple[tuple[float, float], ...]


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
        lines: Per channel, what ``price_s`` says of them.
        points: Per channel, bytes and seconds, ascending; the corners outside what was measured are among them.
        goes_on: Per channel, whether the next one belongs to it.
        hosts_s: Per channel, as ``TimeTables.channel_hosts_s`` has them; the same for those that belong together.
    """

    def __init__(self, costs: CostTables) -> None:
        self.costs = costs
        self.problem = costs.problem
        self._numbers: dict[tuple[str, tuple[CrowdedGroup, ...]], int] = {}
        self.lines: list[tuple[Line, ...]] = []
        self.points: list[Points] = []
        self.goes_on: list[bool] = []
        self.hosts_s: list[tuple[float, float]] = []
        assert MAX_LATENCY_SHARE == collective_table.MAX_LATENCY_SHARE, "what is compiled knows its own constants only"

    def number(self, collective: str, groups: Sequence[CrowdedGroup]) -> int:
        """Return the channel of a collective over groups of devices that do it at once.

        Raises:
            MeasuredSeriesError: If it was only measured with several groups at once, or its launch delays it.
        """
        key = (collective, tuple(groups))
        if key not in self._numbers:
            priced = list(dict.fromkeys(self._priced(collective, group) for group in groups))
            self._numbers[key] = len(self.lines)
            host_s = max(self.costs.collective_host_s(group.members) for group in groups)
            listing_s = max(self.costs.listing_s(group.members, len(group.members)) for group in groups)
            for place, (lines, points) in enumerate(priced):
                self.lines.append(lines)
                self.points.append(points)
                self.goes_on.append(place + 1 < len(priced))
                self.hosts_s.append((host_s, listing_s))
            for num_bytes in _PROBES:
                expected_s = max(
                    self.problem.hardware.crowded_collective_s(collective, num_bytes, group)
                    + self.costs.collective_delay_s(group.members)
                    for group in groups
                )
                own_s = self.price_s(self._numbers[key], num_bytes)
                assert abs(own_s - expected_s) <= 1e-9 * expected_s, "a collective is the quickest of straight lines"
        return self._numbers[key]

    def of_tied(self, placements: Sequence[Sequence[int]]) -> int:
        """Return one more than the channel that reduces a weight of these stages; 0 if nobody else has it.

        Args:
            placements: Devices of each stage that holds it; of one stage, for two layouts in it.
        """
        ranks = min(map(len, placements)) if len(placements) > 1 else 1
        groups = [
            tuple(dict.fromkeys(d for devices in placements for d in devices[rank::ranks])) for rank in range(ranks)
        ]
        unlike = unlike_groups(self.problem.hardware.cluster, (group for group in groups if len(group) > 1))
        return self.number("all_reduce", unlike) + 1 if unlike else 0

    def _priced(self, collective: str, group: CrowdedGroup) -> tuple[tuple[Line, ...], Points]:
        """Return the lines and the points of a collective over one group."""
        points = self._measured(collective, group.members)
        delay_s = self.costs.collective_delay_s(group.members)
        if points and delay_s:
            raise MeasuredSeriesError(
                "the fast estimate adds what launching a collective costs to a modelled time only, but the host of "
                f"runtime {self.problem.runtime.name} never runs ahead and {collective} is measured; use estimate"
            )
        hardware, found = self.problem.hardware, []
        slowdowns = hardware.slowdowns(collective, group)
        for flow, of_flow in zip(hardware.flows(collective, group.members), slowdowns, strict=True):
            for protocol, slowdown in zip(flow.protocols, of_flow, strict=True):
                s_per_byte = flow.s_per_byte(protocol)
                latency_s = protocol.latency_s + delay_s
                start_s = protocol.latency_s + flow.fill_bytes * s_per_byte + delay_s
                found.append((start_s, s_per_byte, latency_s, slowdown - 1))
        return tuple(found), points

    def _measured(self, collective: str, members: tuple[int, ...]) -> Points:
        """Return the measured points that the hardware model would use, chosen by the table itself."""
        hardware = self.problem.hardware
        table = hardware.collective_table
        if table is None or len(members) < 2:
            return ()
        asked = hardware.asked_of_table(collective, members)
        if asked is None:
            return ()
        found = table.find(asked.kind, asked.shape, _ANY_SIZE, any_stride=asked.any_stride)
        if found is None:
            return ()
        if found.shape.groups_per_node > 1:
            raise MeasuredSeriesError(
                f"collectives must have been measured one group at a time, got {collective} over {found.shape} "
                f"({table.source}); use estimate for plans that need it"
            )
        points = self._beyond(asked.kind, members, table.series[asked.kind, found.shape])
        return tuple((size, seconds + size * asked.added_s_per_byte) for size, seconds in points)

    def _beyond(self, kind: str, members: tuple[int, ...], points: Points) -> Points:
        """Return measured points with those that hold outside them: the nearest, growing as the link model does.

        That is the quickest of straight lines, so that its corners say all of it.
        """
        lines = [
            (protocol.latency_s + flow.fill_bytes * flow.s_per_byte(protocol), flow.s_per_byte(protocol))
            for flow in self.problem.hardware.flows(kind, members)
            for protocol in flow.protocols
        ]
        corners = {
            (other_s - start_s) / (slope - other)
            for (start_s, slope), (other_s, other) in combinations(lines, 2)
            if slope != other
        }

        def modelled_s(size: float) -> float:
            return min(start_s + size * slope for start_s, slope in lines)

        (first, first_s), (last, last_s) = points[0], points[-1]
        below = growth(points[0], inner_of(points, 0.0), modelled_s)
        above = growth(points[-1], inner_of(points, _ANY_SIZE), modelled_s)
        return (
            *((size, first_s + below * (modelled_s(size) - modelled_s(first)))
              for size in sorted({0.0, *corners}) if 0 <= size < first),
            *points,
            *((size, last_s + above * (modelled_s(size) - modelled_s(last)))
              for size in sorted({_ANY_SIZE, *corners}) if last < size <= _ANY_SIZE),
        )  # fmt: skip

    def price_s(self, channel: int, num_bytes: float) -> float:
        """Return the seconds of a collective of that size."""
        lines = np.array(self.lines[channel], dtype=np.float64).reshape(-1, LINE)
        points = np.array(self.points[channel], dtype=np.float64).reshape(-1, 2)
        own_s = float(price_s(lines, points, num_bytes))
        return max(own_s, self.price_s(channel + 1, num_bytes)) if self.goes_on[channel] else own_s
