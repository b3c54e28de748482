"""Long pipelines from shorter ones, exactly: what repeats is simulated once.

A pipeline that has filled does the same for every microbatch until it drains. So the same plan with fewer
microbatches is run, and the periods left out are added. Why the result is that of the long run:

- Let t be the moment at which, in the short run, the first rank does what it would not do next if there were more
  microbatches. Up to t every longer run is the same as the short one.
- Let everything that starts in the three periods T before t start and end T after its counterpart k microbatches
  earlier. What runs at t - T, how far it is and what has ended is then what it was at t - 2T, k microbatches
  on; a task that has not started by then starts later than all it waits for that has ended, so older times do
  not matter. All that follows depends on this state alone: the period repeats itself while the order of actions
  does, and the run then ends as the short run does.
- Hosts launch ahead of all this. A host that waits for its device keeps its step: its launches lie T apart as
  well. One that never waits and needs less than T for a period runs ever further ahead: it is left out of the
  comparison if no task of it that is still to come waits for it.

The period is looked for in the trace (one microbatch, two, ...; all chunks of a group where stages are
interleaved), and compared to rounding. Where there is none, for example under GPipe, whose stages drift apart, the
run is not shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.lower import Lowered, lower, pipeline_shape, stage_views
from simulator.memory.device_memory import memory_microbatches
from simulator.plan import Plan
from simulator.schedules.actions import BACKWARD, BACKWARD_WEIGHT, Action
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import Schedule, TaskGraph

Ids = NDArray[np.int64]

TOLERANCE = 1e-12
"""Of the time that has passed: what rounding leaves of equal distances. A thousand periods add up to 1e-9."""
NUM_COMPARED = 3
"""Periods that must be alike."""
WORTH_IT = 0.75
"""Share of the microbatches above which the whole run costs about as much."""


@dataclass(frozen=True)
class Shortened:
    """A run of fewer microbatches that stands for a longer one.

    Attributes:
        lowered, schedule: Of the shorter run.
        iteration_time_s: Of the longer run.
        period_s: Seconds of a period.
        num_left_out: Microbatches that the shorter run lacks.
    """

    lowered: Lowered
    schedule: Schedule
    iteration_time_s: float
    period_s: float
    num_left_out: int


def shortened(
    plan: Plan, costs: CostTables, fidelity: Fidelity, run: Callable[[TaskGraph], Schedule]
) -> Shortened | None:
    """Return a shorter run that says how long a canonical plan takes; None if there is none or it is not worth it.

    Args:
        plan: Any legal plan.
        costs: Cost tables.
        fidelity: Effects to include.
        run: The engine.
    """
    unit = _unit(plan, costs)
    if unit is None:
        return None
    depth = max((*(plan.warmup_in_force() or ()), len(plan.stages)))
    total = plan.num_microbatches
    size = memory_microbatches(plan) + depth + 4 * unit
    for _attempt in range(2):
        size += (total - size) % unit
        if size > WORTH_IT * total:
            return None
        for _ in range(2):  # Once more where the rest is no whole number of periods.
            lowered = lower(replace(plan, num_microbatches=size), costs, fidelity)
            schedule = run(lowered.graph)
            found = _Trace(plan, lowered, schedule).period(unit, depth)
            if found is None:
                break
            length, period_s = found
            missing = (total - size) % length
            if not missing:
                periods = (total - size) // length
                end_s = float(schedule.end_s.max()) + periods * period_s
                return Shortened(lowered, schedule, end_s, period_s, total - size)
            size += missing
        size *= 2
    return None


def _unit(plan: Plan, costs: CostTables) -> int | None:
    """Return the microbatches after which the order of actions repeats itself.

    None if it does not; None too for a smaller last microbatch, whose memory is followed over all of them anyway.
    """
    if plan.schedule == "gpipe" or plan.last_microbatch_size is not None:
        return None
    ranks = max(plan.rank_of_stage) + 1
    turns = lcm(*(view.num_turns for view in stage_views(plan, costs)))
    return lcm(turns, ranks if plan.schedule == "interleaved" else 1)


@dataclass(frozen=True)
class _Steady:
    """The actions of a rank that may repeat themselves.

    Attributes:
        tasks: Ids of their tasks, ascending.
        counterparts: Ids of the same tasks one period earlier.
    """

    tasks: Ids
    counterparts: Ids


class _Trace:
    """One finished run, searched for a period."""

    def __init__(self, plan: Plan, lowered: Lowered, schedule: Schedule) -> None:
        self.plan = plan
        self.lowered = lowered
        self.schedule = schedule
        self.graph = lowered.graph
        self.num_microbatches = max(action.microbatch for order in lowered.orders for action in order) + 1
        self._departures: list[int] = []
        self._departure_s = 0.0

    def period(self, unit: int, depth: int) -> tuple[int, float] | None:
        """Return microbatches and seconds of the shortest period; None if there is none."""
        longer = self._orders(self.num_microbatches + unit)
        self._departures = [
            _departure(order, other) for order, other in zip(self.lowered.orders, longer, strict=True)
        ]
        earliest_s = min(self._departs_s(rank) for rank in range(len(self._departures)))
        self._departure_s = earliest_s * (1 - TOLERANCE)  # What starts then, to rounding, counts as later.
        if not self._labels_are_before(self._departure_s):
            return None
        for length in self._candidates(unit, depth):
            seconds = self._seconds(length)
            if seconds is not None:
                return length, seconds
        return None

    def _orders(self, num_microbatches: int) -> list[list[Action]]:
        shape = pipeline_shape(replace(self.plan, num_microbatches=num_microbatches))
        return schedule_named(self.plan.schedule).actions(shape)

    def _tasks_of(self, rank: int, first: int, stop: int) -> slice:
        """Return the tasks of some actions of a rank; those of its last may reach beyond."""
        base = self.lowered.action_start_task[rank]
        if stop < len(base):
            return slice(int(base[first]), int(base[stop]))
        following = rank + 1 < len(self.lowered.action_start_task)
        end = int(self.lowered.action_start_task[rank + 1][0]) if following else int(base[-1]) + 1
        return slice(int(base[first]), end)

    def _departs_s(self, rank: int) -> float:
        """Return when nothing yet depends on which action follows on a rank, in the short run or a longer one.

        The action that follows in a longer run starts no earlier than the one before both. In the short run, what
        the action receives is launched before its own tasks, so at another time than if it came later.
        """
        start_s, base, stop = self.schedule.start_s, self.lowered.action_start_task[rank], self._departures[rank]
        earliest_s = float(start_s[self._tasks_of(rank, stop - 1, stop)].min())
        classes = {
            c
            for placement in self.lowered.placements
            if self.plan.rank_of_stage[placement.view.position] == rank
            for c in placement.classes
        }
        following = rank + 1 < len(self.lowered.action_start_task)
        end = int(self.lowered.action_start_task[rank + 1][0]) if following else self.graph.num_tasks
        for row in (self.graph.hosts.row(c) for c in classes):
            own = (row >= base[0]) & (row < end)
            first = np.flatnonzero(own & (row >= base[stop]))
            before = np.flatnonzero(own & (row < base[stop]))
            if len(first) and len(before):
                received = row[before[-1] + 1 : first[0]]
                earliest_s = min(earliest_s, float(start_s[received].min(initial=np.inf)))
        return earliest_s

    def _labels_are_before(self, time_s: float) -> bool:
        """Return whether the actions that memory is worked out for lie in what all longer runs share."""
        count = memory_microbatches(self.plan)
        for rank, order in enumerate(self.lowered.orders):
            last = max(position for position, action in enumerate(order) if action.microbatch < count)
            if last >= self._departures[rank]:
                return False
            if float(self.schedule.end_s[self._tasks_of(rank, last, last + 1)].max()) > time_s:
                return False
        return True

    def _candidates(self, unit: int, depth: int) -> Iterator[int]:
        """Yield lengths that the starts of the first departing rank's passes do not rule out."""
        rank = min(
            range(len(self._departures)),
            key=lambda r: float(self.schedule.start_s[self.lowered.action_start_task[r][self._departures[r]]]),
        )
        order, stop = self.lowered.orders[rank], self._departures[rank]
        kind, stage = order[stop - 1].kind, order[stop - 1].stage
        own = [p for p in range(stop) if order[p].kind == kind and order[p].stage == stage]
        starts_s = self.schedule.start_s[self.lowered.action_start_task[rank][own]]
        tolerance_s = TOLERANCE * self._departure_s
        for length in range(unit, max(4 * unit, depth) + 1, unit):
            distances = starts_s[length:] - starts_s[:-length]
            last = distances[-(NUM_COMPARED - 1) * length :]
            if len(last) == (NUM_COMPARED - 1) * length and np.ptp(last) <= 2 * tolerance_s:
                yield length

    def _seconds(self, length: int) -> float | None:
        """Return the seconds of a period of so many microbatches; None if the run does not repeat itself so."""
        longer = self._orders(self.num_microbatches + length)
        found = [self._steady(rank, longer[rank], length) for rank in range(len(longer))]
        steady = [one for one in found if one is not None]
        if len(steady) < len(found):
            return None
        tasks = np.concatenate([one.tasks for one in steady])
        counterparts = np.concatenate([one.counterparts for one in steady])
        start_s, end_s = self.schedule.start_s, self.schedule.end_s
        late = tasks[start_s[tasks] < self._departure_s]
        if not len(late):
            return None
        rough_s = float(start_s[late[-1]] - start_s[counterparts[np.searchsorted(tasks, late[-1])]])
        since_s = self._departure_s - NUM_COMPARED * rough_s
        matters = (start_s >= since_s) & (start_s < self._departure_s)
        own = matters[tasks]
        if int(matters.sum()) != int(own.sum()):
            return None  # Something else still goes on: the pipeline has not filled for long enough.
        apart_s = start_s[tasks[own]] - start_s[counterparts[own]]
        ended = own & (end_s[tasks] <= self._departure_s)
        ends_apart_s = end_s[tasks[ended]] - end_s[counterparts[ended]]
        period_s = float(apart_s.mean())
        tolerance_s = TOLERANCE * self._departure_s
        if max(np.abs(apart_s - period_s).max(), np.abs(ends_apart_s - period_s).max(initial=0.0)) > tolerance_s:
            return None
        partner = np.full(self.graph.num_tasks, -1, dtype=np.int64)
        partner[tasks] = counterparts
        launching = [device for device in range(len(self.graph.hosts)) if len(self.graph.hosts.row(device))]
        hosts = (_Host(self, device, partner, since_s, period_s) for device in launching)
        return period_s if all(host.keeps_step() or host.runs_ahead() for host in hosts) else None

    def _steady(self, rank: int, longer: list[Action], length: int) -> _Steady | None:
        """Return the actions of a rank that repeat those one period before; None if more than they would differ."""
        order, stop = self.lowered.orders[rank], self._departures[rank]
        step = len(longer) - len(order)
        first = stop
        while first > step and order[first - 1] == _later(order[first - 1 - step], length):
            first -= 1
        # A stage's first passes, of either kind, may differ from all others.
        first = max((p + 1 for p in range(first, stop) if order[p].microbatch < length + 1), default=first)
        ends_alike = longer[stop + step :] == [_later(action, length) for action in order[stop:]]
        repeats = longer[stop : stop + step] == [_later(action, length) for action in order[stop - step : stop]]
        if first + step > stop or not ends_alike or not repeats:
            return None
        base = self.lowered.action_start_task[rank]
        sizes = np.diff(base[: stop + 1])
        if not (sizes[first:stop] == sizes[first - step : stop - step]).all():
            return None
        tasks = np.arange(base[first], base[stop])
        counterparts = tasks - np.repeat(base[first:stop] - base[first - step : stop - step], sizes[first:stop])
        for column in (self.graph.work_s, self.graph.latency_s, self.graph.host_s, self.graph.name):
            if not (column[tasks] == column[counterparts]).all():
                return None
        return _Steady(tasks, counterparts)


