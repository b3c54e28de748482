"""The task graph's columns, repeated from those of templates, and its rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from simulator.lowering.rows import TaskRows
from simulator.lowering.tiling import Ids
from simulator.schedules.actions import FORWARD
from simulator.taskgraph import Csr

ROLES = {
    "tensor": "tensor parallel",
    "gather": "parameter gather",
    "reduce": "gradient sync",
    "data": "parameter gather and gradient sync",
}


def stream_name(key: Hashable) -> str:
    """Return a stream's key in words.

    >>> stream_name(("tensor", (2, 4), (1,))), stream_name(("send", ("transfer", 0, "F", 0), 3))
    ('tensor parallel (mesh 2x4, axis 1)', 'send activations of stage 0 to 1')
    """
    match key:
        case ("tensor" | "gather" | "reduce" | "data" as role, (*sizes,), (*axes,)):
            return f"{ROLES[role]} (mesh {'x'.join(map(str, sizes))}, axis {', '.join(map(str, axes))})"
        case ("send" | "receive" as what, ("transfer", int(first), kind, _), _):
            tensors, source, target = (
                ("activations", first, first + 1) if kind == FORWARD else ("gradients", first + 1, first)
            )
            return f"{what} {tensors} of stage {source} to {target}"
        case ("tie", tie):
            return f"tied {tie}"
        case ("norm",):
            return "gradient norm"
    return str(key)


def csr_of_arrays(rows: Sequence[Ids]) -> Csr:
    """Return rows as one ragged array."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    items = np.concatenate(rows).astype(np.int32) if rows else np.zeros(0, dtype=np.int32)
    return Csr(offsets=offsets, items=items)


class TemplateColumns:
    """The columns of all templates, one behind the other, to be repeated for every microbatch.

    Args:
        templates: Their tasks; the epilogue is one more.

    Attributes:
        lengths: int64[templates]. Tasks of each.
        causes, names: Words that ``cause`` and ``name`` number.
    """

    def __init__(self, templates: Sequence[TaskRows]) -> None:
        self.lengths = np.array([len(rows) for rows in templates], dtype=np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths

        def column(name: str, dtype: DTypeLike = np.float64) -> NDArray[Any]:
            return np.array([value for rows in templates for value in getattr(rows, name)], dtype=dtype)

        self._columns = {name: column(name) for name in ("work_s", "latency_s", "lead_s", "host_s", "bound_s")}
        self._columns["kind"] = column("kind", np.int8)
        self._columns["host_waits"] = column("host_waits", np.bool_)
        self._columns["stage"] = column("stage", np.int32)
        causes: dict[str, int] = {}
        names: dict[str, int] = {}
        sets: dict[tuple[tuple[int, float], ...], int] = {}
        words = [(causes.setdefault(word, len(causes))) for rows in templates for word in rows.cause]
        self._columns["cause"] = np.array(words, dtype=np.int16)
        words = [(names.setdefault(word, len(names))) for rows in templates for word in rows.name]
        self._columns["name"] = np.array(words, dtype=np.int32)
        self.causes, self.names = tuple(causes), tuple(names)
        self._share_of = np.array(
            [
                sets.setdefault(tuple(sorted(found.items())), len(sets)) if found else -1
                for rows in templates
                for found in rows.shares
            ],
            dtype=np.int64,
        )
        self._share_sets = list(sets)

    def tiled(self, numbers: Ids) -> tuple[dict[str, NDArray[Any]], Csr, NDArray[np.float64]]:
        """Return columns by name, resources per task, and the fractions beside them.

        Args:
            numbers: int64[A]. Templates in the order of the tasks.
        """
        lengths = self.lengths[numbers]
        ends = np.cumsum(lengths)
        source = np.repeat(self._starts[numbers] - ends + lengths, lengths) + np.arange(ends[-1])
        columns = {name: column[source] for name, column in self._columns.items()}
        return columns, *self._shares(self._share_of[source])

    def _shares(self, share_of: Ids) -> tuple[Csr, NDArray[np.float64]]:
        found = self._share_sets
        lengths = np.array([len(row) for row in found] + [0], dtype=np.int64)
        counts = lengths[share_of]
        offsets = np.zeros(len(share_of) + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        starts = np.cumsum(lengths) - lengths
        source = np.repeat(starts[share_of] - offsets[:-1], counts) + np.arange(offsets[-1])
        items = np.array([resource for row in found for resource, _ in row], dtype=np.int32)[source]
        fractions = np.array([fraction for row in found for _, fraction in row], dtype=np.float64)[source]
        return Csr(offsets=offsets.astype(np.int32), items=items), fractions
