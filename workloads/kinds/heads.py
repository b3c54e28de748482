"""What attention operators share: how queries, keys and values are packed, and the split by heads.

Queries, keys and values travel packed: self attention reads ``(B, S, (A + 2 G) D)`` with A query heads, G
key-value heads and head dimension D, interleaved by head, so that a head split is a contiguous slice of the
last dimension. Cross attention reads ``(B, Sq, A D)`` and ``(B, Sk, 2 G D)``.

Attributes of the operators: ``heads`` (A), ``kv_heads`` (G, default A), ``head_dim`` (D), ``cross`` (default
false), ``causal``; ``window`` (default 0: none), tokens that attend to each other: tokens lie window after window
(``window_order``), and scores are ``(B, A, S, window)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, MemoryBound
from workloads.kinds.attributes import flag, integer, require_rank
from workloads.kinds.base import Attributes, Kind, Local, Shape, Split, SplitTable
from workloads.placements import Shard

HEADS_IN_FEATURES = Shard(2)
HEADS_IN_SCORES = Shard(1)


def key_value_heads(attributes: Attributes) -> int:
    """Return how many heads keys and values have."""
    return integer(attributes, "kv_heads", integer(attributes, "heads"))


def source_features(attributes: Attributes) -> tuple[int, int]:
    """Return the features of the query source and of the key-value source."""
    dim = integer(attributes, "head_dim")
    queries, pairs = integer(attributes, "heads") * dim, 2 * key_value_heads(attributes) * dim
    return (queries, pairs) if flag(attributes, "cross") else (queries + pairs, queries + pairs)


def check_sources(kind: str, attributes: Attributes, shapes: Sequence[Shape], features: Sequence[int]) -> None:
    """Raise ValueError where a source is not ``(samples, tokens, features)``."""
    for shape, wanted in zip(shapes, features, strict=True):
        require_rank(kind, shape, 3, "(samples, tokens, packed features)")
        if shape[2] != wanted:
            raise ValueError(
                f"{kind} with heads={attributes['heads']}, kv_heads={key_value_heads(attributes)}, "
                f"head_dim={attributes['head_dim']} needs {wanted} packed features, got {shape}"
            )


def local_heads(local: Local) -> int:
    """Query heads of this rank: the last dimension is cut by whole heads."""
    features = source_features(local.attributes)[0]
    return integer(local.attributes, "heads") * local.inputs[0][2] // features


def slice_gradients(local: Local, features: Sequence[int]) -> list[Kernel]:
    """Return what gradients of views of the packed tensor cost where each goes back alone (``slices_packed``).

    Args:
        local: The operator; its last input is the packed tensor.
        features: Features of each view, of all heads of a rank.
    """
    if not local.implementation.slices_packed:
        return []
    *tokens, _ = local.inputs[-1]
    each, whole = float(local.element_bytes * prod(tokens)), float(local.element_bytes * prod(local.inputs[-1]))
    found: list[Kernel] = []
    for count in features:
        found += [MemoryBound(0.0, whole), MemoryBound(each * count, each * count, "strided")]
    return found


def packed_sum(local: Local) -> list[Kernel]:
    """Return the sum of two gradients of the packed tensor, the last input (``slices_packed``)."""
    whole = float(local.element_bytes * prod(local.inputs[-1]))
    return [MemoryBound(2 * whole, whole)] if local.implementation.slices_packed else []


def local_key_value_heads(local: Local) -> int:
    """Key-value heads of this rank, of an operator whose last input they come in."""
    return key_value_heads(local.attributes) * local.inputs[-1][2] // source_features(local.attributes)[1]


class ByHead(Kind):
    """What attention operators share: the head split and its limit."""

    input_placements: tuple[Shard, ...]
    output_placement: Shard
    num_parameters = 0

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        head = Split(self.input_placements, (self.output_placement,))
        return SplitTable(self.num_inputs, 1, 0, {"head": head}).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return key_value_heads(attributes) if split == "head" else None
