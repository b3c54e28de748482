"""A workload as a torch module of modules, one for each unit, wrapped by what PyTorch has for data parallelism.

No planned execution: torch's autograd goes through the model, and DistributedDataParallel or one of the two FSDPs does
what it does for everybody. What they hold can so be compared with a plan's simulation under their runtimes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from simulator.costs import cost_tables
from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.parameters import initial_parameter
from validation.execution.reference import terminal_tensors
from validation.kinds.operator_context import Forward, RunState, make_context
from validation.kinds.torch_kinds import build

Values = tuple[torch.Tensor, ...]


class OperatorModule(nn.Module):
    """One operator, with its parameters; what is gathered module by module comes for it alone (DeepSpeed).

    Args:
        call: What computes it.
        parameters: Its own, or tied ones.
    """

    def __init__(self, call: Forward, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._call, self._names = call, [f"parameter_{number}" for number in range(len(parameters))]
        for name, parameter in zip(self._names, parameters, strict=True):
            self.register_parameter(name, parameter)

    def forward(self, *inputs: torch.Tensor) -> Values:
        """Return what it makes."""
        return self._call(inputs, [getattr(self, name) for name in self._names])


class UnitModule(nn.Module):
    """The operators of one unit (``CostTables.units``), with their parameters.

    Args:
        problem: What the model is of.
        operators: Of the unit, ascending.
        tied: Parameters by tie, of all units; filled.
        samples: Of a microbatch.
        state: Of the run.
        recomputes: It keeps its inputs only, and computes the rest again.
        dtype: Of the parameters.

    Attributes:
        entering, leaving: Names of the tensors that it reads from others and makes for them.
        checkpoint: What runs it where it is computed again.
    """

    checkpoint: Callable[..., Any]

    def __init__(
        self,
        problem: Problem,
        operators: list[int],
        tied: dict[str, nn.Parameter],
        samples: int,
        state: RunState,
        *,
        recomputes: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        self._workload, self._indices, self._recomputes = problem.workload, operators, recomputes
        device, inside = torch.device("cpu"), set(operators)
        modules = []
        for index in operators:
            parameters = []
            for number, parameter in enumerate(problem.workload.parameters(index)):
                _, tensor = initial_parameter(problem.workload, index, number, dtype=dtype, device=device)
                own = nn.Parameter(tensor)
                if parameter.tie is not None:
                    own = tied.setdefault(parameter.tie, own)
                parameters.append(own)
            context = make_context(
                problem.workload, index, (), local_rank=0, samples=samples, local_samples=samples,
                implementation=problem.runtime.implementation, device=device, run=state,
            )  # fmt: skip
            modules.append(OperatorModule(build(context), parameters))
        self.operators = nn.ModuleList(modules)
        ends = terminal_tensors(problem.workload)
        made = [name for index in operators for name in problem.workload.operators[index].outputs]
        read = [name for index in operators for name in problem.workload.operators[index].inputs]
        consumers = problem.workload.consumers
        self.leaving = [name for name in made if name in ends or not inside.issuperset(consumers.get(name, ()))]
        self.entering = [name for name in dict.fromkeys(read) if name not in made]
        self._last = {name: index for index in operators for name in problem.workload.operators[index].inputs}

    def forward(self, *values: torch.Tensor) -> Values:
        """Return what leaves, of what enters."""
        if self._recomputes:
            found: torch.Tensor | Values = self.checkpoint(self._run, *values)
            return (found,) if isinstance(found, torch.Tensor) else found
        return self._run(*values)

    def _run(self, *values: torch.Tensor) -> Values:
        live = dict(zip(self.entering, values, strict=True))
        del values
        for index, operator in zip(self._indices, self.operators, strict=True):
            op = self._workload.operators[index]
            outputs = operator(*(live[name] for name in op.inputs))
            live.update(zip(op.outputs, outputs, strict=True))
            del outputs
            for name in dict.fromkeys(op.inputs):
                if self._last[name] == index and name not in self.leaving:
                    del live[name]
        return tuple(live[name] for name in self.leaving)


class WholeModel(nn.Module):
    """All units of a workload, one after the other; its result is the mean loss.

    Args:
        problem: What it is of.
        samples: Of a microbatch.
        segments: What is computed again in backward, as in ``Stage.recompute``.
        dtype: Of the parameters.

    Attributes:
        units: Modules.
        wrapped_apart: Whether each is wrapped on its own: the root's are with the model.
        on_bucket: Called with each of a reducer's buckets when it is full.

    Raises:
        ValueError: If a segment is not a unit.
    """

    def __init__(
        self,
        problem: Problem,
        samples: int,
        segments: Sequence[tuple[int, int]],
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        costs, state, tied = cost_tables(problem), RunState(), dict[str, nn.Parameter]()
        units = [list(members) for _, members in groupby(range(len(problem.workload)), costs.units.__getitem__)]
        spans = [(unit[0], unit[-1] + 1) for unit in units]
        if not set(segments) <= set(spans):
            raise ValueError(f"recomputed segments must be units, {spans}, got {list(segments)}")
        modules = [
            UnitModule(problem, unit, tied, samples, state, recomputes=span in segments, dtype=dtype)
            for unit, span in zip(units, spans, strict=True)
        ]
        self.units = nn.ModuleList(modules)
        self.on_bucket: Callable[[torch.Tensor], object] = lambda bucket: None
        self.wrapped_apart = [costs.units[unit[0]] not in costs.root_units for unit in units]
        self._ends = terminal_tensors(problem.workload)
        self._passed = [(unit.entering, unit.leaving) for unit in modules]

    def forward(self, samples: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of samples, by the names of the graph's inputs."""
        live = dict(samples)
        for number, unit in enumerate(self.units):
            entering, leaving = self._passed[number]
            live.update(zip(leaving, unit(*(live[name] for name in entering)), strict=True))
            later = {name for names, _ in self._passed[number + 1 :] for name in names}
            for name in entering:
                if name not in later:
                    del live[name]
        return torch.stack([live[name].mean() for name in self._ends]).sum()


