"""From one layout of a tensor to another on the devices of a stage, as steps that every rank takes.

The steps are those that ``simulator.lowering.mesh.reshard`` derives (checked here), with the free slices in
between. Where the steps would leave a rank with other chunks than the target layout says (an axis leaves that
is not the innermost of its dimension), the tensor is gathered whole and cut again, which costs more than
derived: ``Conversion.deviates``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from simulator.lowering.mesh import MeshSizes, refine, reshard, settled, spread
from workloads.placements import PARTIAL, Placement, Replicate, Shard, collective_between

Layout = tuple[MeshSizes, tuple[Placement, ...]]
"""Mesh and one placement per axis."""

REDUCTIONS = ("all_reduce", "reduce_scatter")
_ORDER = {"reduce_scatter": 0, "slice": 1, "all_to_all": 2, "all_reduce": 3, "all_gather": 4}


@dataclass(frozen=True)
class Step:
    """One collective (or free slice) over some axes of a mesh.

    Attributes:
        collective: ``reduce_scatter``, ``slice``, ``all_to_all``, ``all_reduce`` or ``all_gather``.
        axes: Axes of the mesh.
        source_dim, target_dim: Dimension that is sharded before and after; -1 where none is.
    """

    collective: str
    axes: tuple[int, ...]
    source_dim: int = -1
    target_dim: int = -1


@dataclass(frozen=True)
class Conversion:
    """How to get from one layout to another.

    Attributes:
        sizes: Mesh of the steps.
        steps: In order; those of the common refinement, or the reduction that precedes ``whole``.
        whole: Then gather the whole tensor over the stage and cut the target's part.
        source, target: Layouts, for ``whole``.
    """

    sizes: MeshSizes
    steps: tuple[Step, ...]
    whole: bool
    source: Layout
    target: Layout

    @property
    def reduction(self) -> Conversion | None:
        """The steps up to the last reduction: a recompute segment keeps what they give. None without one."""
        last = max((n for n, step in enumerate(self.steps) if step.collective in REDUCTIONS), default=-1)
        if last < 0:
            return None
        return replace(self, steps=self.steps[: last + 1], whole=False)

    @property
    def after_reduction(self) -> Conversion | None:
        """What is left to do after ``reduction``; None if nothing."""
        done = 0 if self.reduction is None else len(self.reduction.steps)
        rest = replace(self, steps=self.steps[done:])
        return rest if rest.steps or rest.whole else None

    @property
    def deviates(self) -> bool:
        """Whether it moves more than the plan's derivation says."""
        return self.whole


def is_settled(layout: Layout) -> Layout:
    """Return the layout with partial sums reduced."""
    return layout[0], settled(layout[1])


@lru_cache(maxsize=65536)
def convert(source: Layout, target: Layout, *, ragged: bool) -> Conversion | None:
    """Return the steps from ``source`` to ``target``, or None if nothing is to be done.

    Args:
        source, target: Layouts on the same devices.
        ragged: Samples are not divided equally, so that steps that move samples need the whole tensor.
    """
    refined = refine(frozenset({source[0], target[0]}))
    if refined is None:
        return _whole(source, target)
    have = spread(source[0], source[1], refined)
    want = spread(target[0], target[1], refined)
    steps = _steps(refined, have, want)
    if not steps:
        return None
    derived = [(item.collective, item.axes) for item in reshard(source[0], source[1], target[0], target[1], 1.0)]
    assert derived == [(step.collective, step.axes) for step in steps if step.collective != "slice"], (derived, steps)
    moves_samples = any(0 in (step.source_dim, step.target_dim) for step in steps)
    if (ragged and moves_samples) or not _arrives(have, want, steps):
        return _whole(source, target)
    return Conversion(refined, tuple(steps), False, source, target)


def _steps(sizes: MeshSizes, have: Sequence[Placement], want: Sequence[Placement]) -> list[Step]:
    found: dict[tuple[str, Placement, Placement], list[int]] = {}
    for axis, (before, after) in enumerate(zip(have, want, strict=True)):
        if before == after or sizes[axis] == 1:
            continue
        collective = collective_between(before, after) or "slice"
        found.setdefault((collective, before, after), []).append(axis)
    return [
        Step(collective, tuple(axes), _dim(before), _dim(after))
        for (collective, before, after), axes in sorted(found.items(), key=lambda item: (_ORDER[item[0][0]], item[1]))
    ]


def _dim(placement: Placement) -> int:
    return placement.dim if isinstance(placement, Shard) else -1


def _arrives(have: Sequence[Placement], want: Sequence[Placement], steps: Sequence[Step]) -> bool:
    """Return whether the steps end with the chunks that the target layout gives each rank.

    Per dimension, the axes that cut it are a nest: outermost first. A slice adds axes innermost, a gather can
    only take the innermost away.
    """
    nests: dict[int, list[int]] = {}
    for axis, placement in enumerate(have):
        if isinstance(placement, Shard):
            nests.setdefault(placement.dim, []).append(axis)
    for step in steps:
        axes = list(step.axes)
        if step.source_dim >= 0:
            nest = nests[step.source_dim]
            if nest[-len(axes) :] != axes:
                return False
            del nest[-len(axes) :]
        if step.target_dim >= 0:
            nests.setdefault(step.target_dim, []).extend(axes)
    wanted: dict[int, list[int]] = {}
    for axis, placement in enumerate(want):
        if isinstance(placement, Shard):
            wanted.setdefault(placement.dim, []).append(axis)
    return {dim: nest for dim, nest in nests.items() if nest} == wanted


def _whole(source: Layout, target: Layout) -> Conversion:
    partial = tuple(axis for axis, placement in enumerate(source[1]) if placement == PARTIAL and source[0][axis] > 1)
    steps = (Step("all_reduce", partial),) if partial else ()
    assert all(placement == Replicate() or isinstance(placement, Shard) for placement in target[1]), target
    return Conversion(source[0], steps, True, source, target)
