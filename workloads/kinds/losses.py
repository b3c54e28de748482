"""Output layers with their loss: one number per sample, in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.attributes import flag, integer, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    KEPT,
    RESULTS,
    Attributes,
    InternalCollective,
    Kind,
    Local,
    MemoryStep,
    Parameter,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.registry import register
from workloads.placements import PARTIAL, REPLICATE, Shard

SHARED_ROW_BYTES = (48 << 10) - 128
"""A block of torch's softmax keeps a row in shared memory that is shorter, beside the sums of its warps; it reads
others three times: for the maximum, the sum and the result (aten/native/cuda/SoftMax.cu, ``host_softmax``)."""
READ_AGAIN = 0.5
"""Share of the memory's time that each of the two later reads takes: they come from the level-2 cache in part. One row
of 32,768 fp16 columns takes 1.5 times its bytes on an A100 (gpu_efficiency/memory_bound_ops.csv, LLMCompass; the share
of the bandwidth is that of fused kernels), rows of 32,000 to 51,200 in fp32 about twice on an H100."""


def _row_reads(row_bytes: int) -> float:
    """Return how often torch's softmax reads a row forward, in reads of the memory."""
    return 1.0 if row_bytes < SHARED_ROW_BYTES else 1.0 + 2 * READ_AGAIN


