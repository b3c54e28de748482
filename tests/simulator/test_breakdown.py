from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from simulator.engines.engine_simpy import run_simpy
from simulator.reports.breakdown import EXPOSED, PARTS, breakdown, bubble_share, coalesce, members_text
from simulator.taskgraph import COMMUNICATION, Csr, Schedule, TaskGraph
from tests.benchmarks.measuring import yardsticks
from tests.simulator.graphs import GraphBuilder
from tests.simulator.results import pipeline_graph, pipeline_result, with_causes
from tests.simulator.test_critical_path import graphs


def occupied_s(graph: TaskGraph, schedule: Schedule, device: int) -> tuple[float, float, float]:
    """Count seconds with computation, with exposed and with any communication, interval by interval."""
    tasks = [
        task
        for stream in range(len(graph.streams))
        if graph.stream_device[stream] == device
        for task in graph.streams.row(stream)
    ]
    cuts = sorted({float(t) for task in tasks for t in (schedule.start_s[task], schedule.end_s[task])})
    busy = exposed = communication = 0.0
    for low, high in pairwise(cuts):
        running = [task for task in tasks if schedule.start_s[task] <= low and high <= schedule.end_s[task]]
        computes = any(graph.kind[task] != COMMUNICATION for task in running)
        communicates = any(graph.kind[task] == COMMUNICATION for task in running)
        busy += (high - low) * computes
        exposed += (high - low) * (communicates and not computes)
        communication += (high - low) * communicates
    return busy, exposed, communication


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_rows_add_up_to_the_iteration_and_match_a_count_of_intervals(graph: TaskGraph) -> None:
    schedule = run_simpy(graph)
    end_s = float(schedule.end_s.max())
    table = breakdown(graph, schedule, end_s)
    np.testing.assert_allclose(table[list(PARTS)].sum(axis=1), table["iteration_s"], rtol=1e-12, atol=1e-12)
    assert (table[list(PARTS)] >= -1e-12).all().all()
    for device, row in table.iterrows():
        _, exposed, communication = occupied_s(graph, schedule, int(str(device)))
        assert row[list(EXPOSED)].sum() == pytest.approx(exposed, abs=1e-9)
        assert row["communication_s"] == pytest.approx(communication, abs=1e-9)
        assert row["overlapped_communication_s"] == pytest.approx(communication - exposed, abs=1e-9)


def test_a_pipeline_without_hosts_and_links_has_the_closed_form_bubble() -> None:
    """(p - 1) forwards and backwards of idle time on every stage."""
    stages, microbatches = 4, 8
    table = pipeline_result(
        num_stages=stages, num_microbatches=microbatches, layers=1, host_s=0.0, slowdown=1.0,
        recompute=False, collective_s=0.0,
    ).breakdown()  # fmt: skip
    np.testing.assert_allclose(table["forward_s"], microbatches * 0.01)
    np.testing.assert_allclose(table["backward_s"], microbatches * 0.02)
    np.testing.assert_allclose(table["slowdown_s"], 0.0)
    assert (table["bubble_s"] >= (stages - 1) * 0.03 - 1e-9).all()


def test_launch_bound_time_is_what_the_host_adds_within_and_before_tasks() -> None:
    builder = GraphBuilder()
    stream = builder.stream()
    builder.add(1.0, streams=[stream], hosts=[0], host_s=5.0, bound_s=2.0)
    builder.add(1.0, streams=[stream], hosts=[0])
    graph = with_causes(builder.build(), ["forward", "backward"])
    row = breakdown(graph, run_simpy(graph), 6.0).iloc[0]
    assert row["launch_bound_s"] == pytest.approx(1.0 + 3.0)  # held to 2.0; idle from 2.0 to 5.0
    assert row["forward_s"] == row["backward_s"] == pytest.approx(1.0)
    assert row["bubble_s"] == 0.0


def test_idle_time_while_the_host_waits_for_data_is_a_bubble_not_launch_bound() -> None:
    """Device 0's host waits for a task of device 1, then launches for 0.5 s."""
    builder = GraphBuilder(slowdowns=[(1.0, 1.0)] * 2)
    here, there = builder.stream(0), builder.stream(1)
    far = builder.add(4.0, streams=[there], hosts=[1])
    builder.add(0.0, streams=[here], hosts=[0], after=[far], host_waits=True)
    builder.add(0.0, streams=[builder.stream(0)], hosts=[0], host_s=0.5)
    builder.add(1.0, streams=[here], hosts=[0])
    graph = with_causes(builder.build(), ["forward"] * 4)
    row = breakdown(graph, run_simpy(graph), 5.5).iloc[0]
    assert row["bubble_s"] == pytest.approx(4.0)
    assert row["launch_bound_s"] == pytest.approx(0.5)
    assert row["forward_s"] == pytest.approx(1.0)


