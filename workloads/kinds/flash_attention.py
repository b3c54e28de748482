"""Fused attention, and the rotary positions before attention of either form."""

from __future__ import annotations

from collections.abc import Sequence

from workloads.kernels import FlashAttention, Kernel, MemoryBound
from workloads.kinds.attributes import flag, integer, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    Attributes,
    Local,
    Saved,
    Shape,
)
from workloads.kinds.heads import (
    HEADS_IN_FEATURES,
    ByHead,
    check_sources,
    key_value_heads,
    local_heads,
    local_key_value_heads,
    packed_sum,
    slice_gradients,
    source_features,
)
from workloads.kinds.registry import register

HEAD_MULTIPLE = 8
"""Features that a head comes in: flash-attn 2.5.8 (csrc/flash_attn/flash_api.cpp, ``mha_fwd``) pads to it."""


def _is_grouped(local: Local) -> bool:
    """Return whether query heads lie with the keys and values of their group in one tensor."""
    grouped = key_value_heads(local.attributes) < integer(local.attributes, "heads")
    return grouped and not flag(local.attributes, "cross")


def _repeats(local: Local) -> bool:
    """Return whether keys and values are repeated for each query head of their group."""
    return _is_grouped(local) and local.implementation.repeats_groups


def _copies_queries(local: Local) -> bool:
    """Return whether queries alone are copied, and so is what is made of them: not if a rank has a single group."""
    packed_heads = local.inputs[0][2] // integer(local.attributes, "head_dim")
    groups = (packed_heads - local_heads(local)) // 2
    return _is_grouped(local) and local.implementation.copies_groups and groups > 1


def _padding(local: Local) -> int:
    """Return the features that a head lacks of what the kernels take."""
    return -integer(local.attributes, "head_dim") % HEAD_MULTIPLE


def _padded(shape: Shape, local: Local) -> Shape:
    heads = shape[2] // integer(local.attributes, "head_dim")
    return *shape[:2], shape[2] + heads * _padding(local)


def _given(local: Local) -> tuple[Shape, ...]:
    """Return the shapes of what queries, keys and values come in: one tensor, or two."""
    return local.inputs if flag(local.attributes, "cross") else local.inputs[:1]


def _repeated(local: Local) -> tuple[Shape, ...]:
    """Return the same after keys and values were repeated."""
    if not _repeats(local):
        return _given(local)
    return ((*local.inputs[0][:2], 3 * local_heads(local) * integer(local.attributes, "head_dim")),)


def _copies_output(local: Local) -> bool:
    return (local.implementation.sequence_first and local.inputs[0][0] > 1) or _copies_queries(local)


def _copies(local: Local, phase: str) -> tuple[list[Kernel], list[Kernel]]:
    """Return the copies before and after the fused kernel, or those of gradients that undo them.

    Gradients of copied queries, and of the result, go back as views.
    """
    made, given, repeated = (size_bytes(local, shapes) for shapes in (local.outputs, _given(local), _repeated(local)))
    before: list[Kernel] = []
    if repeated > given:
        # Of three parts as large as the queries two are keys and values.
        many, few = 2 * repeated / 3, given - repeated / 3
        before.append(MemoryBound(few, many) if phase == FORWARD else MemoryBound(many, few, "reduction"))
    if local.implementation.sequence_first:
        before.append(MemoryBound(repeated, repeated))
    elif _copies_queries(local) and phase == FORWARD:
        before.append(MemoryBound(made, made))
    copies_output = _copies_output(local) and (phase == FORWARD or not _copies_queries(local))
    after: list[Kernel] = [MemoryBound(made, made)] if copies_output else []
    if _padding(local):
        wider = size_bytes(local, [_padded(shape, local) for shape in _repeated(local)])
        before.append(MemoryBound(repeated, wider))
        after.insert(0, MemoryBound(made, made))
    return (before, after) if phase == FORWARD else (after[::-1], before[::-1])