class _Host:
    """The launches of one device in a run that may repeat itself.

    Args:
        trace: The run.
        device: The device.
        partner: int64[T]. Counterpart of each task of steady actions, else -1.
        since_s: Where the comparison begins.
        period_s: Seconds of the period.
    """

    def __init__(self, trace: _Trace, device: int, partner: Ids, since_s: float, period_s: float) -> None:
        self.graph, self.schedule = trace.graph, trace.schedule
        self.tasks = self.graph.hosts.row(device).astype(np.int64)
        self.partner = partner[self.tasks]
        self.until_s = trace._departure_s - period_s
        self.since_s = since_s
        self.period_s = period_s
        self.tolerance_s = TOLERANCE * trace._departure_s
        self.arrival_s = self.schedule.host_arrival_s[self.tasks]

    def _apart_s(self, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = self.arrival_s[chosen] - self.schedule.host_arrival_s[self.partner[chosen]]
        return found

    def keeps_step(self) -> bool:
        """Return whether all launches in the periods compared lie a period after their counterparts."""
        inside = (self.arrival_s >= self.since_s) & (self.arrival_s < self.until_s)
        if not inside.any() or (self.partner[inside] < 0).any():
            return False
        return bool(np.abs(self._apart_s(inside) - self.period_s).max() <= self.tolerance_s)

    def runs_ahead(self) -> bool:
        """Return whether nothing still to come waits for the launches, now or further on."""
        graph, schedule, tasks = self.graph, self.schedule, self.tasks
        coming = schedule.start_s[tasks] >= self.since_s
        steady = coming & (self.partner >= 0)
        if not steady.any() or graph.host_waits[tasks[steady]].any():
            return False
        if self._apart_s(steady).max() > self.period_s + self.tolerance_s:
            return False
        left = np.arange(len(tasks)) >= int(np.argmax(coming))
        waits = np.flatnonzero(left & graph.host_waits[tasks])
        if len(waits):  # From there on it keeps step: it waits for its device.
            at = int(waits[0])
            passed_s = self.arrival_s[at] + graph.host_s[tasks[at]]
            if passed_s > schedule.end_s[tasks[at]]:
                return False
            left &= np.arange(len(tasks)) <= at
        rest = tasks[left]
        arrival_s = self.arrival_s[left] + self.tolerance_s
        free = (arrival_s < schedule.start_s[rest]) & (arrival_s + graph.bound_s[rest] < schedule.end_s[rest])
        return bool(free.all())


def _departure(order: list[Action], longer: list[Action]) -> int:
    """Return the first position at which a longer run does something else, or makes its gradients complete."""
    kind = BACKWARD_WEIGHT if any(action.kind == BACKWARD_WEIGHT for action in order) else BACKWARD
    last: dict[int, int] = {action.stage: p for p, action in enumerate(order) if action.kind == kind}
    same = next((p for p, (a, b) in enumerate(zip(order, longer, strict=False)) if a != b), len(order))
    return min(same, *last.values())


def _later(action: Action, num_microbatches: int) -> Action:
    return action._replace(microbatch=action.microbatch + num_microbatches)
