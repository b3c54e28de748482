"""Run a task graph with SimPy: the readable definition of how simulated time passes.

``taskgraph`` states the semantics. Three observations keep the engine short and fast:

- The order on every stream is static, so "next on its stream" is one more edge, and a task has a single
  count of what it still waits for: predecessors, streams and hosts.
- A host only adds up seconds. It needs the clock where it waits for a task, and nowhere else: it runs
  ahead with plain arithmetic, and a task starts at the later of "now" and its hosts' arrivals.
- A speed changes only when a device begins or ceases to overlap, or a resource's load changes. A task
  that neither can happen to is one event.

Speeds change once per instant, after everything that ends or starts at that instant, so a result does
not depend on the order in which SimPy delivers simultaneous events.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from heapq import heappush
from math import fsum
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import NORMAL, EventPriority

from simulator.engines.engine_common import (
    SHARE_TOLERANCE,
    DeadlockError,
    devices_that_slow,
    explain_deadlock,
    shares_that_crowd,
    successors_of_tasks,
)
from simulator.taskgraph import COMMUNICATION, COMPUTATION, Schedule, TaskGraph

__all__ = ["DeadlockError", "run_simpy"]

# After every other event of the same instant (SimPy's own are URGENT = 0 and NORMAL = 1).
AFTER_ALL = EventPriority(2)

TASKS_PER_PROGRESS_CALL = 16384


def run_simpy(graph: TaskGraph, progress: Callable[[int], None] | None = None) -> Schedule:
    """Simulate one iteration and return when every task ran.

    The same graph gives the same bits. A task costs one heap event, one more if it has both a latency
    and a speed that can change, and about one more per change of its speed.

    Args:
        graph: What to run; all times in seconds, finite and >= 0.
        progress: Called now and then with the number of tasks ended so far, at last with all of them.

    Returns:
        Start, end and host arrival of every task in seconds from the start of the iteration. A task
        that no host launches has arrival 0 and no bound. ``statistics`` holds ``events`` (put on the
        heap) and ``speed_changes`` (of running tasks).

    Raises:
        DeadlockError: If tasks wait for each other in a circle; the message names the circle.
    """
    run = _Run(graph, progress)
    run.run()
    if run.num_ended < graph.num_tasks:
        raise DeadlockError(explain_deadlock(graph, np.asarray(run.end_s), run.host_position))
    if progress is not None:
        progress(run.num_ended)
    return Schedule(
        start_s=np.asarray(run.start_s),
        end_s=np.asarray(run.end_s),
        host_arrival_s=np.asarray(run.arrival_s),
        statistics={"events": float(next(run._eid)), "speed_changes": float(run.num_speed_changes)},
    )


class _Moment(simpy.Event):
    """A point in time at which something happens to one task, the event's value.

    SimPy's ``Timeout`` takes a delay and adds it to the clock. Times here are absolute: a sum of
    durations is rounded as anyone would round it, and closed forms hold to the last bit.
    """

    def __init__(
        self,
        run: _Run,
        time_s: float,
        callback: Callable[[Any], None],
        task: int,
        priority: EventPriority = NORMAL,
    ) -> None:
        self.env = run
        self.callbacks = [callback]
        self._value = task
        self._ok = True
        heappush(run._queue, (time_s, priority, next(run._eid), self))


class _Work(_Moment):
    """The end of a running task's work, as far as known when it was put on the heap.

    If the task slows down, the moment stays and is put off when it fires; if the task speeds up, a new
    moment takes its place.

    Attributes:
        since_s: Time of the last change of speed.
        remaining_s: Work left then, in seconds at full speed.
        slowness: One over the present speed, >= 1.
        planned_s: When this fires.
        finish_s: When the work ends at the present speed, never before ``planned_s``.
    """

    def __init__(self, run: _Run, task: int, since_s: float, remaining_s: float, slowness: float) -> None:
        finish_s = since_s + remaining_s * slowness
        super().__init__(run, finish_s, run._finish_work, task)
        self.since_s = since_s
        self.remaining_s = remaining_s
        self.slowness = slowness
        self.planned_s = self.finish_s = finish_s


class _Run(simpy.Environment):
    """SimPy's clock and heap, and the state of one run of one graph.

    Columns are ``array``, not numpy: single elements are read several times faster, and as compactly.
    """

    def __init__(self, graph: TaskGraph, progress: Callable[[int], None] | None) -> None:
        super().__init__(0.0)
        times = (graph.work_s, graph.latency_s, graph.lead_s, graph.host_s, graph.bound_s)
        assert all(np.all((column >= 0) & np.isfinite(column)) for column in times)
        num_tasks, num_devices = graph.num_tasks, graph.num_devices
        self.progress = progress
        self.num_ended = 0
        self.num_speed_changes = 0

        num_hosts = np.bincount(graph.hosts.items, minlength=num_tasks)
        successors, num_before = successors_of_tasks(graph)
        self.first_successor, self.successors = _ints(successors.offsets), _ints(successors.items)
        self.num_awaited: list[int] = (num_before + num_hosts).tolist()
        self.work_s = _floats(graph.work_s)
        self.latency_s = _floats(graph.latency_s)
        self.bound_s = _floats(np.where(num_hosts > 0, graph.bound_s, 0.0))
        self.start_s = _floats(np.full(num_tasks, np.nan))
        self.end_s = _floats(np.full(num_tasks, np.nan))
        self.arrival_s = _floats(np.zeros(num_tasks))

        # What changes speeds: devices that may overlap and resources that may become overfull.
        devices = devices_that_slow(graph)
        shares, fractions = shares_that_crowd(graph)
        self.first_device, self.devices = _ints(devices.offsets), _ints(devices.items)
        self.first_share, self.resources = _ints(shares.offsets), _ints(shares.items)
        self.fractions = _floats(fractions)
        self.speed_can_change = ((np.diff(devices.offsets) > 0) | (np.diff(shares.offsets) > 0)).tobytes()
        self.kind = graph.kind.astype(np.int8).tobytes()
        self.factor: tuple[list[float], list[float]] = (
            graph.slowdown_computation.tolist(),
            graph.slowdown_communication.tolist(),
        )
        self.num_running = ([0] * num_devices, [0] * num_devices)
        self.slowed = [False] * num_devices
        self.load = [1.0] * len(graph.resource_names)
        self.running: dict[int, _Work] = {}
        self.running_on_device: list[set[int]] = [set() for _ in range(num_devices)]
        self.running_on_resource: list[dict[int, float]] = [{} for _ in graph.resource_names]
        self.changed_devices: set[int] = set()
        self.changed_resources: set[int] = set()
        self.change_is_due = False

        self.lead_s, self.host_s = _floats(graph.lead_s), _floats(graph.host_s)
        self.host_waits = graph.host_waits.astype(np.bool_).tobytes()
        self.awaited_by_host: dict[int, simpy.Event] = {}
        self.host_position = [0] * num_devices
        for device in range(num_devices):
            self.process(self._host(device, _ints(graph.hosts.row(device))))
        for task in np.flatnonzero(num_before + num_hosts == 0).tolist():
            self._release(task)

    def _host(self, device: int, tasks: array[int]) -> Generator[simpy.Event, None, None]:
        """Launch the tasks of one device in order, ahead of the clock."""
        clock_s = 0.0
        for position, task in enumerate(tasks):
            arrival_s = clock_s + self.lead_s[task]
            if arrival_s > self.arrival_s[task]:
                self.arrival_s[task] = arrival_s
            self.num_awaited[task] -= 1
            if self.num_awaited[task] == 0:
                self._release(task)
            clock_s += self.host_s[task]
            if self.host_waits[task]:
                self.host_position[device] = position
                yield self.awaited_by_host.setdefault(task, self.event())
                clock_s = max(clock_s, self._now)
        self.host_position[device] = len(tasks)

    def _release(self, task: int) -> None:
        """Start a task that waits for nothing but, perhaps, the time of its hosts' arrival."""
        now = self._now
        arrival = self.arrival_s[task]
        start = arrival if arrival > now else now
        self.start_s[task] = start
        begin = start + self.latency_s[task]
        if not self.speed_can_change[task]:
            end = begin + self.work_s[task]
            earliest = arrival + self.bound_s[task]
            _Moment(self, end if end > earliest else earliest, self._end, task)
        elif begin > now:
            _Moment(self, begin, self._begin_work, task)
        else:
            self._run_task(task)

    def _begin_work(self, event: _Moment) -> None:
        self._run_task(event._value)

    def _run_task(self, task: int) -> None:
        """Begin the work of a task whose latency has passed."""
        kind = self.kind[task]
        for device in self.devices[self.first_device[task] : self.first_device[task + 1]]:
            self.running_on_device[device].add(task)
            same = self.num_running[kind]
            same[device] += 1
            if same[device] == 1 and self.num_running[1 - kind][device]:
                self.changed_devices.add(device)
                self._call_change_speeds()
        for position in range(self.first_share[task], self.first_share[task + 1]):
            resource, fraction = self.resources[position], self.fractions[position]
            users = self.running_on_resource[resource]
            users[task] = fraction
            if len(users) > 1 or fraction > 1.0:
                self.changed_resources.add(resource)
                self._call_change_speeds()
        self.running[task] = _Work(self, task, self._now, self.work_s[task], self._slowness(task))

    def _finish_work(self, work: _Work) -> None:
        task = work._value
        if work.finish_s > self._now:  # It slowed down meanwhile.
            self.running[task] = _Work(self, task, work.since_s, work.remaining_s, work.slowness)
            return
        del self.running[task]
        kind = self.kind[task]
        for device in self.devices[self.first_device[task] : self.first_device[task + 1]]:
            self.running_on_device[device].remove(task)
            same = self.num_running[kind]
            same[device] -= 1
            if same[device] == 0 and self.num_running[1 - kind][device]:
                self.changed_devices.add(device)
                self._call_change_speeds()
        for resource in self.resources[self.first_share[task] : self.first_share[task + 1]]:
            del self.running_on_resource[resource][task]
            if self.load[resource] > 1.0:
                self.changed_resources.add(resource)
                self._call_change_speeds()
        earliest = self.arrival_s[task] + self.bound_s[task]
        if earliest > self._now:
            _Moment(self, earliest, self._end, task)
        else:
            self._end(work)

    def _end(self, event: _Moment) -> None:
        """Free the streams and the successors of a task, and the hosts that wait for it."""
        task = event._value
        self.end_s[task] = self._now
        self.num_ended += 1
        num_awaited = self.num_awaited
        for successor in self.successors[self.first_successor[task] : self.first_successor[task + 1]]:
            left = num_awaited[successor] - 1
            num_awaited[successor] = left
            if left == 0:
                self._release(successor)
        if self.host_waits[task] and task in self.awaited_by_host:
            self.awaited_by_host.pop(task).succeed()
        if self.progress is not None and self.num_ended % TASKS_PER_PROGRESS_CALL == 0:
            self.progress(self.num_ended)

    def _slowness(self, task: int) -> float:
        """Return one over the speed of a running task, from the states in force."""
        load = factor = 1.0
        for resource in self.resources[self.first_share[task] : self.first_share[task + 1]]:
            load = max(load, self.load[resource])
        for device in self.devices[self.first_device[task] : self.first_device[task + 1]]:
            if self.slowed[device]:
                factor = max(factor, self.factor[self.kind[task]][device])
        return load * factor

    def _call_change_speeds(self) -> None:
        if not self.change_is_due:
            self.change_is_due = True
            _Moment(self, self._now, self._change_speeds, task=-1, priority=AFTER_ALL)

    def _change_speeds(self, event: simpy.Event) -> None:
        """Put new overlaps and loads in force; settle and re-time the running tasks they touch."""
        self.change_is_due = False
        touched: set[int] = set()
        for device in self.changed_devices:
            slowed = self.num_running[COMPUTATION][device] > 0 and self.num_running[COMMUNICATION][device] > 0
            if slowed != self.slowed[device]:
                self.slowed[device] = slowed
                touched |= self.running_on_device[device]
        for resource in self.changed_resources:
            # fsum: the load must not depend on the order in which its users came.
            load = fsum(self.running_on_resource[resource].values())
            load = load if load > 1.0 + SHARE_TOLERANCE else 1.0
            if load != self.load[resource]:
                self.load[resource] = load
                touched.update(self.running_on_resource[resource])
        self.changed_devices.clear()
        self.changed_resources.clear()

        now = self._now
        for task in touched:
            work = self.running[task]
            slowness = self._slowness(task)
            if slowness == work.slowness:
                continue
            self.num_speed_changes += 1
            done = (now - work.since_s) / work.slowness
            work.since_s = now
            work.remaining_s = max(0.0, work.remaining_s - done)
            work.slowness = slowness
            work.finish_s = now + work.remaining_s * slowness
            if work.finish_s < work.planned_s:
                work.callbacks = []  # The moment on the heap does nothing any more.
                self.running[task] = _Work(self, task, now, work.remaining_s, slowness)


def _floats(column: NDArray[np.float64]) -> array[float]:
    return array("d", np.ascontiguousarray(column, dtype=np.float64).tobytes())


def _ints(column: NDArray[Any]) -> array[int]:
    return array("i", np.ascontiguousarray(column, dtype=np.int32).tobytes())
