"""Train as one rank of Megatron-Core without a device; return its live bytes and what it sent.

Its layers, tensor parallelism, checkpointing, schedules, gradient buffers and optimizer are Megatron-Core's own, on
fake tensors and a fake process group; see ``stand_ins`` for what is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simulator.problem import Problem
from validation.fake_devices import fake_processes, norms_as_on_cuda
from validation.megatron.calls import CallTracer
from validation.megatron.model import Degrees, Rank, Shape, build_rank
from validation.megatron.stand_ins import extensions, on_no_gpu
from validation.simulated_calls import Call
from validation.storage_tracer import Marks, TracedMemory, summary

with extensions():
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

ITERATIONS = 2


def trace_megatron(problem: Problem, degrees: Degrees, rank: int) -> tuple[TracedMemory, Counter[Call]]:
    """Train for two iterations; return the second's live bytes and calls.

    Args:
        problem: A GPT or LLaMA.
        degrees: Of the plan, whose ranks lie as ``uniform_plan`` lays devices: tensor-parallel ones are neighbours,
            then replicas, then stages.
        rank: Which.

    Raises:
        ValueError: If Megatron-Core has no such plan.
    """
    _check(problem, degrees, rank)
    tracer, marks = CallTracer(), Marks()
    with fake_processes(rank, degrees.num_ranks, alone=True), norms_as_on_cuda(), on_no_gpu(tracer), _groups(degrees):
        with FakeTensorMode(allow_non_fake_inputs=True), tracer:
            own = build_rank(problem, degrees, lambda chunk: _mark(marks, tracer, chunk))
            begun = first = len(tracer.events)
            for _ in range(ITERATIONS):
                first = len(tracer.events)
                tracer.calls.clear()
                _iterate(own, problem, degrees, tracer)
                _mark_optimizer(marks, tracer, own.optimizer)
            del own
        calls = Counter(tracer.calls)
    return summary(tracer.events, begun, first, marks, rank), calls


def _check(problem: Problem, degrees: Degrees, rank: int) -> None:
    shape, stages = Shape.of(problem.workload), degrees.pp * degrees.chunks
    if not 0 <= rank < degrees.num_ranks:
        raise ValueError(f"rank must be from 0 to {degrees.num_ranks - 1}, got {rank}")
    if shape.num_layers % stages:
        raise ValueError(f"stages must have as many layers each, got {shape.num_layers} layers for {stages} stages")
    if degrees.zero > 1:
        raise ValueError(f"zero must be 0 or 1 (the distributed optimizer), got {degrees.zero}")
    if degrees.schedule != ("interleaved" if degrees.chunks > 1 else "1f1b"):
        raise ValueError(f"schedule must be 1f1b, or interleaved with several chunks, got {degrees.schedule}")


@contextmanager
def _groups(degrees: Degrees) -> Iterator[None]:
    chunks = degrees.chunks if degrees.chunks > 1 else None
    parallel_state.initialize_model_parallel(degrees.tp, degrees.pp, chunks)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _iterate(own: Rank, problem: Problem, degrees: Degrees, tracer: CallTracer) -> None:
    shape, stage = Shape.of(problem.workload), parallel_state.get_pipeline_model_parallel_rank()
    passes = Counter[str]()

    def forward(_: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tracer.where = (ord("F"), stage, passes["F"])
        passes["F"] += 1
        tokens = torch.empty(degrees.microbatch, shape.seq_len, dtype=torch.int64)
        labels, positions = torch.empty_like(tokens), torch.empty_like(tokens)
        mask = torch.empty(1, 1, shape.seq_len, shape.seq_len, dtype=torch.bool)
        return model(tokens, positions, mask, labels=labels), _mean

    backward_step = schedules.backward_step

    def backward(*args: Any, **kwargs: Any) -> Any:
        tracer.where = (ord("B"), stage, passes["B"])
        passes["B"] += 1
        return backward_step(*args, **kwargs)

    for chunk in own.chunks:
        chunk.zero_grad_buffer()
    own.optimizer.zero_grad()
    with patch.object(schedules, "backward_step", backward):
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(())] * len(own.chunks),
            model=own.chunks,
            num_microbatches=problem.global_batch // (degrees.dp * degrees.microbatch),
            seq_length=shape.seq_len,
            micro_batch_size=degrees.microbatch,
            decoder_seq_length=shape.seq_len,
            forward_only=False,
        )
    tracer.where = (ord("O"), -1, -1)
    own.optimizer.step()


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss, as pretraining scripts do."""
    return losses.float().sum() / losses.numel(), {}


def _mark(marks: Marks, tracer: CallTracer, chunk: Any) -> None:
    chunk.module.module.model_type = ModelType.encoder_or_decoder
    marks.parameters |= {tracer.see(parameter) for parameter in chunk.parameters()}
    marks.gradients |= {tracer.see(buffer.grad_data) for buffer in chunk.buffers}


def _mark_optimizer(marks: Marks, tracer: CallTracer, optimizer: Any) -> None:
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        states = [value for state in one.optimizer.state.values() for value in state.values()]
        masters = [parameter for group in one.optimizer.param_groups for parameter in group["params"]]
        seen = {tracer.see(each) for each in [*states, *masters] if isinstance(each, torch.Tensor)}
        marks.optimizer |= seen - marks.parameters
