"""Torch for elementwise operators and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from datafiles.words import counted
from validation.kinds.operator_context import Forward, OperatorContext, Tensors, builds, interleaving, unpacked
from workloads.kinds.attributes import real


@builds("gelu")
def build_gelu(context: OperatorContext) -> Forward:
    """Exact GELU."""
    return lambda inputs, parameters: (F.gelu(inputs[0]),)


@builds("relu")
def build_relu(context: OperatorContext) -> Forward:
    """ReLU."""
    return lambda inputs, parameters: (F.relu(inputs[0]),)


@builds("swiglu")
def build_swiglu(context: OperatorContext) -> Forward:
    """``silu(gate) * up``; gate and up alternate in blocks, so that a column split is a contiguous slice.

    Raises:
        ValueError: If the blocks do not divide over the column axes.
    """
    features = context.input_shapes[0][-1] // 2
    blocks, degree = interleaving(features), context.degree("column")
    if blocks % degree:
        raise ValueError(
            f"operator {context.operator.name!r}: the executor interleaves gate and up in {counted(blocks, 'block')}, "
            f"which a column split must divide, got {degree}"
        )
    blocks //= degree

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        gate, up = unpacked(inputs[0], -1, (blocks, 2, -1)).unbind(-2)
        return ((F.silu(gate) * up).flatten(-2),)

    return forward


def drop(context: OperatorContext, tensor: torch.Tensor, probability: float) -> torch.Tensor:
    """Return ``tensor`` with dropout; the mask depends on microbatch, operator and region only."""
    # Not torch.manual_seed, which seeds every device of every backend that there could be, at the host's expense.
    own = torch.cuda.default_generators[tensor.device.index] if tensor.is_cuda else torch.default_generator
    own.manual_seed(context.seed())
    dropped, _ = torch.native_dropout(tensor, probability, True)
    return dropped


@builds("dropout")
def build_dropout(context: OperatorContext) -> Forward:
    """Dropout that keeps a one-byte mask."""
    probability = real(context.local.attributes, "probability")
    if probability == 0:
        return lambda inputs, parameters: (inputs[0].view_as(inputs[0]),)
    return lambda inputs, parameters: (drop(context, inputs[0], probability),)


@builds("add")
def build_add(context: OperatorContext) -> Forward:
    """Sum of two tensors."""
    return lambda inputs, parameters: (inputs[0] + inputs[1],)


@builds("dropout_add")
def build_dropout_add(context: OperatorContext) -> Forward:
    """``residual + dropout(x)``."""
    probability = real(context.local.attributes, "probability")
    if probability == 0:
        return lambda inputs, parameters: (inputs[0] + inputs[1],)
    return lambda inputs, parameters: (drop(context, inputs[0], probability) + inputs[1],)


@builds("layer_norm")
def build_layer_norm(context: OperatorContext) -> Forward:
    """Layer norm over the last dimension."""
    width = context.local.inputs[0][-1:]

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        return (F.layer_norm(inputs[0], width, parameters[0], parameters[1]),)

    return forward


@builds("rms_norm")
def build_rms_norm(context: OperatorContext) -> Forward:
    """RMS norm over the last dimension; one kernel on CUDA, a chain on CPU."""
    width = context.local.inputs[0][-1:]

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        return (F.rms_norm(inputs[0], width, parameters[0], 1e-6),)

    return forward
