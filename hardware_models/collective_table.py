"""Measured collectives and transfers of one machine: what the link model is replaced by where known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hardware_models.communication import Communication
from hardware_models.group_shapes import GroupShape
from hardware_models.links import COLLECTIVES

MAX_LATENCY_SHARE = 0.9
"""A measured time below the modelled latency still leaves some work, so that shares mean something."""

APART = 2.0
"""By what factor two sizes must differ for their times to say how they grow."""

Row = tuple[str, int | GroupShape, float, float]
"""``(collective, group size or shape, bytes, seconds)``."""

TRANSFERS = ("transfer_intra_node", "transfer_inter_node")
"""Sends from one rank to another, beside the collectives of ``hardware_models.links``."""

KINDS = (*COLLECTIVES, *TRANSFERS)
"""What a table can have measured."""

Points = tuple[tuple[float, float], ...]
"""``(bytes, seconds)`` of ascending size."""

Origin = Literal["measured", "interpolated", "modelled"]


class Asked(NamedTuple):
    """What a table is asked about a collective over a group.

    Attributes:
        kind: Whose series holds; a gather's also for one whose parts are joined.
        shape: Of the group.
        nodes: That it lies on.
        any_stride: Strides do not matter: all pairs of a node are joined alike.
        added_s_per_byte: What comes on top of the series: the copies that join.
    """

    kind: str
    shape: GroupShape
    nodes: tuple[int, ...]
    any_stride: bool
    added_s_per_byte: float


@dataclass(frozen=True)
class Found:
    """An answer of the table.

    Attributes:
        seconds: While ``shape.groups_per_node`` groups ran at once.
        origin: ``"measured"``; ``"interpolated"`` between measured sizes or above; ``"modelled"`` below, where it
            is the link model's but for a factor.
        shape: As it was measured.
        num_bytes: Size that ``seconds`` are of: the one asked for, or the nearest measured one where that lies outside.
        inner: A measured point further inside where the size asked for lies outside; None where there is none.
    """

    seconds: float
    origin: Origin
    shape: GroupShape
    num_bytes: float
    inner: tuple[float, float] | None = None

    def extended(self, num_bytes: float, modelled_s: Callable[[float], float]) -> Found:
        """Return the answer for a size outside the measured ones.

        Args:
            num_bytes: Size asked for.
            modelled_s: Seconds of a size by the link model.
        """
        origin: Origin = "modelled" if num_bytes < self.num_bytes else "interpolated"
        rate = growth((self.num_bytes, self.seconds), self.inner, modelled_s)
        seconds = self.seconds + rate * (modelled_s(num_bytes) - modelled_s(self.num_bytes))
        return Found(seconds, origin, self.shape, num_bytes)

    def replace(self, modelled: Communication, crowding: float) -> Communication:
        """Return the modelled cost with its time replaced by what the group takes alone.

        Args:
            modelled: From the link model; its shares stay.
            crowding: Load of the fullest link while the measured groups ran at once, at least 1. The engine
                slows work by it when they do, so alone the work is that much shorter.
        """
        latency = min(modelled.latency_s, MAX_LATENCY_SHARE * self.seconds)
        work = (self.seconds - latency) / max(1.0, crowding)
        return Communication(latency_s=latency, work_s=work, shares=modelled.shares, source=self.origin)


@dataclass(frozen=True)
class CollectiveTable:
    """Times by collective, group shape and message size.

    Attributes:
        series: ``(collective, shape)`` to points. Collectives and sizes as in ``HardwareModel.collective``, and
            ``transfer_intra_node`` / ``transfer_inter_node``.
        source: Where it was measured.
    """

    series: Mapping[tuple[str, GroupShape], Points]
    source: str

    def __hash__(self) -> int:
        return hash((self.source, len(self.series)))

    @classmethod
    def from_rows(cls, rows: Iterable[Row], source: str) -> CollectiveTable:
        """Build a table; repeated keys keep the minimum. A size stands for a group in one node, alone.

        Raises:
            ValueError: If a row is of no known collective, has no positive size, no finite time, or an impossible
                group.
        """
        best: dict[tuple[str, GroupShape], dict[float, float]] = {}
        for kind, group, num_bytes, seconds in rows:
            if kind not in KINDS:
                raise ValueError(f"{source}: a collective must be one of {', '.join(KINDS)}, got {kind!r:.60}")
            shape = _shape(kind, group)
            if not (0 < num_bytes < float("inf") and 0 < seconds < float("inf")):
                raise ValueError(
                    f"{source}: {kind} over {shape} must have positive size and finite time, "
                    f"got {num_bytes} bytes and {seconds} s; remove the row"
                )
            points = best.setdefault((kind, shape), {})
            points[num_bytes] = min(seconds, points.get(num_bytes, seconds))
        return cls({key: tuple(sorted(points.items())) for key, points in best.items()}, source)

    def rows(self) -> list[tuple[str, GroupShape, float, float]]:
        """Return all points."""
        return [
            (kind, shape, size, seconds) for (kind, shape), points in self.series.items() for size, seconds in points
        ]

    def find(self, kind: str, group: int | GroupShape, num_bytes: float, *, any_stride: bool = False) -> Found | None:
        """Return what is known about a group; of several series the one with fewest groups at once.

        Args:
            kind: Collective or transfer.
            group: Size of a group in one node, or a shape (how many groups ran at once is not compared).
            num_bytes: Size as in ``HardwareModel.collective``.
            any_stride: Strides do not matter: all pairs of the node are joined alike.

        Returns:
            None where the table says nothing of the group. Between sizes time is linear in bytes, as a latency and a
            bandwidth between neighbours would have it; outside them it is that of the nearest, for ``extended``.
        """
        wanted = _shape(kind, group)
        found = [
            (shape.groups_per_node, shape.stride != wanted.stride, shape.stride or 0, shape)
            for each, shape in self.series
            if each == kind
            and (shape.size, shape.num_nodes) == (wanted.size, wanted.num_nodes)
            and (any_stride or shape.stride in (None, wanted.stride))
        ]
        if not found:
            return None
        shape = min(found, key=lambda each: each[:-1])[-1]
        points = self.series[kind, shape]
        nearest = min(max(num_bytes, points[0][0]), points[-1][0])
        answer = interpolated(points, nearest)
        assert answer is not None, "the nearest size is not below the smallest"
        return Found(*answer, shape, nearest, inner_of(points, num_bytes))

    def lookup(self, kind: str, group_size: int, num_bytes: float) -> tuple[float, Origin] | None:
        """Return ``(seconds, origin)`` for a group in one node as measured; None outside that (see :meth:`find`)."""
        found = self.find(kind, group_size, num_bytes, any_stride=True)
        return (found.seconds, found.origin) if found is not None and found.num_bytes == num_bytes else None


def _shape(kind: str, group: int | GroupShape) -> GroupShape:
    if not isinstance(group, int):
        return group
    return GroupShape(group, 2 if kind == TRANSFERS[1] else 1)


def inner_of(points: Points, num_bytes: float) -> tuple[float, float] | None:
    """Return the measured point nearest to the one beyond which a size lies, and APART from it.

    >>> inner_of(((1.0, 1.0), (6.0, 2.0), (8.0, 3.0)), 9.0)
    (1.0, 1.0)
    """
    first, last = points[0][0], points[-1][0]
    if num_bytes < first:
        return next((point for point in points if point[0] >= APART * first), None)
    return next((point for point in reversed(points) if point[0] * APART <= last), None) if num_bytes > last else None


def growth(
    edge: tuple[float, float], inner: tuple[float, float] | None, modelled_s: Callable[[float], float]
) -> float:
    """Return how quickly time grows beyond an edge of the measured sizes, over the link model's growth.

    As it does between the edge and a point further inside, within bounds. At most so that all of the edge's time grows
    with the size, which is what one point says. And where the edge takes longer than modelled, no less than the model:
    then what it takes longer is a launch, which does not grow.
    """
    size, seconds = edge
    most = seconds / modelled_s(size)
    if inner is None:
        return most
    seen = (seconds - inner[1]) / (modelled_s(size) - modelled_s(inner[0]))
    return min(max(seen, 1.0), most)


def interpolated(points: Sequence[tuple[float, float]], num_bytes: float) -> tuple[float, Origin] | None:
    """Return seconds at a size, and whether it was measured; None below the smallest size.

    >>> interpolated(((1024.0, 1.0), (4096.0, 4.0)), 2048)
    (2.0, 'interpolated')
    """
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
    part = (num_bytes - size_below) / (size - size_below)
    return seconds_below + part * (seconds - seconds_below), "interpolated"


def leave_one_size_out(table: CollectiveTable) -> list[tuple[str, GroupShape, float, float, float]]:
    """Return ``(collective, shape, bytes, measured s, interpolated s)`` of every inner size, left out in turn."""
    found = []
    for (kind, shape), points in table.series.items():
        for index in range(1, len(points) - 1):
            size, seconds = points[index]
            answer = interpolated(points[:index] + points[index + 1 :], size)
            assert answer is not None
            found.append((kind, shape, size, seconds, answer[0]))
    return found
