"""How one tensor lies over one mesh axis, in DTensor's words, and what moving between layouts costs.

A tensor on a mesh of several axes has one placement per axis. Collectives are never typed in: they
follow from the placement an operator produces and the placement its consumer wants.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensor is cut along dimension ``dim`` (0 is the batch)."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a summand; the tensor is the sum over the axis."""


Placement = Shard | Replicate | Partial
REPLICATE = Replicate()
PARTIAL = Partial()


def collective_between(source: Placement, target: Placement) -> str | None:
    """Return the collective that turns ``source`` into ``target``, or None where it is free.

    Returns:
        ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"`` or None. Replicate to
        Shard is free (each rank keeps its slice).

    Raises:
        ValueError: If ``target`` is Partial and ``source`` is not: nothing needs that.

    >>> collective_between(PARTIAL, Shard(1))
    'reduce_scatter'
    """
    if source == target:
        return None
    match source, target:
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(), Shard():
            return "all_to_all"
        case Replicate(), Shard():
            return None
        case _:
            raise ValueError(f"no collective turns {source} into {target}: a tensor is never made partial")
