"""Run a task graph with numba: the SimPy engine's semantics, two to three orders of magnitude faster.

``taskgraph`` states the semantics and ``engine_simpy`` defines them readably. Times come out bit for bit as
there, because both do the same arithmetic. The differences are in what needs a clock:

- A task whose speed cannot change ends when plain arithmetic says, once all it waits for have ended. Such
  tasks never see the heap, and are worked out ahead of the clock, as hosts are. A graph without changing
  speeds is a longest-path sweep.
- The heap holds only tasks whose speed may change: their begin where that lies ahead, and their end, one
  entry each that moves when the speed changes.
- Loads are summed in twice the precision, so the order of users does not matter (SimPy's engine: fsum).

The first call in a fresh environment compiles for up to a minute and says so on the log ``windtunnel``;
compiled code is kept on disk (``compiled_cache`` says where; ``NUMBA_CACHE_DIR`` moves it).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from simulator.compiled_cache import is_cached
from simulator.engines.compiled_arrays import EVENTS, NUM_ENDED, SPEED_CHANGES, RunState
from simulator.engines.compiled_loop import advance
from simulator.engines.compiled_state import prepare
from simulator.engines.engine_common import DeadlockError, explain_deadlock
from simulator.taskgraph import Schedule, TaskGraph

__all__ = ["DeadlockError", "run_compiled"]

TASKS_PER_PROGRESS_CALL = 1 << 18
"""Tasks between two returns to Python, for progress and for interrupts."""


def run_compiled(graph: TaskGraph, progress: Callable[[int], None] | None = None) -> Schedule:
    """Simulate one iteration and return when every task ran, as ``run_simpy`` does.

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
    if not is_cached(advance):
        log = logging.getLogger("windtunnel")
        log.warning("compiling the engine, once on this machine (a minute, or some on a slow one) ...")
    fixed, state = prepare(graph)
    counters = state.counters
    while True:
        ended = int(counters[NUM_ENDED])
        going_on = advance(fixed, state, ended + TASKS_PER_PROGRESS_CALL)
        if not going_on:
            break
        if progress is not None:
            progress(int(counters[NUM_ENDED]))
    if counters[NUM_ENDED] < graph.num_tasks:
        raise DeadlockError(explain_deadlock(graph, state.end_s, _host_positions(graph, state)))
    if progress is not None:
        progress(int(counters[NUM_ENDED]))
    return Schedule(
        start_s=state.start_s,
        end_s=state.end_s,
        host_arrival_s=state.arrival_s,
        statistics={"events": float(counters[EVENTS]), "speed_changes": float(counters[SPEED_CHANGES])},
    )


def _host_positions(graph: TaskGraph, state: RunState) -> list[int]:
    """Return where each host has stopped: at a task it waits for, or behind its last."""
    positions: list[int] = state.host_position.tolist()
    for device, position in enumerate(positions):
        last = graph.hosts.row(device)[position - 1] if position else -1
        if last >= 0 and graph.host_waits[last] and np.isnan(state.end_s[last]):
            positions[device] -= 1
    return positions
