"""The critical path: which chain of causes an iteration's time consists of.

The walk goes back from the task that ends last. At each task it asks what fixed the end (its work, a stretch
of it, or the host that launched too late) and what fixed the start (a task on the same stream, a
predecessor, or a host), and goes on there. The segments tile the iteration without gap or overlap::

    host     |launch|
    stage 0         |forward 0|                                        |backward 0|
    link                      |transfer|                    |transfer|
    stage 1                            |forward 0|backward 0|
    path     |launch|forward 0|transfer|forward 0|backward 0|transfer|backward 0|
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from datafiles.words import counted
from simulator.taskgraph import Bools, Csr, Floats, Ints, Schedule, TaskGraph

HOST_LAUNCH = "host launch"
STRETCH = "overlap slowdown and contention"
WAITING = "waiting"
"""Time before a start that neither a task nor a host explains; engines never produce it."""

RELATIVE_TOLERANCE = 1e-11
"""Two times are the same if they differ by less than this share of the iteration. Rounding of sums of
millions of terms stays below it, the shortest kernel (1e-6 s in iterations of 100 s) far above."""

CAUSE_WORDS = {
    "forward": "computation (forward)",
    "backward": "computation (backward)",
    "backward input": "computation (input gradients)",
    "backward weight": "computation (weight gradients)",
    "recompute": "recomputation",
    "tensor parallel": "tensor-parallel communication",
    "resharding": "resharding",
    "gradient sync": "gradient synchronisation",
    "parameter gather": "parameter gathering",
    "transfer": "transfers between stages",
    "optimizer": "optimizer step",
    "gradient norm": "gradient norm",
    "embedding sync": "tied-embedding synchronisation",
    "loss": "loss",
}
"""How causes are spelled in sentences; others stand for themselves."""

_CAUSES_OF_STAGES = frozenset({"forward", "backward", "backward input", "backward weight", "recompute"})


class Segment(NamedTuple):
    """One piece of the critical path.

    Attributes:
        start_s, end_s: Seconds from the start of the iteration.
        cause: A cause of the task graph, or HOST_LAUNCH, STRETCH, WAITING.
        stage, microbatch: -1 where they do not apply.
        device: Representative on which the time passes.
        task: The task it belongs to; for a host's segment the task it ends with.
        stretched: Of a STRETCH the cause of the task that took longer than alone.
    """

    start_s: float
    end_s: float
    cause: str
    stage: int
    microbatch: int
    device: int
    task: int
    stretched: str = ""


@dataclass(frozen=True)
class CriticalPath:
    """Contiguous segments from the start of the iteration to its end, in order of time."""

    segments: tuple[Segment, ...]

    @property
    def total_s(self) -> float:
        """Length of the path: the iteration time."""
        return self.segments[-1].end_s - self.segments[0].start_s if self.segments else 0.0

    def seconds_by(self, *, per_stage: bool) -> dict[tuple[str, int], float]:
        """Return seconds per (cause, stage); stage is -1 for causes that are not a stage's computation."""
        seconds: dict[tuple[str, int], float] = {}
        for segment in self.segments:
            stage = segment.stage if per_stage and segment.cause in _CAUSES_OF_STAGES else -1
            key = (segment.cause, stage)
            seconds[key] = seconds.get(key, 0.0) + (segment.end_s - segment.start_s)
        return seconds

    def by_cause(self, *, per_stage: bool = True) -> list[tuple[str, float, float]]:
        """Return (words, seconds, share of the iteration), largest first.

        Args:
            per_stage: Tell computation of one stage from that of another.
        """
        total = self.total_s
        rows = [
            (cause_words(cause, stage), seconds, seconds / total if total > 0 else 0.0)
            for (cause, stage), seconds in self.seconds_by(per_stage=per_stage).items()
        ]
        return sorted(rows, key=lambda row: (-row[1], row[0]))

    def stretched_s(self) -> dict[str, float]:
        """Return the seconds of STRETCH by the cause of what took longer than alone."""
        seconds: dict[str, float] = {}
        for segment in self.segments:
            if segment.cause == STRETCH:
                seconds[segment.stretched] = seconds.get(segment.stretched, 0.0) + (segment.end_s - segment.start_s)
        return seconds

    def describe(self, limit: int = 6) -> str:
        """Return one line per cause, largest first: ``62.1 %  computation (forward) of stage 3``.

        Stages share a line; the line names a stage that has most of it, or what was stretched most.
        """
        rows = self.by_cause(per_stage=False)
        parts = self.seconds_by(per_stage=True)
        leading: dict[str, tuple[float, int]] = {}
        for (cause, stage), seconds in parts.items():
            words = cause_words(cause)
            leading[words] = max(leading.get(words, (0.0, -1)), (seconds, stage))
        lines = []
        for words, seconds, share in rows[:limit]:
            most, stage = leading[words]
            where = ""
            if stage >= 0 and most > 0.5 * seconds:
                where = f" of stage {stage}" if most > 0.9995 * seconds else f", most of it in stage {stage}"
            if words == STRETCH:
                stretched = self.stretched_s()
                where = f", mostly of {cause_words(max(stretched, key=stretched.__getitem__))}"
            lines.append(f"{100 * share:5.1f} %  {words}{where}")
        if len(rows) > limit:
            rest, number = sum(share for _, _, share in rows[limit:]), len(rows) - limit
            lines.append(f"{100 * rest:5.1f} %  {counted(number, 'smaller cause')}")
        return "\n".join(lines)


