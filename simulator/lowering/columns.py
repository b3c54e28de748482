"""The task graph's columns, filled template by template, and its rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.lowering.rows import TaskRows
from simulator.lowering.tiling import Ids
from simulator.taskgraph import Csr


def stream_name(key: Hashable) -> str:
    """Return a stream's key in words."""
    if isinstance(key, str):
        return key
    assert isinstance(key, tuple)
    return " ".join(
        "x".join(str(size) for size in part)
        if isinstance(part, tuple) and all(isinstance(x, int) for x in part)
        else str(part)
        for part in key
    )


def csr_of_arrays(rows: Sequence[Ids]) -> Csr:
    """Return rows as one ragged array."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    items = np.concatenate(rows).astype(np.int32) if rows else np.zeros(0, dtype=np.int32)
    return Csr(offsets=offsets, items=items)


class Columns:
    """The task graph's columns, filled template by template."""

    def __init__(self, total: int) -> None:
        self.work_s = np.zeros(total)
        self.latency_s = np.zeros(total)
        self.lead_s = np.zeros(total)
        self.host_s = np.zeros(total)
        self.bound_s = np.zeros(total)
        self.kind = np.zeros(total, dtype=np.int8)
        self.host_waits = np.zeros(total, dtype=np.bool_)
        self.cause = np.zeros(total, dtype=np.int16)
        self.stage = np.full(total, -1, dtype=np.int32)
        self.microbatch = np.full(total, -1, dtype=np.int32)
        self.name = np.zeros(total, dtype=np.int32)
        self.causes: dict[str, int] = {}
        self.names: dict[str, int] = {}
        self._share_of = np.full(total, -1, dtype=np.int32)
        self._share_sets: dict[tuple[tuple[int, float], ...], int] = {}

    def tile(self, rows: TaskRows, bases: Ids, microbatches: Ids) -> None:
        """Write copies of ``rows`` at ``bases``."""
        if not len(bases) or not len(rows):
            return
        ids = (bases[:, None] + np.arange(len(rows))).ravel()
        repeat = len(bases)
        for name in ("work_s", "latency_s", "lead_s", "host_s", "bound_s", "kind", "host_waits", "stage"):
            getattr(self, name)[ids] = np.tile(np.array(getattr(rows, name)), repeat)
        self.cause[ids] = np.tile([self.causes.setdefault(word, len(self.causes)) for word in rows.cause], repeat)
        self.name[ids] = np.tile([self.names.setdefault(word, len(self.names)) for word in rows.name], repeat)
        self.microbatch[ids] = np.repeat(microbatches, len(rows))
        sets = [
            self._share_sets.setdefault(tuple(sorted(found.items())), len(self._share_sets)) if found else -1
            for found in rows.shares
        ]
        self._share_of[ids] = np.tile(sets, repeat)

    def shares(self) -> tuple[Csr, NDArray[np.float64]]:
        """Return resources per task and the fractions beside them."""
        found = list(self._share_sets)
        lengths = np.array([len(row) for row in found] + [0], dtype=np.int64)
        counts = lengths[self._share_of]
        offsets = np.zeros(len(self._share_of) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        starts = np.cumsum(lengths) - lengths
        source = np.repeat(starts[self._share_of] - offsets[:-1], counts) + np.arange(offsets[-1])
        items = np.array([resource for row in found for resource, _ in row], dtype=np.int32)[source]
        fractions = np.array([fraction for row in found for _, fraction in row], dtype=np.float64)[source]
        return Csr(offsets=offsets.astype(np.int32), items=items), fractions
