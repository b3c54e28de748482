"""Torch for attention. Queries, keys and values travel packed, interleaved by key-value head."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812

from validation.operator_context import Forward, OperatorContext, Tensors, builds, unpacked
from workloads.kinds.attributes import flag, integer
from workloads.kinds.base import Attributes


def _repeats(attributes: Attributes) -> int:
    """Query heads per key-value head."""
    heads = integer(attributes, "heads")
    return heads // integer(attributes, "kv_heads", heads)


def _queries(attributes: Attributes, source: torch.Tensor) -> torch.Tensor:
    """Return queries ``(B, G, R, S, D)`` of a packed ``(B, S, ...)``: G groups of R heads."""
    repeats, dim = _repeats(attributes), integer(attributes, "head_dim")
    if flag(attributes, "cross"):
        return unpacked(source, -1, (-1, repeats, dim)).permute(0, 2, 3, 1, 4)
    return unpacked(source, -1, (-1, repeats + 2, dim))[..., :repeats, :].permute(0, 2, 3, 1, 4)


def _pair(attributes: Attributes, source: torch.Tensor, number: int) -> torch.Tensor:
    """Return keys (``number`` 0) or values (1), ``(B, G, S, D)``."""
    width = 2 if flag(attributes, "cross") else _repeats(attributes) + 2
    packed = unpacked(source, -1, (-1, width, integer(attributes, "head_dim")))
    return packed[..., width - 2 + number, :].transpose(1, 2)


@builds("attention_score")
def build_attention_score(context: OperatorContext) -> Forward:
    """Queries times keys; the scale is the softmax's."""
    attributes = context.local.attributes

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        keys = _pair(attributes, inputs[1], 0).unsqueeze(2).transpose(-1, -2)
        return (torch.matmul(_queries(attributes, inputs[0]), keys).flatten(1, 2),)

    return forward


@lru_cache(maxsize=32)
def _mask(queries: int, keys: int, causal: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what is added to scores: 0, or minus infinity where attention must not look."""
    mask = torch.zeros(queries, keys, dtype=dtype, device=device)
    if causal:
        later = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)
        mask.masked_fill_(later, float("-inf"))
    return mask


@lru_cache(maxsize=32)
def _buckets(queries: int, keys: int, count: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Return the bucket of each relative position: half exact, half logarithmic up to 128 (Raffel et al. 2020)."""
    relative = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
    buckets = torch.zeros_like(relative)
    if causal:
        relative = -relative.clamp(max=0)
    else:
        count //= 2
        buckets = (relative > 0) * count
        relative = relative.abs()
    exact = max(count // 2, 1)
    far = exact + (torch.log(relative.clamp(min=1) / exact) / math.log(max(128 / exact, 1.01)) * (count - exact)).to(
        torch.int64
    )
    return buckets + torch.where(relative < exact, relative, far.clamp(exact, max(count - 1, 0)))


@builds("softmax")
def build_softmax(context: OperatorContext) -> Forward:
    """Scale, mask, softmax; in fp32 where scores are lower precision. Head size and mask are the producer's.

    Raises:
        ValueError: If the scores do not come from attention.
    """
    maker = context.producers[0]
    if maker is None or maker.kind not in ("attention_score", "relative_score"):
        raise ValueError(
            f"operator {context.operator.name!r}: softmax executes on the scores of attention only, got "
            f"{'a graph input' if maker is None else maker.kind}"
        )
    _, _, queries, keys = context.local.inputs[0]
    scale = integer(maker.attributes, "head_dim") ** -0.5
    causal = flag(maker.attributes, "causal")
    mask = _mask(queries, keys, causal, context.dtype, context.device)
    count = integer(context.local.attributes, "position_buckets", 0)
    buckets = _buckets(queries, keys, count, causal, context.device) if count else None

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        scores = inputs[0] * scale
        if buckets is not None:
            scores = scores + F.embedding(buckets, parameters[0]).permute(2, 0, 1)
        scores = scores + mask
        return (torch.softmax(scores, dim=-1, dtype=torch.float32).to(inputs[0].dtype),)

    return forward


@builds("attention_context")
def build_attention_context(context: OperatorContext) -> Forward:
    """Probabilities times values."""
    attributes = context.local.attributes
    repeats = _repeats(attributes)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        values = _pair(attributes, inputs[1], 1).unsqueeze(2)
        mixed = torch.matmul(unpacked(inputs[0], 1, (-1, repeats)), values)
        return (mixed.permute(0, 3, 1, 2, 4).flatten(2),)

    return forward


@builds("flash_attention")
def build_flash_attention(context: OperatorContext) -> Forward:
    """Fused attention, torch's ``scaled_dot_product_attention``."""
    attributes = context.local.attributes
    causal, grouped = flag(attributes, "causal"), _repeats(attributes) > 1

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        queries = _queries(attributes, inputs[0]).flatten(1, 2)
        keys, values = (_pair(attributes, inputs[1], number) for number in range(2))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=grouped)
        return (mixed.transpose(1, 2).flatten(2),)

    return forward


@lru_cache(maxsize=32)
def _rotations(tokens: int, repeats: int, dim: int, device: torch.device) -> torch.Tensor:
    """Return complex factors ``(S, R + 2, D / 2)``; values are not turned."""
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.arange(tokens, device=device)[:, None] * frequency
    turned = torch.polar(torch.ones_like(angles), angles)
    parts = [turned] * (repeats + 1) + [torch.ones_like(turned)]
    return torch.stack(parts, dim=1)


@builds("rotary")
def build_rotary(context: OperatorContext) -> Forward:
    """Rotary positions: neighbours in a head are the two parts of a complex number, multiplied by a table."""
    attributes = context.local.attributes
    repeats, dim = _repeats(attributes), integer(attributes, "head_dim")
    table = _rotations(context.local.inputs[0][1], repeats, dim, context.device).unsqueeze(1)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        packed = unpacked(inputs[0].float(), -1, (-1, repeats + 2, dim // 2, 2))
        turned = torch.view_as_real(torch.view_as_complex(packed) * table)
        return (turned.flatten(2).to(inputs[0].dtype),)

    return forward
