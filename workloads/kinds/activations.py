"""Elementwise operators: activation functions, dropout, residual additions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, MemoryBound
from workloads.kinds import elementary
from workloads.kinds.attributes import flag, integer, real, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    KEPT,
    RESULTS,
    Attributes,
    Kind,
    Local,
    MemoryStep,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.registry import register
from workloads.placements import Shard


class _Elementwise(Kind):
    """One input, one output of the same shape ``(B, S, F)``, no parameters.

    Attributes of the operator: ``groups`` (optional), what a column split must divide; ``image``, true for
    ``(B, C, Y, X)``, which splits by ``channel``, ``groups`` dividing it.
    """

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        return (inputs[0],)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        if flag(attributes, "image"):
            channel = Split((Shard(1),) * self.num_inputs, (Shard(1),))
            return SplitTable(self.num_inputs, 1, 0, {"channel": channel}).build()
        own = {
            "column": Split((Shard(2),) * self.num_inputs, (Shard(2),)),
            "sequence": Split((Shard(1),) * self.num_inputs, (Shard(1),)),
        }
        return SplitTable(self.num_inputs, 1, 0, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        cuts = split in ("column", "channel")
        return integer(attributes, "groups") if cuts and "groups" in attributes else None


@register
class Gelu(_Elementwise):
    """GELU; keeps its input. One kernel in torch as in Megatron's bias fusion.

    As a chain of operations, ``x * (0.5 * (1 + erf(x / sqrt(2))))``, it keeps ``x / sqrt(2)`` and the second factor as
    well.
    """

    name = "gelu"

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if local.implementation.elementary:
            return Saved("input:0"), Saved("argument", local.inputs[0]), Saved("cumulative", local.inputs[0])
        return (Saved("input:0"),)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.inputs)
        if local.implementation.elementary:
            passes = {FORWARD: elementary.GELU_FORWARD, BACKWARD_INPUT: elementary.GELU_BACKWARD}
            return elementary.chain(passes.get(phase, ()), size)
        if phase == FORWARD:
            return [MemoryBound(size, size)]
        return [MemoryBound(2 * size, size)] if phase == BACKWARD_INPUT else []


@register
class Relu(_Elementwise):
    """ReLU; keeps its output, which the next matmul keeps as well."""

    name = "relu"

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return (Saved("output:0"),)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.inputs)
        if phase == FORWARD:
            return [MemoryBound(size, size)]
        return [MemoryBound(2 * size, size)] if phase == BACKWARD_INPUT else []


@register
class SwiGLU(_Elementwise):
    """``silu(gate) * up`` of a packed ``(B, S, 2F)``; output ``(B, S, F)``.

    Gate and up are interleaved by rank, so that a column split needs no communication. Unfused, the silu's
    result is kept as well.
    """

    name = "swiglu"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        if inputs[0][-1] % 2:
            raise ValueError(f"swiglu needs an even number of features (gate and up), got {inputs[0]}")
        return ((*inputs[0][:-1], inputs[0][-1] // 2),)

    @staticmethod
    def _is_fused(local: Local) -> bool:
        return local.implementation.fused_bias_activation and local.implementation.fused_gate

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if self._is_fused(local):
            return (Saved("input:0"),)
        return Saved("input:0"), Saved("silu", local.outputs[0])

    def memory_steps(self, phase: str, local: Local) -> tuple[MemoryStep, ...]:
        if phase != FORWARD or self._is_fused(local):
            return super().memory_steps(phase, local)
        return MemoryStep(KEPT), MemoryStep(RESULTS), MemoryStep(KEPT, gives=True)

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        # Gradients of gate and up are put together when autograd has let go of what they were made from, unless that is
        # held to the end of the operator's backward pass.
        holds = local.implementation.holds_operands and not self._is_fused(local)
        return ((local.inputs[0], "activation"),) if phase == BACKWARD_INPUT and holds else ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        half = size_bytes(local, local.outputs)
        fused = self._is_fused(local)
        if phase == FORWARD:
            if fused:
                return [MemoryBound(2 * half, half)]
            return [MemoryBound(half, half, "strided"), MemoryBound(2 * half, half, "strided")]
        if phase == BACKWARD_INPUT:
            if fused:
                return [MemoryBound(3 * half, 2 * half)]
            return [
                MemoryBound(2 * half, half),
                MemoryBound(2 * half, half, "strided"),
                MemoryBound(2 * half, half, "strided"),
                MemoryBound(2 * half, 2 * half),
            ]
        return []


def _elementary_dropout(phase: str, size: float) -> list[Kernel]:
    if phase == FORWARD:
        return [MemoryBound(0.0, size, "random"), *elementary.chain(elementary.DROPOUT_FORWARD, size)]
    return elementary.chain(elementary.DROPOUT_BACKWARD, size) if phase == BACKWARD_INPUT else []


@register
class Dropout(_Elementwise):
    """Dropout; keeps a one-byte mask.

    Attributes of the operator: ``probability``; ``scores``, true for attention probabilities ``(B, A, Sq,
    Sk)``, which split by ``head`` and nothing else; ``heads`` with it.
    """

    name = "dropout"
    has_dropout_state = True

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        if flag(attributes, "scores"):
            return SplitTable(1, 1, 0, {"head": Split((Shard(1),), (Shard(1),))}).build()
        return super().splits(attributes)

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        if split == "head":
            return integer(attributes, "heads")
        return super().split_limit(attributes, split)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if real(local.attributes, "probability") == 0:
            return ()
        return (Saved("mask", local.outputs[0], local.implementation.mask_dtype),)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if real(local.attributes, "probability") == 0:
            return []
        size, mask = size_bytes(local, local.inputs), float(prod(local.inputs[0]))
        if local.implementation.elementary:
            return _elementary_dropout(phase, size)
        if phase == FORWARD:
            return [MemoryBound(size, size + mask, "random")]
        return [MemoryBound(size + mask, size)] if phase == BACKWARD_INPUT else []


@register
class Add(_Elementwise):
    """The sum of a block's result and its residual, of equal shape; keeps nothing.

    Backward adds the two gradients that meet where the residual branches off, once per block.
    """

    name = "add"
    num_inputs = 2

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        if inputs[0] != inputs[1]:
            raise ValueError(f"{self.name} needs two inputs of equal shape, got {inputs[0]} and {inputs[1]}")
        return (inputs[0],)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.outputs)
        # Backward hands the same gradient to both inputs; what it adds is as large, but where a block changes shape.
        return [] if phase == BACKWARD_WEIGHT else [MemoryBound(2 * size, size)]

    def gradient_sums(self, local: Local) -> list[Kernel]:
        return self.kernels(BACKWARD_INPUT, local)[-1:]


@register
class DropoutAdd(Add):
    """Bias, dropout and the residual: ``residual + dropout(x)``; inputs ``(x, residual)``.

    Attributes of the operator: ``probability`` (0: no mask); ``bias``, false where the linear before has none.
    """

    name = "dropout_add"
    has_dropout_state = True

    def saved(self, local: Local) -> tuple[Saved, ...]:
        if real(local.attributes, "probability") == 0:
            return ()
        return (Saved("mask", local.outputs[0], local.implementation.mask_dtype),)

    @staticmethod
    def _is_fused(local: Local) -> bool:
        return local.implementation.fused_bias_activation and local.implementation.fused_bias_dropout

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        # What dropout leaves, before the residual is added to it.
        is_apart = bool(self.saved(local)) and not self._is_fused(local) and not local.implementation.elementary
        return ((local.outputs[0], "activation"),) if phase == FORWARD and is_apart else ()

    def memory_steps(self, phase: str, local: Local) -> tuple[MemoryStep, ...]:
        taken = self.workspace(phase, local)
        if not taken:
            return super().memory_steps(phase, local)
        (dropped,) = taken
        mask = MemoryStep(KEPT), MemoryStep(KEPT, gives=True)
        return MemoryStep("dropped", dropped), *mask, MemoryStep(RESULTS), MemoryStep("dropped", gives=True)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size, mask = size_bytes(local, local.outputs), float(prod(local.outputs[0]))
        drops = real(local.attributes, "probability") > 0
        residual = size / local.element_bytes * local.implementation.residual_bytes
        add = MemoryBound((size if phase == FORWARD else residual) + residual, residual)
        if drops and local.implementation.elementary:
            dropout = _elementary_dropout(phase, size)
            return [*dropout, add] if dropout else []
        if phase == FORWARD:
            if not drops:
                return [add]
            if self._is_fused(local):
                return [MemoryBound(2 * size, size + mask, "random")]
            has_bias = flag(local.attributes, "bias", default=True) and local.implementation.fused_bias_activation
            deferred_bias = [MemoryBound(size, size)] if has_bias else []
            return [*deferred_bias, MemoryBound(size, size + mask, "random"), add]
        if phase == BACKWARD_INPUT:
            return [MemoryBound(size + mask, size), add] if drops else [add]
        return []
