"""Torch for attention. Queries, keys and values travel packed, interleaved by key-value head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812

from validation.kinds.operator_context import Forward, OperatorContext, Tensors, builds, unpacked
from validation.kinds.shared_tensors import shared
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
    window = integer(attributes, "window", 0)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        keys = _pair(attributes, inputs[1], 0).unsqueeze(2)
        queries = _queries(attributes, inputs[0])
        if window:
            queries, keys = (unpacked(source, 3, (-1, window)) for source in (queries, keys))
        scores = torch.matmul(queries, keys.transpose(-1, -2))
        return ((scores.flatten(3, 4) if window else scores).flatten(1, 2),)

    return forward


@shared
def _window_mask(side: int, window: int, shift: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what is added to scores ``(side^2, window)`` in window order: nothing passes the image's old border."""
    width = math.isqrt(window)
    bounds = torch.tensor([side - width, side - shift], device=device)
    bands = torch.bucketize(torch.arange(side, device=device), bounds, right=True)
    regions = 3 * bands[:, None] + bands[None, :]
    regions = unpacked(unpacked(regions, 0, (-1, width)), 2, (-1, width))
    regions = regions.permute(0, 2, 1, 3).reshape(-1, window)
    apart = (regions[:, :, None] != regions[:, None, :]).flatten(0, 1)
    return torch.zeros(apart.shape, dtype=dtype, device=device).masked_fill_(apart, float("-inf"))


@shared
def _window_buckets(window: int, device: torch.device) -> torch.Tensor:
    """Return the bucket of each pair of tokens of a window: rows apart, columns apart (Liu et al. 2021)."""
    width = math.isqrt(window)
    places = torch.arange(width, device=device)
    apart = places[:, None] - places[None, :] + width - 1
    pairs = apart[:, None, :, None] * (2 * width - 1) + apart[None, :, None, :]
    return pairs.reshape(window, window)


@shared
def _mask(queries: int, keys: int, causal: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return what is added to scores: 0, or minus infinity where attention must not look."""
    mask = torch.zeros(queries, keys, dtype=dtype, device=device)
    if causal:
        later = torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)
        mask.masked_fill_(later, float("-inf"))
    return mask


@shared
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
    attributes = context.local.attributes
    count = integer(attributes, "position_buckets", 0)
    window, shift = integer(attributes, "window", 0), integer(attributes, "shift", 0)
    if shift:
        side = integer(attributes, "side")
        mask = _window_mask(side, window, shift, context.dtype, context.device)
    else:
        mask = _mask(queries, keys, causal, context.dtype, context.device)
    if count and window:
        buckets: torch.Tensor | None = _window_buckets(window, context.device)
    else:
        buckets = _buckets(queries, keys, count, causal, context.device) if count else None
    repeats = queries // window if window else 1

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        scores = inputs[0] * scale
        if buckets is not None:
            # Heads outermost in memory too: added as a view, each number of the bias would be read with its sector.
            bias = F.embedding(buckets, parameters[0]).permute(2, 0, 1).contiguous()
            scores = scores + (bias.repeat(1, repeats, 1) if repeats > 1 else bias)
        scores = scores + mask
        return (torch.softmax(scores, dim=-1, dtype=torch.float32).to(inputs[0].dtype),)

    return forward


@builds("attention_context")
def build_attention_context(context: OperatorContext) -> Forward:
    """Probabilities times values."""
    attributes = context.local.attributes
    repeats = _repeats(attributes)
    window = integer(attributes, "window", 0)

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        values = _pair(attributes, inputs[1], 1).unsqueeze(2)
        weights = unpacked(inputs[0], 1, (-1, repeats))
        if window:
            values, weights = (unpacked(source, 3, (-1, window)) for source in (values, weights))
        mixed = torch.matmul(weights, values)
        mixed = mixed.flatten(3, 4) if window else mixed
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


@shared
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
    expands = flag(attributes, "repeats")

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        packed = unpacked(inputs[0].float(), -1, (-1, repeats + 2, dim // 2, 2))
        turned = torch.view_as_real(torch.view_as_complex(packed) * table)
        made = turned.flatten(2).to(inputs[0].dtype)
        if expands:  # to (B, S, G, R, 3, D): each query head with keys and values of its own
            groups = unpacked(made, -1, (-1, repeats + 2, dim))
            queries, keys, values = torch.split(groups, [repeats, 1, 1], dim=3)
            made = torch.stack([queries, keys.expand_as(queries), values.expand_as(queries)], dim=4).flatten(2)
        return (made,)

    return forward
