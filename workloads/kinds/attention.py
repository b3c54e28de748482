"""Attention in separate operators: scores, softmax, context (their inputs are packed as in `workloads.kinds.heads`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds import elementary
from workloads.kinds.attributes import flag, integer, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    GRADIENTS,
    KEPT,
    RESULTS,
    Attributes,
    Local,
    MemoryStep,
    Parameter,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.heads import (
    HEADS_IN_FEATURES,
    HEADS_IN_SCORES,
    ByHead,
    check_sources,
    local_heads,
    local_key_value_heads,
    packed_sum,
    slice_gradients,
    source_features,
)
from workloads.kinds.registry import register
from workloads.placements import Shard


def _transposes(local: Local, *elements: int) -> list[Kernel]:
    """Return the copies from tokens to heads, or back, of tensors that matmuls elsewhere read with strides."""
    if not local.implementation.elementary:
        return []
    return [kernel for count in elements for kernel in elementary.chain((elementary.MAP,), count * local.element_bytes)]


def _copies(local: Local, *elements: int) -> list[Kernel]:
    """Return the copies of what a product reads out of the packed tensor, by head (``slices_packed``)."""
    if not local.implementation.slices_packed:
        return []
    sizes = [float(local.element_bytes * count) for count in elements]
    return [MemoryBound(size, size, "strided") for size in sizes]


def _products(attributes: Attributes, scores: Shape) -> tuple[int, int, int]:
    """Return the batch, rows and columns of the products that make scores ``(B, A, Sq, Sk)``, by window."""
    samples, heads, queries, keys = scores
    windows = queries // integer(attributes, "window") if integer(attributes, "window", 0) else 1
    return samples * heads * windows, queries // windows, keys


@register
class AttentionScore(ByHead):
    """Queries times keys: inputs ``(query source, key source)``, output ``(B, A, Sq, Sk)``.

    In self attention both sources are the same packed tensor, which is kept (once).
    """

    name = "attention_score"
    num_inputs = 2
    input_placements = (HEADS_IN_FEATURES, HEADS_IN_FEATURES)
    output_placement = HEADS_IN_SCORES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        check_sources(self.name, attributes, inputs, source_features(attributes))
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
            copies = _copies(local, batch * queries * dim, batch * keys * dim)
            return [*transposes, *copies, Matmul(m=queries, n=keys, k=dim, batch=batch)]
        if phase == BACKWARD_INPUT:
            heads, few = local_heads(local), local_key_value_heads(local)
            cross = flag(local.attributes, "cross")
            return [
                Matmul(m=queries, n=dim, k=keys, batch=batch, role="data_gradient"),
                Matmul(m=keys, n=dim, k=queries, batch=batch, role="data_gradient"),
                *transposes,
                *slice_gradients(local, [few * dim] if cross else [heads * dim, few * dim]),
                *self.gradient_sums(local),
            ]
        return []

    def gradient_sums(self, local: Local) -> list[Kernel]:
        return [] if flag(local.attributes, "cross") else packed_sum(local)


SHORTEST_FUSED = 17
"""Keys from which on Megatron's fused softmax runs (``fused_softmax.py``, ``is_kernel_available``)."""


