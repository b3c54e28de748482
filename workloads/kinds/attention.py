"""Attention in separate operators, and fused.

Queries, keys and values travel packed: self attention reads ``(B, S, (A + 2 G) D)`` with A query heads, G
key-value heads and head dimension D, interleaved by head, so that a head split is a contiguous slice of the
last dimension. Cross attention reads ``(B, Sq, A D)`` and ``(B, Sk, 2 G D)``.

Attributes of the operators: ``heads`` (A), ``kv_heads`` (G, default A), ``head_dim`` (D), ``cross`` (default
false), ``causal``; ``window`` (default 0: none), tokens that attend to each other: tokens lie window after window
(``window_order``), and scores are ``(B, A, S, window)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kernels import FlashAttention, Kernel, Matmul, MemoryBound
from workloads.kinds import elementary
from workloads.kinds.attributes import flag, integer, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    Attributes,
    Kind,
    Local,
    Parameter,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.registry import register
from workloads.placements import Shard

HEADS_IN_FEATURES = Shard(2)
HEADS_IN_SCORES = Shard(1)


def _key_value_heads(attributes: Attributes) -> int:
    return integer(attributes, "kv_heads", integer(attributes, "heads"))


def _source_features(attributes: Attributes) -> tuple[int, int]:
    """Return the features of the query source and of the key-value source."""
    dim = integer(attributes, "head_dim")
    queries, pairs = integer(attributes, "heads") * dim, 2 * _key_value_heads(attributes) * dim
    return (queries, pairs) if flag(attributes, "cross") else (queries + pairs, queries + pairs)


def _check_sources(kind: str, attributes: Attributes, shapes: Sequence[Shape], features: Sequence[int]) -> None:
    for shape, wanted in zip(shapes, features, strict=True):
        require_rank(kind, shape, 3, "(samples, tokens, packed features)")
        if shape[2] != wanted:
            raise ValueError(
                f"{kind} with heads={attributes['heads']}, kv_heads={_key_value_heads(attributes)}, "
                f"head_dim={attributes['head_dim']} needs {wanted} packed features, got {shape}"
            )


def _local_heads(local: Local) -> int:
    """Query heads of this rank: the last dimension is cut by whole heads."""
    features = _source_features(local.attributes)[0]
    return integer(local.attributes, "heads") * local.inputs[0][2] // features


def _transposes(local: Local, *elements: int) -> list[Kernel]:
    """Return the copies from tokens to heads, or back, of tensors that matmuls elsewhere read with strides."""
    if not local.implementation.elementary:
        return []
    return [kernel for count in elements for kernel in elementary.chain((elementary.MAP,), count * local.element_bytes)]


def _products(attributes: Attributes, scores: Shape) -> tuple[int, int, int]:
    """Return the batch, rows and columns of the products that make scores ``(B, A, Sq, Sk)``, by window."""
    samples, heads, queries, keys = scores
    windows = queries // integer(attributes, "window") if integer(attributes, "window", 0) else 1
    return samples * heads * windows, queries // windows, keys


class _ByHead(Kind):
    """What attention operators share: the head split and its limit."""

    input_placements: tuple[Shard, ...]
    output_placement: Shard
    num_parameters = 0

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        head = Split(self.input_placements, (self.output_placement,))
        return SplitTable(self.num_inputs, 1, 0, {"head": head}).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return _key_value_heads(attributes) if split == "head" else None


@register
class AttentionScore(_ByHead):
    """Queries times keys: inputs ``(query source, key source)``, output ``(B, A, Sq, Sk)``.

    In self attention both sources are the same packed tensor, which is kept (once).
    """

    name = "attention_score"
    num_inputs = 2
    input_placements = (HEADS_IN_FEATURES, HEADS_IN_FEATURES)
    output_placement = HEADS_IN_SCORES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        _check_sources(self.name, attributes, inputs, _source_features(attributes))
        window = integer(attributes, "window", 0)
        if window and (inputs[0][1] != inputs[1][1] or inputs[0][1] % window):
            raise ValueError(f"attention_score with window={window} needs whole windows, got {inputs[0][1]} tokens")
        return ((inputs[0][0], integer(attributes, "heads"), inputs[0][1], window or inputs[1][1]),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return Saved("input:0"), Saved("input:1")

    def lasting_buffer(self, local: Local) -> tuple[tuple[Shape, str], ...]:
        return ((local.outputs[0], "activation"),) if local.implementation.keeps_score_buffer else ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        batch, queries, keys = _products(local.attributes, local.outputs[0])
        dim = integer(local.attributes, "head_dim")
        transposes = _transposes(local, batch * queries * dim, batch * keys * dim)
        if phase == FORWARD:
            return [*transposes, Matmul(m=queries, n=keys, k=dim, batch=batch)]
        if phase == BACKWARD_INPUT:
            return [
                Matmul(m=queries, n=dim, k=keys, batch=batch, role="data_gradient"),
                Matmul(m=keys, n=dim, k=queries, batch=batch, role="data_gradient"),
                *transposes,
            ]
        return []


SHORTEST_FUSED = 17
"""Keys from which on Megatron's fused softmax runs (``fused_softmax.py``, ``is_kernel_available``)."""


