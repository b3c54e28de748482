"""Allocations and frees of one device as arrays: a stage's passes, repeated for every microbatch of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.memory.events import CATEGORIES, GRADIENTS
from simulator.schedules.actions import BACKWARD, BACKWARD_WEIGHT, Action

BLOCK_BYTES = 512
"""The caching allocator's rounding."""

LATE, HANDED, STEPPED = 1, 2, 3
"""Marks of events."""


@dataclass(frozen=True)
class StagePasses:
    """Allocations and frees of a stage on a representative.

    Attributes:
        num_tensors: Of one microbatch.
        passes: By kind of action.
        lasting: int64, ascending. Tensors that all microbatches share, in the order their stage makes them.
        lasting_buffer: Bytes of the buffer that its operators share and never give back.
        dropped: int64[., 2]. Of the lasting, gradients that go before the optimizer step, and their bytes.
    """

    num_tensors: int
    passes: dict[str, PassEvents]
    lasting: NDArray[np.int64]
    lasting_buffer: int = 0
    dropped: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))

    def counterpart(self, tensors: NDArray[np.int64], other: StagePasses) -> NDArray[np.int64]:
        """Return one's own numbers for the lasting tensors of a microbatch of another size; any for the rest."""
        assert len(self.lasting) == len(other.lasting), "gradients and gathered parameters do not depend on samples"
        if not len(self.lasting):
            return np.zeros_like(tensors)
        places = np.searchsorted(other.lasting, tensors)
        return self.lasting[np.minimum(places, len(self.lasting) - 1)]


@dataclass(frozen=True)
class PassEvents:
    """Events of one pass, arrays of one length.

    Attributes:
        tensors: int64, counted within a microbatch.
        lasting: bool. Whether all microbatches share the tensor.
        is_alloc: bool.
        sizes, categories: int64.
        portions: float64. When, from 0 at the start of the pass to 1 at its end.
        rooms: int64. Of a gradient that stays as it is made where it is a stage's first, the event of the pass with
            which its operator begins; else -1.
        at_last: bool. Whether it frees in a stage's last such pass alone.
    """

    tensors: NDArray[np.int64]
    lasting: NDArray[np.bool_]
    is_alloc: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    categories: NDArray[np.int64]
    portions: NDArray[np.float64]
    rooms: NDArray[np.int64]
    at_last: NDArray[np.bool_]


@dataclass(frozen=True)
class EventArrays:
    """Allocations and frees of one device. Arrays of length E.

    Attributes:
        sizes, rounded: int64 bytes asked for, and in 512-byte blocks.
        tensors: int32 tensor ids.
        is_alloc: bool.
        categories: int64 index into CATEGORIES.
        actions: int64 position in the rank's order; -1 before, len(order) after.
        times_s: float64, non-decreasing.
        marks: int8. ``LATE`` for what the first step makes, ``HANDED`` for gradients that are there all the time and
            for those that a first microbatch makes, which take their place; ``STEPPED`` where moments must be there.
        rooms: int64. Where a gradient is made that takes the place of another, the event before which that goes;
            else -1.
    """

    sizes: NDArray[np.int64]
    rounded: NDArray[np.int64]
    tensors: NDArray[np.int32]
    is_alloc: NDArray[np.bool_]
    categories: NDArray[np.int64]
    actions: NDArray[np.int64]
    times_s: NDArray[np.float64]
    marks: NDArray[np.int8]
    rooms: NDArray[np.int64]


