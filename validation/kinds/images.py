"""Torch for convolutions, batch norm and pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from validation.kinds.dense import add_once
from validation.kinds.operator_context import Forward, OperatorContext, Tensors, builds
from workloads.kinds.attributes import flag, integer


@builds("conv2d")
def build_conv2d(context: OperatorContext) -> Forward:
    """Convolution; an input-channel split leaves a partial sum, to which one rank adds the bias."""
    attributes = context.local.attributes
    stride, padding = integer(attributes, "stride", 1), integer(attributes, "padding", 0)
    applies = context.applies(1)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        bias = parameters[1] if len(parameters) > 1 else None
        if bias is None or applies:
            return (F.conv2d(inputs[0], parameters[0], bias, stride, padding),)
        found = F.conv2d(inputs[0], parameters[0], None, stride, padding)
        return (add_once(found, bias.view(-1, 1, 1), applies=False),)

    return forward


def normalised(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return ``x`` normalised by the statistics of this rank's samples."""
    return F.batch_norm(x, None, None, weight, bias, training=True)


@builds("batch_norm")
def build_batch_norm(context: OperatorContext) -> Forward:
    """Batch norm without running averages; a ReLU in place where the operator has one."""
    rectifies = flag(context.local.attributes, "relu")

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        found = normalised(inputs[0], parameters[0], parameters[1])
        return (F.relu(found, inplace=True) if rectifies else found,)

    return forward


@builds("shortcut")
def build_shortcut(context: OperatorContext) -> Forward:
    """``x + batch_norm(conv1x1(residual))``."""
    stride = integer(context.local.attributes, "stride", 1)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        projected = F.conv2d(inputs[1], parameters[0], None, stride)
        return (inputs[0] + normalised(projected, parameters[1], parameters[2]),)

    return forward


@builds("max_pool")
def build_max_pool(context: OperatorContext) -> Forward:
    """Maximum of each window."""
    words = [integer(context.local.attributes, *word) for word in (("kernel",), ("stride", 1), ("padding", 0))]
    kernel, stride, padding = words
    return lambda inputs, parameters: (F.max_pool2d(inputs[0], kernel, stride, padding),)


@builds("global_average_pool")
def build_global_average_pool(context: OperatorContext) -> Forward:
    """The mean over all pixels."""
    return lambda inputs, parameters: (inputs[0].mean(dim=(2, 3)),)


@builds("flatten")
def build_flatten(context: OperatorContext) -> Forward:
    """An image as one row of features."""
    return lambda inputs, parameters: (inputs[0].flatten(1).unsqueeze(1),)
