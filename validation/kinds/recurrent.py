"""Torch for recurrent layers, additive attention, concatenation, and scores with relative positions."""

from __future__ import annotations

import torch

from validation.kinds.operator_context import Forward, OperatorContext, Tensors, builds, unpacked
from validation.kinds.shared_tensors import shared
from workloads.kinds.attributes import flag, integer


@builds("lstm")
def build_lstm(context: OperatorContext) -> Forward:
    """One layer of LSTM, from a zero state."""
    hidden = integer(context.local.attributes, "hidden")
    both = flag(context.local.attributes, "bidirectional")

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        (x,) = inputs
        zero = x.new_zeros(2 if both else 1, x.shape[0], hidden)
        found, _, _ = torch.lstm(x, (zero, zero), list(parameters), True, 1, 0.0, True, both, True)
        return (found,)

    return forward


@builds("additive_attention")
def build_additive_attention(context: OperatorContext) -> Forward:
    """Weighted memory; the scores are those of a small network on every pair."""

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        (queries, memory), (query, key, score) = inputs, parameters
        pairs = (queries @ query.T).unsqueeze(2) + (memory @ key.T).unsqueeze(1)
        weights = torch.softmax(torch.tanh(pairs) @ score, dim=-1)
        return (weights @ memory,)

    return forward


@builds("concat")
def build_concat(context: OperatorContext) -> Forward:
    """Features side by side."""
    return lambda inputs, parameters: (torch.cat(list(inputs), dim=-1),)


@shared
def _sinusoid(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the encodings of distances ``tokens - 1`` down to ``1 - tokens``: ``(2 S - 1, hidden)``."""
    distances = torch.arange(tokens - 1, -tokens, -1, dtype=torch.float32, device=device)
    exponents = torch.arange(0, hidden, 2, dtype=torch.float32, device=device) / hidden
    angles = distances[:, None] / 10_000.0**exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :hidden].to(dtype)


@shared
def _other_half(tokens: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return 1 where query and key are in different halves of the tokens, else 0: ``(S, S)``."""
    halves = torch.arange(tokens, device=device) * 2 >= tokens
    return (halves[:, None] != halves[None, :]).to(dtype)


def _shifted(scores: torch.Tensor) -> torch.Tensor:
    """Return what query i has for key j, ``(..., S, S)``, of scores for rows of the sinusoid, ``(..., S, 2 S - 1)``.

    It is that of distance i - j, row ``S - 1 - i + j``: one step less to the right in each row, by strides alone, so
    that autograd keeps nothing.
    """
    *leading, tokens, rows = scores.shape
    dense = scores.contiguous()
    return dense.as_strided((*leading, tokens, tokens), (*dense.stride()[:-2], rows - 1, 1), tokens - 1)


@builds("relative_score")
def build_relative_score(context: OperatorContext) -> Forward:
    """Content, position and segment terms; the first half of the tokens is one segment, the rest the other."""
    attributes = context.local.attributes
    dim, hidden = integer(attributes, "head_dim"), integer(attributes, "hidden")

    def forward(inputs: Tensors, parameters: Tensors) -> tuple[torch.Tensor, ...]:
        position, content_bias, position_bias, segment_bias, segment = parameters
        packed = unpacked(inputs[0], -1, (-1, 3, dim))
        queries, keys = packed[..., 0, :].transpose(1, 2), packed[..., 1, :].transpose(1, 2)
        samples, heads, tokens, _ = queries.shape

        def by_head(bias: torch.Tensor) -> torch.Tensor:
            return bias.view(heads, 1, dim)

        scores = (queries + by_head(content_bias)) @ keys.transpose(-1, -2)
        encodings = _sinusoid(tokens, hidden, queries.dtype, queries.device).expand(samples, -1, -1) @ position.T
        places = encodings.view(samples, -1, heads, dim).permute(0, 2, 3, 1)
        scores = scores + _shifted((queries + by_head(position_bias)) @ places)
        kinds = segment.view(2, heads, dim).permute(1, 2, 0)
        same = (queries + by_head(segment_bias)) @ kinds
        other = _other_half(tokens, queries.dtype, queries.device)
        return (scores + torch.lerp(same[..., :1], same[..., 1:], other),)

    return forward
