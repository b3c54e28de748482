"""Hybrid strategies of one layer as ordered trees over data, sharded-data and tensor parallelism.

A pipeline of P stages leaves N / P devices per stage. Every tree over those devices is a sequence of levels,
outermost first; a level has one kind of parallelism, none occurs twice, degrees are powers of two. The order
says which ranks form a group: ``tp 2`` innermost pairs neighbours, outermost it pairs the first with the last
half. Every tree exists with and without activation checkpointing.

Source: Galvatron-BMW (TKDE 2024), section III-B; takeaway 3 removes trees that mix DP with SDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import prod
from typing import NamedTuple

from simulator.plan import Axis, Sharding

DATA, SHARDED, TENSOR = "dp", "sdp", "tp"
LEVELS = (DATA, SHARDED, TENSOR)


class Level(NamedTuple):
    """One level of a tree: ``kind`` of DATA, SHARDED, TENSOR, and how many branches it has."""

    kind: str
    degree: int


Layout = tuple[tuple[str, int], ...]
"""How activations lie: ``batch`` and ``tensor`` levels, outermost first. DP and SDP lie alike."""


@dataclass(frozen=True)
class Strategy:
    """What one layer does on the devices of its stage.

    Attributes:
        levels: Outermost first; empty on one device.
        checkpoint: The layer's inner activations are computed again in the backward pass.
    """

    levels: tuple[Level, ...] = ()
    checkpoint: bool = False

    def degree(self, *kinds: str) -> int:
        """Return the product of the degrees of these kinds."""
        return prod(level.degree for level in self.levels if level.kind in kinds)

    @cached_property
    def data(self) -> int:
        """Parts into which samples are cut: DP times SDP."""
        return self.degree(DATA, SHARDED)

    @cached_property
    def tensor(self) -> int:
        """Tensor-parallel degree."""
        return self.degree(TENSOR)

    @cached_property
    def sharded(self) -> int:
        """Sharded-data-parallel degree."""
        return self.degree(SHARDED)

    @property
    def num_devices(self) -> int:
        """Devices of the tree."""
        return self.degree(*LEVELS)

    @cached_property
    def layout(self) -> Layout:
        """How activations lie over the devices."""
        merged: list[tuple[str, int]] = []
        for kind, degree in self.levels:
            split = "tensor" if kind == TENSOR else "batch"
            if merged and merged[-1][0] == split:
                merged[-1] = (split, merged[-1][1] * degree)
            else:
                merged.append((split, degree))
        return tuple(merged)

    @property
    def sharding(self) -> Sharding:
        """The plan's axes.

        >>> Strategy((Level(SHARDED, 4), Level(TENSOR, 2))).sharding
        (Axis(split='batch', size=4, zero=3), Axis(split='tensor', size=2, zero=0))
        """
        return tuple(
            Axis("tensor", degree) if kind == TENSOR else Axis("batch", degree, 3 if kind == SHARDED else 0)
            for kind, degree in self.levels
        )

    def axis_position(self, kind: str) -> int | None:
        """Return the level of that kind, or None."""
        for position, level in enumerate(self.levels):
            if level.kind == kind:
                return position
        return None

    def __str__(self) -> str:
        words = [f"{kind} {degree}" for kind, degree in self.levels] or ["1 device"]
        return " > ".join(words) + (" + ckpt" if self.checkpoint else "")


def strategies(
    num_devices: int,
    *,
    kinds: tuple[str, ...] = LEVELS,
    checkpoint: bool = True,
    mix_data_and_sharded: bool = False,
) -> tuple[Strategy, ...]:
    """Return the strategies of one layer on ``num_devices`` devices, plain ones first.

    Args:
        num_devices: Devices of a stage, a power of two.
        kinds: Kinds of parallelism that levels may have.
        checkpoint: Whether every tree also comes with activation checkpointing.
        mix_data_and_sharded: Whether a tree may have both DP and SDP (takeaway 3 says no).

    >>> [len(strategies(n, mix_data_and_sharded=True)) for n in (8, 4, 2, 1)]
    [42, 18, 6, 2]
    """
    if num_devices < 1 or num_devices & (num_devices - 1):
        raise ValueError(
            f"devices of a stage must be a power of two, got {num_devices}: Galvatron's trees split by two; take a "
            "cluster of 2, 4, 8, ... GPUs or another searcher"
        )
    unknown = [kind for kind in kinds if kind not in LEVELS]
    if unknown:
        raise ValueError(f"kinds must be of {', '.join(LEVELS)}, got {unknown[0]!r}")
    trees = [
        levels
        for levels in _trees(num_devices, kinds)
        if mix_data_and_sharded or not {DATA, SHARDED} <= {level.kind for level in levels}
    ]
    flags = (False, True) if checkpoint else (False,)
    return tuple(Strategy(levels, flag) for flag in flags for levels in trees)


def _trees(num_devices: int, kinds: tuple[str, ...]) -> Iterator[tuple[Level, ...]]:
    if num_devices == 1:
        yield ()
        return
    for height in range(1, len(kinds) + 1):
        for order in permutations(kinds, height):
            for degrees in _degrees(num_devices, height):
                yield tuple(Level(*pair) for pair in zip(order, degrees, strict=True))


def _degrees(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield ordered powers of two, each at least 2, with that product."""
    if count == 1:
        if product >= 2:
            yield (product,)
        return
    first = 2
    while first <= product // 2:
        for rest in _degrees(product // first, count - 1):
            yield (first, *rest)
        first *= 2


def pipeline_degrees(num_devices: int) -> tuple[int, ...]:
    """Return the pipeline degrees: 1, 2, 4, ... up to the devices."""
    degrees, degree = [], 1
    while degree <= num_devices:
        if num_devices % degree == 0:
            degrees.append(degree)
        degree *= 2
    return tuple(degrees)


def decision_trees(
    num_devices: int, *, checkpoint: bool = True, mix_data_and_sharded: bool = False
) -> Mapping[int, tuple[Strategy, ...]]:
    """Return the strategies per pipeline degree.

    >>> def count(n, **options): return sum(map(len, decision_trees(n, **options).values()))
    >>> count(8, mix_data_and_sharded=True), count(8), count(8, checkpoint=False)
    (68, 44, 22)
    """
    return {
        degree: strategies(num_devices // degree, checkpoint=checkpoint, mix_data_and_sharded=mix_data_and_sharded)
        for degree in pipeline_degrees(num_devices)
    }