@register
class Softmax(_ByHead):
    """Scale, mask and softmax of scores ``(B, A, Sq, Sk)``.

    Fused: one kernel that keeps its output. Unfused: scale, mask and softmax apart; scores of 16 bits go through fp32,
    with a cast before and after and a mask that copies the gradient (Aceso's rows of 13B without the fused kernel move
    18.5 times the tensor forward, as this counts). The result is kept in fp32; one of lower precision is a copy, kept
    only by who reads it: GPT 13B without the fused kernel (tensor parallel 4) holds 160 MiB = 4 a s^2 / t more in
    Aceso's profile. Where the scaled scores are kept as well (``Implementation.keeps_scores``), BERT layers hold three
    fp32 score tensors and a mask byte with dropout (13 a s^2 bytes), two without (8 a s^2), as measured by Galvatron.

    A fused causal kernel reads the lower half of what it is given and writes all of its result (Megatron's
    upper-triangular masked softmax): Aceso's V100 times would else need more than the memory's bandwidth.

    Attributes of the operator: ``heads``, ``causal`` (optional), ``position_buckets`` (optional: adds a learned
    relative position bias per head and bucket, as in T5), ``window`` (optional: the bias is of one window, and
    Swin's buckets are two-dimensional).
    """

    name = "softmax"
    input_placements = (HEADS_IN_SCORES,)
    output_placement = HEADS_IN_SCORES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 4, "(samples, heads, queries, keys)")
        return (inputs[0],)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        buckets = integer(attributes, "position_buckets", 0)
        return (Parameter("relative_bias", (buckets, integer(attributes, "heads"))),) if buckets else ()

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        biased = bool(integer(attributes, "position_buckets", 0))
        head = Split(self.input_placements, (self.output_placement,), (Shard(1),) if biased else ())
        return SplitTable(1, 1, int(biased), {"head": head}).build()

    @staticmethod
    def _is_fused(local: Local) -> bool:
        samples, heads, queries, keys = local.outputs[0]
        choice = local.implementation
        longest = choice.fused_softmax_longest
        fits = longest is None or (SHORTEST_FUSED <= keys <= longest and queries % 4 == keys % 4 == 0)
        return choice.fused_softmax and fits and samples * heads % choice.fused_softmax_multiple == 0

    def num_calls(self, phase: str, local: Local) -> int:
        # Unfused, every cast, the scale and the mask are operations of their own, with a node each in backward
        # (Megatron-LM fused_softmax.py, forward_torch_softmax).
        calls = super().num_calls(phase, local)
        return calls if self._is_fused(local) else calls * len(self.kernels(FORWARD, local))

    @staticmethod
    def _unfused_forward(size: float, local: Local) -> list[Kernel]:
        """Scale, mask, softmax; in fp32 between two casts where the scores have 16 bits."""
        if local.implementation.elementary:
            return elementary.chain(elementary.SOFTMAX_FORWARD, size)
        if local.element_bytes == DTYPE_BYTES["fp32"]:
            return [MemoryBound(size, size), MemoryBound(size, size), MemoryBound(size, size, "reduction")]
        elements = size / local.element_bytes
        wide = elements * DTYPE_BYTES["fp32"]
        return [
            MemoryBound(size, wide),
            MemoryBound(wide, wide),
            MemoryBound(wide + elements, wide),
            MemoryBound(wide, wide, "reduction"),
            MemoryBound(wide, size),
        ]

    @staticmethod
    def _unfused_backward(size: float, local: Local) -> list[Kernel]:
        if local.implementation.elementary:
            return elementary.chain(elementary.SOFTMAX_BACKWARD, size)
        if local.element_bytes == DTYPE_BYTES["fp32"]:
            return [MemoryBound(2 * size, size, "reduction"), MemoryBound(size, size), MemoryBound(size, size)]
        elements = size / local.element_bytes
        wide = elements * DTYPE_BYTES["fp32"]
        return [
            MemoryBound(size, wide),
            MemoryBound(2 * wide, wide, "reduction"),
            MemoryBound(wide, wide),  # the mask's gradient is masked in a copy
            MemoryBound(wide + elements, wide),
            MemoryBound(wide, wide),
            MemoryBound(wide, size),
        ]

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if self._is_fused(local) or local.implementation.elementary:
            return (Saved("output:0"),)
        is_high = local.element_bytes == DTYPE_BYTES["fp32"]
        result = Saved("output:0") if is_high else Saved("softmax", local.outputs[0], "fp32")
        return (result, Saved("scores", local.outputs[0], "fp32")) if local.implementation.keeps_scores else (result,)

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        if self._is_fused(local) or phase == BACKWARD_WEIGHT:
            return ()
        # Forward: masked scores beside what they become, in fp32. Backward: the gradient in fp32 before and after
        # the softmax, of which the second is not there yet where the gradient needs no conversion.
        scores = (local.outputs[0], "fp32")
        if phase == FORWARD or local.element_bytes == DTYPE_BYTES["fp32"]:
            return (scores,)
        return scores, (local.outputs[0], "activation")

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.inputs)
        fused = self._is_fused(local)
        rows = _products(local.attributes, local.inputs[0])[1]  # of one window, or all
        _, heads, _, keys = local.inputs[0]
        bias = float(local.element_bytes * heads * rows * keys) if local.parameters else 0.0
        read = 0.5 if fused and flag(local.attributes, "causal") else 1.0
        if phase == FORWARD:
            found: list[Kernel] = [MemoryBound(read * size, size, "reduction")]
            if not fused:
                found = self._unfused_forward(size, local)
            if bias:
                found = [MemoryBound(bias, bias, "gather"), MemoryBound(size + bias, size), *found]
            return found
        if phase == BACKWARD_INPUT:
            return [MemoryBound(2 * read * size, size, "reduction")] if fused else self._unfused_backward(size, local)
        # The bias gradient: a sum over samples, then a scatter into the buckets.
        return [MemoryBound(size, bias, "reduction"), MemoryBound(bias, bias, "gather")] if bias else []