def test_slowdown_is_the_stretch_of_computation_under_communication() -> None:
    builder = GraphBuilder(slowdowns=[(1.5, 1.0)])
    builder.add(3.0, streams=[builder.stream()])
    builder.add(1.5, streams=[builder.stream()], kind=COMMUNICATION)
    graph = with_causes(builder.build(), ["backward", "gradient sync"])
    schedule = run_simpy(graph)
    row = breakdown(graph, schedule, float(schedule.end_s.max())).iloc[0]
    assert row["backward_s"] == pytest.approx(3.0)
    assert row["slowdown_s"] == pytest.approx(0.5)
    assert row["overlapped_communication_s"] == pytest.approx(1.5)
    assert row["exposed_gradient_sync_s"] == 0.0


def test_of_two_communications_in_progress_the_blocking_one_is_blamed() -> None:
    builder = GraphBuilder()
    builder.add(3.0, streams=[builder.stream()], kind=COMMUNICATION)
    builder.add(1.0, streams=[builder.stream()], kind=COMMUNICATION)
    graph = with_causes(builder.build(), ["gradient sync", "tensor parallel"])
    row = breakdown(graph, run_simpy(graph), 3.0).iloc[0]
    assert row["exposed_tensor_parallel_s"] == 1.0
    assert row["exposed_gradient_sync_s"] == 2.0


def test_an_unknown_cause_has_a_column_and_an_empty_device_is_all_bubble() -> None:
    builder = GraphBuilder(slowdowns=[(1.0, 1.0)] * 2)
    builder.add(3.0, streams=[builder.stream(0)])
    graph = with_causes(builder.build(), ["something new"])
    table = breakdown(graph, run_simpy(graph), 3.0)
    assert table["other_s"].tolist() == [3.0, 0.0]
    assert table["bubble_s"].tolist() == [0.0, 3.0]
    assert bubble_share(table.to_dict("records")) == 0.5


def test_union_of_intervals() -> None:
    low, high = coalesce(np.array([3.0, 0.0, 1.0, 6.0]), np.array([4.0, 2.0, 3.0, 7.0]))
    assert (low.tolist(), high.tolist()) == ([0.0, 6.0], [4.0, 7.0])


def test_members_are_joined_to_ranges() -> None:
    assert members_text((5, 4, 0)) == "0, 4-5"


@pytest.mark.measured
def test_breakdown_of_millions_of_tasks_takes_seconds() -> None:
    graph = pipeline_graph(8, 64)
    copies = 2_800_000 // graph.num_tasks
    num_tasks = graph.num_tasks * copies
    base = run_simpy(graph)
    end_s = float(base.end_s.max())
    shift = np.repeat(np.arange(copies) * end_s, graph.num_tasks)

    def tiled(rows: Csr) -> Csr:
        """Repeat the graph's tasks copy after copy within each row."""
        items = [
            (rows.row(row)[None, :] + np.arange(copies)[:, None] * graph.num_tasks).ravel() for row in range(len(rows))
        ]
        offsets = np.concatenate(([0], np.cumsum([len(row) for row in items])))
        return Csr(offsets=offsets.astype(np.int32), items=np.concatenate(items).astype(np.int32))

    fields = {
        name: np.tile(getattr(graph, name), copies)
        for name in (
            "work_s", "latency_s", "lead_s", "host_s", "bound_s", "kind", "host_waits", "cause", "stage",
            "microbatch", "name",
        )
    }  # fmt: skip
    empty = Csr(offsets=np.zeros(num_tasks + 1, dtype=np.int32), items=np.empty(0, dtype=np.int32))
    large = TaskGraph(
        **{
            **graph.__dict__, **fields, "streams": tiled(graph.streams), "hosts": tiled(graph.hosts),
            "predecessors": empty, "shares": empty, "share_fractions": np.empty(0),
        }
    )  # fmt: skip
    schedule = Schedule(
        start_s=np.tile(base.start_s, copies) + shift,
        end_s=np.tile(base.end_s, copies) + shift,
        host_arrival_s=np.tile(base.host_arrival_s, copies) + shift,
    )
    tables = []  # takes 50 yardsticks when written
    assert yardsticks(lambda: tables.append(breakdown(large, schedule, copies * end_s)), repeats=1) < 150
    (table,) = tables
    np.testing.assert_allclose(table[list(PARTS)].sum(axis=1), table["iteration_s"])
