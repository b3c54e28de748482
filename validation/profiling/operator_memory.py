"""What operators keep for backward and need meanwhile, measured one at a time on one process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hardware_models.profile import ProfileRow
from simulator.plan import resolve
from simulator.problem import Problem
from simulator.uniform import uniform_plan
from validation.execution.launch import Worker, launch
from validation.kinds.operator_context import DTYPES, OperatorContext, make_context
from validation.kinds.torch_kinds import build

OperatorMemory = tuple[str, float, float, float]
"""Role; bytes saved for backward; temporary bytes forward and backward."""


def measure_memory(
    problem: Problem, samples: int, tensor_size: int, *, device: str = "cpu", timeout_s: float = 600.0
) -> list[OperatorMemory]:
    """Measure what every distinct operator keeps for backward and needs meanwhile, on the first rank of a split.

    Saved storages count once and parameters not. Temporary is what is allocated beyond inputs, outputs, saved tensors
    and gradients: on CUDA by the allocator, on the CPU by the storages of torch's operations.
    """
    request = (problem, samples, tensor_size)
    found: list[OperatorMemory] = launch(
        _memory, request, num_processes=1, device=device, timeout_s=timeout_s, num_threads=1
    )[0]
    return found


def with_memory(rows: Sequence[ProfileRow], measured: Sequence[OperatorMemory]) -> list[ProfileRow]:
    """Return rows with measured bytes in the place of derived ones; rows of other roles stay."""
    by_role = {role: parts for role, *parts in measured}
    return [
        replace(
            row,
            saved_bytes=by_role[row.role][0],
            forward_workspace_bytes=by_role[row.role][1],
            backward_workspace_bytes=by_role[row.role][2],
        )
        if row.role in by_role
        else row
        for row in rows
    ]


def _memory(worker: Worker, request: tuple[Problem, int, int]) -> list[OperatorMemory]:
    problem, samples, tensor_size = request
    workload = problem.workload
    plan = uniform_plan(replace(problem, global_batch=samples), tp=tensor_size, microbatch=samples)
    words = list(plan.stages[0].sharding_per_operator())
    found: dict[str, OperatorMemory] = {}
    for index, op in enumerate(workload.operators):
        axes = [(axis.split, axis.size) for axis in resolve(words[index], op)]
        role = workload.profile_roles[index]
        if role in found or (tensor_size > 1 and not axes):
            continue
        context = make_context(
            workload, index, axes, local_rank=0, samples=samples, local_samples=samples,
            implementation=problem.runtime.implementation, device=worker.device,
            reduce=lambda tensor, operation, split: tensor,
            gather=lambda tensor, split, dim: torch.cat([tensor] * tensor_size, dim),
        )  # fmt: skip
        found[role] = (role, *_operator_memory(context, worker.device))
    return list(found.values())


def _operator_memory(context: OperatorContext, device: torch.device) -> tuple[float, float, float]:
    forward = build(context)
    parameters = [
        torch.randn(shape, dtype=context.dtype, device=device).requires_grad_() for shape in context.local.parameters
    ]
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    rounds: list[dict[int, int]] = []
    temporary = (0.0, 0.0)
    alive = []
    for _ in range(2):  # what both keep are tables, made once
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = _inputs(context, device)
        with _meter(device) as meter, saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward(inputs, parameters)
        leaves = [tensor for tensor in (*inputs, *parameters) if tensor.requires_grad]
        ends = [output for output in outputs if output.requires_grad]
        ones = [torch.ones_like(output) for output in ends]
        after = _meter(device)
        with after:
            gradients = torch.autograd.grad(ends, leaves, ones, retain_graph=True, allow_unused=True) if ends else ()
        temporary = float(meter.temporary_bytes), float(after.temporary_bytes)
        rounds.append(saved)
        alive.append((inputs, outputs, gradients))
    kept = sum(size for pointer, size in rounds[1].items() if pointer not in rounds[0])
    return float(kept), *temporary


def _inputs(context: OperatorContext, device: torch.device) -> list[torch.Tensor]:
    kind = context.operator.definition
    found: list[torch.Tensor] = []
    for position, shape in enumerate(context.local.inputs):
        first = context.operator.inputs.index(context.operator.inputs[position])
        word = kind.input_dtype(position)
        if first < position:
            found.append(found[first])
        elif word == "index":
            found.append(torch.randint(2, shape, device=device))
        else:
            dtype = context.dtype if word == "activation" else DTYPES[word]
            graph_input = context.producers[position] is None
            found.append(torch.randn(shape, device=device).to(dtype).requires_grad_(not graph_input))
    return found


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that torch's operations make, while they live."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in known or key in self._seen:
                continue
            self._seen.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, key, size)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    @property
    def temporary_bytes(self) -> int:
        """Bytes at the peak beyond those that are still there."""
        return self.peak - self.live


class _CudaMeter:
    """The same by CUDA's allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.temporary_bytes = 0

    def __enter__(self) -> _CudaMeter:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *ignored: object) -> None:
        torch.cuda.synchronize(self.device)
        peak, now = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        self.temporary_bytes = peak - now


def _meter(device: torch.device) -> Any:
    return _CudaMeter(device) if device.type == "cuda" else _Meter(device)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
