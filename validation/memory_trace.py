"""Live bytes of a plan's execution without a device: torch runs it on fake tensors, every storage is counted.

Fake tensors have shapes and storages but no data, so a model of any size runs on this machine; a fake process group
answers every collective at once, so one process is any rank, and what was sent is let go at once. The executor is
the real one, with torch's autograd and optimizer. Two operations hold on CUDA what they do not on the CPU, and are
given it here: RMS norm is one kernel that keeps its input and statistics, and softmax's backward multiplies gradient
and result into a tensor of its own (aten/native/cuda/SoftMax.cu). What a fake run cannot show is what else CUDA
kernels allocate inside, the context, and the buffers of NCCL.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from simulator.memory.allocator import UNLIMITED_BYTES, replay
from simulator.memory.events import ACTIVATIONS, GRADIENTS, OPTIMIZER_STATES, PARAMETERS
from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.executable import check_executable
from validation.execution.groups import GroupPool
from validation.execution.launch import Worker
from validation.execution.operator_call import storage_key
from validation.execution.plan_executor import PlanExecutor
from validation.kinds.shared_tensors import forget_shared

_Mode: Any = _python_dispatch.TorchDispatchMode
_Function: Any = torch.autograd.Function

BLOCK_BYTES = 512
"""The caching allocator's rounding, so that sums compare with its ``allocated``."""


@dataclass
class _Event:
    storage: int
    num_bytes: int
    where: tuple[int, int, int]


