from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engines.engine_simpy import run_simpy
from simulator.reports.critical_path import (
    HOST_LAUNCH,
    STRETCH,
    WAITING,
    CriticalPath,
    critical_path,
    host_bound,
    walk_hosts,
)
from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER, Schedule, TaskGraph
from tests.simulator.graphs import GraphBuilder
from tests.simulator.results import pipeline_graph, result_of, with_causes

FACTORS = st.sampled_from([1.0, 1.25, 1.7])
SECONDS = st.sampled_from([0.0, 0.1, 0.25, 0.3, 1.0])
LATENCIES = st.sampled_from([0.0, 0.0, 0.05])
SHARES = st.dictionaries(st.integers(0, 1), st.sampled_from([0.5, 0.8, 1.0]), max_size=2)
KINDS = st.sampled_from([COMPUTATION, COMMUNICATION, OTHER])
CAUSES = st.sampled_from(["forward", "backward", "recompute", "tensor parallel", "transfer", "gradient sync"])


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Draw graphs with several devices, hosts, waits, shares and slowdowns."""
    num_devices = draw(st.integers(1, 3))
    builder = GraphBuilder(slowdowns=[(draw(FACTORS), draw(FACTORS)) for _ in range(num_devices)], num_resources=2)
    streams = [builder.stream(device) for device in range(num_devices) for _ in range(2)]
    some_streams = st.lists(st.sampled_from(streams), min_size=1, max_size=2, unique=True)
    num_tasks = draw(st.integers(1, 25))
    for task in range(num_tasks):
        on = draw(some_streams)
        devices = sorted({stream // 2 for stream in on})
        work = draw(SECONDS)
        builder.add(
            work,
            streams=on,
            after=draw(st.lists(st.integers(0, task - 1), max_size=2, unique=True)) if task else [],
            hosts=devices if draw(st.booleans()) else [],
            shares=draw(SHARES),
            latency_s=draw(LATENCIES),
            host_s=draw(SECONDS),
            bound_s=work + draw(SECONDS) if draw(st.booleans()) else 0.0,
            kind=draw(KINDS),
            host_waits=draw(st.booleans()) and draw(st.booleans()),
            stage=devices[0],
        )
    causes = draw(st.lists(CAUSES, min_size=num_tasks, max_size=num_tasks))
    return with_causes(builder.build(), causes)


def assert_tiles(path: CriticalPath, end_s: float) -> None:
    if end_s == 0.0:
        assert path.segments == ()
        return
    assert path.segments[0].start_s == 0.0
    assert path.segments[-1].end_s == end_s
    assert path.total_s == end_s
    for before, after in pairwise(path.segments):
        assert before.end_s == after.start_s
    assert all(segment.start_s < segment.end_s for segment in path.segments)
    total = math.fsum(segment.end_s - segment.start_s for segment in path.segments)
    assert total == pytest.approx(end_s, rel=1e-14)
    assert math.fsum(seconds for _, seconds, _ in path.by_cause()) == pytest.approx(end_s, rel=1e-12)
    assert math.fsum(share for _, _, share in path.by_cause()) == pytest.approx(1.0, rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_segments_tile_the_iteration_and_every_start_is_explained(graph: TaskGraph) -> None:
    schedule = run_simpy(graph)
    path = critical_path(graph, schedule)
    assert_tiles(path, float(schedule.end_s.max()))
    assert WAITING not in {segment.cause for segment in path.segments}
    for segment in path.segments:
        if segment.cause not in (HOST_LAUNCH, STRETCH):
            alone = graph.work_s[segment.task] + graph.latency_s[segment.task]
            assert segment.end_s - segment.start_s <= alone + 1e-9


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_recomputed_host_arrivals_equal_the_engines(graph: TaskGraph) -> None:
    schedule = run_simpy(graph)
    latest = np.zeros(graph.num_tasks)
    np.maximum.at(latest, graph.hosts.items, walk_hosts(graph, schedule).arrival_s)
    np.testing.assert_allclose(latest, schedule.host_arrival_s, rtol=1e-12, atol=1e-12)


def chain(*tasks: dict[str, object]) -> TaskGraph:
    builder = GraphBuilder()
    stream = builder.stream()
    for task in tasks:
        builder.add(**{"streams": [stream], "hosts": [0], "stage": 3, **task})  # type: ignore[arg-type]
    return with_causes(builder.build(), ["forward"] * len(tasks))


def test_path_of_one_task_is_that_task() -> None:
    graph = chain({"work_s": 2.0})
    (segment,) = critical_path(graph, run_simpy(graph)).segments
    assert segment == (0.0, 2.0, "forward", 3, -1, 0, 0, "")


def test_launch_before_an_idle_stream_is_host_launch() -> None:
    graph = chain({"work_s": 0.1, "host_s": 1.0}, {"work_s": 0.5})
    path = critical_path(graph, run_simpy(graph))
    assert [(s.start_s, s.end_s, s.cause) for s in path.segments] == [
        (0.0, 1.0, HOST_LAUNCH),
        (1.0, 1.5, "forward"),
    ]


def test_a_task_that_its_host_holds_up_counts_its_alone_time_and_the_rest_as_host_launch() -> None:
    graph = chain({"work_s": 1.0, "bound_s": 4.0})
    schedule = run_simpy(graph)
    assert host_bound(graph, schedule).tolist() == [True]
    path = critical_path(graph, schedule)
    assert [(s.start_s, s.end_s, s.cause) for s in path.segments] == [
        (0.0, 3.0, HOST_LAUNCH),
        (3.0, 4.0, "forward"),
    ]


def test_the_path_of_a_host_goes_back_to_the_task_it_waited_for() -> None:
    graph = chain({"work_s": 2.0, "host_s": 0.1, "host_waits": True}, {"work_s": 0.0, "host_s": 0.5}, {"work_s": 1.0})
    path = critical_path(graph, run_simpy(graph))
    assert [(s.start_s, s.end_s, s.cause) for s in path.segments] == [
        (0.0, 2.0, "forward"),
        (2.0, 2.5, HOST_LAUNCH),
        (2.5, 3.5, "forward"),
    ]


def test_contention_is_a_cause_of_its_own() -> None:
    builder = GraphBuilder(num_resources=1)
    for _ in range(2):
        builder.add(1.0, streams=[builder.stream()], kind=COMMUNICATION, shares={0: 1.0})
    graph = with_causes(builder.build(), ["transfer", "transfer"])
    path = critical_path(graph, run_simpy(graph))
    assert [(s.end_s - s.start_s, s.cause) for s in path.segments] == [(1.0, "transfer"), (1.0, STRETCH)]
    assert path.stretched_s() == {"transfer": 1.0}
    assert path.describe().splitlines() == [
        " 50.0 %  overlap slowdown and contention, mostly of transfers between stages",
        " 50.0 %  transfers between stages",
    ]


def test_a_host_that_ends_last_adds_launching_at_the_end() -> None:
    graph = chain({"work_s": 1.0})
    path = critical_path(graph, run_simpy(graph), iteration_time_s=1.5)
    assert_tiles(path, 1.5)
    assert path.segments[-1].cause == HOST_LAUNCH


def test_1f1b_path_has_the_closed_form_m_plus_p_minus_1() -> None:
    """The path of a pipeline of equal stages has m + p - 1 forwards and as many backwards."""
    stages, microbatches = 4, 8
    graph = pipeline_graph(stages, microbatches, layers=1, host_s=0.0, slowdown=1.0, recompute=False, collective_s=0.0)
    free = replace(
        graph,
        work_s=np.where(graph.kind == COMMUNICATION, 0.0, graph.work_s),
        latency_s=np.zeros(graph.num_tasks),
        bound_s=np.zeros(graph.num_tasks),
    )
    result = result_of(free)
    rounds = microbatches + stages - 1
    assert result.iteration_time_s == pytest.approx(rounds * 0.03 + 0.02, rel=1e-12)
    by_cause = {words: seconds for words, seconds, _ in result.critical_path().by_cause(per_stage=False)}
    assert by_cause["computation (forward)"] == pytest.approx(rounds * 0.01)
    assert by_cause["computation (backward)"] == pytest.approx(rounds * 0.02)
    assert by_cause["optimizer step"] == pytest.approx(0.02)


def test_words_name_the_stage_of_computation_only() -> None:
    path = critical_path(chain({"work_s": 2.0}), run_simpy(chain({"work_s": 2.0})))
    assert path.by_cause() == [("computation (forward) of stage 3", 2.0, 1.0)]
    assert path.by_cause(per_stage=False) == [("computation (forward)", 2.0, 1.0)]
    assert path.describe() == "100.0 %  computation (forward) of stage 3"


def test_an_unexplained_gap_is_waiting_not_a_hole() -> None:
    graph = chain({"work_s": 1.0}, {"work_s": 1.0})
    measured = Schedule(start_s=np.array([0.0, 3.0]), end_s=np.array([1.0, 4.0]), host_arrival_s=np.array([0.0, 0.0]))
    path = critical_path(graph, measured)
    assert_tiles(path, 4.0)
    assert [segment.cause for segment in path.segments] == ["forward", WAITING, "forward"]
