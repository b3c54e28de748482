"""Chrome trace (JSON, gzip) of a simulated iteration, for https://ui.perfetto.dev.

A process per representative device, a thread per stream, a slice per task and stream, arrows along
transfers (producer, transfer, consumer), and a counter of live bytes. The same result gives the same bytes.

Source:
    Trace Event Format, Google, 2016: phases X (slices), M (names), s/t/f (flows), C (counters); times in us.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datafiles.writer import check_ending, replacing
from simulator.memory.usage import LiveBytes
from simulator.reports.breakdown import members_text
from simulator.reports.critical_path import walk_hosts
from simulator.taskgraph import COMMUNICATION, TaskGraph

if TYPE_CHECKING:
    from simulator.result import SimulationResult

Nanoseconds = NDArray[np.int64]

EVENTS_PER_CHUNK = 4096

MAX_EVENTS = 1_000_000
"""Perfetto's page loads this many (about 12 MB compressed) without complaint; several million it may not."""

MAX_MOMENTS = 100_000
"""Of live bytes, of all devices together; where there are more, neighbours share a moment."""

HOST_THREAD = 0

_TRANSFER = "transfer"


@dataclass(frozen=True)
class TraceReport:
    """What a trace file holds.

    Attributes:
        num_events: Lines of the file that are events.
        window_s: Start and end of the part of the iteration it shows.
        complete: Nothing of the window asked for was left out.
    """

    num_events: int
    window_s: tuple[float, float]
    complete: bool


def write_trace(
    result: SimulationResult,
    path: str | Path,
    *,
    window: tuple[float, float] | None = None,
    max_events: int = MAX_EVENTS,
    hosts: bool = False,
) -> TraceReport:
    """Write the trace, whole or not at all.

    Args:
        result: A simulated iteration.
        path: A ``.json.gz`` file; its folder must exist.
        window: (start_s, end_s): only what overlaps it. None for the whole iteration.
        max_events: Where there are more events, the window ends where so many have begun.
        hosts: Add a thread per host with one slice per launch.

    Returns:
        What was written.

    Raises:
        ValueError: If the window is empty, max_events is below 1, or the name does not end in ``.json.gz``.
        OSError: If the file cannot be written; an old one is then untouched.
    """
    start_s, end_s = (0.0, result.iteration_time_s) if window is None else window
    if not start_s < end_s:
        raise ValueError(f"window must end after it starts, got ({start_s}, {end_s}); give (start_s, end_s)")
    if max_events < 1:
        raise ValueError(f"max_events must be at least 1, got {max_events}")
    check_ending(path, ".json.gz", "trace")
    at_end = end_s >= result.iteration_time_s  # What happens at the very end, in no time, is of the iteration too.
    content = _Content(result, (_ns(start_s), _ns(end_s) + at_end), hosts)
    complete = content.limit(max_events)
    window_s = (start_s, end_s if complete else content.window[1] * 1e-9)
    other = {
        "iteration_time_s": result.iteration_time_s,
        "plan_hash": result.plan_hash,
        "window_s": list(window_s),
        "complete": complete,
    }
    with (
        replacing(path) as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed,
    ):
        packed.write(f'{{"displayTimeUnit":"ms","otherData":{_json(other)},"traceEvents":[\n'.encode())
        num_events = 0
        for chunk in _chunks(content.events()):
            packed.write(((",\n" if num_events else "") + ",\n".join(chunk)).encode())
            num_events += len(chunk)
        packed.write(b"\n]}\n")
    return TraceReport(num_events=num_events, window_s=window_s, complete=complete)


