"""Live bytes of a model under PyTorch's own data parallelism, or DeepSpeed's, without a device; see ``wrapped_model``.

On fake tensors but for DistributedDataParallel, whose reducer reads what is in its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simulator.plan import Plan
from simulator.problem import Problem
from simulator.validate import validate
from validation.deepspeed_engine import DeepSpeedTraining, as_with_cuda
from validation.execution.parameters import input_specs, make_samples
from validation.fake_devices import as_on_cuda, fake_processes
from validation.kinds.operator_context import DTYPES
from validation.storage_tracer import Marks, StorageTracer, TracedMemory, summary
from validation.wrapped_model import WRAPPERS, WholeModel, autocasting, begin_microbatch

ITERATIONS = 2
DDP = "pytorch-ddp"
"""The runtime whose wrapper shards nothing, and does not work without data."""
DEEPSPEED = ("megatron-deepspeed", "deepspeed-zero3-2021")
"""The runtimes that DeepSpeed's own engine stands for."""
LEVELS: Mapping[str, tuple[int, ...]] = {DDP: (0,), "megatron-deepspeed": (0, 1, 2)}
"""Levels of ZeRO, by runtime; of others 3."""
STAYS_GATHERED = ("pytorch-fsdp2",)
"""Runtimes whose plans may keep what ZeRO-3 gathers (the first FSDP cannot without data)."""
KERNELS: Mapping[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "per_tensor": {"foreach": False},
}
"""What AdamW is told, by ``Runtime.optimizer_kernels``. Without data it can be fused only."""


class TorchTraining:
    """A model under one of torch's own wrappers, and torch's optimizer.

    Args:
        model, problem, plan: See ``trace_wrapped``.
    """

    def __init__(self, model: WholeModel, problem: Problem, plan: Plan) -> None:
        self._plan, self._problem = plan, problem
        self._wrapped = WRAPPERS[problem.runtime.name](model, problem, plan)
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self._wrapped.parameters(), **KERNELS[problem.runtime.optimizer_kernels]
        )

    def begin(self, *, is_first: bool, is_last: bool) -> AbstractContextManager[Any]:
        """Return what holds during the passes of a microbatch."""
        if is_first:
            self._optimizer.zero_grad()
        return begin_microbatch(self._wrapped, self._plan, is_last=is_last)

    def loss(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss."""
        with autocasting(self._problem):
            found: torch.Tensor = self._wrapped(samples)
        return found

    def backward(self, loss: Any) -> None:
        """Run the backward pass."""
        loss.backward()

    def step(self, *, is_last: bool) -> None:
        """Step after the last microbatch."""
        if is_last:
            self._optimizer.step()

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients that are there."""
        yield from (each.grad for each in self._wrapped.parameters() if each.grad is not None)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters."""
        yield from self._wrapped.parameters()

    def states(self) -> Iterator[torch.Tensor]:
        """Yield what the optimizer keeps."""
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


Training = TorchTraining | DeepSpeedTraining


def trace_wrapped(plan: Plan, problem: Problem) -> TracedMemory:
    """Train a model under the wrapper of the problem's runtime, as the first of its ranks, and return its live bytes.

    Args:
        plan: Of one stage, whose devices are replicas; ZeRO-3 over all of them under FSDP, any under DeepSpeed, none
            otherwise. FSDP2 may keep parameters gathered.
        problem: What it is for.

    Raises:
        ValueError: If the runtime has no wrapper, or the plan is of another kind.
        ImportError: If the runtime needs DeepSpeed, which is not there.
    """
    name = problem.runtime.name
    by_deepspeed = name in DEEPSPEED
    if name not in WRAPPERS and not by_deepspeed:
        raise ValueError(f"runtime must be one of {', '.join((*WRAPPERS, *DEEPSPEED))}, got {name}")
    canonical = _replicated(plan, problem)
    count, tracer, marks = len(canonical.devices), StorageTracer(), Marks()
    without_data = nullcontext() if name == DDP else FakeTensorMode()
    of_engine = as_with_cuda(shards_parameters=name not in LEVELS) if by_deepspeed else nullcontext()
    dtype = DTYPES[problem.runtime.implementation.dtype] if by_deepspeed else torch.float32
    with fake_processes(0, count), as_on_cuda(), without_data, tracer, of_engine:
        samples = canonical.microbatch_size // count
        model = WholeModel(problem, samples, canonical.stages[0].recompute, dtype=dtype)
        model.on_bucket = lambda bucket: marks.gradients.add(tracer.see(bucket))
        begun = len(tracer.events)
        training: Training = (DeepSpeedTraining if by_deepspeed else TorchTraining)(model, problem, canonical)
        if name != DDP:
            begun = len(tracer.events)  # Whole parameters have gone.
        first = begun
        for _ in range(ITERATIONS):
            first = len(tracer.events)
            _iterate(canonical, problem, training, tracer, marks)
    return summary(tracer.events, begun, first, marks, min(canonical.devices))


def _replicated(plan: Plan, problem: Problem) -> Plan:
    """Return a plan in canonical form, if the wrapper of its runtime can do what it says."""
    canonical, name = validate(plan, problem), problem.runtime.name
    count, levels = len(canonical.devices), LEVELS.get(name, (3,))
    axes = {
        tuple((axis.split, axis.size, axis.zero) for axis in found) for _, found in canonical.stages[0].shardings
    }
    wanted = [{(("batch", count, zero),) if count > 1 else ()} for zero in levels]
    if len(canonical.stages) > 1 or axes not in wanted:
        of_one = "that share all by ZeRO-3" if levels == (3,) else "without ZeRO"
        sharing = of_one if len(levels) == 1 else f"under ZeRO {', '.join(map(str, levels))}"
        raise ValueError(
            f"the plan must have one stage of replicas {sharing}, got {len(canonical.stages)} stages with axes "
            f"{sorted(axes)}"
        )
    if name in DEEPSPEED and count == 1:
        raise ValueError(f"{name} needs two replicas or more here, got one")
    if canonical.last_microbatch_size is not None or canonical.rotates:
        raise ValueError("microbatches must be equal and cut over all replicas, got others")
    if not canonical.reshard_after_forward and name not in STAYS_GATHERED:
        raise ValueError(f"only {', '.join(STAYS_GATHERED)} can keep parameters gathered here, got {name}")
    return canonical


def _iterate(plan: Plan, problem: Problem, training: Training, tracer: StorageTracer, marks: Marks) -> None:
    specs, dtype = input_specs(problem.workload), DTYPES[problem.runtime.implementation.dtype]
    share = range(plan.microbatch_size // len(plan.devices))
    for microbatch in range(plan.num_microbatches):
        is_last = microbatch == plan.num_microbatches - 1
        with training.begin(is_first=microbatch == 0, is_last=is_last):
            samples = {name: make_samples(spec, share, dtype) for name, spec in specs.items()}
            tracer.where = (ord("F"), 0, microbatch)
            loss = training.loss(samples)
            tracer.where = (ord("B"), 0, microbatch)
            training.backward(loss)
        del loss, samples
        marks.gradients |= {tracer.see(each) for each in training.gradients()}
        if is_last:
            tracer.where = (ord("O"), -1, -1)
        training.step(is_last=is_last)
    marks.parameters |= {tracer.see(each) for each in training.parameters()}
    marks.optimizer |= {tracer.see(each) for each in training.states()}