@register
class AttentionContext(_ByHead):
    """Probabilities times values: inputs ``(probabilities, value source)``, output ``(B, Sq, A D)``."""

    name = "attention_context"
    num_inputs = 2
    input_placements = (HEADS_IN_SCORES, HEADS_IN_FEATURES)
    output_placement = HEADS_IN_FEATURES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 4, "(samples, heads, queries, keys)")
        _check_sources(self.name, attributes, inputs[1:], _source_features(attributes)[1:])
        samples, heads, queries, _ = inputs[0]
        return ((samples, queries, heads * integer(attributes, "head_dim")),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return Saved("input:0"), Saved("input:1")

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        batch, queries, keys = _products(local.attributes, local.inputs[0])
        dim = integer(local.attributes, "head_dim")
        if phase == FORWARD:
            # The product is laid out by head; the projection wants it by token: one copy.
            size = size_bytes(local, local.outputs)
            transposes = _transposes(local, batch * keys * dim)
            return [*transposes, Matmul(m=queries, n=dim, k=keys, batch=batch), MemoryBound(size, size)]
        if phase == BACKWARD_INPUT:
            return [
                *_transposes(local, batch * queries * dim),
                Matmul(m=queries, n=keys, k=dim, batch=batch, role="data_gradient"),
                Matmul(m=keys, n=dim, k=queries, batch=batch, role="data_gradient"),
                *_transposes(local, batch * keys * dim),
            ]
        return []


@register
class FlashAttentionOperator(_ByHead):
    """Fused attention: inputs ``(query source, key-value source)``, output ``(B, Sq, A D)``.

    Keeps the sources, the output, and one fp32 log-sum-exp per query and head.
    """

    name = "flash_attention"
    num_inputs = 2
    input_placements = (HEADS_IN_FEATURES, HEADS_IN_FEATURES)
    output_placement = HEADS_IN_FEATURES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        _check_sources(self.name, attributes, inputs, _source_features(attributes))
        return ((inputs[0][0], inputs[0][1], integer(attributes, "heads") * integer(attributes, "head_dim")),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        samples, queries = local.inputs[0][:2]
        logsumexp = Saved("logsumexp", (samples, _local_heads(local), queries), "fp32")
        return Saved("input:0"), Saved("input:1"), Saved("output:0"), logsumexp

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        if phase != BACKWARD_INPUT:
            return ()
        # Gradients of queries add up in fp32; those of grouped keys and values are made for every query head first
        # (FlashAttention-2, mha_bwd: dq_accum, dk_expanded, dv_expanded).
        width = local.outputs[0][2]
        found: list[tuple[Shape, str]] = [((*local.inputs[0][:2], width), "fp32")]
        if _key_value_heads(local.attributes) < integer(local.attributes, "heads"):
            found.append(((*local.inputs[1][:2], 2 * width), "activation"))
        return tuple(found)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if phase == BACKWARD_WEIGHT:
            return []
        causal = flag(local.attributes, "causal") and local.implementation.flash_causal_skip
        fused = FlashAttention(
            batch=local.inputs[0][0] * _local_heads(local),
            query_length=local.inputs[0][1],
            key_length=local.inputs[1][1],
            head_dim=integer(local.attributes, "head_dim"),
            causal=causal,
            backward=phase == BACKWARD_INPUT,
            generation=local.implementation.flash_generation,
        )
        if phase == FORWARD:
            return [fused]
        # First the row sums of gradient times output, in a kernel of their own.
        size = size_bytes(local, local.outputs)
        row_sums = float(DTYPE_BYTES["fp32"] * fused.batch * fused.query_length)
        return [MemoryBound(2 * size, row_sums, "reduction"), fused]


@register
class Rotary(_ByHead):
    """Rotary position embedding of the queries and keys in a packed tensor; keeps nothing but tables.

    Where the packed tensor outlives it (``Implementation.packed_rotary``), what it made is counted here, and the packed
    tensor stands for its output.

    ``repeats`` (default false): it also repeats keys and values for each query head of their group, since batched
    products read them one by one: output ``(B, S, 3 A D)``, nothing packed outlives it. So do Megatron-LM (core 0.3.0,
    transformer/attention.py: ``repeat_interleave``, ahead of what selective recomputation runs again), Hugging Face
    (``repeat_kv``) and torch's ``matmul`` itself where it broadcasts; fused attention reads groups as they are.
    """

    name = "rotary"
    input_placements = (HEADS_IN_FEATURES,)
    output_placement = HEADS_IN_FEATURES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        _check_sources(self.name, attributes, inputs, _source_features(attributes)[:1])
        if not flag(attributes, "repeats"):
            return (inputs[0],)
        return ((*inputs[0][:2], 3 * integer(attributes, "heads") * integer(attributes, "head_dim")),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if not local.implementation.packed_rotary or flag(local.attributes, "repeats"):
            return ()
        heads, kv_heads = integer(local.attributes, "heads"), _key_value_heads(local.attributes)
        *tokens, packed = local.outputs[0]
        return (Saved("rotated", (*tokens, packed * (heads + kv_heads) // (heads + 2 * kv_heads))),)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if phase == BACKWARD_WEIGHT:
            return []
        heads, kv_heads = integer(local.attributes, "heads"), _key_value_heads(local.attributes)
        size = size_bytes(local, local.inputs) * (heads + kv_heads) / (heads + 2 * kv_heads)
        repeats = self._repeats(phase, size, local)
        if local.implementation.fused_rotary:
            return [MemoryBound(size, size), *repeats]
        # Queries, then keys: to fp32, times a complex number for each pair, and back; gradients alike.
        found: list[Kernel] = repeats
        for part in (size * heads / (heads + kv_heads), size * kv_heads / (heads + kv_heads)):
            wide = part / local.element_bytes * DTYPE_BYTES["fp32"]
            found += [MemoryBound(part, wide), MemoryBound(wide, wide), MemoryBound(wide, part)]
        return found

    @staticmethod
    def _repeats(phase: str, size: float, local: Local) -> list[Kernel]:
        """Return the copies of keys and of values for every query head, or the sums of their gradients.

        Args:
            phase: Forward, or of input gradients.
            size: Bytes of queries and keys together.
            local: The operator.
        """
        if not flag(local.attributes, "repeats"):
            return []
        heads, kv_heads = integer(local.attributes, "heads"), _key_value_heads(local.attributes)
        many, few = (size * count / (heads + kv_heads) for count in (heads, kv_heads))
        return [MemoryBound(few, many) if phase == FORWARD else MemoryBound(many, few, "reduction")] * 2
