"""Torch for rearrangements of image tokens."""

from __future__ import annotations

import torch

from validation.kinds.operator_context import Forward, OperatorContext, Tensors, builds, unpacked
from workloads.kinds.attributes import flag, integer


@builds("window_order")
def build_window_order(context: OperatorContext) -> Forward:
    """Row order to window order, rolled first; or back, rolled last."""
    attributes = context.local.attributes
    side, window = integer(attributes, "side"), integer(attributes, "window")
    shift, reverse = integer(attributes, "shift", 0), flag(attributes, "reverse")
    count = side // window

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        x = inputs[0]
        if reverse:
            image = unpacked(x, 1, (count, count, window, window)).transpose(2, 3).reshape(len(x), side, side, -1)
            return ((image.roll((shift, shift), (1, 2)) if shift else image).flatten(1, 2),)
        image = unpacked(x, 1, (side, side))
        image = image.roll((-shift, -shift), (1, 2)) if shift else image
        tiles = unpacked(unpacked(image, 2, (count, window)), 1, (count, window))
        return (tiles.transpose(2, 3).reshape(len(x), side * side, -1),)

    return forward


@builds("patch_merge")
def build_patch_merge(context: OperatorContext) -> Forward:
    """Two by two neighbours side by side."""
    side = integer(context.local.attributes, "side")

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        x = inputs[0]
        tiles = unpacked(x, 1, (side // 2, 2, side // 2, 2)).transpose(2, 3)
        return (tiles.reshape(len(x), side * side // 4, -1),)

    return forward


@builds("token_mean")
def build_token_mean(context: OperatorContext) -> Forward:
    """The mean over tokens."""
    return lambda inputs, parameters: (inputs[0].mean(dim=1),)
