"""Conversions between layouts end where the target layout says, whichever meshes are given."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.lowering.mesh import groups
from validation.execution.layouts import Conversion, Layout, convert
from validation.kinds.operator_context import rank_box
from workloads.placements import PARTIAL, REPLICATE, Partial, Placement, Shard

SHAPE = (8, 8)
MESHES = ((4,), (2, 2), (2, 2, 2), (8,), (2, 4), (4, 2), (1,), (3, 2), (2, 3))
Parts = list[NDArray[np.int64]]


def laid_out(layout: Layout, whole: NDArray[np.int64]) -> Parts:
    """Return what every rank holds; partial sums are the whole on the first rank of the axis, else zero."""
    sizes, placements = layout
    found = []
    for rank, coordinates in enumerate(itertools.product(*(range(size) for size in sizes))):
        own = whole[rank_box(sizes, placements, whole.shape, rank)]
        speaks = all(
            coordinate == 0
            for coordinate, placement in zip(coordinates, placements, strict=True)
            if isinstance(placement, Partial)
        )
        found.append(own if speaks else np.zeros_like(own))
    return found


def taken(conversion: Conversion, parts: Parts) -> Parts:
    """Return what every rank holds after the steps."""
    for step in conversion.steps:
        after = list(parts)
        for members in groups(conversion.sizes, step.axes):
            held = [parts[member] for member in members]
            for place, member in enumerate(members):
                if step.collective == "all_reduce":
                    after[member] = np.sum(held, axis=0)
                elif step.collective == "all_gather":
                    after[member] = np.concatenate(held, axis=step.source_dim)
                elif step.collective == "slice":
                    after[member] = np.split(held[place], len(members), axis=step.target_dim)[place]
                elif step.collective == "reduce_scatter":
                    after[member] = np.split(np.sum(held, axis=0), len(members), axis=step.target_dim)[place]
                else:
                    pieces = [np.split(part, len(members), axis=step.target_dim)[place] for part in held]
                    after[member] = np.concatenate(pieces, axis=step.source_dim)
        parts = after
    return parts


def random_layout(generator: random.Random, num_ranks: int, *, partial: bool) -> Layout:
    sizes = generator.choice([mesh for mesh in MESHES if prod(mesh) == num_ranks])
    choices: list[Placement] = [REPLICATE, Shard(0), Shard(1), *([PARTIAL] if partial else [])]
    while True:
        placements = tuple(generator.choice(choices) for _ in sizes)
        cuts = [prod(size for size, p in zip(sizes, placements, strict=True) if p == Shard(dim)) for dim in (0, 1)]
        if all(SHAPE[dim] % cut == 0 for dim, cut in enumerate(cuts)):
            return sizes, placements


def test_random_conversions_arrive_or_go_through_the_whole() -> None:
    generator = random.Random(1)
    whole = np.arange(prod(SHAPE)).reshape(SHAPE)
    counts = {"steps": 0, "whole": 0, "nothing": 0}
    for _ in range(1500):
        num_ranks = generator.choice((1, 4, 6, 8))
        source = random_layout(generator, num_ranks, partial=True)
        target = random_layout(generator, num_ranks, partial=False)
        conversion = convert(source, target, ragged=False)
        before, wanted = laid_out(source, whole), laid_out(target, whole)
        if conversion is None:
            counts["nothing"] += 1
        elif conversion.whole:
            counts["whole"] += 1
            continue
        else:
            counts["steps"] += 1
        after = before if conversion is None else taken(conversion, before)
        for have, want in zip(after, wanted, strict=True):
            assert np.array_equal(have, want), (source, target, conversion)
    assert min(counts.values()) > 20, counts


def test_galvatrons_slice_and_gather_are_single_steps() -> None:
    replicas, tensor = ((4,), (Shard(0),)), ((2, 2), (Shard(0), REPLICATE))
    gather, cut = convert(replicas, tensor, ragged=False), convert(tensor, replicas, ragged=False)
    assert gather is not None
    assert cut is not None
    assert [step.collective for step in gather.steps] == ["all_gather"]
    assert [step.collective for step in cut.steps] == ["slice"]
    assert not gather.deviates


def test_an_axis_that_is_not_innermost_goes_through_the_whole_and_says_so() -> None:
    conversion = convert(((4,), (Shard(0),)), ((2, 2), (REPLICATE, Shard(0))), ragged=False)
    assert conversion is not None
    assert conversion.deviates


def test_unequal_slices_are_not_exchanged_piecewise() -> None:
    source, target = ((2,), (Shard(0),)), ((2,), (REPLICATE,))
    equal, unequal = convert(source, target, ragged=False), convert(source, target, ragged=True)
    assert equal is not None
    assert unequal is not None
    assert not equal.whole
    assert unequal.whole