class StorageTracer(_Mode):  # type: ignore[misc]
    """Counts the storages that operations make, from their first sight to their end.

    Attributes:
        events: In order; negative bytes where a storage ends.
        where: Noted with each event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[_Event] = []
        self.where: Any = (0, 0, 0)
        self._serial_of: dict[int, int] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # Two of three calls; fake tensors would take long to say it.
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.see(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
        if func is torch.ops.aten._softmax_backward_data.default:
            self.see(torch.empty_like(args[1]))
        return result

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are there now."""
        return sum(event.num_bytes for event in self.events)

    def see(self, tensor: torch.Tensor) -> int:
        """Return the serial number of a tensor's storage, counted from now on if it is new."""
        key = storage_key(tensor)
        if key not in self._serial_of:
            storage = tensor.untyped_storage()
            size = -(-int(storage.nbytes()) // BLOCK_BYTES) * BLOCK_BYTES
            self._count += 1
            self._serial_of[key] = self._count
            self.events.append(_Event(self._count, size, tuple(self.where)))
            weakref.finalize(storage, self._ended, key, self._count, size).atexit = False
        return self._serial_of[key]

    def _ended(self, key: int, serial: int, size: int) -> None:
        self.events.append(_Event(serial, -size, tuple(self.where)))
        if self._serial_of.get(key) == serial:
            del self._serial_of[key]


@dataclass(frozen=True)
class TracedMemory:
    """Live bytes of one rank over an iteration after the first.

    Attributes:
        device: Device id of the plan.
        peak_bytes: Largest sum of live storages, in 512-byte blocks.
        consumers: Of that, parameters, gradients, optimizer states, and the rest (activations).
        peak_where: What ran then.
        num_events: Storages made and ended.
        reserved_bytes: What the simulator's caching allocator holds for the storages of both iterations, in the order
            in which torch made them, beside those that were there before (of which it counts bytes, not segments).
    """

    device: int
    peak_bytes: int
    consumers: dict[str, int]
    peak_where: str
    num_events: int
    reserved_bytes: int


@dataclass
class _Marks:
    """Storages whose use is known."""

    parameters: set[int] = field(default_factory=set)
    gradients: set[int] = field(default_factory=set)
    optimizer: set[int] = field(default_factory=set)

    def note(self, tracer: StorageTracer, executor: PlanExecutor) -> None:
        for runner in executor.runners.values():
            for held in runner.parameters.held:
                self.parameters.add(tracer.see(held.trained))
                if held.whole is not None and not held.placed.is_gathered:
                    self.parameters.add(tracer.see(held.whole))
                if held.gradient is not None:
                    self.gradients.add(tracer.see(held.gradient))
            for unit in runner.parameters.units:
                if unit.flat is not None:
                    self.parameters.add(tracer.see(unit.flat))
            for bucket in runner.gradients.buckets:
                for tensor in (bucket.buffer, bucket.result, bucket.pending):
                    if tensor is not None:
                        self.gradients.add(tracer.see(tensor))
        if executor.optimizer is not None:
            for state in executor.optimizer.state.values():
                self.optimizer |= {tracer.see(value) for value in state.values() if isinstance(value, torch.Tensor)}


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
    with fake_processes(rank, world_size) as backend, _as_on_cuda(), FakeTensorMode(), tracer:
        pool = GroupPool(rank=rank, world_size=world_size, backend=backend)
        worker = Worker(rank, world_size, pool, torch.device("cpu"))
        executor = PlanExecutor(plan, problem, worker)
        begun = len(tracer.events)
        marks = _Marks()

        def reduced(done: PlanExecutor) -> None:
            marks.note(tracer, done)
            tracer.where = (ord("O"), -1, -1)

        executor.on_gradients = reduced
        executor.run_iteration(0)
        marks.note(tracer, executor)
        first = len(tracer.events)
        progress = worker.progress
        tracer.where = _Position(progress)
        executor.on_gradients = lambda done: marks.note(tracer, done)
        executor.run_iteration(1)
        marks.note(tracer, executor)
        device = executor.device_id
        del executor, worker
    return _summary(tracer.events, begun, first, marks, device)


class _RmsNormOfCuda(_Function):  # type: ignore[misc]
    """What ``aten::_fused_rms_norm`` makes and keeps on CUDA; tensors without data."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        statistics = torch.empty(*source.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(source, weight, statistics)
        return torch.empty_like(source)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        source, weight, _ = ctx.saved_tensors
        return torch.empty_like(source), torch.empty_like(weight)


def _norm_as_on_cuda(source: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    found: torch.Tensor = _RmsNormOfCuda.apply(source, weight)
    return found


class _Sent:
    """A send that has arrived; the fake process group's never say so."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    """Norms keep what they do on CUDA, and what is sent has arrived."""
    with patch.object(F, "rms_norm", _norm_as_on_cuda), patch.object(dist, "isend", lambda *_, **__: _Sent()):
        yield


class _Position:
    """What the worker says it is doing, read when it is asked for."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress

    def __iter__(self) -> Iterator[int]:
        return iter(self.progress[1:4])


def _reserved_bytes(events: Sequence[_Event], begun: int) -> int:
    """Return what a caching allocator reserves that begins with nothing free (``execute`` empties it)."""
    there: dict[int, int] = {}
    for event in events[:begun]:
        there[event.storage] = there.get(event.storage, 0) + event.num_bytes
    held = {storage for storage, size in there.items() if size > 0}
    listed = [event for event in events[begun:] if event.num_bytes and event.storage not in held]
    replayed = replay(
        np.array([max(event.num_bytes, 0) for event in listed], dtype=np.int64),
        np.array([event.storage for event in listed], dtype=np.int32),
        np.array([event.num_bytes > 0 for event in listed], dtype=np.bool_),
        UNLIMITED_BYTES,
    )
    return sum(there.values()) + replayed.reserved_peak_bytes


def _summary(events: Sequence[_Event], begun: int, first: int, marks: _Marks, device: int) -> TracedMemory:
    live: dict[int, int] = {}
    total = peak = 0
    at = first
    for number, event in enumerate(events):
        total += event.num_bytes
        if number >= first and total > peak:
            peak, at = total, number
    for event in events[: at + 1]:
        if event.num_bytes > 0:
            live[event.storage] = event.num_bytes
        else:
            live.pop(event.storage, None)
    consumers = {PARAMETERS: 0, GRADIENTS: 0, OPTIMIZER_STATES: 0, ACTIVATIONS: 0}
    for storage, size in live.items():
        if storage in marks.parameters:
            consumers[PARAMETERS] += size
        elif storage in marks.optimizer:
            consumers[OPTIMIZER_STATES] += size
        elif storage in marks.gradients:
            consumers[GRADIENTS] += size
        else:
            consumers[ACTIVATIONS] += size
    kind, stage, microbatch = events[at].where
    where = f"stage {stage}, {chr(kind)} of microbatch {microbatch}" if kind else "start"
    return TracedMemory(device, peak, consumers, where, len(events) - first, _reserved_bytes(events, begun))


@contextmanager
def fake_processes(rank: int, world_size: int) -> Iterator[str | None]:
    """Make this process one rank of a process group in which every collective is done at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("memory is traced in a process without a process group, but there is one; use another process")
    forget_shared()
    try:
        if world_size > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield "fake" if world_size > 1 else None
    finally:
        forget_shared()
        if world_size > 1:
            dist.destroy_process_group()
