"""Live bytes of a plan's execution without a device: torch runs it on fake tensors, every storage is counted.

Fake tensors have shapes and storages but no data, so a model of any size runs on this machine; a fake process group
answers every collective at once, so one process is any rank, and what was sent is let go at once. The executor is
the real one, with torch's autograd and optimizer. What a fake run cannot show is what CUDA kernels allocate inside
(but for ``fake_devices``), the context, and the buffers of NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.executable import check_executable
from validation.execution.groups import GroupPool
from validation.execution.launch import Worker
from validation.execution.plan_executor import PlanExecutor
from validation.fake_devices import as_on_cuda, fake_processes
from validation.storage_tracer import Marks, StorageTracer, TracedMemory, summary


def trace_memory(plan: Plan, problem: Problem, devices: Sequence[int] | None = None) -> list[TracedMemory]:
    """Execute a plan on fake tensors, one rank after the other, and return their live bytes.

    Args:
        plan: The plan.
        problem: What it is for; its runtime should be windtunnel-executor or windtunnel-executor-fp32.
        devices: Device ids; None for all of the plan.

    Raises:
        ValueError: If the plan is not legal or not executable, or has no such device.
    """
    canonical = check_executable(plan, problem, device="cpu")
    everything = sorted(canonical.devices)
    chosen = everything if devices is None else list(devices)
    unknown = sorted(set(chosen) - set(everything))
    if unknown:
        raise ValueError(f"devices must be of the plan ({everything}), got {unknown}")
    return [_trace_rank(canonical, problem, everything.index(device), len(everything)) for device in chosen]


def _trace_rank(plan: Plan, problem: Problem, rank: int, world_size: int) -> TracedMemory:
    tracer = StorageTracer()
    with fake_processes(rank, world_size) as backend, as_on_cuda(), FakeTensorMode(), tracer:
        pool = GroupPool(rank=rank, world_size=world_size, backend=backend)
        worker = Worker(rank, world_size, pool, torch.device("cpu"))
        executor = PlanExecutor(plan, problem, worker)
        begun = len(tracer.events)
        marks = Marks()

        def reduced(done: PlanExecutor) -> None:
            _note(marks, tracer, done)
            tracer.where = (ord("O"), -1, -1)

        executor.on_gradients = reduced
        executor.run_iteration(0)
        _note(marks, tracer, executor)
        first = len(tracer.events)
        progress = worker.progress
        tracer.where = _Position(progress)
        executor.on_gradients = lambda done: _note(marks, tracer, done)
        executor.run_iteration(1)
        _note(marks, tracer, executor)
        device = executor.device_id
        del executor, worker
    return summary(tracer.events, begun, first, marks, device)


def _note(marks: Marks, tracer: StorageTracer, executor: PlanExecutor) -> None:
    for runner in executor.runners.values():
        for held in runner.parameters.held:
            marks.parameters.add(tracer.see(held.trained))
            if held.whole is not None and not held.placed.is_gathered:
                marks.parameters.add(tracer.see(held.whole))
            if held.gradient is not None:
                marks.gradients.add(tracer.see(held.gradient))
        for unit in runner.parameters.units:
            if unit.flat is not None:
                marks.parameters.add(tracer.see(unit.flat))
        for bucket in runner.gradients.buckets:
            for tensor in (bucket.buffer, bucket.result, bucket.pending):
                if tensor is not None:
                    marks.gradients.add(tracer.see(tensor))
    if executor.optimizer is not None:
        for state in executor.optimizer.state.values():
            marks.optimizer |= {tracer.see(value) for value in state.values() if isinstance(value, torch.Tensor)}


class _Position:
    """What the worker says it is doing, read when it is asked for."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress

    def __iter__(self) -> Iterator[int]:
        return iter(self.progress[1:4])