@register
class LanguageModelLoss(Kind):
    """Logits and cross entropy: inputs ``(x (B, S, H), labels (B, S))``, output ``(B,)``.

    The default kernels are Megatron's vocab-parallel cross entropy (which it also runs on one GPU): cast,
    maximum, subtraction in place, exponential in place, sum, division in place. It keeps one tensor the size
    of the logits (the softmax) in ``Implementation.logits_dtype``; the logits themselves live during the
    forward only; with ``loss_clones_logits`` they stay, and forward works in a copy. A vocabulary split all-reduces
    maximum, target logit and sum.

    Attributes of the operator: ``vocab``, ``hidden``, ``bias``.
    """

    name = "lm_loss"
    parts_late = True
    num_inputs = 2

    def input_dtype(self, index: int) -> str:
        return "activation" if index == 0 else "index"

    def output_dtype(self, index: int) -> str:
        return "fp32"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        states, labels = inputs
        if len(states) != 3 or states[:2] != tuple(labels) or states[2] != integer(attributes, "hidden"):
            raise ValueError(
                f"lm_loss needs states (samples, tokens, {attributes['hidden']}) and labels (samples, "
                f"tokens), got {states} and {labels}"
            )
        return ((states[0],),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        vocab = integer(attributes, "vocab")
        weight = Parameter("weight", (vocab, integer(attributes, "hidden")))
        return (weight, Parameter("bias", (vocab,))) if flag(attributes, "bias") else (weight,)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        count = 1 + flag(attributes, "bias")
        own = {
            "vocab": Split((REPLICATE, REPLICATE), (REPLICATE,), (Shard(0),) * count),
            "sequence": Split((Shard(1), Shard(1)), (PARTIAL,), (REPLICATE,) * count),
        }
        return SplitTable(2, 1, count, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return integer(attributes, "vocab") if split == "vocab" else None

    @staticmethod
    def _logits(local: Local) -> Shape:
        return (*local.inputs[0][:2], local.parameters[0][0])

    def saved(self, local: Local) -> tuple[Saved, ...]:
        kept = [Saved("input:0"), Saved("input:1")]
        if local.implementation.loss_clones_logits:
            kept.append(Saved("logits", self._logits(local), local.implementation.logits_dtype))
        elif local.implementation.loss_keeps_logits:
            kept.append(Saved("logits", self._logits(local)))
        return (*kept, Saved("softmax", self._logits(local), local.implementation.logits_dtype))

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        samples, tokens, hidden = local.inputs[0]
        rows, vocab = samples * tokens, local.parameters[0][0]
        low = float(rows * vocab * local.element_bytes)
        high = float(rows * vocab * local.implementation.logits_bytes)
        row = float(rows * DTYPE_BYTES["fp32"])
        casts = local.implementation.casts_logits
        if phase == FORWARD:
            found: list[Kernel] = [Matmul(m=rows, n=vocab, k=hidden)]
            if flag(local.attributes, "bias"):
                found.append(MemoryBound(low, low))
            if casts:
                found.append(MemoryBound(low, high))
            if local.implementation.fused_loss:
                is_torch = local.implementation.loss_temporaries > 1
                reads = _row_reads(vocab * local.implementation.logits_bytes) if is_torch else 1.0
                return [*found, MemoryBound(reads * high, high, "reduction"), MemoryBound(row, row, "gather")]
            copies = [MemoryBound(high, high)] if local.implementation.loss_clones_logits else []
            return [
                *found,
                *copies,
                MemoryBound(high, row, "reduction"),
                MemoryBound(high, high),
                MemoryBound(row, row, "gather"),
                MemoryBound(high, high),
                MemoryBound(high, row, "reduction"),
                MemoryBound(high, high),
            ]
        if phase == BACKWARD_INPUT:
            # Softmax minus one-hot, times the incoming gradient; cast back; product.
            found = [MemoryBound(row, row, "gather"), MemoryBound(high, high)]
            if local.implementation.fused_loss and local.implementation.loss_temporaries > 1:
                # Torch's: the gradient of the log-softmax is set to zero and one entry a row written, then read again.
                found = [
                    MemoryBound(0.0, high),
                    MemoryBound(row, row, "gather"),
                    MemoryBound(2 * high, high, "reduction"),
                ]
            if casts:
                found.append(MemoryBound(high, low))
            found.append(Matmul(m=rows, n=hidden, k=vocab, role="data_gradient"))
            return found + self._metric(rows, vocab, local) * local.implementation.loss_metrics
        found = [Matmul(m=vocab, n=hidden, k=rows, role="weight_gradient")]
        if flag(local.attributes, "bias"):
            found.append(MemoryBound(low, float(vocab * local.element_bytes), "reduction"))
        return found

    @staticmethod
    def _metric(rows: int, vocab: int, local: Local) -> list[Kernel]:
        """Return the kernels of torch's cross entropy of the logits, forward alone, as autocast runs it in fp32."""
        wide, row = float(rows * vocab * DTYPE_BYTES["fp32"]), float(rows * DTYPE_BYTES["fp32"])
        made = float(rows * vocab * local.implementation.logits_bytes)
        casts: list[Kernel] = [MemoryBound(made, wide)] if made < wide else []
        reads = _row_reads(vocab * DTYPE_BYTES["fp32"])
        return [*casts, MemoryBound(reads * wide, wide, "reduction"), MemoryBound(row, row, "gather")]

    def num_calls(self, phase: str, local: Local) -> int:
        # Logits, cast and cross entropy are called one by one; so is each step of Megatron's cross entropy, either way.
        return 0 if phase == BACKWARD_WEIGHT else len(self.kernels(phase, local))

    def internal_collectives(self, phase: str, split: str, local: Local) -> tuple[InternalCollective, ...]:
        if split != "vocab" or phase != FORWARD:
            return ()
        # Maximum, target logit, sum of exponentials: Megatron-LM mpu/cross_entropy.py.
        return (InternalCollective("all_reduce", local.inputs[0][:2], "fp32"),) * 3

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        # Forward: logits as the matmul wrote them, and cast. Backward: gradients.
        choice = local.implementation
        low, high = (self._logits(local), "activation"), (self._logits(local), choice.logits_dtype)
        if not choice.fused_loss:
            # Megatron works in place, in what it keeps: the logits themselves, or cast. Or it works in a copy, when the
            # narrow logits are gone, or beside both. Its gradient is made in what it kept too, and cast.
            if phase == FORWARD and choice.loss_clones_logits:
                return (high,)
            if phase == FORWARD and choice.loss_subtracts_anew:
                return (low, high) if choice.casts_logits else (low,)
            return (low,) if choice.casts_logits or phase == BACKWARD_WEIGHT else ()
        if phase == BACKWARD_WEIGHT:
            return (low,)
        if choice.loss_temporaries > 1 and local.parameters[0][0] < integer(local.attributes, "vocab"):
            # Torch has no loss of a vocabulary that is cut; Megatron's has the cast logits beside what it keeps, and
            # one gradient.
            return (high,)
        if phase == BACKWARD_INPUT:
            return (high,) * choice.loss_temporaries
        made = [high] if choice.casts_logits else []
        return tuple(made) if choice.loss_keeps_logits else (low, *made)

    def memory_steps(self, phase: str, local: Local) -> tuple[MemoryStep, ...]:
        choice, whole = local.implementation, integer(local.attributes, "vocab")
        is_cut = local.parameters[0][0] < whole
        if not choice.fused_loss or choice.loss_temporaries != 2 or choice.loss_keeps_logits or is_cut:
            return super().memory_steps(phase, local)
        low, high = (self._logits(local), "activation"), (self._logits(local), choice.logits_dtype)
        if phase == BACKWARD_INPUT:
            both = MemoryStep("of log-softmax", high), MemoryStep("of logits", high)
            steps = (*both, MemoryStep("of log-softmax", gives=True), MemoryStep(RESULTS))
            return steps if choice.casts_logits else (*steps, MemoryStep("of logits", gives=True))
        made, passed = (MemoryStep(KEPT), MemoryStep(RESULTS)), MemoryStep(KEPT, gives=True)
        if not choice.casts_logits:
            return (MemoryStep("logits", low), *made, MemoryStep("logits", gives=True), passed)
        cast = MemoryStep("cast", high), MemoryStep("logits", gives=True)
        return (MemoryStep("logits", low), *cast, *made, MemoryStep("cast", gives=True), passed)


@register
class ClassifierLoss(Kind):
    """A linear to classes and cross entropy: inputs ``(x, labels (B,))``, output ``(B,)``.

    ``x`` is ``(B, H)``, or ``(B, S, H)`` of which the first token counts.

    Attributes of the operator: ``hidden``, ``classes``, ``bias``.
    """

    name = "classifier_loss"
    parts_late = True
    num_inputs = 2

    def input_dtype(self, index: int) -> str:
        return "activation" if index == 0 else "index"

    def output_dtype(self, index: int) -> str:
        return "fp32"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        if inputs[0][-1] != integer(attributes, "hidden"):
            raise ValueError(f"classifier_loss has hidden={attributes['hidden']}, got an input of {inputs[0]}")
        return ((inputs[0][0],),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        classes = integer(attributes, "classes")
        weight = Parameter("weight", (classes, integer(attributes, "hidden")))
        return (weight, Parameter("bias", (classes,))) if flag(attributes, "bias", True) else (weight,)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(2, 1, 1 + flag(attributes, "bias", True)).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        log_softmax = Saved("log_softmax", self._logits(local), local.implementation.logits_dtype)
        return Saved("input:0"), Saved("input:1"), log_softmax

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        return () if phase == FORWARD else ((self._logits(local), "activation"),)

    @staticmethod
    def _logits(local: Local) -> Shape:
        return local.inputs[0][0], local.parameters[0][0]

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        samples, (classes, hidden) = local.inputs[0][0], local.parameters[0]
        low = float(samples * classes * local.element_bytes)
        high = float(samples * classes * local.implementation.logits_bytes)
        if phase == FORWARD:
            return [
                Matmul(m=samples, n=classes, k=hidden),
                MemoryBound(low, high, "reduction"),
                MemoryBound(float(4 * samples), float(4 * samples), "gather"),
            ]
        if phase == BACKWARD_INPUT:
            found: list[Kernel] = [
                MemoryBound(high, low, "reduction"),
                Matmul(m=samples, n=hidden, k=classes, role="data_gradient"),
            ]
            if len(local.inputs[0]) == 3:  # the gradient of the other tokens is zero
                found.append(MemoryBound(0.0, size_bytes(local, local.inputs[:1])))
            return found
        weights = float(local.element_bytes * prod(local.parameters[0]))
        found = [Matmul(m=classes, n=hidden, k=samples, role="weight_gradient")]
        if flag(local.attributes, "bias", True):
            found.append(MemoryBound(low, weights / hidden, "reduction"))
        return found


@register
class LossSum(Kind):
    """The sum of two losses ``(B,)`` (BERT: masked words and next sentence)."""

    name = "loss_sum"
    num_inputs = 2

    def input_dtype(self, index: int) -> str:
        return "fp32"

    def output_dtype(self, index: int) -> str:
        return "fp32"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        if inputs[0] != inputs[1]:
            raise ValueError(f"loss_sum needs two losses of equal shape, got {inputs[0]} and {inputs[1]}")
        return (inputs[0],)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(2, 1, 0).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = float(DTYPE_BYTES["fp32"] * prod(local.outputs[0]))
        return [MemoryBound(2 * size, size)] if phase == FORWARD else []