def _distributed(model: WholeModel, problem: Problem, plan: Plan) -> nn.Module:
    """Wrap by DistributedDataParallel, whose reducer is told at once that a bucket is reduced."""
    if len(plan.devices) == 1:
        return model
    agreed = patch.object(ddp, "_verify_param_shape_across_processes", lambda *_, **__: True)
    with agreed, patch.object(ddp, "_sync_module_states", lambda *_, **__: None):
        wrapped = ddp.DistributedDataParallel(model)
    wrapped.register_comm_hook(model, lambda of, bucket: _reduced(of, bucket))
    return wrapped


def _reduced(model: WholeModel, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    model.on_bucket(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _fully_sharded(model: WholeModel, problem: Problem, plan: Plan) -> nn.Module:
    """Wrap by FSDP2: each unit but the root's, and the root."""
    runtime = problem.runtime
    reduced = torch.float32 if runtime.travelling_gradient_bytes == 4 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    mesh = _mesh(len(plan.devices))
    for unit, apart in zip(model.units, model.wrapped_apart, strict=True):
        if apart:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _mesh(world_size: int) -> Any:
    with unset_fake_temporarily():
        return dist.device_mesh.init_device_mesh("cpu", (world_size,))


def _flat(model: WholeModel, problem: Problem, plan: Plan) -> nn.Module:
    """Wrap by torch's first FSDP: each unit but the root's, and the root."""
    runtime = problem.runtime
    reduced = torch.float32 if runtime.travelling_gradient_bytes == 4 else torch.bfloat16
    before, after = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST

    def wrapped(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduced),
            backward_prefetch=before if runtime.holds_next("backward") else after,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )

    for number, apart in enumerate(model.wrapped_apart):
        if apart:
            model.units[number] = wrapped(model.units[number])
    return wrapped(model)


Wrap = Callable[[WholeModel, Problem, Plan], nn.Module]
WRAPPERS: Mapping[str, Wrap] = {
    "pytorch-ddp": _distributed,
    "pytorch-fsdp2": _fully_sharded,
    "composer-fsdp": _flat,
    "hetu-galvatron": _flat,
}
"""By runtime."""


def begin_microbatch(wrapped: nn.Module, plan: Plan, *, is_last: bool) -> AbstractContextManager[Any]:
    """Tell a wrapper of what a plan does in the last microbatch alone; return what holds during its passes.

    Reductions of gradients, and giving back parameters that stay gathered after a forward pass.
    """
    waits = plan.gradient_reduction == "last" and not is_last
    if isinstance(wrapped, FSDPModule):
        wrapped.set_requires_gradient_sync(not waits)
        if not plan.reshard_after_forward:
            wrapped.set_reshard_after_backward(is_last)
        return nullcontext()
    if waits and isinstance(wrapped, (ddp.DistributedDataParallel, FullyShardedDataParallel)):
        return wrapped.no_sync()
    return nullcontext()


@contextmanager
def autocasting(problem: Problem) -> Iterator[None]:
    """Let operators choose their number format where the runtime does."""
    choice = problem.runtime.implementation
    if choice.autocast:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    else:
        yield
