"""Tasks per second of both engines and plans per second of batches.

``pytest tests/benchmarks/test_engine_speed.py --benchmark-only``

The graph is a 1F1B pipeline in which every pass of a stage is a chain of computations and tensor-parallel
collectives, launched by a host, followed by a transfer to the neighbouring stage on its own stream.
"""

from __future__ import annotations

import numpy as np
import pytest

from simulator.batch.evaluator import BatchEvaluator, PlanBatch
from simulator.engines.engine_compiled import run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.problem import Problem, ProblemSpec
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


def random_batch(problem: Problem, count: int, generator: np.random.Generator, max_stages: int) -> PlanBatch:
    """Return different plans: 1, 2, 4, ... stages of equal devices, other degrees and cuts in each stage.

    Cuts are anywhere between operators, each within 30 % of an equal share from where equal stages have it.
    """
    count_operators, devices = len(problem.workload), problem.num_devices
    rows: list[tuple[int, int, int, bool]] = []
    offsets, sizes = [0], []
    while len(sizes) < count:
        num_stages = 2 ** int(generator.integers(0, int(np.log2(max_stages)) + 1))
        share, each = count_operators / num_stages, devices // num_stages
        places = share * (np.arange(1, num_stages) + generator.uniform(-0.3, 0.3, num_stages - 1))
        stops = [*np.round(places).astype(int).tolist(), count_operators]
        tps = generator.choice([tp for tp in (1, 2, 4, 8) if tp <= each], num_stages).tolist()
        size = max(each // tp for tp in tps) * 2 ** int(generator.integers(0, 4))
        if problem.global_batch % size or len(set(stops)) < num_stages:
            continue
        rows += [(stop, tp, each // tp, bool(generator.integers(2))) for stop, tp in zip(stops, tps, strict=True)]
        offsets.append(len(rows))
        sizes.append(size)
    stops_of, tp_of, dp_of, recompute = (np.array(column) for column in zip(*rows, strict=True))
    size_of = np.array(sizes)
    return PlanBatch(
        stage_offsets=np.array(offsets),
        stops=stops_of,
        tp=tp_of,
        dp=dp_of,
        recompute=recompute,
        microbatch_size=size_of,
        num_microbatches=problem.global_batch // size_of,
        gpipe=np.zeros(count, dtype=np.bool_),
    )


@pytest.mark.parametrize(
    ("model", "cluster", "global_batch", "max_stages"),
    [("gpt3-1.3b", "v100-32g-dgx1:1x4", 1024, 4), ("gpt3-175b", "a100-80g-dgx:128x8", 1536, 64)],
    ids=["1.3B on 4", "175B on 1024"],
)
def test_speed_of_batches(benchmark, model: str, cluster: str, global_batch: int, max_stages: int) -> None:
    """Times and peaks of 2,000 plans that were not seen before, tables of this problem warm."""
    problem = ProblemSpec(model, cluster, "galvatron-v1", global_batch).load()
    evaluator = BatchEvaluator(problem)
    generator = np.random.default_rng(0)

    def new_plans() -> tuple[tuple[PlanBatch], dict[str, object]]:
        return (random_batch(problem, 2000, generator, max_stages),), {}

    result = benchmark.pedantic(evaluator.evaluate, setup=new_plans, rounds=5, warmup_rounds=2)
    assert np.isfinite(result.iteration_time_s).all()
    benchmark.extra_info["plans_per_s"] = round(2000 / benchmark.stats["median"])
    benchmark.extra_info["plans_followed_unit_by_unit"] = result.num_apart


def test_speed_of_batches_with_512_microbatches(benchmark) -> None:
    """GPT-3 1.3B on 4 GPUs, two samples in a microbatch."""
    problem = ProblemSpec("gpt3-1.3b", "v100-32g-dgx1:1x4", "galvatron-v1", 1024).load()
    evaluator = BatchEvaluator(problem)
    batch = random_batch(problem, 8000, np.random.default_rng(1), 4)
    fits = np.ones(8000, dtype=np.bool_)
    np.logical_and.at(fits, batch.plan_of_stage, 2 % batch.dp == 0)
    chosen = np.flatnonzero(fits)[:2000]
    rows = np.flatnonzero(np.isin(batch.plan_of_stage, chosen))
    same = PlanBatch(
        stage_offsets=np.concatenate([[0], np.cumsum(np.diff(batch.stage_offsets)[chosen])]),
        stops=batch.stops[rows],
        tp=batch.tp[rows],
        dp=batch.dp[rows],
        recompute=batch.recompute[rows],
        microbatch_size=np.full(len(chosen), 2),
        num_microbatches=np.full(len(chosen), 512),
        gpipe=np.zeros(len(chosen), dtype=np.bool_),
    )
    result = benchmark.pedantic(evaluator.evaluate, args=(same,), rounds=5, warmup_rounds=1)
    benchmark.extra_info["plans"] = len(chosen)
    benchmark.extra_info["plans_per_s"] = round(len(chosen) / benchmark.stats["median"])
    assert np.isfinite(result.iteration_time_s).all()
