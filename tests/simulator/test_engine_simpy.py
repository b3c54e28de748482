"""The SimPy engine: when tasks start and end by their predecessors, streams and hosts, and what stops it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engines.engine_simpy import DeadlockError, run_simpy
from simulator.taskgraph import COMMUNICATION
from tests.simulator.graphs import GraphBuilder, makespan_s


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
