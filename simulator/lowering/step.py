"""What the optimizer's step reads and writes on a rank, and the seconds of its kernels: lowering and closed forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, inf
from typing import NamedTuple

from hardware_models.runtime import Runtime
from simulator.costs import CostTables
from simulator.lowering.synchronisation import ParameterGroup, is_gathered, parameter_groups
from simulator.lowering.view import StageView
from workloads.kernels import MemoryBound

OPTIMIZER_STATE_BYTES = 4
LIST_TENSORS, LIST_ELEMENTS = 48, 320 * 65536
"""What one launch over lists takes in: tensors of an operation on three lists, and chunks of 65,536 elements
(torch 2.13.0, ATen/native/cuda/MultiTensorApply.cuh, before CUDA 13)."""


class StepWork(NamedTuple):
    """What a rank does in one step.

    Attributes:
        passed_bytes: Read and written of gradients between their reduction and the optimizer.
        touched_bytes: Read and written by the optimizer.
        num_tensors: Parameters.
        num_stepped: Tensors that the optimizer steps: parameters, or what they are flattened into.
        num_rebuilt: Parts of ranks that parameters are put together of behind it, copied one by one: of those that are
            not gathered by calls of their own (``Runtime.parameter_calls_above``) but kept whole.
    """

    passed_bytes: float
    touched_bytes: float
    num_tensors: int
    num_stepped: int
    num_rebuilt: int


class AdamLaunches(NamedTuple):
    """How many kernels the optimizer launches: ``kernels`` for so many tensors, and for so many touched bytes.

    Attributes:
        kernels: Launched together, one for each operation.
        tensors_each, bytes_each: What one of them takes in at most.
    """

    kernels: int
    tensors_each: float
    bytes_each: float


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
    passed_bytes, elements, num_tensors, num_stepped, num_rebuilt = 0.0, 0.0, 0, 0, 0
    largest_kept = runtime.parameter_calls_above
    for group in groups:
        shards = group.num_shards if group.zero else 1
        passed_bytes += group.num_elements * (whole + stepped / shards)
        elements += group.num_elements / shards
        num_tensors += 1
        # A flat tensor stands at its first parameter.
        num_stepped += group.leads_unit or not (runtime.flattens_sharded and is_gathered(group))
        if largest_kept is not None and is_gathered(group) and group.num_elements <= largest_kept:
            num_rebuilt += ceil(group.num_elements / ceil(group.num_elements / group.num_shards))
    return StepWork(passed_bytes, elements * _touched_bytes(runtime), num_tensors, num_stepped, num_rebuilt)


def rebuilding_s(costs: CostTables, gpu_type: str, num_rebuilt: int, num_microbatches: int) -> float:
    """Return how long a host puts parts of ranks together in an iteration, which the device waits for.

    Behind each backward pass what stays whole is given back too (``_partition_all_parameters``): the step gathers it,
    and the forward pass of each later microbatch, by a call for each parameter. All of it counts behind the step.
    """
    return num_microbatches * num_rebuilt * costs.entry_s(gpu_type)


def _touched_bytes(runtime: Runtime) -> float:
    """Return the bytes per parameter that the step reads and writes: plain operations have what they work in."""
    fused = runtime.optimizer_kernels == "fused"
    return adam_bytes(runtime) + 2 * runtime.optimizer_workspace_bytes * fused


def adam_bytes(runtime: Runtime) -> float:
    """Return the bytes per parameter that the optimizer's kernels read and write, without its workspace.

    A fused one reads and writes each of its states once.
    """
    if runtime.optimizer_kernels == "fused":
        return runtime.gradient_accumulation_bytes + 2 * runtime.optimizer_bytes + 2 * runtime.parameter_bytes
    return runtime.adam_operations[1] * OPTIMIZER_STATE_BYTES


def adam_launches(runtime: Runtime) -> AdamLaunches:
    """Return how the optimizer's kernels are launched; in types that are the same for all, compiled code knows one."""
    if runtime.optimizer_kernels == "fused":
        return AdamLaunches(1, inf, inf)
    if runtime.optimizer_kernels == "per_tensor":
        return AdamLaunches(runtime.adam_operations[0], 1.0, inf)
    bytes_each = float(LIST_ELEMENTS * _touched_bytes(runtime))
    return AdamLaunches(runtime.adam_operations[0], float(LIST_TENSORS), bytes_each)


def num_launches(launches: AdamLaunches, num_stepped: float, touched_bytes: float) -> float:
    """Return how many kernels the optimizer launches, at least one for each of its operations."""
    of_tensors, of_bytes = ceil(num_stepped / launches.tensors_each), ceil(touched_bytes / launches.bytes_each)
    return float(launches.kernels * max(1, of_tensors, of_bytes))


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
