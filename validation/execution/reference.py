"""The whole model in one process through torch's own autograd: what a planned run must agree with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from simulator.problem import Problem
from validation.execution.parameters import initial_parameter, input_specs, make_samples
from validation.kinds.operator_context import DTYPES, RunState, make_context
from validation.kinds.torch_kinds import build
from workloads.operators import Workload


@dataclass(frozen=True)
class Reference:
    """What training steps without a plan give.

    Attributes:
        losses: Mean loss over the global batch, per iteration.
        gradients: Of the first iteration, by parameter key.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, torch.Tensor]


def terminal_tensors(workload: Workload) -> tuple[str, ...]:
    """Return the tensors nobody reads: their mean is the loss.

    Raises:
        ValueError: If one of them is not a loss.
    """
    found = []
    for op in workload.operators:
        for tensor in op.outputs:
            if tensor in workload.consumers:
                continue
            if op.kind not in ("lm_loss", "classifier_loss", "loss_sum"):
                raise ValueError(f"operator {op.name!r} of kind {op.kind} ends the graph; a loss must")
            found.append(tensor)
    return tuple(found)


def run_reference(problem: Problem, *, iterations: int = 1, device: str = "cpu") -> Reference:
    """Train for some iterations with the whole global batch at once, in this process.

    Parameters depend on the sort of device, since its generator makes them: compare with runs on the same.
    """
    workload, implementation = problem.workload, problem.runtime.implementation
    place, dtype = torch.device(device), DTYPES[problem.runtime.implementation.dtype]
    parameters: dict[str, torch.Tensor] = {}
    of_operator: list[list[torch.Tensor]] = []
    calls = []
    batch = problem.global_batch
    state = RunState()
    for index in range(len(workload)):
        own = []
        for number in range(len(workload.parameters(index))):
            key, tensor = initial_parameter(workload, index, number, dtype=dtype, device=place)
            own.append(parameters.setdefault(key, tensor.requires_grad_()))
        of_operator.append(own)
        context = make_context(
            workload, index, (), local_rank=0, samples=batch, local_samples=batch,
            implementation=implementation, device=place, run=state,
        )  # fmt: skip
        calls.append(build(context))
    data = {name: make_samples(spec, range(batch), dtype).to(place) for name, spec in input_specs(workload).items()}
    optimizer = torch.optim.Adam(parameters.values())
    losses, gradients = [], {}
    for iteration in range(iterations):
        state.iteration = iteration
        values = dict(data)
        for index, op in enumerate(workload.operators):
            outputs = calls[index]([values[name] for name in op.inputs], of_operator[index])
            values.update(zip(op.outputs, outputs, strict=True))
        loss = torch.stack([values[name].mean() for name in terminal_tensors(workload)]).sum()
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        if not iteration:
            gradients = {
                key: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
                for key, tensor in parameters.items()
            }
        optimizer.step()
        losses.append(float(loss.detach()))
    return Reference(tuple(losses), gradients)
