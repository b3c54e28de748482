"""The CPU under the name of a GPU: the executor takes its CUDA branches, torch computes where it can."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.groups import GroupPool
from validation.execution.launch import Worker
from validation.execution.plan_executor import PlanExecutor
from validation.fake_devices import fake_processes


class PosingGpu(str):
    """A device that torch reads as ``cpu`` and whose type says ``cuda``."""

    type = "cuda"
    index = 0


class Event:
    """What ``torch.cuda.Event`` is to the executor; it happens at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


@contextmanager
def posing_gpu() -> Iterator[PosingGpu]:
    """Let the CPU pose as a GPU while the block runs; it counts no memory."""
    nothing: Any = lambda device=None: 0  # noqa: E731
    stand_ins = {"synchronize": nothing, "reset_peak_memory_stats": nothing, "max_memory_allocated": nothing,
                 "max_memory_reserved": nothing, "empty_cache": lambda: None, "_sleep": nothing}  # fmt: skip
    with (
        patch.multiple(torch.cuda, Event=Event, **stand_ins),
        patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True),
    ):
        yield PosingGpu("cpu")


@contextmanager
def rank_on_posing_gpu(plan: Plan, problem: Problem, rank: int) -> Iterator[PlanExecutor]:
    """Make one rank of a plan, on tensors without data; every collective and transfer is done at once."""
    size = len(plan.devices)
    with posing_gpu() as device, fake_processes(rank, size) as backend, FakeTensorMode():
        pool: Any = GroupPool(rank=rank, world_size=size, backend=backend)
        yield PlanExecutor(plan, problem, Worker(rank, size, pool, device))  # type: ignore[arg-type]