@register
class Softmax(ByHead):
    """Scale, mask and softmax of scores ``(B, A, Sq, Sk)``.

    Fused: one kernel that keeps its output. Unfused: scale, mask and softmax apart; scores of 16 bits go through fp32,
    with a cast before and after and a mask that copies the gradient (Aceso's rows of 13B without the fused kernel move
    18.5 times the tensor forward and take 1.63 times as long backward; this counts 18.5, and 1.65 times as many
    bytes). Backward, torch multiplies gradient and result into a tensor of its own first (aten/native/cuda/SoftMax.cu,
    ``softmax_backward_cuda_out``). The result is kept in fp32; one of lower precision is a copy, kept
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
        if local.implementation.adds_mask:
            masked = [MemoryBound(size, size), MemoryBound(size, size, "strided"), MemoryBound(size, wide)]
            return [*masked, MemoryBound(wide, wide, "reduction"), MemoryBound(wide, size)]
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
            softmax = [MemoryBound(2 * size, size), MemoryBound(2 * size, size, "reduction")]
            return [*softmax, *[MemoryBound(size, size)] * (1 if local.implementation.adds_mask else 2)]
        elements = size / local.element_bytes
        wide = elements * DTYPE_BYTES["fp32"]
        softmax = [MemoryBound(size, wide), MemoryBound(2 * wide, wide), MemoryBound(2 * wide, wide, "reduction")]
        if local.implementation.adds_mask:
            return [*softmax, MemoryBound(wide, size), MemoryBound(size, size)]
        return [
            *softmax,
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
        # the softmax, and its product with the result; where the gradient needs no conversion, one of them less.
        scores = (local.outputs[0], "fp32")
        if phase == FORWARD or local.element_bytes == DTYPE_BYTES["fp32"]:
            return (scores,)
        if local.implementation.elementary:
            return scores, (local.outputs[0], "activation")
        return scores, scores, (local.outputs[0], "activation")

    def memory_steps(self, phase: str, local: Local) -> tuple[MemoryStep, ...]:
        choice = local.implementation
        given = MemoryStep(GRADIENTS, gives=True)
        if self._is_fused(local) and phase == BACKWARD_INPUT and not choice.holds_operands:
            return given, MemoryStep(RESULTS)
        if self._is_fused(local) or choice.elementary or choice.keeps_scores:
            return super().memory_steps(phase, local)
        narrow, wide = (local.outputs[0], "activation"), (local.outputs[0], "fp32")
        is_high = local.element_bytes == DTYPE_BYTES["fp32"]
        if not choice.adds_mask:
            if phase == FORWARD or is_high or choice.holds_operands:
                return super().memory_steps(phase, local)
            back = [MemoryStep("unscaled", wide), MemoryStep("product", wide), MemoryStep("product", gives=True)]
            chain = [MemoryStep("cast", wide), given, *back, MemoryStep("cast", gives=True)]
            masked = [MemoryStep("masked", wide), MemoryStep("unscaled", gives=True)]
            return (*chain, *masked, MemoryStep(RESULTS), MemoryStep("masked", gives=True))
        if phase == FORWARD:
            chain = [MemoryStep("scaled", narrow), MemoryStep("masked", narrow), MemoryStep("scaled", gives=True)]
            if not is_high:
                chain += [MemoryStep("cast", wide), MemoryStep(KEPT), MemoryStep("cast", gives=True)]
            chain += [MemoryStep(RESULTS)] if is_high else [MemoryStep(RESULTS), MemoryStep(KEPT, gives=True)]
            return (*chain, MemoryStep("masked", gives=True))
        chain = [] if is_high else [MemoryStep("cast", wide)]
        chain += [] if is_high or choice.holds_operands else [given]
        chain += [MemoryStep("unscaled", wide), MemoryStep("product", wide), MemoryStep("product", gives=True)]
        if is_high:
            return (*chain, MemoryStep(RESULTS), MemoryStep("unscaled", gives=True))
        back = [MemoryStep("back", narrow), MemoryStep("unscaled", gives=True), MemoryStep(RESULTS)]
        return (*chain, MemoryStep("cast", gives=True), *back, MemoryStep("back", gives=True))

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
            if bias and local.implementation.adds_mask and not fused:  # the looked-up bias is laid out by head
                laid = [MemoryBound(bias, bias, "gather"), MemoryBound(bias, bias, "strided")]
                return [*laid, MemoryBound(size + bias, size, "strided"), *found]
            if bias:
                found = [MemoryBound(bias, bias, "gather"), MemoryBound(size + bias, size), *found]
            return found
        if phase == BACKWARD_INPUT:
            return [MemoryBound(2 * read * size, size, "reduction")] if fused else self._unfused_backward(size, local)
        # The bias gradient: a sum over samples, then a scatter into the buckets.
        return [MemoryBound(size, bias, "reduction"), MemoryBound(bias, bias, "gather")] if bias else []


@register
class AttentionContext(ByHead):
    """Probabilities times values: inputs ``(probabilities, value source)``, output ``(B, Sq, A D)``."""

    name = "attention_context"
    num_inputs = 2
    input_placements = (HEADS_IN_SCORES, HEADS_IN_FEATURES)
    output_placement = HEADS_IN_FEATURES

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 4, "(samples, heads, queries, keys)")
        check_sources(self.name, attributes, inputs[1:], source_features(attributes)[1:])
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
            before = [*_transposes(local, batch * keys * dim), *_copies(local, batch * keys * dim)]
            return [*before, Matmul(m=queries, n=dim, k=keys, batch=batch), MemoryBound(size, size, "strided")]
        if phase == BACKWARD_INPUT:
            return [
                *_transposes(local, batch * queries * dim),
                *_copies(local, batch * queries * dim),
                Matmul(m=queries, n=keys, k=dim, batch=batch, role="data_gradient"),
                Matmul(m=keys, n=dim, k=queries, batch=batch, role="data_gradient"),
                *_transposes(local, batch * keys * dim),
                *slice_gradients(local, [local_key_value_heads(local) * dim]),
                *self.gradient_sums(local),
            ]
        return []

    def gradient_sums(self, local: Local) -> list[Kernel]:
        return packed_sum(local)
