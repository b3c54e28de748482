"""The SimPy engine against an independent slow one, on random graphs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engines.engine_simpy import DeadlockError, run_simpy
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import COMMUNICATION, COMPUTATION, Csr, TaskGraph
from tests.simulator.graphs import pipeline_graph, plain_shape
from tests.simulator.random_graphs import graphs, with_shuffled_orders


def run_slowly(graph: TaskGraph) -> tuple[list[float], list[float], list[float]]:
    """Step through time, looking at every task and host at every step: O(n^2), and no cleverness.

    Returns start, end and latest host arrival of every task; NaN for what never happens.
    """
    tasks = range(graph.num_tasks)
    preds = [graph.predecessors.row(t).tolist() for t in tasks]
    streams = [graph.streams.row(s).tolist() for s in range(len(graph.streams))]
    hosts = [graph.hosts.row(d).tolist() for d in range(graph.num_devices)]
    on_devices = [{int(graph.stream_device[s]) for s, row in enumerate(streams) if t in row} for t in tasks]
    shares: list[dict[int, float]] = []
    for t in tasks:
        low, high = graph.shares.offsets[t], graph.shares.offsets[t + 1]
        fractions = graph.share_fractions[low:high].tolist()
        shares.append(dict(zip(graph.shares.items[low:high].tolist(), fractions, strict=True)))
    state = ["waiting"] * graph.num_tasks
    start, end = [math.nan] * graph.num_tasks, [math.nan] * graph.num_tasks
    left = graph.work_s.tolist()
    arrivals: list[list[float]] = [[] for _ in tasks]
    num_hosts = [sum(t in row for row in hosts) for t in tasks]
    place, free_at, waits_for = [0] * len(hosts), [0.0] * len(hosts), [-1] * len(hosts)
    now = 0.0

    def earliest_end(t: int) -> float:
        return max(arrivals[t]) + float(graph.bound_s[t]) if arrivals[t] else 0.0

    def one_step() -> bool:
        for d, row in enumerate(hosts):
            if waits_for[d] >= 0 and state[waits_for[d]] == "ended":
                free_at[d], waits_for[d] = max(free_at[d], now), -1
                return True
            if waits_for[d] < 0 and place[d] < len(row) and free_at[d] <= now:
                t = row[place[d]]
                arrivals[t].append(free_at[d] + float(graph.lead_s[t]))
                place[d] += 1
                free_at[d] += float(graph.host_s[t])
                waits_for[d] = t if graph.host_waits[t] else -1
                return True
        for t in tasks:
            if state[t] == "waiting":
                turn = all(all(state[u] == "ended" for u in row[: row.index(t)]) for row in streams if t in row)
                launched = len(arrivals[t]) == num_hosts[t] and now >= max(arrivals[t], default=0.0)
                if turn and all(state[u] == "ended" for u in preds[t]) and launched:
                    state[t], start[t] = "latency", now
                    return True
            elif state[t] == "latency" and now >= start[t] + graph.latency_s[t]:
                state[t] = "running"
                return True
            elif state[t] == "running" and left[t] <= 0.0:
                state[t] = "bound"
                return True
            elif state[t] == "bound" and now >= earliest_end(t):
                state[t], end[t] = "ended", now
                return True
        return False

    def speed(t: int, running: list[int]) -> float:
        loads = [sum(shares[u].get(r, 0.0) for u in running) for r in shares[t]]
        factors = [1.0]
        for d in on_devices[t]:
            kinds = {int(graph.kind[u]) for u in running if d in on_devices[u]}
            if {COMPUTATION, COMMUNICATION} <= kinds:
                if graph.kind[t] == COMPUTATION:
                    factors.append(float(graph.slowdown_computation[d]))
                elif graph.kind[t] == COMMUNICATION:
                    factors.append(float(graph.slowdown_communication[d]))
        return 1.0 / (max([1.0, *loads]) * max(factors))

    while True:
        while one_step():
            pass
        running = [t for t in tasks if state[t] == "running"]
        speeds = {t: speed(t, running) for t in running}
        moments = [now + left[t] / speeds[t] for t in running]
        moments += [start[t] + float(graph.latency_s[t]) for t in tasks if state[t] == "latency"]
        moments += [earliest_end(t) for t in tasks if state[t] == "bound"]
        moments += [free_at[d] for d, row in enumerate(hosts) if waits_for[d] < 0 and place[d] < len(row)]
        moments += [max(arrivals[t]) for t in tasks if state[t] == "waiting" and arrivals[t]]
        moments = [moment for moment in moments if moment > now]
        if not moments:
            return start, end, [max(a, default=0.0) for a in arrivals]
        then = min(moments)
        for t in running:
            done_at = now + left[t] / speeds[t]
            left[t] = 0.0 if done_at <= then + 1e-13 else left[t] - (then - now) * speeds[t]
        now = then


def renumbered(graph: TaskGraph, new_id: list[int]) -> TaskGraph:
    """Return the same graph with task i called new_id[i]."""
    old_id = np.argsort(new_id)
    names = ["work_s", "latency_s", "lead_s", "host_s", "bound_s", "kind", "host_waits"]
    names += ["cause", "stage", "microbatch", "name"]
    ids = np.array(new_id, dtype=np.int32)
    bounds = graph.shares.offsets
    return replace(
        graph,
        **{name: getattr(graph, name)[old_id] for name in names},
        predecessors=Csr.from_rows([ids[graph.predecessors.row(t)].tolist() for t in old_id]),
        streams=Csr(graph.streams.offsets, ids[graph.streams.items]),
        hosts=Csr(graph.hosts.offsets, ids[graph.hosts.items]),
        shares=Csr.from_rows([graph.shares.row(t).tolist() for t in old_id]),
        share_fractions=np.concatenate([graph.share_fractions[bounds[t] : bounds[t + 1]] for t in old_id]),
    )


@settings(max_examples=1_000, deadline=None)
@given(graph=graphs())
def test_every_task_agrees_with_a_slow_independent_engine(graph) -> None:
    schedule = run_simpy(graph)
    start, end, arrival = run_slowly(graph)
    np.testing.assert_allclose(schedule.start_s, start, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(schedule.end_s, end, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(schedule.host_arrival_s, arrival, rtol=1e-9, atol=1e-9)


@settings(deadline=None)
@given(graph=graphs(), seed=st.integers(0, 1000))
def test_results_are_the_same_bits_however_tasks_are_numbered(graph, seed) -> None:
    new_id = list(range(graph.num_tasks))
    random.Random(seed).shuffle(new_id)
    plain, shuffled = run_simpy(graph), run_simpy(renumbered(graph, new_id))
    assert plain.start_s.tobytes() == shuffled.start_s[new_id].tobytes()
    assert plain.end_s.tobytes() == shuffled.end_s[new_id].tobytes()


@settings(deadline=None)
@given(graph=graphs(), seed=st.integers(0, 1000))
def test_orders_shuffled_into_circles_stop_both_engines_alike(graph, seed) -> None:
    graph = with_shuffled_orders(graph, seed)
    _, end, _ = run_slowly(graph)
    if np.isnan(end).any():
        with pytest.raises(DeadlockError, match=f"{np.isnan(end).sum()} of {graph.num_tasks} never do"):
            run_simpy(graph)
    else:
        np.testing.assert_allclose(run_simpy(graph).end_s, end, rtol=1e-9, atol=1e-9)


def test_a_pipeline_agrees_with_the_slow_engine() -> None:
    shape = plain_shape(3, 5)
    graph = pipeline_graph(shape, schedule_named("zb-h1").actions(shape), link_s=0.3).graph
    np.testing.assert_allclose(run_simpy(graph).end_s, run_slowly(graph)[1], rtol=1e-12)