def cause_words(cause: str, stage: int = -1) -> str:
    """Return a cause as a reader says it.

    >>> cause_words("forward", 3)
    'computation (forward) of stage 3'
    """
    words = CAUSE_WORDS.get(cause, cause)
    return f"{words} of stage {stage}" if stage >= 0 else words


@dataclass(frozen=True)
class HostWalk:
    """When each host came to each of its tasks, and since when it had launched without waiting.

    Attributes:
        arrival_s: float64[len(graph.hosts.items)].
        origin: int32, same length: the last task whose end the host waited for (and which held it up)
            before it came here; -1 if it has launched since the start of the iteration.
    """

    arrival_s: Floats
    origin: Ints


def walk_hosts(graph: TaskGraph, schedule: Schedule) -> HostWalk:
    """Recompute every host's arrivals from the ends of the tasks it waited for.

    With C the sum of the launch times before a task, arrival = C + the largest (end - C behind it) of the
    waits before: a running maximum.
    """
    hosts = graph.hosts
    arrival = np.zeros(len(hosts.items))
    origin = np.full(len(hosts.items), -1, dtype=np.int32)
    for device in range(len(hosts)):
        lo, hi = int(hosts.offsets[device]), int(hosts.offsets[device + 1])
        tasks = hosts.items[lo:hi]
        if lo == hi:
            continue
        behind = np.cumsum(graph.host_s[tasks])
        level = np.where(graph.host_waits[tasks], schedule.end_s[tasks] - behind, -np.inf)
        base = np.maximum.accumulate(np.concatenate(([0.0], level)))
        came = base[:-1] + np.concatenate(([0.0], behind[:-1]))
        arrival[lo:hi] = came + graph.lead_s[tasks]
        record = np.where(level > base[:-1], np.arange(hi - lo), -1)
        last = np.maximum.accumulate(np.concatenate(([-1], record)))[:-1]
        origin[lo:hi] = np.where(last >= 0, tasks[last], -1)
    return HostWalk(arrival_s=arrival, origin=origin)


def tolerance_s(schedule: Schedule) -> float:
    """Return the difference in seconds below which two times of the schedule are the same."""
    return RELATIVE_TOLERANCE * float(schedule.end_s.max(initial=0.0))


def host_bound(graph: TaskGraph, schedule: Schedule) -> Bools:
    """Return bool[T]: the task's end was fixed by its host, which came too late for its kernels."""
    tolerance = tolerance_s(schedule)
    excess = schedule.end_s - schedule.start_s - graph.latency_s - graph.work_s
    launched = np.bincount(graph.hosts.items, minlength=graph.num_tasks) > 0
    bound_end = schedule.host_arrival_s + graph.bound_s
    return launched & (excess > tolerance) & (bound_end >= schedule.end_s - tolerance)


NOBODY = -1
"""Before the first of a row."""


class Positions:
    """Where each task stands in the rows of a Csr: the inverse of its items."""

    def __init__(self, rows: Csr, num_tasks: int) -> None:
        lengths = np.diff(rows.offsets)
        before = np.concatenate(([NOBODY], rows.items))[: len(rows.items)]
        before[rows.offsets[:-1][lengths > 0]] = NOBODY
        # Lists: the walk asks for one number at a time.
        self._entries = np.argsort(rows.items, kind="stable").tolist()
        self._offsets = [0, *np.cumsum(np.bincount(rows.items, minlength=num_tasks)).tolist()]
        self._row = np.repeat(np.arange(len(lengths)), lengths).tolist()
        self._before = before.tolist()

    def of(self, task: int) -> list[int]:
        """Return the indices into ``rows.items`` that hold the task, by row."""
        found: list[int] = self._entries[self._offsets[task] : self._offsets[task + 1]]
        return found

    def row_of(self, entry: int) -> int:
        """Return the row of an index into ``rows.items``."""
        row: int = self._row[entry]
        return row

    def previous(self, task: int) -> list[int]:
        """Return the tasks directly before this one in each of its rows."""
        return [self._before[entry] for entry in self.of(task) if self._before[entry] != NOBODY]