class _Content:
    """The events of a window, as arrays until they are written."""

    def __init__(self, result: SimulationResult, window: tuple[int, int], hosts: bool) -> None:
        self.window = window
        self._result = result
        self._graph = graph = result.graph
        self._start, self._end = _ns_array(result.schedule.start_s), _ns_array(result.schedule.end_s)
        streams = np.repeat(np.arange(len(graph.streams)), np.diff(graph.streams.offsets))
        self._task = graph.streams.items
        self._pid = graph.stream_device[streams]
        self._tid = _thread_of_stream(graph)[streams]
        self._slice = self._inside(self._start[self._task], self._end[self._task])
        self._order = np.lexsort((self._tid, self._pid, self._start[self._task]))
        self._order = self._order[self._slice[self._order]]
        self._counters = [
            _samples(result.live_bytes(memory.device), MAX_MOMENTS // len(result.memory)) for memory in result.memory
        ]
        self._flows = _flows(graph, self._task, self._start, self._pid)
        self._launches = _launches(result) if hosts else None

    def _inside(self, start: Nanoseconds, end: Nanoseconds) -> NDArray[np.bool_]:
        first, last = self.window
        return np.asarray((start < last) & ((end > first) | (start >= first)))

    def limit(self, max_events: int) -> bool:
        """Move the window's end forward until no more than ``max_events`` begin; return if it stayed."""
        flows = self._task[self._flows]
        shown = self._inside(self._start[flows[:, 0]], self._end[flows[:, 2]])
        begins = [self._start[self._task[self._order]], np.repeat(self._start[flows[shown, 0]], 3)]
        begins += [times[times >= self.window[0]] for times, _ in self._counters]
        if self._launches is not None:
            _, start, duration, _ = self._launches
            begins.append(start[self._inside(start, start + duration)])
        # What began before the window is in it from its start.
        times = np.sort(np.maximum(np.concatenate(begins), self.window[0]))
        times = times[times < self.window[1]]
        room = max(0, max_events - sum(1 for _ in self._names()))
        if len(times) <= room:
            return True
        self.window = (self.window[0], int(times[room]))
        self._slice &= self._start[self._task] < self.window[1]
        self._order = self._order[self._slice[self._order]]
        return False

    def events(self) -> Iterator[str]:
        """Yield events as JSON text: names, slices by start, launches, flows, counters."""
        yield from self._names()
        yield from self._slices()
        yield from self._host_slices()
        yield from self._arrows()
        yield from self._memory()

    def _names(self) -> Iterator[str]:
        graph = self._graph
        threads = _thread_of_stream(graph)
        for device, members in enumerate(graph.device_members):
            stage = int(graph.device_stage[device])
            name = f"stage {stage}: GPU {members_text(members)}"
            yield _event(ph="M", name="process_name", pid=device, tid=0, args={"name": name})
            yield _event(ph="M", name="process_sort_index", pid=device, tid=0, args={"sort_index": device})
            if self._launches is not None:
                yield _event(ph="M", name="thread_name", pid=device, tid=HOST_THREAD, args={"name": "host"})
        for stream, device in enumerate(graph.stream_device):
            where = {"pid": int(device), "tid": int(threads[stream])}
            yield _event(ph="M", name="thread_name", **where, args={"name": graph.stream_names[stream]})
            yield _event(ph="M", name="thread_sort_index", **where, args={"sort_index": int(threads[stream])})

    def _slices(self) -> Iterator[str]:
        graph, schedule = self._graph, self._result.schedule
        causes = [_json(cause) for cause in graph.causes]
        names = [_json(name)[:-1] for name in graph.names]  # closed behind the microbatch
        alone = graph.latency_s + graph.work_s
        for entries in _array_chunks(self._order):
            tasks = self._task[entries]
            columns = (
                tasks,
                self._pid[entries],
                self._tid[entries],
                self._start[tasks],
                self._end[tasks] - self._start[tasks],
                graph.cause[tasks],
                graph.name[tasks],
                graph.stage[tasks],
                graph.microbatch[tasks],
                alone[tasks] * 1e6,
                (schedule.end_s[tasks] - schedule.start_s[tasks]) * 1e6,
            )
            for task, pid, tid, start, duration, cause, name, stage, microbatch, own, real in zip(
                *(column.tolist() for column in columns), strict=True
            ):
                title = names[name] + (f' {microbatch}"' if microbatch >= 0 else '"')
                yield (
                    f'{{"ph":"X","name":{title},"cat":{causes[cause]},"pid":{pid},"tid":{tid},'
                    f'"ts":{_us(start)},"dur":{_us(duration)},"args":{{"cause":{causes[cause]},'
                    f'"stage":{stage},"microbatch":{microbatch},"task":{task},'
                    f'"alone_us":{own:.3f},"real_us":{real:.3f}}}}}'
                )

    def _host_slices(self) -> Iterator[str]:
        if self._launches is None:
            return
        device, start, duration, task = self._launches
        names = [_json(f"launch {name}") for name in self._graph.names]
        for entry in np.flatnonzero(self._inside(start, start + duration)).tolist():
            name = names[int(self._graph.name[task[entry]])]
            yield (
                f'{{"ph":"X","name":{name},"cat":"host","pid":{device[entry]},"tid":{HOST_THREAD},'
                f'"ts":{_us(int(start[entry]))},"dur":{_us(int(duration[entry]))},'
                f'"args":{{"task":{task[entry]}}}}}'
            )

    def _arrows(self) -> Iterator[str]:
        for entries in self._flows.tolist():
            shown = [entry for entry in entries if self._slice[entry]]
            if len(shown) < 2:
                continue
            identity = int(self._task[entries[1]])  # the transfer
            for number, entry in enumerate(shown):
                task = self._task[entry]
                first, last = number == 0, number == len(shown) - 1
                start, end = int(self._start[task]), int(self._end[task])
                # A flow binds to the slice that encloses its time: leave just before the end.
                time = max(start, end - 1) if first else start
                phase = "s" if first else "f" if last else "t"
                yield (
                    f'{{"ph":"{phase}","name":"transfer","cat":"transfer","id":{identity},'
                    f'"pid":{self._pid[entry]},"tid":{self._tid[entry]},"ts":{_us(time)}'
                    + (',"bp":"e"}' if last else "}")
                )

    def _memory(self) -> Iterator[str]:
        for memory, (times, live) in zip(self._result.memory, self._counters, strict=True):
            inside = (times >= self.window[0]) & (times < self.window[1])
            for time, size in zip(times[inside].tolist(), live[inside].tolist(), strict=True):
                yield (
                    f'{{"ph":"C","name":"live memory (bytes)","pid":{memory.device},"tid":0,'
                    f'"ts":{_us(time)},"args":{{"live":{size:.0f}}}}}'
                )


def _thread_of_stream(graph: TaskGraph) -> NDArray[np.int64]:
    """Return each stream's number on its device, from 1 (0 is the host)."""
    threads = np.zeros(len(graph.stream_device), dtype=np.int64)
    for device in range(graph.num_devices):
        mine = np.flatnonzero(graph.stream_device == device)
        threads[mine] = HOST_THREAD + 1 + np.arange(len(mine))
    return threads


def _samples(history: LiveBytes, limit: int) -> tuple[Nanoseconds, NDArray[np.float64]]:
    """Return ascending times with the largest and the last value of each moment, of so many moments at most."""
    times, live = _ns_array(history.times_s), history.live_bytes
    if len(times) == 0:
        return times, live
    moments = times
    if np.count_nonzero(times[1:] != times[:-1]) >= limit:
        moments = times // (int(times[-1]) // max(1, limit - 1) + 1)
    first = np.flatnonzero(np.concatenate(([True], moments[1:] != moments[:-1])))
    last = np.concatenate((first[1:], [len(times)])) - 1
    largest = np.maximum.reduceat(live, first)
    keep = np.ones(2 * len(first), dtype=bool)
    keep[1::2] = largest != live[last]
    return (
        np.column_stack((times[first], times[last])).ravel()[keep],
        np.column_stack((largest, live[last])).ravel()[keep],
    )


def _flows(
    graph: TaskGraph, task_of_entry: NDArray[np.int32], start: Nanoseconds, pid: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return (producer, transfer, consumer) as entries of the streams, one row per transfer.

    The producer is the last of a transfer's predecessors to start, the consumer the first task that waits
    for it, preferably on another device than the producer. Transfers without both are left out.
    """
    if _TRANSFER not in graph.causes:
        return np.empty((0, 3), dtype=np.int64)
    moves = (graph.cause == graph.causes.index(_TRANSFER)) & (graph.kind == COMMUNICATION)
    rows = np.repeat(np.arange(graph.num_tasks), np.diff(graph.predecessors.offsets))
    items = graph.predecessors.items
    entry_of_task = np.full(graph.num_tasks, -1, dtype=np.int64)
    entry_of_task[task_of_entry[::-1]] = np.arange(len(task_of_entry))[::-1]  # the first stream of each
    producer: dict[int, int] = {}
    for edge in np.flatnonzero(moves[rows]):
        move, other = int(rows[edge]), int(items[edge])
        if move not in producer or start[other] > start[producer[move]]:
            producer[move] = other
    consumer: dict[int, tuple[bool, int, int]] = {}
    for edge in np.flatnonzero(moves[items]):
        move, other = int(items[edge]), int(rows[edge])
        if move in producer:
            same = bool(pid[entry_of_task[producer[move]]] == pid[entry_of_task[other]])
            rank = (same, int(start[other]), other)
            consumer[move] = min(consumer.get(move, rank), rank)
    triples = [(producer[move], move, consumer[move][2]) for move in sorted(consumer)]
    entries = entry_of_task[np.array(triples, dtype=np.int64).reshape(-1, 3)]
    return entries[(entries >= 0).all(axis=1)]


def _launches(
    result: SimulationResult,
) -> tuple[NDArray[np.int64], Nanoseconds, Nanoseconds, NDArray[np.int32]]:
    """Return (device, start, duration, task) of every launch, by device and time."""
    hosts = result.graph.hosts
    arrival = walk_hosts(result.graph, result.schedule).arrival_s
    device = np.repeat(np.arange(len(hosts)), np.diff(hosts.offsets))
    came = arrival - result.graph.lead_s[hosts.items]
    start = _ns_array(came)
    duration = _ns_array(came + result.graph.host_s[hosts.items]) - start
    return device, start, duration, hosts.items


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _ns_array(seconds: NDArray[np.float64]) -> Nanoseconds:
    return np.rint(seconds * 1e9).astype(np.int64)


def _us(nanoseconds: int) -> str:
    """Return nanoseconds as microseconds, exactly."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)


def _event(**fields: Any) -> str:
    return _json(fields)


def _array_chunks(array: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for begin in range(0, len(array), EVENTS_PER_CHUNK):
        yield array[begin : begin + EVENTS_PER_CHUNK]


def _chunks(events: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for event in events:
        chunk.append(event)
        if len(chunk) == EVENTS_PER_CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
