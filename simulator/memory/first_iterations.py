"""The first two iterations as a caching allocator meets them: what it has reserved then is what a run reserves.

The optimizer's moments are made when it first steps, in what the first iteration's activations have left, and the
second iteration finds that much less there (torch/optim/adam.py, ``_init_group``; Apex's FusedAdam likewise). Gradients
that are handed over are made by the first backward pass; in the next iteration each goes when its operator's backward
pass begins, which makes it anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.memory.stream import HANDED, LATE, STEPPED, EventArrays

Columns = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]
"""Bytes asked for, tensor ids, and whether it is an allocation."""


def first_iterations(events: EventArrays, num_actions: int) -> Columns:
    """Return what the allocator is asked for over two iterations.

    Args:
        events: Of one iteration like any other.
        num_actions: Passes of an iteration.
    """
    before = events.actions < 0
    late, handed = events.marks == LATE, events.marks == HANDED
    is_replaced = handed & ~before & ~events.is_alloc
    place = np.arange(len(before))
    stepped = np.flatnonzero(events.marks == STEPPED)
    moments_made = stepped[0] if len(stepped) else np.searchsorted(events.actions, num_actions)
    shift = int(events.tensors.max(initial=-1)) + 1
    parts = [
        _part(events, before & ~late & ~handed),
        _part(events, ~before & (place < moments_made) & ~is_replaced),
        _part(events, late),
        _part(events, ~before & (place >= moments_made)),
        _left_over(events, ~before & ~handed),
        _second(events, ~before & ~is_replaced, shift),
    ]
    sizes, tensors, is_alloc = (np.concatenate(column) for column in zip(*parts, strict=True))
    return sizes, tensors, is_alloc


def _part(events: EventArrays, chosen: NDArray[np.bool_]) -> Columns:
    return events.sizes[chosen], events.tensors[chosen], events.is_alloc[chosen]


def _left_over(events: EventArrays, chosen: NDArray[np.bool_]) -> Columns:
    """Return frees of what an iteration leaves to the next, which makes it anew."""
    tensors, is_alloc = events.tensors[chosen], events.is_alloc[chosen]
    balance = np.bincount(tensors, np.where(is_alloc, 1.0, -1.0))
    left = np.flatnonzero(balance > 0).astype(np.int32)
    return np.zeros(len(left), dtype=np.int64), left, np.zeros(len(left), dtype=np.bool_)


def _second(events: EventArrays, chosen: NDArray[np.bool_], shift: int) -> Columns:
    """Return the next iteration; where a gradient will be handed over, the one before has gone."""
    chosen_before: NDArray[np.int64] = np.cumsum(chosen) - chosen
    replacing = np.flatnonzero(events.rooms >= 0)
    places: NDArray[np.int64] = chosen_before[events.rooms[replacing]]
    replaced = events.tensors[replacing]
    tensors = (events.tensors[chosen] + shift).astype(np.int32)
    return (
        np.insert(events.sizes[chosen], places, 0),
        np.insert(tensors, places, replaced),
        np.insert(events.is_alloc[chosen], places, False),
    )
