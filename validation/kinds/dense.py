"""Torch for matrix products with a weight, and embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from validation.kinds.elementwise import drop
from validation.kinds.operator_context import Forward, Gather, OperatorContext, Reduce, Tensors, builds
from workloads.kinds.attributes import flag, integer, real

_Function: Any = torch.autograd.Function


class _AddOnce(_Function):  # type: ignore[misc]
    """Adds a term to a partial sum on one rank only, and gives every rank the term's whole gradient."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, term: torch.Tensor, applies: bool) -> torch.Tensor:
        ctx.shape = term.shape
        return total + term if applies else total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,) = gradients
        return gradient, gradient.sum_to_size(ctx.shape), None


class _AddToParts(_Function):  # type: ignore[misc]
    """Adds a term to a partial sum on one rank only, in place, and gives each rank the gradient of its tokens."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, term: torch.Tensor, applies: bool, part: int, num_parts: int
    ) -> torch.Tensor:
        ctx.shape, ctx.part, ctx.num_parts = term.shape, part, num_parts
        ctx.mark_dirty(total)
        return total.add_(term) if applies else total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        (gradient,) = gradients
        own = gradient.tensor_split(ctx.num_parts, dim=1)[ctx.part]
        return gradient, own.sum_to_size(ctx.shape), None, None, None


def add_once(total: torch.Tensor, term: torch.Tensor, *, applies: bool) -> torch.Tensor:
    """Return ``total + term`` where ``applies``, else ``total``; the term's gradient is whole everywhere."""
    result: torch.Tensor = _AddOnce.apply(total, term, applies)
    return result


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, applies: bool) -> torch.Tensor:
    """Return ``x @ weight.T + bias``; the bias only where ``applies`` (a row split's ranks sum up)."""
    if bias is None or applies:
        return F.linear(x, weight, bias)
    return add_once(F.linear(x, weight), bias, applies=False)


@builds("linear")
def build_linear(context: OperatorContext) -> Forward:
    """Linear; the weight is ``(out, in)``."""
    applies = context.applies(1)
    part, num_parts = context.coordinate("row_sequence"), context.degree("row_sequence")

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        bias = parameters[1] if len(parameters) > 1 else None
        if bias is not None and num_parts > 1:
            return (_AddToParts.apply(F.linear(inputs[0], parameters[0]), bias, applies, part, num_parts),)
        return (project(inputs[0], parameters[0], bias, applies=applies),)

    return forward


@builds("cross_projection")
def build_cross_projection(context: OperatorContext) -> Forward:
    """Queries of one stream, keys and values of another."""
    applies = context.applies(2)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        biases = parameters[2:] or (None, None)
        return tuple(
            project(inputs[number], parameters[number], biases[number], applies=applies) for number in range(2)
        )

    return forward


@builds("pooler")
def build_pooler(context: OperatorContext) -> Forward:
    """The first token through a linear and tanh."""

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        return (torch.tanh(F.linear(inputs[0][:, 0], parameters[0], parameters[1])),)

    return forward


class _SumOfRows(_Function):  # type: ignore[misc]
    """Sum over the ranks that a vocabulary is cut over; each needs the whole gradient for its rows."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        return reduce(found.clone(), "sum", "vocab_sequence")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _OwnPart(_Function):  # type: ignore[misc]
    """A rank's part of the sequence; gradients of all parts are gathered."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, own: slice, gather: Gather) -> torch.Tensor:
        ctx.gather = gather
        return whole[:, own].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        return ctx.gather(gradients[0], "vocab_sequence", 1), None, None


@builds("embedding")
def build_embedding(context: OperatorContext) -> Forward:
    """Token look-up, positions and segments; a vocabulary split gives a partial sum, or a part of the sequence.

    The graph has no segment ids: a sequence is taken to be of equal segments, one after the other.
    """
    attributes = context.local.attributes
    rows = context.parameter_boxes[0][0]
    is_cut = rows.stop - rows.start < integer(attributes, "vocab")
    tokens = context.input_boxes[0][1]
    has_positions, num_segments = integer(attributes, "positions", 0) > 0, integer(attributes, "segments", 0)
    length = context.input_shapes[0][1]
    places = torch.arange(tokens.start, tokens.stop, device=context.device)
    segments = places * num_segments // length
    own = context.output_boxes[0][1]
    sums = own != tokens
    applies = sums or context.applies(1)
    probability = real(attributes, "dropout", 0.0)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        ids = inputs[0]
        if is_cut:
            outside = (ids < rows.start) | (ids >= rows.stop)
            found = F.embedding((ids - rows.start).masked_fill(outside, 0), parameters[0])
            found = found.masked_fill(outside.unsqueeze(-1), 0.0)
        else:
            found = F.embedding(ids, parameters[0])
        if sums:
            found = _SumOfRows.apply(found, context.reduce)
        if has_positions:
            found = add_once(found, parameters[1][tokens], applies=applies)
        if num_segments:
            found = add_once(found, F.embedding(segments, parameters[-1]), applies=applies)
        if sums:
            found = _OwnPart.apply(found, own, context.gather)
        return (drop(context, found, probability) if probability > 0 else found,)

    return forward


@builds("patch_embedding")
def build_patch_embedding(context: OperatorContext) -> Forward:
    """Image patches through a linear, a class token in front, positions added."""
    attributes = context.local.attributes
    patch = integer(attributes, "patch")
    class_token, positions = flag(attributes, "class_token", True), flag(attributes, "positions", True)
    probability = real(attributes, "dropout", 0.0)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        images = inputs[0]
        samples, channels, side, _ = images.shape
        grid = images.reshape(samples, channels, side // patch, patch, side // patch, patch)
        patches = grid.permute(0, 2, 4, 1, 3, 5).reshape(samples, (side // patch) ** 2, channels * patch * patch)
        found = F.linear(patches, parameters[0], parameters[1])
        if class_token:
            found = torch.cat([parameters[-1].expand(samples, 1, -1), found], dim=1)
        if positions:
            found = found + parameters[2]
        return (drop(context, found, probability) if probability > 0 else found,)

    return forward
