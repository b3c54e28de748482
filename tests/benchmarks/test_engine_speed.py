"""Tasks per second of both engines.

``pytest tests/benchmarks/test_engine_speed.py --benchmark-only``

The graph is a 1F1B pipeline in which every pass of a stage is a chain of computations and tensor-parallel
collectives, launched by a host, followed by a transfer to the neighbouring stage on its own stream.
"""

from __future__ import annotations

import numpy as np
import pytest

from simulator.engines.engine_compiled import run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.schedules.actions import FORWARD, PipelineShape
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import COMMUNICATION, COMPUTATION, Csr, TaskGraph


def pipeline_with_collectives(
    *, num_stages: int, num_microbatches: int, num_chained: int, slowdown: float, transfer_share: float
) -> TaskGraph:
    """Return about ``2 * num_stages * num_microbatches * (num_chained + 1)`` tasks, built with numpy.

    Args:
        num_stages: Pipeline depth, one device per stage.
        num_microbatches: Microbatches per iteration.
        num_chained: Tasks of one pass of one stage: computation, collective, computation, ...
        slowdown: Factor while a transfer overlaps with computation; 1 leaves every speed constant.
        transfer_share: Share of the one fabric that a transfer uses alone.
    """
    shape = PipelineShape(num_stages, num_microbatches, tuple(range(num_stages)))
    orders = schedule_named("1f1b").actions(shape)
    actions = np.array([(rank, kind == FORWARD, mb) for rank, order in enumerate(orders) for kind, _, mb in order])
    rank, is_forward, microbatch = actions.T
    size = num_chained + 1
    first = np.arange(len(actions)) * size
    num_tasks = len(actions) * size
    place = np.arange(num_tasks) % size
    is_transfer = place == num_chained
    is_collective = ~is_transfer & (place % 2 == 1)

    index = np.full((2, num_stages, num_microbatches), -1)
    index[is_forward, rank, microbatch] = first
    source_rank = rank + np.where(is_forward, -1, 1)
    has_source = (source_rank >= 0) & (source_rank < num_stages)
    before_first = np.where(
        has_source, index[is_forward, source_rank.clip(0, num_stages - 1), microbatch] + num_chained, -1
    )
    before = np.arange(num_tasks) - 1
    before[first] = before_first
    num_before = (before >= 0).astype(np.int32)

    task_rank = np.repeat(rank, size)
    stream = task_rank * 4 + np.where(is_transfer, 2 + np.repeat(is_forward, size), is_collective)
    by_stream = np.argsort(stream, kind="stable")
    launched = np.argsort(task_rank, kind="stable")

    def offsets(counts: np.ndarray) -> np.ndarray:
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)

    work_s = np.where(is_transfer, 0.7, np.where(is_collective, 0.2, 1.0)) * np.repeat(2 - is_forward, size)
    return TaskGraph(
        work_s=work_s,
        latency_s=np.where(is_transfer, 0.01, 0.0),
        lead_s=np.zeros(num_tasks),
        host_s=np.full(num_tasks, 0.05),
        bound_s=np.full(num_tasks, 0.05),
        kind=np.where(is_transfer | is_collective, COMMUNICATION, COMPUTATION).astype(np.int8),
        host_waits=np.zeros(num_tasks, dtype=np.bool_),
        predecessors=Csr(offsets(num_before), before[before >= 0].astype(np.int32)),
        streams=Csr(offsets(np.bincount(stream, minlength=4 * num_stages)), by_stream.astype(np.int32)),
        stream_device=np.repeat(np.arange(num_stages), 4).astype(np.int32),
        hosts=Csr(offsets(np.bincount(task_rank, minlength=num_stages)), launched.astype(np.int32)),
        shares=Csr(offsets(is_transfer), np.zeros(int(is_transfer.sum()), dtype=np.int32)),
        share_fractions=np.full(int(is_transfer.sum()), transfer_share),
        slowdown_computation=np.full(num_stages, slowdown),
        slowdown_communication=np.full(num_stages, slowdown),
        cause=np.zeros(num_tasks, dtype=np.int16),
        stage=task_rank.astype(np.int32),
        microbatch=np.repeat(microbatch, size).astype(np.int32),
        name=np.zeros(num_tasks, dtype=np.int32),
        causes=("any",),
        names=("task",),
        stream_names=tuple(f"stream {i}" for i in range(4 * num_stages)),
        resource_names=("fabric",),
        device_stage=np.arange(num_stages, dtype=np.int32),
        device_members=tuple((device,) for device in range(num_stages)),
    )


KINDS = pytest.mark.parametrize(
    ("slowdown", "transfer_share"),
    [(1.0, 0.0), (1.2, 0.0), (1.0, 0.7), (1.2, 0.7)],
    ids=["constant speeds", "overlap", "contention", "overlap and contention"],
)


@KINDS
def test_speed_of_the_simpy_engine(benchmark, slowdown: float, transfer_share: float) -> None:
    graph = pipeline_with_collectives(
        num_stages=8, num_microbatches=64, num_chained=41, slowdown=slowdown, transfer_share=transfer_share
    )
    schedule = benchmark.pedantic(run_simpy, args=(graph,), rounds=3, warmup_rounds=1)
    assert np.isfinite(schedule.end_s).all()
    benchmark.extra_info["tasks_per_s"] = round(graph.num_tasks / benchmark.stats["median"])
    benchmark.extra_info["events_per_task"] = round(schedule.statistics["events"] / graph.num_tasks, 2)
    benchmark.extra_info["speed_changes_per_task"] = round(schedule.statistics["speed_changes"] / graph.num_tasks, 2)


@KINDS
@pytest.mark.parametrize("num_chained", [3, 41])
def test_speed_of_the_compiled_engine(benchmark, num_chained: int, slowdown: float, transfer_share: float) -> None:
    graph = pipeline_with_collectives(
        num_stages=64,
        num_microbatches=512,
        num_chained=num_chained,
        slowdown=slowdown,
        transfer_share=transfer_share,
    )
    schedule = benchmark.pedantic(run_compiled, args=(graph,), rounds=5, warmup_rounds=1)
    assert np.isfinite(schedule.end_s).all()
    benchmark.extra_info["tasks"] = graph.num_tasks
    benchmark.extra_info["tasks_per_s"] = round(graph.num_tasks / benchmark.stats["median"])
    benchmark.extra_info["speed_changes_per_task"] = round(schedule.statistics["speed_changes"] / graph.num_tasks, 2)
