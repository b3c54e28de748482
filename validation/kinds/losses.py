"""Torch for output layers with their loss. A sample's loss is the mean over its tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from validation.kinds.operator_context import Box, Forward, OperatorContext, Reduce, Tensors, builds

_Function: Any = torch.autograd.Function


class _VocabParallelCrossEntropy(_Function):  # type: ignore[misc]
    """Cross entropy of logits whose vocabulary is cut: Megatron-LM mpu/cross_entropy.py."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, rows: slice, reduce: Reduce) -> torch.Tensor:
        largest = reduce(logits.max(dim=-1).values, "max", "vocab")
        logits = logits - largest.unsqueeze(-1)
        outside = (labels < rows.start) | (labels >= rows.stop)
        places = (labels - rows.start).masked_fill(outside, 0).unsqueeze(-1)
        target = logits.gather(-1, places).squeeze(-1).masked_fill(outside, 0.0)
        target = reduce(target, "sum", "vocab")
        softmax = logits.exp_()
        total = reduce(softmax.sum(dim=-1), "sum", "vocab")
        softmax.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, outside, places)
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        softmax, outside, places = ctx.saved_tensors
        hits = (~outside).to(softmax.dtype).unsqueeze(-1)
        gradient = softmax.scatter_add(-1, places, -hits)
        return gradient.mul_(gradients[0].unsqueeze(-1)), None, None, None


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, rows: Box, vocab: int, reduce: Reduce) -> torch.Tensor:
    if rows[0].stop - rows[0].start < vocab:
        found: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, labels, rows[0], reduce)
        return found
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


@builds("lm_loss")
def build_lm_loss(context: OperatorContext) -> Forward:
    """Logits and cross entropy; a sequence split gives partial sums over tokens."""
    rows, vocab = context.parameter_boxes[0], context.parameter_shapes[0][0]
    tokens = context.input_shapes[0][1]

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        bias = parameters[1] if len(parameters) > 1 else None
        logits = F.linear(inputs[0], parameters[0], bias).to(context.logits_dtype)
        losses = _cross_entropy(logits, inputs[1], rows, vocab, context.reduce)
        return (losses.float().sum(dim=1) / tokens,)

    return forward


@builds("classifier_loss")
def build_classifier_loss(context: OperatorContext) -> Forward:
    """A linear to classes and cross entropy; of a sequence the first token counts."""

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        x = inputs[0] if inputs[0].dim() == 2 else inputs[0][:, 0]
        bias = parameters[1] if len(parameters) > 1 else None
        logits = F.linear(x, parameters[0], bias).to(context.logits_dtype)
        return (F.cross_entropy(logits, inputs[1], reduction="none").float(),)

    return forward


@builds("loss_sum")
def build_loss_sum(context: OperatorContext) -> Forward:
    """The sum of two losses."""
    return lambda inputs, parameters: (inputs[0] + inputs[1],)
