"""Normalisations over the feature dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, MemoryBound
from workloads.kinds import elementary
from workloads.kinds.attributes import integer, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
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
from workloads.placements import REPLICATE, Shard

NUM_BLOCKS = 108
"""Of a persistent norm's gradients: one for each multiprocessor, an A100's here (flash-attn 2.5.8, csrc/layer_norm,
ln_bwd_kernels.cuh, which goes back to Apex's: as many as fit at once)."""


MANY_ROWS = 65_536
COLUMNS_OF_BLOCK, FEW_BLOCKS = 32, 66
"""From more rows on gradients of weights are summed in two steps, by many blocks each, if blocks of so many columns
would fill less than half of the multiprocessors, an H100's 132 here: on no other GPU were rows timed
(aten/native/cuda/layer_norm_kernel.cu, ``LaunchGammaBetaBackwardCUDAKernel``)."""


class _Norm(Kind):
    """What the two norms share. ``(B, S, H) -> (B, S, H)``; attribute ``hidden``."""

    parameter_names: tuple[str, ...]
    num_statistics: int
    """fp32 numbers kept per token."""
    num_passes: int
    """Elementwise passes where it is not one kernel (``fused_norm`` false); 0: it always is one."""

    def _is_fused(self, local: Local) -> bool:
        return local.implementation.fused_norm or not self.num_passes

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 3, "(samples, tokens, features)")
        if inputs[0][-1] != integer(attributes, "hidden"):
            raise ValueError(f"{self.name} has hidden={attributes['hidden']}, got an input of shape {inputs[0]}")
        return (inputs[0],)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        return tuple(Parameter(name, (integer(attributes, "hidden"),)) for name in self.parameter_names)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        count = len(self.parameter_names)
        sequence = Split((Shard(1),), (Shard(1),), (REPLICATE,) * count)
        return SplitTable(1, 1, count, {"sequence": sequence}).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        kept = (
            Saved("wide", local.inputs[0], "fp32") if local.implementation.autocast else Saved("input:0"),
            Saved("statistics", (self.num_statistics, *local.inputs[0][:-1]), "fp32"),
        )
        if local.implementation.elementary:
            return (*kept, Saved("scale", local.inputs[0]))
        if self._is_fused(local):
            return kept
        return (*kept, Saved("normalised", local.inputs[0]))

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.inputs)
        statistics = float(DTYPE_BYTES["fp32"] * self.num_statistics * prod(local.inputs[0][:-1]))
        fused = self._is_fused(local)
        if self.name in local.implementation.persistent_norms and fused and phase != FORWARD:
            return self._persistent(phase, size, statistics, local)
        if local.implementation.autocast and fused:
            return self._cast(phase, size, statistics, local)
        if local.implementation.elementary:
            passes = {FORWARD: elementary.NORM_FORWARD, BACKWARD_INPUT: elementary.NORM_BACKWARD}
            return elementary.chain(passes.get(phase, ()), size)
        if local.implementation.norms_by_blocks and fused:
            return self._by_blocks(phase, size, statistics, local)
        if phase == FORWARD:
            if fused:
                return [MemoryBound(size, size + statistics, "reduction")]
            return [
                MemoryBound(size, statistics, "reduction"),
                *(MemoryBound(size, size) for _ in range(self.num_passes)),
            ]
        if phase == BACKWARD_INPUT:
            if fused:
                # Two passes over gradient and input: first the row's sums, then the result.
                return [MemoryBound(4 * size + statistics, size, "reduction")]
            return [
                MemoryBound(2 * size, statistics, "reduction"),
                *(MemoryBound(2 * size, size) for _ in range(self.num_passes)),
            ]
        # Partial sums over blocks of tokens, then their sum.
        weights = float(local.element_bytes * sum(prod(shape) for shape in local.parameters))
        return [
            MemoryBound(2 * size + statistics, weights, "reduction"),
            MemoryBound(weights, weights, "reduction"),
        ]

    @staticmethod
    def _persistent(phase: str, size: float, statistics: float, local: Local) -> list[Kernel]:
        """Return the gradients of one pass, and the sum over what its blocks have found for the weights."""
        num_rows = min(NUM_BLOCKS, prod(local.inputs[0][:-1]))
        elements = sum(prod(shape) for shape in local.parameters)
        partial = float(DTYPE_BYTES["fp32"] * num_rows * elements)
        if phase == BACKWARD_INPUT:
            return [MemoryBound(2 * size + statistics, size + partial, "reduction")]
        return [MemoryBound(partial, float(local.element_bytes * elements), "reduction")]

    def _by_blocks(self, phase: str, size: float, statistics: float, local: Local) -> list[Kernel]:
        """Return the kernels of PyTorch 2, which read everything once: what a block reads again is in its cache."""
        *tokens, features = local.inputs[0]
        rows = prod(tokens)
        if phase == FORWARD:
            # A mean and a variance are merged from thread to thread; a sum of squares is as quick as the reads.
            pattern = "row_norm" if self.num_statistics > 1 else "reduction"
            return [MemoryBound(size, size + statistics, pattern, rows)]
        if phase == BACKWARD_INPUT:
            return [MemoryBound(2 * size + statistics, size, "reduction")]
        weights = float(local.element_bytes * sum(prod(shape) for shape in local.parameters))
        if rows > MANY_ROWS and features // COLUMNS_OF_BLOCK < FEW_BLOCKS:
            return [MemoryBound(2 * size + statistics, weights, "reduction")]
        return [MemoryBound(2 * size + statistics, weights, "column_sum", rows)]

    @staticmethod
    def _cast(phase: str, size: float, statistics: float, local: Local) -> list[Kernel]:
        """Return the kernels on fp32 residuals, with the casts before and after the product that reads the result."""
        wide = size / local.element_bytes * DTYPE_BYTES["fp32"]
        weights = float(DTYPE_BYTES["fp32"] * sum(prod(shape) for shape in local.parameters))
        if phase == FORWARD:
            return [MemoryBound(wide, wide + statistics, "reduction"), MemoryBound(wide, size)]
        if phase == BACKWARD_INPUT:
            return [MemoryBound(size, wide), MemoryBound(4 * wide + statistics, wide, "reduction")]
        return [MemoryBound(2 * wide + statistics, weights, "reduction"), MemoryBound(weights, weights, "reduction")]


@register
class LayerNorm(_Norm):
    """Layer normalisation with gain and bias; keeps its input, and mean and deviation in fp32.

    As a chain (TensorFlow 1's moments, then ``x * scale + (bias - mean * scale)``) it keeps the gain over the
    deviation as well, which is of the size of its input.
    """

    name = "layer_norm"
    parameter_names = ("weight", "bias")
    num_statistics = 2
    num_passes = 0


@register
class RMSNorm(_Norm):
    """Root-mean-square normalisation with a gain; keeps its input and one fp32 number per token.

    In separate passes it keeps the normalised tensor as well: Galvatron's T5 encoder layer, 91.0 MiB per
    sample at hidden 1024 and 512 tokens, shows it (released profile, RTX TITAN, fp32).
    """

    name = "rms_norm"
    parameter_names = ("weight",)
    num_statistics = 1
    num_passes = 3
