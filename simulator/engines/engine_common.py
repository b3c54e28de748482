"""What engines work out from a task graph before they run it, and say when it cannot run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER, Csr, TaskGraph

# Shares that add up to 1 and no more than this are full, not overfull: the rest is rounding.
SHARE_TOLERANCE = 1e-12

MAX_TASKS_NAMED = 10


class DeadlockError(RuntimeError, ValueError):
    """Tasks wait for each other in a circle, so the graph can never finish."""


def _row_of_items(rows: Csr) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(rows), dtype=np.int64), np.diff(rows.offsets))


def _rows(num_rows: int, row_of_item: NDArray[np.int64], items: NDArray[np.int64]) -> Csr:
    """Return rows from items sorted by row."""
    offsets = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(row_of_item, minlength=num_rows), out=offsets[1:])
    return Csr(offsets=offsets, items=items.astype(np.int32))


def _stream_edges(graph: TaskGraph) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (earlier task, next task, stream) for neighbours on a stream."""
    stream = _row_of_items(graph.streams)
    items = graph.streams.items.astype(np.int64)
    same = stream[1:] == stream[:-1]
    return items[:-1][same], items[1:][same], stream[1:][same]


def successors_of_tasks(graph: TaskGraph) -> tuple[Csr, NDArray[np.int64]]:
    """Return each task's successors, by predecessors and streams, and how many tasks each waits for.

    A pair related in several ways counts once.
    """
    num_tasks = graph.num_tasks
    earlier, later, _ = _stream_edges(graph)
    keys = np.concatenate(
        (
            graph.predecessors.items.astype(np.int64) * num_tasks + _row_of_items(graph.predecessors),
            earlier * num_tasks + later,
        )
    )
    keys = _distinct(keys)
    before, after = np.divmod(keys, max(1, num_tasks))
    return _rows(num_tasks, before, after), np.bincount(after, minlength=num_tasks)


def _distinct(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the keys sorted, each once; sorts in place (several times faster than ``np.unique``)."""
    keys.sort()
    new = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    distinct: NDArray[np.int64] = keys[new]
    return distinct


def devices_that_slow(graph: TaskGraph) -> Csr:
    """Return for each task the devices of its streams on which overlap may change its or others' speed."""
    num_devices = graph.num_devices
    task = graph.streams.items.astype(np.int64)
    device = graph.stream_device.astype(np.int64)[_row_of_items(graph.streams)]
    works = graph.work_s[task] > 0
    may_slow = np.maximum(graph.slowdown_computation, graph.slowdown_communication) > 1.0
    for kind in (COMPUTATION, COMMUNICATION):
        there = works & (graph.kind[task] == kind)
        may_slow &= np.bincount(device[there], minlength=num_devices) > 0
    counts = works & (graph.kind[task] != OTHER) & may_slow[device]
    keys = _distinct(task[counts] * num_devices + device[counts])
    rows, items = np.divmod(keys, max(1, num_devices))
    return _rows(graph.num_tasks, rows, items)


def shares_that_crowd(graph: TaskGraph) -> tuple[Csr, NDArray[np.float64]]:
    """Return for each task its shares of resources that may become overfull.

    Tasks of one stream never run at once. So a resource cannot be overfull if the largest shares of
    each stream's tasks add up to 1 or less.
    """
    num_tasks, num_resources = graph.num_tasks, len(graph.resource_names)
    task, resource = _row_of_items(graph.shares), graph.shares.items.astype(np.int64)
    stream_of_task = len(graph.streams) + np.arange(num_tasks, dtype=np.int64)
    stream_of_task[graph.streams.items] = _row_of_items(graph.streams)
    used = (graph.work_s[task] > 0) & (graph.share_fractions > 0)
    task, resource, fraction = task[used], resource[used], graph.share_fractions[used]
    if not len(task):
        return _rows(num_tasks, task, resource), fraction
    assert len(_distinct(task * num_resources + resource)) == len(task), "a task lists a resource twice"

    user = resource * (len(graph.streams) + num_tasks) + stream_of_task[task]
    order = np.argsort(user, kind="stable")
    first = np.flatnonzero(np.concatenate(([True], np.diff(user[order]) != 0)))
    largest = np.maximum.reduceat(fraction[order], first)
    fullest = np.bincount(resource[order][first], weights=largest, minlength=num_resources)
    crowds = fullest[resource] > 1.0 + SHARE_TOLERANCE
    return _rows(num_tasks, task[crowds], resource[crowds]), fraction[crowds]


def explain_deadlock(graph: TaskGraph, end_s: NDArray[np.float64], host_position: list[int]) -> str:
    """Follow one unfinished task to one it waits for, until the circle closes."""
    unfinished = np.isnan(end_s)
    earlier, later, stream = _stream_edges(graph)
    edges = [
        (graph.predecessors.items.astype(np.int64), _row_of_items(graph.predecessors), "predecessor", None),
        (earlier, later, "stream", stream),
    ]
    for device, position in enumerate(host_position):
        tasks = graph.hosts.row(device).astype(np.int64)
        if position < len(tasks):
            after = tasks[position + 1 :]
            edges.append((np.full(len(after), tasks[position]), after, "host", np.full(len(after), device)))
    awaited: dict[int, tuple[int, str]] = {}
    for before, after, how, which in edges:
        for index in np.flatnonzero(unfinished[before] & unfinished[after]).tolist():
            task = int(after[index])
            if task not in awaited:
                reason = {
                    "predecessor": "its predecessor",
                    "stream": "before it on stream {}",
                    "host": "for which the host of device {} waits before it launches the former",
                }[how]
                if which is not None:
                    at = int(which[index])
                    reason = reason.format(repr(graph.stream_names[at]) if how == "stream" else at)
                awaited[task] = (int(before[index]), reason)

    path: list[int] = []
    place: dict[int, int] = {}
    task = min(awaited)
    while task not in place:
        place[task] = len(path)
        path.append(task)
        task = awaited[task][0]
    circle = path[place[task] :]

    def describe(task: int) -> str:
        words = [f"task {task}"]
        words += [f"stage {graph.stage[task]}"] if graph.stage[task] >= 0 else []
        words += [f"microbatch {graph.microbatch[task]}"] if graph.microbatch[task] >= 0 else []
        return f"{graph.names[graph.name[task]]!r} ({', '.join(words)})"

    lines = [
        f"{describe(task)} waits for {describe(awaited[task][0])}, {awaited[task][1]}"
        for task in circle[:MAX_TASKS_NAMED]
    ]
    if len(circle) > MAX_TASKS_NAMED:
        lines.append(f"... and {len(circle) - MAX_TASKS_NAMED} more until the circle closes")
    return (
        f"every task must be able to end, but {int(unfinished.sum())} of {graph.num_tasks} never do, "
        f"because {len(circle)} wait for each other in a circle; change the order on a stream, of the host "
        "or of the schedule:\n  " + "\n  ".join(lines)
    )
