"""Device meshes as mixed-radix numbers: common refinement, groups, and collectives between layouts."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from hardware_models.links import GATHERS, JOINED_GATHER
from simulator.plan import Sharding
from workloads.kinds.base import Split
from workloads.placements import PARTIAL, REPLICATE, Placement, Shard, collective_between

MeshSizes = tuple[int, ...]


@lru_cache(maxsize=4096)
def refine(meshes: frozenset[MeshSizes]) -> MeshSizes | None:
    """Return the coarsest mesh in which every axis of every given mesh is a run of axes, or None.

    Meshes must have equal products. ``None`` where radices do not nest (3 x 2 and 2 x 3).

    >>> refine(frozenset({(4, 2), (2, 4)}))
    (2, 2, 2)
    """
    strides = {1}
    total = 1
    for sizes in meshes:
        total = max(total, prod(sizes))
        stride = 1
        for size in reversed(sizes):
            stride *= size
            strides.add(stride)
    ordered = sorted(strides | {total}, reverse=True)
    for larger, smaller in itertools.pairwise(ordered):
        if larger % smaller:
            return None
    return tuple(larger // smaller for larger, smaller in itertools.pairwise(ordered))


def spread(sizes: MeshSizes, values: Sequence[Placement], refined: MeshSizes) -> tuple[Placement, ...]:
    """Return per-axis values of mesh ``sizes`` repeated over the axes of its refinement."""
    result: list[Placement] = []
    position = 0
    for size, value in zip(sizes, values, strict=True):
        covered = 1
        while covered < size:
            covered *= refined[position]
            result.append(value)
            position += 1
    assert position == len(refined), (sizes, refined)
    return tuple(result)


@lru_cache(maxsize=4096)
def groups(sizes: MeshSizes, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of local device indices that differ only along ``axes``, in order.

    >>> groups((2, 2), (0,))
    ((0, 2), (1, 3))
    """
    grid = np.arange(prod(sizes)).reshape(sizes)
    moved = np.moveaxis(grid, axes, range(-len(axes), 0))
    rows = moved.reshape(-1, prod(sizes[axis] for axis in axes))
    return tuple(tuple(int(device) for device in row) for row in rows)


@dataclass(frozen=True)
class MeshCollective:
    """One collective over some axes of a mesh.

    Attributes:
        collective: ``all_reduce``, ``all_gather`` (or ``joined_all_gather``), ``reduce_scatter`` (of gradients also
            ``owner_reduce``) or ``all_to_all``.
        sizes: The mesh.
        axes: Axes of the mesh that a group spans.
        num_bytes: As ``HardwareModel.collective`` counts: the buffer (all_reduce), the gathered result
            (all_gather), the input (reduce_scatter), what a rank holds (all_to_all).
        moves_batch: Whether the batch dimension changes hands.
    """

    collective: str
    sizes: MeshSizes
    axes: tuple[int, ...]
    num_bytes: float
    moves_batch: bool = False


REDUCTIONS = ("all_reduce", "reduce_scatter")

_ORDER = {"reduce_scatter": 0, "slice": 1, "all_to_all": 2, "all_reduce": 3, "all_gather": 4, JOINED_GATHER: 4}


def collectives_between(
    sizes: MeshSizes, source: Sequence[Placement], target: Sequence[Placement], num_bytes: float, *, joins: bool = False
) -> list[MeshCollective]:
    """Return the collectives that turn one layout of a tensor into another on the same mesh.

    Axes that need the same collective on the same dimensions share one over their product. What shrinks
    the tensor goes first, what grows it last.

    Args:
        sizes: The mesh.
        source, target: One placement per axis.
        num_bytes: Bytes one rank holds under ``source``.
        joins: Gathers along other dimensions than the first are joined from lists.
    """
    steps: dict[tuple[str, Placement, Placement], list[int]] = {}
    for axis, (have, want) in enumerate(zip(source, target, strict=True)):
        collective = collective_between(have, want)
        if collective is None and have != want:
            collective = "slice"
        if joins and collective == "all_gather" and have != Shard(0):
            collective = JOINED_GATHER
        if collective is not None:
            steps.setdefault((collective, have, want), []).append(axis)
    found = []
    for (collective, have, want), axes in sorted(steps.items(), key=lambda step: (_ORDER[step[0][0]], step[1])):
        size = prod(sizes[axis] for axis in axes)
        if size == 1:
            continue
        if collective in GATHERS:
            num_bytes *= size
        if collective != "slice":
            moves_batch = Shard(0) in (have, want)
            found.append(MeshCollective(collective, sizes, tuple(axes), num_bytes, moves_batch))
        if collective in ("slice", "reduce_scatter"):
            num_bytes /= size
    return found


@lru_cache(maxsize=65536)
def reshard(
    source_sizes: MeshSizes,
    source: tuple[Placement, ...],
    target_sizes: MeshSizes,
    target: tuple[Placement, ...],
    num_bytes: float,
    *,
    joins: bool = False,
) -> tuple[MeshCollective, ...]:
    """Return the collectives between two layouts that may lie on different meshes of the same devices.

    Where the meshes have no common refinement the tensor is gathered whole and cut again.
    """
    refined = refine(frozenset({source_sizes, target_sizes}))
    if refined is not None:
        return tuple(
            collectives_between(
                refined,
                spread(source_sizes, source, refined),
                spread(target_sizes, target, refined),
                num_bytes,
                joins=joins,
            )
        )
    whole = (REPLICATE,) * len(source_sizes)
    return tuple(collectives_between(source_sizes, source, whole, num_bytes, joins=joins))


def mesh_sizes(sharding: Sharding) -> MeshSizes:
    """Return the axis sizes of a canonical sharding; a single device is the mesh ``(1,)``."""
    return tuple(axis.size for axis in sharding) or (1,)


def parameter_layout(sharding: Sharding, splits: Sequence[Split], number: int) -> Hashable:
    """Return how an operator's parameter lies on its ranks: operators that tie one and agree in this hold it once.

    Splits of other names may lay it out alike (an embedding's rows and those of the head).
    """
    axes = tuple((axis.size, axis.split == "batch", axis.zero) for axis in sharding)
    return axes, tuple((split.parameters[number], split.parameter_gradient(number)) for split in splits)


def settled(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Return placements with partial sums reduced: what leaves a stage."""
    return tuple(REPLICATE if placement == PARTIAL else placement for placement in placements)


def batch_degree(sharding: Sharding) -> int:
    """Return the product of the batch axes of a canonical sharding."""
    return prod(axis.size for axis in sharding if axis.split == "batch")


def batch_coordinate(sharding: Sharding, local: int) -> int:
    """Return the number of the replica that local device ``local`` belongs to."""
    return _batch_coordinates(sharding)[local] if sharding else 0


@lru_cache(maxsize=4096)
def _batch_coordinates(sharding: Sharding) -> tuple[int, ...]:
    found = [0]
    for split, size, _ in sharding:
        steps = range(size) if split == "batch" else [0] * size
        found = [replica * (size if split == "batch" else 1) + step for replica in found for step in steps]
    return tuple(found)
