"""Live bytes of a model under PyTorch's own data parallelism, without a device; see ``wrapped_model``.

On fake tensors but for DistributedDataParallel, whose reducer reads what is in its buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from simulator.plan import Plan
from simulator.problem import Problem
from simulator.validate import validate
from validation.execution.parameters import input_specs, make_samples
from validation.fake_devices import as_on_cuda, fake_processes
from validation.kinds.operator_context import DTYPES
from validation.storage_tracer import Marks, StorageTracer, TracedMemory, summary
from validation.wrapped_model import WRAPPERS, WholeModel, autocasting, begin_microbatch

ITERATIONS = 2
DDP = "pytorch-ddp"
"""The runtime whose wrapper shards nothing, and does not work without data."""
STAYS_GATHERED = ("pytorch-fsdp2",)
"""Runtimes whose plans may keep what ZeRO-3 gathers (the first FSDP cannot without data)."""
KERNELS: Mapping[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "per_tensor": {"foreach": False},
}
"""What AdamW is told, by ``Runtime.optimizer_kernels``. Without data it can be fused only."""


def trace_wrapped(plan: Plan, problem: Problem) -> TracedMemory:
    """Train a model under the wrapper of the problem's runtime, as the first of its ranks, and return its live bytes.

    Args:
        plan: Of one stage, whose devices are replicas; ZeRO-3 over all of them under FSDP, none otherwise. FSDP2 may
            keep parameters gathered.
        problem: What it is for.

    Raises:
        ValueError: If the runtime has no wrapper, or the plan is of another kind.
    """
    name = problem.runtime.name
    if name not in WRAPPERS:
        raise ValueError(f"runtime must be one of {', '.join(WRAPPERS)}, got {name}")
    canonical = _replicated(plan, problem)
    count, tracer, marks = len(canonical.devices), StorageTracer(), Marks()
    without_data = nullcontext() if name == DDP else FakeTensorMode()
    with fake_processes(0, count), as_on_cuda(), without_data, tracer:
        model = WholeModel(problem, canonical.microbatch_size // count, canonical.stages[0].recompute)
        model.on_bucket = lambda bucket: marks.gradients.add(tracer.see(bucket))
        begun = len(tracer.events)
        wrapped = WRAPPERS[name](model, problem, canonical)
        if name != DDP:
            begun = len(tracer.events)  # Whole parameters have gone.
        optimizer = torch.optim.AdamW(wrapped.parameters(), **KERNELS[problem.runtime.optimizer_kernels])
        first = begun
        for _ in range(ITERATIONS):
            first = len(tracer.events)
            _iterate(canonical, problem, wrapped, optimizer, tracer, marks)
    return summary(tracer.events, begun, first, marks, min(canonical.devices))


def _replicated(plan: Plan, problem: Problem) -> Plan:
    """Return a plan in canonical form, if the wrapper of its runtime can do what it says."""
    canonical, name = validate(plan, problem), problem.runtime.name
    count, zero = len(canonical.devices), 3 * (name != DDP)
    axes = {
        tuple((axis.split, axis.size, axis.zero) for axis in found) for _, found in canonical.stages[0].shardings
    }
    wanted = {(("batch", count, zero),) if count > 1 else ()}
    if len(canonical.stages) > 1 or axes != wanted:
        sharing = "that share all by ZeRO-3" if zero else "without ZeRO"
        raise ValueError(
            f"the plan must have one stage of replicas {sharing}, got {len(canonical.stages)} stages with axes "
            f"{sorted(axes)}"
        )
    if canonical.last_microbatch_size is not None or canonical.rotates:
        raise ValueError("microbatches must be equal and cut over all replicas, got others")
    if not canonical.reshard_after_forward and name not in STAYS_GATHERED:
        raise ValueError(f"only {', '.join(STAYS_GATHERED)} can keep parameters gathered here, got {name}")
    return canonical


def _iterate(
    plan: Plan,
    problem: Problem,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    tracer: StorageTracer,
    marks: Marks,
) -> None:
    specs, dtype = input_specs(problem.workload), DTYPES[problem.runtime.implementation.dtype]
    share = range(plan.microbatch_size // len(plan.devices))
    optimizer.zero_grad()
    for microbatch in range(plan.num_microbatches):
        is_last = microbatch == plan.num_microbatches - 1
        samples = {name: make_samples(spec, share, dtype) for name, spec in specs.items()}
        with begin_microbatch(wrapped, plan, is_last=is_last):
            tracer.where = (ord("F"), 0, microbatch)
            with autocasting(problem):
                loss = wrapped(samples)
            tracer.where = (ord("B"), 0, microbatch)
            loss.backward()
        del loss, samples
    marks.gradients |= {tracer.see(each.grad) for each in wrapped.parameters() if each.grad is not None}
    tracer.where = (ord("O"), -1, -1)
    optimizer.step()
    marks.parameters |= {tracer.see(each) for each in wrapped.parameters()}
    for state in optimizer.state.values():
        marks.optimizer |= {tracer.see(value) for value in state.values() if isinstance(value, torch.Tensor)}
