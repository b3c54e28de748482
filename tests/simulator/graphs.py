"""Small task graphs for tests: one call per task, and whole pipelines from a schedule's orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from simulator.engines.engine_simpy import run_simpy
from simulator.schedules.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineShape,
)
from simulator.schedules.orders import needs
from simulator.taskgraph import COMMUNICATION, COMPUTATION, OTHER, Csr, Schedule, TaskGraph

KINDS = (COMPUTATION, COMMUNICATION, OTHER)


@dataclass
class GraphBuilder:
    """Collects tasks and streams, then builds the arrays.

    Streams get their tasks in the order of ``add`` unless ``stream_orders`` says otherwise; so do hosts.
    """

    slowdowns: Sequence[tuple[float, float]] = ((1.0, 1.0),)
    num_resources: int = 0
    stream_device: list[int] = field(default_factory=list)
    stream_tasks: list[list[int]] = field(default_factory=list)
    host_tasks: list[list[int]] = field(default_factory=list)
    columns: list[dict[str, float]] = field(default_factory=list)
    predecessors: list[list[int]] = field(default_factory=list)
    shares: list[dict[int, float]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host_tasks = [[] for _ in self.slowdowns]

    def stream(self, device: int = 0) -> int:
        """Add a stream to a device and return its id."""
        self.stream_device.append(device)
        self.stream_tasks.append([])
        return len(self.stream_device) - 1

    def add(
        self,
        work_s: float = 0.0,
        *,
        streams: Sequence[int] = (),
        after: Sequence[int] = (),
        hosts: Sequence[int] = (),
        shares: dict[int, float] | None = None,
        latency_s: float = 0.0,
        lead_s: float = 0.0,
        host_s: float = 0.0,
        bound_s: float = 0.0,
        kind: int = COMPUTATION,
        host_waits: bool = False,
        name: str = "task",
        stage: int = -1,
        microbatch: int = -1,
    ) -> int:
        """Add a task and return its id."""
        task = len(self.columns)
        self.columns.append(
            {
                "work_s": work_s,
                "latency_s": latency_s,
                "lead_s": lead_s,
                "host_s": host_s,
                "bound_s": bound_s,
                "kind": kind,
                "host_waits": host_waits,
                "stage": stage,
                "microbatch": microbatch,
            }
        )
        self.names.append(name)
        self.predecessors.append(list(after))
        self.shares.append(shares or {})
        for stream in streams:
            self.stream_tasks[stream].append(task)
        for host in hosts:
            self.host_tasks[host].append(task)
        return task

    def build(self) -> TaskGraph:
        """Return the arrays."""

        def column(name: str, dtype: type) -> np.ndarray:
            return np.array([row[name] for row in self.columns], dtype=dtype)

        names = tuple(dict.fromkeys(self.names)) or ("task",)
        num_devices = len(self.slowdowns)
        return TaskGraph(
            work_s=column("work_s", np.float64),
            latency_s=column("latency_s", np.float64),
            lead_s=column("lead_s", np.float64),
            host_s=column("host_s", np.float64),
            bound_s=column("bound_s", np.float64),
            kind=column("kind", np.int8),
            host_waits=column("host_waits", np.bool_),
            predecessors=Csr.from_rows(self.predecessors),
            streams=Csr.from_rows(self.stream_tasks),
            stream_device=np.array(self.stream_device, dtype=np.int32),
            hosts=Csr.from_rows(self.host_tasks),
            shares=Csr.from_rows([list(row) for row in self.shares]),
            share_fractions=np.array([share for row in self.shares for share in row.values()], dtype=np.float64),
            slowdown_computation=np.array([pair[0] for pair in self.slowdowns], dtype=np.float64),
            slowdown_communication=np.array([pair[1] for pair in self.slowdowns], dtype=np.float64),
            cause=np.zeros(len(self.columns), dtype=np.int16),
            stage=column("stage", np.int32),
            microbatch=column("microbatch", np.int32),
            name=np.array([names.index(name) for name in self.names], dtype=np.int32),
            causes=("any",),
            names=names,
            stream_names=tuple(f"stream {index}" for index in range(len(self.stream_device))),
            resource_names=tuple(f"link {index}" for index in range(self.num_resources)),
            device_stage=np.arange(num_devices, dtype=np.int32),
            device_members=tuple((device,) for device in range(num_devices)),
        )


def makespan_s(schedule: Schedule) -> float:
    """Return the end of the last task."""
    return float(schedule.end_s.max())


@dataclass(frozen=True)
class Pipeline:
    """A task graph of a schedule and where each action went in it."""

    graph: TaskGraph
    task_of: dict[Action, int]


def plain_shape(num_stages: int, num_microbatches: int, warmup: tuple[int, ...] | None = None) -> PipelineShape:
    """Return the shape with stage i on rank i."""
    return PipelineShape(num_stages, num_microbatches, tuple(range(num_stages)), warmup)


def interleaved_shape(num_ranks: int, num_chunks: int, num_microbatches: int) -> PipelineShape:
    """Return the shape with stage s on rank s mod p."""
    num_stages = num_ranks * num_chunks
    ranks = tuple(stage % num_ranks for stage in range(num_stages))
    return PipelineShape(num_stages, num_microbatches, ranks)


def pipeline_graph(
    shape: PipelineShape,
    orders: list[list[Action]],
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    backward_input_s: float = 1.0,
    link_s: float = 0.0,
    half_duplex: bool = False,
) -> Pipeline:
    """Return a pipeline of equal stages: one computation per action, one transfer per boundary crossed.

    Args:
        shape: The pipeline.
        orders: The actions of each rank.
        forward_s: Seconds of a forward of one stage.
        backward_s: Seconds of a whole backward.
        backward_input_s: Seconds of its input-gradient part; the rest is the weight gradient.
        link_s: Seconds of one transfer between neighbouring stages; 0 leaves transfers out.
        half_duplex: One stream per boundary, in the order in which data gets ready where both directions
            are free, instead of one stream per direction.
    """
    durations = {
        FORWARD: forward_s,
        BACKWARD: backward_s,
        BACKWARD_INPUT: backward_input_s,
        BACKWARD_WEIGHT: backward_s - backward_input_s,
    }
    num_ranks = len(orders)
    actions = [(rank, action) for rank, order in enumerate(orders) for action in order]
    task_of = {action: task for task, (_, action) in enumerate(actions)}
    builder = GraphBuilder(slowdowns=[(1.0, 1.0)] * num_ranks)
    for rank in range(num_ranks):
        builder.stream(rank)

    transfers: list[tuple[Action, Action]] = []  # (source, user)
    for rank, action in actions:
        after = [task_of[needed] for needed in needs(shape, action, task_of.keys())]
        if link_s > 0:
            crossing = [source for source in needs(shape, action, task_of.keys()) if source.stage != action.stage]
            after = [task for task in after if actions[task][1] not in crossing]
            for source in crossing:
                after.append(len(actions) + len(transfers))
                transfers.append((source, action))
        kind, stage, microbatch = action
        builder.add(durations[kind], streams=[rank], after=after, name=kind, stage=stage, microbatch=microbatch)

    of_link: dict[tuple[int, str], list[int]] = {}
    for index, (source, user) in enumerate(transfers):
        task = builder.add(link_s, after=[task_of[source]], kind=COMMUNICATION, name="transfer")
        assert task == len(actions) + index
        direction = "both" if half_duplex else source.kind
        of_link.setdefault((min(source.stage, user.stage), direction), []).append(index)
    ready = np.zeros(len(transfers))
    if half_duplex:
        free = pipeline_graph(
            shape,
            orders,
            forward_s=forward_s,
            backward_s=backward_s,
            backward_input_s=backward_input_s,
            link_s=link_s,
        )
        end_s = run_simpy(free.graph).end_s
        ready = end_s[[task_of[source] for source, _ in transfers]]
    place = {action: index for order in orders for index, action in enumerate(order)}
    for (boundary, _), members in sorted(of_link.items()):
        stream = builder.stream(shape.rank_of_stage[boundary])
        members.sort(key=lambda index: (ready[index], place[transfers[index][0]]))
        builder.stream_tasks[stream] = [len(actions) + index for index in members]
    return Pipeline(builder.build(), task_of)


def pipeline_s(shape: PipelineShape, orders: list[list[Action]], **options: float) -> float:
    """Return the end of the last task of ``pipeline_graph``."""
    return makespan_s(run_simpy(pipeline_graph(shape, orders, **options).graph))  # type: ignore[arg-type]
