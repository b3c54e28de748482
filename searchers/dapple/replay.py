"""Exact replay of a pipeline of stages with links between them, on the simulator's engine.

This is what the formula is held against: the same stages and transfers, without hosts and kernels. A link is
either two one-way streams (full duplex), or one that both directions share (half duplex): transfers that meet there
get half of it each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulator.engines.engine_compiled import run_compiled
from simulator.schedules.actions import FORWARD, Action, PipelineShape
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import COMMUNICATION, COMPUTATION, Csr, TaskGraph


def replay_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
    all_reduce_s: Sequence[float],
    num_microbatches: int,
    *,
    warmup: tuple[int, ...] | None = None,
    schedule: str = "1f1b",
    half_duplex: bool = False,
) -> float:
    """Return the end of the last task.

    Args:
        forward_s, backward_s: Seconds of each stage for one microbatch.
        transfer_s: Seconds of each boundary, either way; one less than stages.
        all_reduce_s: Seconds of each stage's gradient synchronisation after its last backward pass.
        num_microbatches: M.
        warmup: Forwards before the first backward; None for the schedule's own.
        schedule: ``1f1b`` or ``gpipe``.
        half_duplex: Both directions of a boundary share one link.

    >>> replay_s([1.0] * 4, [2.0] * 4, [0.0] * 3, [0.0] * 4, 8)
    33.0
    """
    graph = replay_graph(
        forward_s, backward_s, transfer_s, all_reduce_s, num_microbatches, warmup, schedule, half_duplex
    )
    return float(run_compiled(graph).end_s.max())


def replay_graph(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
    all_reduce_s: Sequence[float],
    num_microbatches: int,
    warmup: tuple[int, ...] | None,
    schedule: str,
    half_duplex: bool,
) -> TaskGraph:
    """Return the task graph of a replay; arguments as for `replay_s`."""
    stages = len(forward_s)
    shape = PipelineShape(stages, num_microbatches, tuple(range(stages)), warmup)
    orders = schedule_named(schedule).actions(shape)
    task: dict[Action, int] = {}
    for order in orders:
        for action in order:
            task[action] = len(task)
    num_passes = len(task)
    work = np.zeros(num_passes)
    rows: list[list[int]] = [[] for _ in task]
    streams = [[task[action] for action in order] for order in orders]
    stream_device = list(range(stages))
    transfers: dict[tuple[int, str], list[int]] = {}
    sent: list[tuple[int, int, float]] = []  # (maker, boundary, seconds)
    for action, number in task.items():
        kind, stage, microbatch = action
        work[number] = (forward_s if kind == FORWARD else backward_s)[stage]
        if kind != FORWARD:
            rows[number].append(task[Action(FORWARD, stage, microbatch)])
    for order in orders:
        for action in order:
            stage = action.stage
            target = stage + 1 if action.kind == FORWARD else stage - 1
            if not 0 <= target < stages:
                continue
            boundary = min(stage, target)
            reader = task[Action(action.kind, target, action.microbatch)]
            if transfer_s[boundary] == 0:
                rows[reader].append(task[action])
                continue
            number = num_passes + len(sent)
            sent.append((task[action], boundary, transfer_s[boundary]))
            rows[reader].append(number)
            transfers.setdefault((boundary, action.kind), []).append(number)
    rows += [[maker] for maker, _, _ in sent]
    for (boundary, _), numbers in sorted(transfers.items()):
        streams.append(numbers)
        stream_device.append(boundary)
    reductions = [stage for stage in range(stages) if all_reduce_s[stage] > 0]
    rows += [[task[orders[stage][-1]]] for stage in reductions]
    work = np.concatenate(
        [work, [seconds for _, _, seconds in sent], [all_reduce_s[stage] for stage in reductions]]
    ).astype(np.float64)
    count = len(work)
    kind_of = np.full(count, COMMUNICATION, dtype=np.int8)
    kind_of[:num_passes] = COMPUTATION
    zeros = np.zeros(count)
    shares: list[list[int]] = [[] for _ in range(num_passes)]
    shares += [[boundary] if half_duplex else [] for _, boundary, _ in sent]
    shares += [[] for _ in reductions]
    return TaskGraph(
        work_s=work,
        latency_s=zeros,
        lead_s=zeros,
        host_s=zeros,
        bound_s=zeros,
        kind=kind_of,
        host_waits=np.zeros(count, dtype=np.bool_),
        predecessors=Csr.from_rows(rows),
        streams=Csr.from_rows(streams),
        stream_device=np.array(stream_device, dtype=np.int32),
        hosts=Csr.from_rows([[] for _ in range(stages)]),
        shares=Csr.from_rows(shares),
        share_fractions=np.ones(sum(len(row) for row in shares)),
        slowdown_computation=np.ones(stages),
        slowdown_communication=np.ones(stages),
        cause=np.zeros(count, dtype=np.int16),
        stage=np.full(count, -1, dtype=np.int32),
        microbatch=np.full(count, -1, dtype=np.int32),
        name=np.zeros(count, dtype=np.int32),
        causes=("any",),
        names=("task",),
        stream_names=tuple(f"stream {index}" for index in range(len(streams))),
        resource_names=tuple(f"link {index}" for index in range(max(0, stages - 1))),
        device_stage=np.arange(stages, dtype=np.int32),
        device_members=tuple((stage,) for stage in range(stages)),
    )
