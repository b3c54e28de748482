"""The SimPy engine against closed forms, its own properties and an independent slow engine."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine_simpy import DeadlockError, run_simpy
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER, Csr, Schedule, TaskGraph
from tests.simulator.graphs import GraphBuilder, makespan_s, pipeline_graph, plain_shape
from tests.simulator.random_graphs import graphs

# Starts, hosts and streams


def test_a_task_waits_for_its_predecessors_and_its_turn_on_every_stream() -> None:
    builder = GraphBuilder(slowdowns=[(1.0, 1.0)] * 2)
    left, right = builder.stream(0), builder.stream(1)
    a = builder.add(3.0, streams=[left])
    b = builder.add(1.0, streams=[right])
    both = builder.add(2.0, streams=[left, right], after=[b])
    after = builder.add(0.5, streams=[right])
    schedule = run_simpy(builder.build())
    assert schedule.start_s[[a, b, both, after]].tolist() == [0.0, 0.0, 3.0, 5.0]
    assert schedule.end_s[[a, b, both, after]].tolist() == [3.0, 1.0, 5.0, 5.5]


def test_stream_order_holds_even_where_a_later_task_is_ready_first() -> None:
    builder = GraphBuilder()
    stream, other = builder.stream(), builder.stream()
    slow = builder.add(10.0, streams=[other])
    first = builder.add(1.0, streams=[stream], after=[slow])
    second = builder.add(1.0, streams=[stream])
    assert run_simpy(builder.build()).start_s[[first, second]].tolist() == [10.0, 11.0]


def test_a_host_runs_ahead_and_delays_what_it_launches_late() -> None:
    builder = GraphBuilder()
    stream = builder.stream()
    for _ in range(3):
        builder.add(1.0, streams=[stream], hosts=[0], host_s=2.0)
    schedule = run_simpy(builder.build())
    assert schedule.host_arrival_s.tolist() == [0.0, 2.0, 4.0]
    assert schedule.start_s.tolist() == [0.0, 2.0, 4.0]


def test_a_waiting_host_goes_on_after_the_later_of_its_own_time_and_the_task() -> None:
    builder = GraphBuilder()
    stream = builder.stream()
    for work_s in (5.0, 0.5, 1.0):
        builder.add(work_s, streams=[stream], hosts=[0], host_s=1.0, host_waits=True)
    schedule = run_simpy(builder.build())
    assert schedule.host_arrival_s.tolist() == [0.0, 5.0, 6.0]
    assert schedule.end_s.tolist() == [5.0, 5.5, 7.0]


def test_a_task_of_several_hosts_needs_them_all() -> None:
    builder = GraphBuilder(slowdowns=[(1.0, 1.0)] * 2)
    streams = [builder.stream(0), builder.stream(1)]
    builder.add(0.0, hosts=[1], host_s=4.0)
    shared = builder.add(1.0, streams=streams, hosts=[0, 1], bound_s=3.0, host_waits=True)
    last = builder.add(1.0, streams=streams[:1], hosts=[0])
    schedule = run_simpy(builder.build())
    assert schedule.host_arrival_s[shared] == schedule.start_s[shared] == 4.0
    assert schedule.end_s[shared] == 7.0  # The latest arrival counts for the bound.
    assert schedule.start_s[last] == 7.0


def test_the_bound_does_not_hold_for_a_task_without_a_host() -> None:
    builder = GraphBuilder()
    builder.add(1.0, bound_s=9.0)
    schedule = run_simpy(builder.build())
    assert schedule.end_s.tolist() == [1.0]
    assert schedule.host_arrival_s.tolist() == [0.0]


def test_a_bound_holds_the_streams_but_not_the_links() -> None:
    builder = GraphBuilder(num_resources=1)
    streams = [builder.stream(), builder.stream()]
    builder.add(1.0, streams=streams[:1], hosts=[0], bound_s=4.0, shares={0: 1.0}, kind=COMMUNICATION)
    builder.add(2.0, streams=streams[1:], shares={0: 1.0}, kind=COMMUNICATION)
    builder.add(1.0, streams=streams[:1])
    assert run_simpy(builder.build()).end_s.tolist() == [4.0, 3.0, 5.0]


kernel = st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 3.0))


@given(
    prefix=st.lists(kernel, max_size=4),
    segment=st.lists(kernel, min_size=1, max_size=8),
    suffix=st.lists(kernel, min_size=1, max_size=3),
    wait_before=st.booleans(),
    wait_after=st.booleans(),
)
def test_a_segment_of_kernels_as_one_task_equals_the_kernels(prefix, segment, suffix, wait_before, wait_after) -> None:
    def run(merged: bool) -> list[float]:
        builder = GraphBuilder()
        stream = builder.stream()

        def kernels(launches: list[tuple[float, float]], host_waits: bool) -> int:
            for index, (host_s, device_s) in enumerate(launches):
                task = builder.add(
                    device_s,
                    streams=[stream],
                    hosts=[0],
                    lead_s=host_s,
                    host_s=host_s,
                    bound_s=device_s,
                    host_waits=host_waits and index == len(launches) - 1,
                )
            return task

        watched = [kernels(prefix, wait_before)] if prefix else []
        if merged:
            host_s = [h for h, _ in segment]
            device_s = [d for _, d in segment]
            bound_s = max(sum(host_s[: j + 1]) + sum(device_s[j:]) for j in range(len(segment)))
            watched.append(
                builder.add(
                    sum(device_s),
                    streams=[stream],
                    hosts=[0],
                    lead_s=host_s[0],
                    host_s=sum(host_s),
                    bound_s=bound_s - host_s[0],
                    host_waits=wait_after,
                )
            )
        else:
            watched.append(kernels(segment, wait_after))
        watched.append(kernels(suffix, False))
        return run_simpy(builder.build()).end_s[watched].tolist()

    assert run(merged=True) == pytest.approx(run(merged=False), rel=1e-9, abs=1e-12)


# Shared links


def transfers(works: list[float], shares: list[dict[int, float]], **options: float) -> Schedule:
    """Run transfers that all may start at once, each on its own stream."""
    builder = GraphBuilder(num_resources=3)
    for work_s, share in zip(works, shares, strict=True):
        builder.add(work_s, streams=[builder.stream()], shares=share, kind=COMMUNICATION, **options)
    return run_simpy(builder.build())


def test_two_transfers_on_one_link_share_it_equally() -> None:
    # Half speed until the short one has done 1, then the other has 2 left.
    assert transfers([1.0, 3.0], [{0: 1.0}, {0: 1.0}]).end_s.tolist() == [2.0, 4.0]
    assert transfers([2.0, 2.0], [{0: 1.0}, {0: 1.0}]).end_s.tolist() == [4.0, 4.0]


@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8))
def test_n_transfers_end_as_processor_sharing_says(works) -> None:
    expected, so_far, done = {}, 0.0, 0.0
    for rank, index in enumerate(np.argsort(works)):
        so_far += (works[index] - done) * (len(works) - rank)
        done = works[index]
        expected[int(index)] = so_far
    schedule = transfers(works, [{0: 1.0}] * len(works))
    assert schedule.end_s.tolist() == pytest.approx([expected[i] for i in range(len(works))], rel=1e-12)


def test_a_transfer_that_comes_later_slows_the_first_from_then_on() -> None:
    builder = GraphBuilder(num_resources=1)
    first = builder.add(4.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
    before = builder.add(2.0, kind=OTHER)
    second = builder.add(4.0, streams=[builder.stream()], after=[before], shares={0: 1.0}, kind=COMMUNICATION)
    assert run_simpy(builder.build()).end_s[[first, second]].tolist() == [6.0, 8.0]


def test_shares_that_fit_do_not_slow() -> None:
    schedule = transfers([1.0, 2.0, 3.0], [{0: 0.5}, {0: 0.25}, {0: 0.25}])
    assert schedule.end_s.tolist() == [1.0, 2.0, 3.0]
    assert schedule.statistics["speed_changes"] == 0


def test_ten_tenths_fit() -> None:
    assert transfers([1.0] * 10, [{0: 0.1}] * 10).end_s.tolist() == [1.0] * 10


def test_the_fullest_resource_of_a_task_sets_its_speed() -> None:
    # Loads: link 0 1.5 (a, b), link 1 2.0 (b, c); a at 1/1.5, b and c at 1/2.
    schedule = transfers([1.0, 1.0, 1.0], [{0: 1.0}, {0: 0.5, 1: 1.0}, {1: 1.0}])
    assert schedule.end_s.tolist() == pytest.approx([1.5, 2.0, 2.0], rel=1e-12)


def test_a_share_above_one_slows_a_transfer_alone() -> None:
    assert transfers([2.0], [{0: 1.5}]).end_s.tolist() == [3.0]


def test_latency_passes_whatever_else_happens_and_loads_nothing() -> None:
    schedule = transfers([1.0, 1.0], [{0: 1.0}, {0: 1.0}], latency_s=0.5)
    assert schedule.end_s.tolist() == [2.5, 2.5]
    builder = GraphBuilder(num_resources=1)
    builder.add(1.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
    builder.add(1.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION, latency_s=1.0)
    assert run_simpy(builder.build()).end_s.tolist() == [1.0, 2.0]


# Overlap


def overlapping(computation_s: float, communication_s: float, kind: int = COMMUNICATION) -> list[float]:
    builder = GraphBuilder(slowdowns=[(1.5, 1.25)])
    builder.add(computation_s, streams=[builder.stream()])
    builder.add(communication_s, streams=[builder.stream()], kind=kind)
    return run_simpy(builder.build()).end_s.tolist()


def test_overlap_slows_both_sides_while_both_run() -> None:
    assert overlapping(3.0, 1.0) == pytest.approx([1.25 + 3.0 - 1.25 / 1.5, 1.25], rel=1e-12)
    assert overlapping(1.0, 3.0) == pytest.approx([1.5, 1.5 + 3.0 - 1.5 / 1.25], rel=1e-12)


def test_other_tasks_neither_slow_nor_are_slowed() -> None:
    assert overlapping(3.0, 1.0, kind=OTHER) == [3.0, 1.0]


def test_waiting_in_latency_is_not_overlap() -> None:
    builder = GraphBuilder(slowdowns=[(2.0, 2.0)])
    builder.add(1.0, streams=[builder.stream()])
    builder.add(1.0, streams=[builder.stream()], kind=COMMUNICATION, latency_s=1.0)
    assert run_simpy(builder.build()).end_s.tolist() == [1.0, 2.0]


def test_a_task_on_several_devices_takes_the_largest_factor_of_those_that_overlap() -> None:
    builder = GraphBuilder(slowdowns=[(2.0, 2.0), (1.5, 1.25), (9.0, 9.0)])
    streams = [builder.stream(device) for device in range(3)]
    builder.add(100.0, streams=[builder.stream(0)])
    builder.add(100.0, streams=[builder.stream(1)])
    transfer = builder.add(3.0, streams=streams, kind=COMMUNICATION)
    assert run_simpy(builder.build()).end_s[transfer] == 6.0


def test_devices_that_begin_to_overlap_at_the_same_instant_all_slow() -> None:
    builder = GraphBuilder(slowdowns=[(2.0, 1.0), (3.0, 1.0)])
    computations = [builder.add(4.0, streams=[builder.stream(device)]) for device in range(2)]
    streams = [builder.stream(device) for device in range(2)]
    builder.add(3.0, streams=streams, kind=COMMUNICATION, latency_s=1.0)
    assert run_simpy(builder.build()).end_s[computations].tolist() == [4.0 + 1.5, 4.0 + 2.0]


def test_overlap_and_contention_multiply() -> None:
    builder = GraphBuilder(slowdowns=[(1.5, 1.25)], num_resources=1)
    builder.add(100.0, streams=[builder.stream()])
    for _ in range(2):
        builder.add(2.0, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
    assert run_simpy(builder.build()).end_s[1:].tolist() == [5.0, 5.0]


def test_tasks_that_follow_at_the_same_instant_change_no_speed() -> None:
    builder = GraphBuilder(slowdowns=[(1.5, 1.25)])
    stream = builder.stream()
    transfer = builder.add(6.0, streams=[builder.stream()], kind=COMMUNICATION)
    for _ in range(5):
        builder.add(0.0, streams=[stream], hosts=[0], host_waits=True)  # Several events between the two.
        last = builder.add(1.0, streams=[stream], hosts=[0])
    schedule = run_simpy(builder.build())
    assert schedule.end_s[[last, transfer]].tolist() == [7.5, 7.5]
    # One change each for those that started before the overlap was in force, at time 0.
    assert schedule.statistics["speed_changes"] == 2


def test_ends_a_rounding_apart_move_nothing() -> None:
    def run(parts: list[float]) -> np.ndarray:
        builder = GraphBuilder(slowdowns=[(1.5, 1.25)], num_resources=1)
        stream = builder.stream()
        builder.add(0.3, streams=[builder.stream()], shares={0: 1.0}, kind=COMMUNICATION)
        for work_s in parts:
            builder.add(work_s, streams=[stream], shares={0: 1.0})
        last = builder.add(1.0, streams=[stream], shares={0: 1.0})
        return run_simpy(builder.build()).end_s[[0, last]]

    assert sum([0.1, 0.1, 0.1]) != 0.3
    np.testing.assert_allclose(run([0.1, 0.1, 0.1]), run([0.3]), rtol=1e-14)


# The whole


def test_an_empty_graph_takes_no_time() -> None:
    assert len(run_simpy(GraphBuilder().build()).end_s) == 0


def test_tasks_without_work_end_at_once() -> None:
    builder = GraphBuilder()
    stream = builder.stream()
    for _ in range(5000):
        last = builder.add(0.0, streams=[stream], hosts=[0], host_waits=True)
    assert run_simpy(builder.build()).end_s[last] == 0.0


def test_progress_is_told_how_many_tasks_have_ended() -> None:
    builder = GraphBuilder()
    stream = builder.stream()
    for _ in range(40_000):
        builder.add(1.0, streams=[stream])
    calls: list[int] = []
    schedule = run_simpy(builder.build(), calls.append)
    assert calls == [16384, 32768, 40000]
    assert makespan_s(schedule) == 40_000.0


def test_a_circle_is_an_error_that_names_it() -> None:
    builder = GraphBuilder()
    stream = builder.stream()
    builder.add(1.0, name="warm-up")
    builder.add(1.0, streams=[stream], after=[2], name="backward", stage=0, microbatch=1)
    builder.add(1.0, streams=[stream], name="forward", stage=0, microbatch=3)
    builder.add(1.0, after=[2], name="optimizer")
    with pytest.raises(DeadlockError) as raised:
        run_simpy(builder.build())
    message = str(raised.value)
    assert isinstance(raised.value, ValueError)
    assert "3 of 4 never do, because 2 wait for each other" in message
    assert (
        "'backward' (task 1, stage 0, microbatch 1) waits for "
        "'forward' (task 2, stage 0, microbatch 3), its predecessor" in message
    )
    assert "'backward' (task 1, stage 0, microbatch 1), before it on stream 'stream 0'" in message
    assert "optimizer" not in message


def test_a_circle_through_a_waiting_host_names_the_host() -> None:
    builder = GraphBuilder()
    builder.add(1.0, hosts=[0], host_waits=True, after=[1], name="receive")
    builder.add(1.0, hosts=[0], name="send")
    with pytest.raises(DeadlockError, match=r"'receive' \(task 0\), for which the host of device 0 waits"):
        run_simpy(builder.build())


def test_a_long_circle_is_cut_at_ten_tasks() -> None:
    builder = GraphBuilder()
    for task in range(30):
        builder.add(1.0, after=[(task + 1) % 30])
    with pytest.raises(DeadlockError, match="and 20 more"):
        run_simpy(builder.build())


# An independent engine


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


@settings(max_examples=400, deadline=None)
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
    generator = random.Random(seed)
    rows = [graph.streams.row(s).tolist() for s in range(len(graph.streams))]
    for row in rows:
        generator.shuffle(row)
    graph = replace(graph, streams=Csr.from_rows(rows))
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