@register
class FlashAttentionOperator(ByHead):
    """Fused attention: inputs ``(query source, key-value source)``, output ``(B, Sq, A D)``.

    Keeps the sources, the output, and one fp32 log-sum-exp per query and head. Its kernels take heads of a multiple of
    eight features: others are padded before and cut after (flash-attn 2.5, ``FlashAttnFunc``; torch's
    ``pad_last_dim``), and the padded tensors are kept. Where samples are not the first dimension in memory
    (``Implementation.sequence_first``), queries, keys and values are copied as well, and the output of several samples.
    Grouped keys and values are read as they are, unless the framework repeats them (``repeats_groups``); their queries
    can be copied (``copies_groups``).
    """

    name = "flash_attention"
    num_inputs = 2
    input_placements = (HEADS_IN_FEATURES, HEADS_IN_FEATURES)
    output_placement = HEADS_IN_FEATURES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        check_sources(self.name, attributes, inputs, source_features(attributes))
        return ((inputs[0][0], inputs[0][1], integer(attributes, "heads") * integer(attributes, "head_dim")),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        samples, queries = local.inputs[0][:2]
        logsumexp = Saved("logsumexp", (samples, local_heads(local), queries), "fp32")
        taken = tuple(_padded(shape, local) for shape in _repeated(local))
        sources: tuple[Saved, ...] = (Saved("input:0"), Saved("input:1"))
        if taken != _given(local):
            sources = tuple(Saved(f"taken {place}", shape) for place, shape in enumerate(taken))
        elif _copies_queries(local):
            sources = *sources, Saved("queries", local.outputs[0])
        if _padding(local) or _copies_output(local):
            return *sources, Saved("made", _padded(local.outputs[0], local)), logsumexp
        return *sources, Saved("output:0"), logsumexp

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        if phase != BACKWARD_INPUT:
            return ()
        # Gradients of queries add up in fp32; those of grouped keys and values are made for every query head first
        # (FlashAttention-2, mha_bwd: dq_accum, dk_expanded, dv_expanded).
        width = local.outputs[0][2]
        found: list[tuple[Shape, str]] = [((*local.inputs[0][:2], width), "fp32")]
        if key_value_heads(local.attributes) < integer(local.attributes, "heads") and not _repeats(local):
            found.append(((*local.inputs[1][:2], 2 * width), "activation"))
        return tuple(found)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if phase == BACKWARD_WEIGHT:
            return []
        causal = flag(local.attributes, "causal") and local.implementation.flash_causal_skip
        fused = FlashAttention(
            batch=local.inputs[0][0] * local_heads(local),
            query_length=local.inputs[0][1],
            key_length=local.inputs[1][1],
            head_dim=integer(local.attributes, "head_dim") + _padding(local),
            causal=causal,
            backward=phase == BACKWARD_INPUT,
            generation=local.implementation.flash_generation,
        )
        before, after = _copies(local, phase)
        if phase == FORWARD:
            return [*before, fused, *after]
        # First the row sums of gradient times output, in a kernel of their own.
        size = size_bytes(local, local.outputs)
        row_sums = float(DTYPE_BYTES["fp32"] * fused.batch * fused.query_length)
        width, few = integer(local.attributes, "head_dim"), local_key_value_heads(local)
        own = [] if flag(local.attributes, "cross") else [local_heads(local) * width]
        slices = [*slice_gradients(local, [*own, few * width, few * width]), *packed_sum(local)]
        sums = self.gradient_sums(local)
        return [*before, MemoryBound(2 * size, row_sums, "reduction"), fused, *after, *slices, *sums]

    def gradient_sums(self, local: Local) -> list[Kernel]:
        # Of the queries' and that of keys and values, which is summed here.
        return [] if flag(local.attributes, "cross") else packed_sum(local)


@register
class Rotary(ByHead):
    """Rotary position embedding of the queries and keys in a packed tensor; keeps nothing but tables.

    Where the packed tensor outlives it (``Implementation.packed_rotary``), what it made is counted here, and the packed
    tensor stands for its output.

    ``repeats`` (default false): it also repeats keys and values for each query head of their group, since batched
    products read them one by one: output ``(B, S, 3 A D)``, nothing packed outlives it. So do Megatron-LM (core 0.3.0,
    transformer/attention.py: ``repeat_interleave``, ahead of what selective recomputation runs again), Hugging Face
    (``repeat_kv``) and torch's ``matmul`` itself where it broadcasts. Fused attention says for itself.
    """

    name = "rotary"
    input_placements = (HEADS_IN_FEATURES,)
    output_placement = HEADS_IN_FEATURES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        check_sources(self.name, attributes, inputs, source_features(attributes)[:1])
        if not flag(attributes, "repeats"):
            return (inputs[0],)
        return ((*inputs[0][:2], 3 * integer(attributes, "heads") * integer(attributes, "head_dim")),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if not local.implementation.packed_rotary or flag(local.attributes, "repeats"):
            return ()
        heads, kv_heads = integer(local.attributes, "heads"), key_value_heads(local.attributes)
        *tokens, packed = local.outputs[0]
        return (Saved("rotated", (*tokens, packed * (heads + kv_heads) // (heads + 2 * kv_heads))),)

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        # In plain operations: what is turned in fp32, what it is turned into, and that cast back before it is repeated.
        choice = local.implementation
        if phase == BACKWARD_WEIGHT or choice.fused_rotary or local.element_bytes == DTYPE_BYTES["fp32"]:
            return ()
        heads, kv_heads = integer(local.attributes, "heads"), key_value_heads(local.attributes)
        *tokens, packed = local.inputs[0]
        at_once = packed if choice.slices_packed else packed * heads // (heads + 2 * kv_heads)
        turned = (((*tokens, at_once), "fp32"),) * 2
        is_repeated = phase == FORWARD and choice.slices_packed and flag(local.attributes, "repeats")
        return (*turned, (local.inputs[0], "activation")) if is_repeated else turned

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if phase == BACKWARD_WEIGHT:
            return []
        heads, kv_heads = integer(local.attributes, "heads"), key_value_heads(local.attributes)
        size = size_bytes(local, local.inputs) * (heads + kv_heads) / (heads + 2 * kv_heads)
        if local.implementation.slices_packed and not local.implementation.fused_rotary:
            return self._whole(phase, local)
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
    def _whole(phase: str, local: Local) -> list[Kernel]:
        """Return the same of the packed tensor in one, values turned by nothing; repeated heads are stacked anew."""
        size, made = size_bytes(local, local.inputs), size_bytes(local, local.outputs)
        wide = size / local.element_bytes * DTYPE_BYTES["fp32"]
        turned: list[Kernel] = [MemoryBound(wide, wide, "strided")]
        if wide > size:
            turned = [MemoryBound(size, wide), *turned, MemoryBound(wide, size)]
        if not flag(local.attributes, "repeats"):
            return turned
        if phase == FORWARD:
            return [*turned, MemoryBound(made, made, "strided")]
        few = (size - made / 3) / 2  # Keys, or values.
        return [*[MemoryBound(made / 3, few, "reduction")] * 2, MemoryBound(size, size), *turned]

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
        heads, kv_heads = integer(local.attributes, "heads"), key_value_heads(local.attributes)
        many, few = (size * count / (heads + kv_heads) for count in (heads, kv_heads))
        return [MemoryBound(few, many) if phase == FORWARD else MemoryBound(many, few, "reduction")] * 2
