"""Small simulation results for tests of what reads them: a pipeline with every kind of task."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from simulator.engines.engine_simpy import run_simpy
from simulator.fidelity import Fidelity
from simulator.memory.usage import DeviceMemory, LiveBytes
from simulator.result import SimulationResult
from simulator.run import Run
from simulator.taskgraph import COMMUNICATION, TaskGraph
from tests.simulator.graphs import GraphBuilder


def with_causes(graph: TaskGraph, causes: list[str]) -> TaskGraph:
    """Return the graph with one cause per task."""
    words = tuple(dict.fromkeys(causes))
    return replace(graph, causes=words, cause=np.array([words.index(cause) for cause in causes], dtype=np.int16))


def pipeline_graph(
    num_stages: int = 4,
    num_microbatches: int = 8,
    *,
    layers: int = 2,
    host_s: float = 2e-4,
    slowdown: float = 1.3,
    recompute: bool = True,
    collective_s: float = 2e-3,
) -> TaskGraph:
    """Return 1F1B with tensor-parallel collectives, transfers, gradient buckets and an optimizer."""
    builder = GraphBuilder(slowdowns=[(slowdown, slowdown)] * num_stages, num_resources=1)
    compute = [builder.stream(stage) for stage in range(num_stages)]
    tensor = [builder.stream(stage) for stage in range(num_stages)]
    data = [builder.stream(stage) for stage in range(num_stages)]
    down = [(builder.stream(s), builder.stream(s + 1)) for s in range(num_stages - 1)]
    up = [(builder.stream(s + 1), builder.stream(s)) for s in range(num_stages - 1)]
    causes: list[str] = []
    ended: dict[tuple[str, int, int], int] = {}
    buckets: list[list[int]] = [[] for _ in range(num_stages)]

    def add(cause: str, stage: int, microbatch: int, work_s: float, **options: object) -> int:
        causes.append(cause)
        return builder.add(
            work_s, stage=stage, microbatch=microbatch, name=cause, host_s=host_s, hosts=[stage], **options
        )

    def phase(name: str, stage: int, microbatch: int, work_s: float, after: list[int]) -> int:
        last = -1
        for layer in range(layers):
            before = after if layer == 0 else [last]
            if name == "backward" and recompute:
                before = [add("recompute", stage, microbatch, 0.5 * work_s, streams=[compute[stage]], after=before)]
            task = add(
                name,
                stage,
                microbatch,
                work_s,
                streams=[compute[stage]],
                after=before,
                bound_s=work_s + host_s,
            )
            if name == "backward" and microbatch == num_microbatches - 1:
                buckets[stage].append(
                    add(
                        "gradient sync", stage, -1, 3 * collective_s, streams=[data[stage]], after=[task],
                        kind=COMMUNICATION, shares={0: 0.6},
                    )
                )  # fmt: skip
            last = add(
                "tensor parallel", stage, microbatch, collective_s, streams=[tensor[stage]], after=[task],
                kind=COMMUNICATION, latency_s=1e-5, bound_s=host_s,
            )  # fmt: skip
        return last

    def run(stage: int, name: str, microbatch: int) -> None:
        source = stage - 1 if name == "forward" else stage + 1
        after = [ended["forward", stage, microbatch]] if name == "backward" else []
        if 0 <= source < num_stages:
            after.append(ended["move " + name, source, microbatch])
        last = phase(name, stage, microbatch, 0.01 if name == "forward" else 0.02, after)
        ended[name, stage, microbatch] = last
        target = stage + 1 if name == "forward" else stage - 1
        if 0 <= target < num_stages:
            pair = down[stage] if name == "forward" else up[target]
            ended["move " + name, stage, microbatch] = add(
                "transfer", stage, microbatch, 4e-3, streams=list(pair), after=[last],
                kind=COMMUNICATION, shares={0: 0.6},
            )  # fmt: skip

    orders = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage, num_microbatches)
        order = [("forward", m) for m in range(warmup)]
        for m in range(num_microbatches):
            order.append(("backward", m))
            if warmup + m < num_microbatches:
                order.append(("forward", warmup + m))
        orders.append(order)
    while any(orders):  # in an order in which what a task waits for exists
        for stage, order in enumerate(orders):
            while order:
                name, microbatch = order[0]
                source = stage - 1 if name == "forward" else stage + 1
                if 0 <= source < num_stages and ("move " + name, source, microbatch) not in ended:
                    break
                run(stage, *order.pop(0))
    for stage in range(num_stages):
        last = builder.stream_tasks[compute[stage]][-1]
        add("optimizer", stage, -1, 0.02, streams=[compute[stage]], after=[last, *buckets[stage]])
    graph = with_causes(builder.build(), causes)
    kinds = ("compute", "tensor parallel", "data parallel")
    names = [kind for kind in kinds for _ in range(num_stages)]
    names += [f"{word} {i}" for s in range(num_stages - 1) for word, i in (("send to", s + 1), ("receive from", s))]
    names += [f"{word} {i}" for s in range(num_stages - 1) for word, i in (("send to", s), ("receive from", s + 1))]
    return replace(graph, stream_names=tuple(names))


def live_bytes(device: int, *, num_devices: int, end_s: float) -> LiveBytes:
    """Return a plausible memory history."""
    depth = num_devices - device
    steps = np.concatenate((np.arange(depth), np.tile((depth, depth - 1), 8), np.arange(depth)[::-1]))
    live = (8.0 + 3.0 * steps) * 2**30
    return LiveBytes(np.linspace(0.0, 0.95 * end_s, len(live)), live)


def device_memory(graph: TaskGraph, device: int, end_s: float, *, fits: bool = True) -> DeviceMemory:
    """Return what fits the history."""
    history = live_bytes(device, num_devices=graph.num_devices, end_s=end_s)
    times, live = history.times_s, history.live_bytes
    depth = graph.num_devices - device
    peak = int(live.argmax())
    return DeviceMemory(
        device=device,
        peak_allocated_bytes=int(live[peak]),
        peak_reserved_bytes=int(1.05 * live[peak]),
        capacity_bytes=30 * 2**30 if fits else 10 * 2**30,
        fits=fits,
        peak_time_s=float(times[peak]),
        peak_where=f"stage {device}, forward of microbatch {depth - 1}",
        consumers={
            "parameters": 2 * 2**30,
            "optimizer states": 6 * 2**30,
            "saved activations": int(live[peak]) - 8 * 2**30,
        },
        failed_request_bytes=None if fits else 3 * 2**30,
    )


def result_of(graph: TaskGraph, *, fits: bool = True) -> SimulationResult:
    """Simulate the graph and fill in the rest."""
    schedule = run_simpy(graph)
    end_s = float(schedule.end_s.max())
    return SimulationResult(
        iteration_time_s=end_s,
        global_batch=64,
        tokens_per_sample=1024,
        num_devices=sum(len(members) for members in graph.device_members),
        model_flop=2e14,
        hardware_flop=2.5e14,
        peak_flop_per_s=1.25e14 * graph.num_devices,
        memory=tuple(device_memory(graph, d, end_s, fits=fits) for d in range(graph.num_devices)),
        run=Run(graph, schedule, partial(live_bytes, num_devices=graph.num_devices, end_s=end_s)),
        fidelity=Fidelity(),
        duration_sources={"measured": 0.0, "interpolated": 0.25, "modelled": 0.75},
        plan_hash="0123456789abcdef",
        engine="simpy",
        wall_s=0.1,
    )


def pipeline_result(*, fits: bool = True, **options: object) -> SimulationResult:
    """Simulate ``pipeline_graph(**options)``."""
    return result_of(pipeline_graph(**options), fits=fits)  # type: ignore[arg-type]
