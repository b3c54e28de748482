"""What the optimizer's step reads and writes on a rank, and the seconds of its kernels: lowering and closed forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hardware_models.runtime import Runtime
from simulator.costs import CostTables
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups
from simulator.lowering.view import StageView
from workloads.kernels import MemoryBound

PER_TENSOR_ADAM_KERNELS = 8
PER_TENSOR_ADAM_ACCESSES = 20
"""Kernels and element accesses of Adam written in plain tensor operations (torch.optim, single-tensor form):
mul and add on the first moment (2 + 3 accesses), mul and addcmul on the second (2 + 3), sqrt, division by the
bias correction and add of epsilon on a temporary (2 + 2 + 2), addcdiv on the parameter (4)."""
OPTIMIZER_STATE_BYTES = 4


class StepWork(NamedTuple):
    """What a rank does in one step.

    Attributes:
        passed_bytes: Read and written of gradients between their reduction and the optimizer.
        touched_bytes: Read and written by the optimizer.
        num_tensors: Parameters.
    """

    passed_bytes: float
    touched_bytes: float
    num_tensors: int


def step_work(view: StageView) -> StepWork:
    """Return the work of a stage's step; what operators of the stage share in one layout is stepped once."""
    if "step work" not in view.shared:
        view.shared["step work"] = work_of(parameter_groups(view), view.costs.problem.runtime)
    found: StepWork = view.shared["step work"]
    return found


def work_of(groups: Iterable[ParameterGroup], runtime: Runtime) -> StepWork:
    """Return the work of stepping parameters: ZeRO's ranks step a shard each."""
    passes = float(runtime.gradient_clipping) + 2.0 * runtime.loss_scaling
    whole, stepped = runtime.gradient_pass_bytes or (0.0, passes * runtime.gradient_accumulation_bytes)
    passed_bytes, elements, num_tensors = 0.0, 0.0, 0
    for group in groups:
        shards = group.num_shards if group.zero else 1
        passed_bytes += group.num_elements * (whole + stepped / shards)
        elements += group.num_elements / shards
        num_tensors += 1
    touched_bytes = elements * (adam_bytes(runtime) + 2 * runtime.optimizer_workspace_bytes)
    return StepWork(passed_bytes, touched_bytes, num_tensors)


def adam_bytes(runtime: Runtime) -> float:
    """Return the bytes per parameter that the optimizer's kernels read and write, without its workspace.

    A fused one reads and writes each of its states once.
    """
    if runtime.optimizer_kernels == "fused":
        return runtime.gradient_accumulation_bytes + 2 * runtime.optimizer_bytes + 2 * runtime.parameter_bytes
    return PER_TENSOR_ADAM_ACCESSES * OPTIMIZER_STATE_BYTES


def adam_kernels(runtime: Runtime, num_tensors: int) -> int:
    """Return how many kernels the optimizer launches, at least one."""
    return 1 if runtime.optimizer_kernels == "fused" else max(1, PER_TENSOR_ADAM_KERNELS * num_tensors)


def has_norm(runtime: Runtime) -> bool:
    """Return whether all ranks agree on the norm of the gradients, or that they are finite, before they step."""
    return runtime.gradient_clipping or runtime.loss_scaling


def passes_gradients(runtime: Runtime) -> bool:
    """Return whether a rank goes over its gradients before the optimizer."""
    return has_norm(runtime) or runtime.gradient_pass_bytes is not None


def gradient_pass_s(costs: CostTables, gpu_type: str, num_bytes: float) -> float:
    """Return the seconds of going over gradients: three of four bytes are read."""
    problem = costs.problem
    kernel = MemoryBound(num_bytes * 0.75, num_bytes * 0.25, "reduction")
    return problem.hardware.kernel_time_s(gpu_type, kernel, problem.runtime.implementation.dtype)


def norm_s(costs: CostTables, devices: Sequence[int]) -> float:
    """Return the seconds of the collective over all ranks that the gradient norm needs; 0 where there is none."""
    if len(devices) == 1 or not has_norm(costs.problem.runtime):
        return 0.0
    return costs.problem.hardware.collective("all_reduce", 4.0, devices).alone_s