def critical_path(graph: TaskGraph, schedule: Schedule, iteration_time_s: float | None = None) -> CriticalPath:
    """Walk back from the task that ends last to the start of the iteration.

    A task that its host held up contributes its alone time as its own cause and the rest, back to the
    host's arrival, as HOST_LAUNCH; the walk goes on at that host. Any other task contributes its alone
    time, then what it took beyond that as STRETCH. Among several things that could have fixed a start,
    the task on the same stream comes first, then predecessors, then hosts: the path stays on a device
    as long as it can.

    Args:
        graph: Tasks.
        schedule: Their times.
        iteration_time_s: Where the path ends; a host may finish after the last task. None for the end of
            the last task.

    Returns:
        Segments that tile [0, iteration_time_s].
    """
    return _Walk(graph, schedule).run(iteration_time_s)


class _Walk:
    def __init__(self, graph: TaskGraph, schedule: Schedule) -> None:
        self._graph = graph
        self._schedule = schedule
        self._tolerance = tolerance_s(schedule)
        self._host_bound = host_bound(graph, schedule).tolist()
        self._start, self._end = schedule.start_s.tolist(), schedule.end_s.tolist()
        self._arrival = schedule.host_arrival_s.tolist()
        self._alone = (graph.latency_s + graph.work_s).tolist()
        self._streams = Positions(graph.streams, graph.num_tasks)
        self._hosts: tuple[Positions, HostWalk] | None = None
        self._segments: list[Segment] = []
        self._time = 0.0

    def run(self, iteration_time_s: float | None) -> CriticalPath:
        end = self._schedule.end_s
        if len(end) == 0:
            return CriticalPath(segments=())
        task: int | None = int(end.argmax())
        assert task is not None
        self._time = float(end[task])
        if iteration_time_s is not None and iteration_time_s - self._time > self._tolerance:
            last, self._time = self._time, iteration_time_s
            self._add(last, HOST_LAUNCH, task, self._device(task))
        elif iteration_time_s is not None:
            self._time = iteration_time_s
        while task is not None:
            task = self._step(task)
        self._segments.reverse()
        return CriticalPath(segments=tuple(self._segments))

    def _step(self, task: int) -> int | None:
        """Add the segments of a task that ends now; return the task whose end fixed where they begin."""
        graph = self._graph
        start, end, arrival, alone = self._start[task], self._end[task], self._arrival[task], self._alone[task]
        cause = graph.causes[graph.cause[task]]
        device = self._device(task)
        if self._host_bound[task]:
            self._add(end - alone, cause, task, device)
            self._add(arrival, HOST_LAUNCH, task, device)
            return self._go_to_host(task)
        if end - start - alone > self._tolerance:
            self._add(start + alone, STRETCH, task, device)
        if start <= self._tolerance:
            self._add(0.0, cause, task, device)
            return None
        self._add(start, cause, task, device)
        candidates: list[int] = [*self._streams.previous(task), *graph.predecessors.row(task).tolist()]
        for candidate in candidates:
            if self._end[candidate] >= start - self._tolerance:
                return candidate
        if arrival >= start - self._tolerance:
            return self._go_to_host(task)
        latest = max(candidates, key=self._end.__getitem__, default=None)
        self._add(0.0 if latest is None else self._end[latest], WAITING, task, device)
        return latest

    def _go_to_host(self, task: int) -> int | None:
        """Add the launching before a host's arrival; return the task it had waited for, if any."""
        if self._hosts is None:
            positions = Positions(self._graph.hosts, self._graph.num_tasks)
            self._hosts = positions, walk_hosts(self._graph, self._schedule)
        positions, walk = self._hosts
        entries = positions.of(task)
        if not entries:  # no host launches it: it could start at once
            self._add(0.0, WAITING, task, self._device(task))
            return None
        entry = max(entries, key=lambda entry: float(walk.arrival_s[entry]))
        origin = int(walk.origin[entry])
        began = 0.0 if origin < 0 else float(self._schedule.end_s[origin])
        self._add(began, HOST_LAUNCH, task, positions.row_of(entry))
        return None if origin < 0 else origin

    def _add(self, start: float, cause: str, task: int, device: int) -> None:
        """Put a segment from ``start`` before all others."""
        if start < self._time:
            graph = self._graph
            stage, microbatch = int(graph.stage[task]), int(graph.microbatch[task])
            stretched = graph.causes[graph.cause[task]] if cause == STRETCH else ""
            self._segments.append(Segment(start, self._time, cause, stage, microbatch, device, task, stretched))
            self._time = start

    def _device(self, task: int) -> int:
        entries = self._streams.of(task)
        if not entries:
            return -1
        return int(self._graph.stream_device[self._streams.row_of(entries[0])])
