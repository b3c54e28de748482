"""Where each device's time goes: computation, exposed communication, launch-bound time, bubble.

Every instant of a device belongs to the first of these that applies:

1. a computation (or other non-communication) task occupies it. Of such a task the alone time counts for its
   cause; what it took beyond counts as *launch-bound* where its host fixed the end, else as *slowdown*;
2. a communication is in progress: *exposed*, for the first of COMMUNICATION_COLUMNS that is in progress;
3. a task that could have started had not been launched: *launch-bound*. The wait runs from when
   predecessors and streams were ready, but not from before the host last had to wait for a task's end;
4. nothing: *bubble*.

Contention that stretches a communication is part of that communication's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from simulator.reports.critical_path import host_bound, tolerance_s, walk_hosts
from simulator.taskgraph import COMMUNICATION, Floats, Ints, Schedule, TaskGraph

if TYPE_CHECKING:
    import pandas as pd

BUSY_COLUMNS = {
    "forward": "forward_s",
    "backward": "backward_s",
    "backward input": "backward_s",
    "backward weight": "weight_gradient_s",
    "recompute": "recompute_s",
    "loss": "loss_s",
    "gradient copy": "backward_s",
    "optimizer": "optimizer_s",
    "gradient norm": "optimizer_s",
}
OTHER_BUSY = "other_s"

COMMUNICATION_COLUMNS = {
    "tensor parallel": "exposed_tensor_parallel_s",
    "loss": "exposed_tensor_parallel_s",
    "resharding": "exposed_resharding_s",
    "transfer": "exposed_transfer_s",
    "parameter gather": "exposed_parameter_gather_s",
    "embedding sync": "exposed_embedding_sync_s",
    "gradient sync": "exposed_gradient_sync_s",
}
"""Order of blame: what blocks computation before what only ought to be hidden behind it."""
OTHER_COMMUNICATION = "exposed_other_s"

BUSY = (*dict.fromkeys(BUSY_COLUMNS.values()), OTHER_BUSY)
EXPOSED = (*dict.fromkeys(COMMUNICATION_COLUMNS.values()), OTHER_COMMUNICATION)
PARTS = (*BUSY, "slowdown_s", "launch_bound_s", *EXPOSED, "bubble_s")
"""Columns that add up to ``iteration_s``."""


def breakdown(graph: TaskGraph, schedule: Schedule, iteration_time_s: float) -> pd.DataFrame:
    """Return one row per representative device.

    Args:
        graph: Tasks.
        schedule: Their times.
        iteration_time_s: Length of the iteration.

    Returns:
        Columns: ``device`` (index of the representative), ``members`` (device ids it stands for, as
        text), ``num_members``, ``stage``, the PARTS (seconds, adding up to ``iteration_s``),
        ``iteration_s``, ``overlapped_communication_s`` (communication in progress behind computation)
        and ``communication_s`` (exposed + overlapped).
    """
    import pandas as pd

    return pd.DataFrame(breakdown_rows(graph, schedule, iteration_time_s))


def breakdown_rows(graph: TaskGraph, schedule: Schedule, iteration_time_s: float) -> list[dict[str, Any]]:
    """Return the rows of ``breakdown`` without pandas, which takes longer to import than most plans to simulate."""
    facts = _Facts(graph, schedule)
    rows: list[dict[str, Any]] = []
    for device, members in enumerate(graph.device_members):
        row: dict[str, Any] = {
            "device": device,
            "members": members_text(members),
            "num_members": len(members),
            "stage": int(graph.device_stage[device]),
        }
        row.update(facts.device_seconds(device, iteration_time_s))
        rows.append(row)
    return rows


def bubble_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the bubble's share of all devices' time, representatives weighted by their members."""
    weights, iteration_s, bubble_s = (
        np.array([row[name] for row in rows]) for name in ("num_members", "iteration_s", "bubble_s")
    )
    total = float((iteration_s * weights).sum())
    return float((bubble_s * weights).sum()) / total if total > 0 else 0.0


def members_text(members: tuple[int, ...]) -> str:
    """Return device ids with ranges joined.

    >>> members_text((0, 1, 2, 3, 8, 10, 11))
    '0-3, 8, 10-11'
    """
    ordered = sorted(members)
    words, first = [], 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            low, high = ordered[first], ordered[index - 1]
            words.append(str(low) if low == high else f"{low}-{high}")
            first = index
    return ", ".join(words)


def device_tasks(graph: TaskGraph, device: int) -> Ints:
    """Return the tasks that occupy any stream of the device, ascending, each once."""
    rows = [graph.streams.row(int(stream)) for stream in np.flatnonzero(graph.stream_device == device)]
    return np.unique(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int32)


def coalesce(start: Floats, end: Floats) -> tuple[Floats, Floats]:
    """Return the union of intervals as ascending disjoint ones."""
    if len(start) == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    return start[first], reach[np.concatenate((first[1:], [True]))]