class EventStream:
    """Collects events of one device as arrays."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]] = []
        self._actions: list[NDArray[np.int64]] = []
        self._times: list[NDArray[np.float64]] = []
        self._marks: list[NDArray[np.int8]] = []
        self._rooms: dict[int, int] = {}
        self._dropped: list[NDArray[np.int64]] = []
        self._num_events = 0
        self._next_id = 0

    def add_static(self, sizes: Sequence[int], category: str, *, mark: int = 0) -> None:
        """Allocate tensors that are never freed."""
        kept = [size for size in sizes if size > 0]
        ids = np.arange(self._next_id, self._next_id + len(kept))
        self._next_id += len(kept)
        self._append(
            np.array(kept, dtype=np.int64),
            ids,
            np.ones(len(kept), dtype=np.bool_),
            CATEGORIES.index(category),
            -1,
            0.0,
            mark,
        )

    def _append(
        self,
        sizes: NDArray[np.int64],
        ids: NDArray[np.int64],
        is_alloc: NDArray[np.bool_],
        category: int | NDArray[np.int64],
        action: int,
        time_s: float,
        mark: int = 0,
    ) -> None:
        self._parts.append((sizes, ids, is_alloc, np.broadcast_to(category, sizes.shape).astype(np.int64)))
        self._actions.append(np.full(len(sizes), action, dtype=np.int64))
        self._times.append(np.broadcast_to(time_s, sizes.shape).astype(np.float64))
        self._marks.append(np.full(len(sizes), mark, dtype=np.int8))
        self._num_events += len(sizes)

    def add_actions(
        self,
        programs: dict[int, StagePasses],
        order: list[Action],
        labels: NDArray[np.float64],
        smaller: dict[int, StagePasses],
        last: int,
    ) -> None:
        """Append the events of every action. What microbatches share is one tensor, made by the first that needs it.

        Args:
            programs: By stage.
            order: Actions.
            labels: float64[len(order), 2]. When they start and end.
            smaller: By stage, for the last microbatch if it has fewer samples; else empty.
            last: Number of the last microbatch.
        """
        count = max((action.microbatch for action in order), default=0) + 1
        first_id, smaller_id = {}, {}
        for stage, program in programs.items():
            first_id[stage] = self._next_id
            self._dropped.append(program.dropped + np.array([self._next_id, 0]))
            self._next_id += count * program.num_tensors
        for stage, program in smaller.items():
            smaller_id[stage] = self._next_id
            self._next_id += program.num_tensors
        lengths = []
        begun = set[int]()
        ends = {(kind, stage): microbatch for kind, stage, microbatch in order}
        for (kind, stage, microbatch), (start, end) in zip(order, labels.tolist(), strict=True):
            if smaller and microbatch == last:
                events = smaller[stage].passes[kind]
                lasting = first_id[stage] + programs[stage].counterpart(events.tensors, smaller[stage])
                ids = np.where(events.lasting, lasting, smaller_id[stage] + events.tensors)
            else:
                program = programs[stage]
                events = program.passes[kind]
                own = np.where(events.lasting, 0, microbatch)
                ids = events.tensors + (first_id[stage] + own * program.num_tensors)
            # What stays is as if made again, which changes nothing (``_consistent``).
            is_alloc = events.is_alloc | events.at_last if microbatch != ends[kind, stage] else events.is_alloc
            self._parts.append((events.sizes, ids, is_alloc, events.categories))
            self._times.append(start + (end - start) * events.portions)
            lengths.append(len(ids))
            is_first = kind in (BACKWARD, BACKWARD_WEIGHT) and stage not in begun
            handed = (events.rooms >= 0) & is_first
            self._marks.append(np.where(handed, HANDED, 0).astype(np.int8))
            if is_first:
                begun.add(stage)
                for place in np.flatnonzero(handed & events.is_alloc).tolist():
                    self._rooms[self._num_events + place] = self._num_events + int(events.rooms[place])
            self._num_events += len(ids)
        self._actions.append(np.repeat(np.arange(len(order)), lengths))
        self._num_actions = len(order)

    def drop_gradients(self, time_s: float) -> None:
        """Append the end of gradients that go before the optimizer step (``StagePasses.dropped``)."""
        for each in self._dropped:
            freed = np.zeros(len(each), dtype=np.bool_)
            self._append(each[:, 1], each[:, 0], freed, CATEGORIES.index(GRADIENTS), self._num_actions, time_s)

    def add_step(self, sizes: list[int], start_s: float, end_s: float, *, marks: tuple[int, int] = (0, 0)) -> None:
        """Append what lives during the optimizer step, or after it while parameters are refreshed.

        Args:
            sizes: Bytes of each tensor.
            start_s, end_s: When they are taken and given back.
            marks: Of the events that take them, and that give them back.
        """
        kept = np.array([size for size in sizes if size > 0], dtype=np.int64)
        ids = np.arange(self._next_id, self._next_id + len(kept))
        self._next_id += len(kept)
        for allocates, time_s, mark in ((True, start_s, marks[0]), (False, end_s, marks[1])):
            self._append(
                kept,
                ids,
                np.full(len(kept), allocates),
                CATEGORIES.index("optimizer workspace"),
                self._num_actions,
                time_s,
                mark,
            )

    def arrays(self) -> EventArrays:
        """Return everything appended, pairs that do not match removed."""
        sizes = np.concatenate([part[0] for part in self._parts])
        ids = np.concatenate([part[1] for part in self._parts])
        is_alloc = np.concatenate([part[2] for part in self._parts])
        categories = np.concatenate([part[3] for part in self._parts])
        actions = np.concatenate(self._actions)
        times = np.maximum.accumulate(np.concatenate(self._times))
        marks = np.concatenate(self._marks)
        keep = _consistent(ids, is_alloc)
        rooms = np.full(len(ids), -1)
        kept_before: NDArray[np.int64] = np.cumsum(keep) - keep
        rooms[list(self._rooms)] = kept_before[list(self._rooms.values())]
        sizes, ids, is_alloc = sizes[keep], ids[keep], is_alloc[keep]
        return EventArrays(
            sizes=sizes,
            rounded=-(-sizes // BLOCK_BYTES) * BLOCK_BYTES,
            tensors=ids.astype(np.int32),
            is_alloc=is_alloc,
            categories=categories[keep],
            actions=actions[keep],
            times_s=times[keep],
            marks=marks[keep],
            rooms=rooms[keep],
        )


def _consistent(ids: NDArray[np.int64], is_alloc: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which events change something: a free of what is not live, or a second allocation, does not."""
    order = np.argsort(ids, kind="stable")
    sorted_ids, sorted_alloc = ids[order], is_alloc[order]
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    previous_alloc = np.zeros(len(ids), dtype=np.bool_)
    previous_alloc[1:] = sorted_alloc[:-1]
    previous_alloc[first] = False
    keep_sorted = sorted_alloc != previous_alloc
    keep = np.empty(len(ids), dtype=np.bool_)
    keep[order] = keep_sorted
    return keep