class _Facts:
    """What is computed once for all devices."""

    def __init__(self, graph: TaskGraph, schedule: Schedule) -> None:
        self._graph, self._schedule = graph, schedule
        self._tolerance = tolerance_s(schedule)
        self._alone = graph.latency_s + graph.work_s
        self._host_bound = host_bound(graph, schedule)
        self._busy_column = _columns(graph.causes, BUSY_COLUMNS, BUSY)[graph.cause]
        self._exposed_column = _columns(graph.causes, COMMUNICATION_COLUMNS, EXPOSED)[graph.cause]
        self._launchable = self._launchable_since()

    def _launchable_since(self) -> Floats:
        """Return float64[T]: since when only its launch was missing; the start where that was in time."""
        graph, start, end = self._graph, self._schedule.start_s, self._schedule.end_s
        late = (self._schedule.host_arrival_s >= start - self._tolerance) & (start > self._tolerance)
        ready = np.zeros(graph.num_tasks)
        sizes = np.diff(graph.predecessors.offsets)
        np.maximum.at(ready, np.repeat(np.arange(graph.num_tasks), sizes), end[graph.predecessors.items])
        items, offsets = graph.streams.items, graph.streams.offsets
        if len(items) > 1:
            follows = np.ones(len(items), dtype=bool)
            follows[offsets[:-1][offsets[:-1] < len(items)]] = False
            entries = np.flatnonzero(follows)
            np.maximum.at(ready, items[entries], end[items[entries - 1]])
        walk, tasks = walk_hosts(graph, self._schedule), graph.hosts.items
        last = walk.arrival_s >= self._schedule.host_arrival_s[tasks] - self._tolerance
        held = last & (walk.origin >= 0)
        np.maximum.at(ready, tasks[held], end[walk.origin[held]])
        return np.where(late, np.minimum(ready, start), start)

    def device_seconds(self, device: int, iteration_time_s: float) -> dict[str, float]:
        tasks = device_tasks(self._graph, device)
        communicates = self._graph.kind[tasks] == COMMUNICATION
        seconds = dict.fromkeys(PARTS, 0.0)
        cover = self._occupy(tasks[~communicates], seconds)
        covered = _measure(cover)
        communications = tasks[communicates]
        starts, ends = self._schedule.start_s[communications], self._schedule.end_s[communications]
        columns = self._exposed_column[communications]
        communication = _measure(coalesce(starts, ends))
        exposed = 0.0
        for index in np.unique(columns):
            chosen = columns == index
            cover, covered, gained = _extend(cover, covered, starts[chosen], ends[chosen])
            seconds[EXPOSED[index]] = gained
            exposed += gained
        starts, ends = self._launchable[tasks], self._schedule.start_s[tasks]
        waits = ends - starts > self._tolerance
        cover, covered, gained = _extend(cover, covered, starts[waits], ends[waits])
        seconds["launch_bound_s"] += gained
        bubble = iteration_time_s - sum(seconds.values())
        seconds["bubble_s"] = bubble if abs(bubble) > self._tolerance else 0.0
        seconds["iteration_s"] = iteration_time_s
        seconds["overlapped_communication_s"] = max(0.0, communication - exposed)
        seconds["communication_s"] = communication
        return seconds

    def _occupy(self, tasks: Ints, seconds: dict[str, float]) -> tuple[Floats, Floats]:
        """Add the time of computation tasks to ``seconds``; return the union of their intervals."""
        start, end = self._schedule.start_s[tasks], self._schedule.end_s[tasks]
        if len(tasks) == 0:
            return start, end
        order = np.lexsort((end, start))
        tasks, start, end = tasks[order], start[order], end[order]
        # Tasks of several compute streams may run at once: each instant counts for the first to start.
        reach = np.maximum.accumulate(np.concatenate(([0.0], end[:-1])))
        piece = np.maximum(0.0, end - np.maximum(start, reach))
        excess = piece - self._alone[tasks]
        excess[excess <= self._tolerance] = 0.0
        for index, amount in enumerate(
            np.bincount(self._busy_column[tasks], weights=piece - excess, minlength=len(BUSY))
        ):
            seconds[BUSY[index]] += float(amount)
        launch = self._host_bound[tasks]
        seconds["launch_bound_s"] += float(excess[launch].sum())
        seconds["slowdown_s"] += float(excess[~launch].sum())
        return coalesce(start, end)


def _columns(causes: tuple[str, ...], words: dict[str, str], columns: tuple[str, ...]) -> NDArray[np.int64]:
    return np.array([columns.index(words.get(cause, columns[-1])) for cause in causes], dtype=np.int64)


def _measure(intervals: tuple[Floats, Floats]) -> float:
    return float((intervals[1] - intervals[0]).sum())


def _extend(
    cover: tuple[Floats, Floats], covered: float, start: Floats, end: Floats
) -> tuple[tuple[Floats, Floats], float, float]:
    """Return the union of a cover with more intervals, its measure, and by how much it grew."""
    if len(start) == 0:
        return cover, covered, 0.0
    union = coalesce(np.concatenate((cover[0], start)), np.concatenate((cover[1], end)))
    measure = _measure(union)
    return union, measure, max(0.0, measure - covered)
