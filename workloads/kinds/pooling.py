"""Pooling of images, and images as rows of features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from workloads.kernels import Kernel, MemoryBound
from workloads.kinds.attributes import integer, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    DTYPE_BYTES,
    FORWARD,
    Attributes,
    Kind,
    Local,
    Saved,
    Shape,
    Split,
    SplitTable,
)
from workloads.kinds.convolution import IMAGE_WORDS, windowed
from workloads.kinds.registry import register
from workloads.placements import Shard


class _ByChannel(Kind):
    """One input, one output, no parameters; channels are independent.

    Attributes of the operator: ``channels`` (optional), what a channel split must divide.
    """

    output_dim = 1
    """Where the channels are in the output."""

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(1, 1, 0, {"channel": Split((Shard(1),), (Shard(self.output_dim),))}).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return integer(attributes, "channels") if split == "channel" and "channels" in attributes else None


@register
class MaxPool(_ByChannel):
    """Maximum of each window; keeps its input and an index per output.

    Attributes of the operator: ``kernel``, ``stride`` (1), ``padding`` (0); ``channels``.
    """

    name = "max_pool"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        return ((*inputs[0][:2], *windowed(self.name, attributes, inputs[0])),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return Saved("input:0"), Saved("places", local.outputs[0], "index")

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        """Return PyTorch's kernels, whose threads load one number each, two bytes as slowly as four.

        Backward each pixel reads place and gradient of every window that it is in
        (``aten/src/ATen/native/cuda/DilatedMaxPool2d.cu``).
        """
        slower = max(1.0, DTYPE_BYTES["fp32"] / local.element_bytes)
        before, after = (slower * size_bytes(local, shapes) for shapes in (local.inputs, local.outputs))
        places = float(DTYPE_BYTES["index"] * prod(local.outputs[0]))
        if phase == FORWARD:
            return [MemoryBound(before, after + places)]
        if phase == BACKWARD_INPUT:  # set to zero, then filled
            pixels = integer(local.attributes, "kernel") ** 2
            return [MemoryBound(0.0, size_bytes(local, local.inputs)), MemoryBound(pixels * (after + places), before)]
        return []


@register
class GlobalAveragePool(_ByChannel):
    """The mean over all pixels: ``(B, C, Y, X) -> (B, C)``; keeps nothing."""

    name = "global_average_pool"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 4, IMAGE_WORDS)
        return (inputs[0][:2],)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        before, after = size_bytes(local, local.inputs), size_bytes(local, local.outputs)
        if phase == FORWARD:
            return [MemoryBound(before, after, "reduction")]
        return [MemoryBound(after, before)] if phase == BACKWARD_INPUT else []


@register
class Flatten(_ByChannel):
    """An image as one row of features: ``(B, C, Y, X) -> (B, 1, C Y X)``; a view, it costs nothing."""

    name = "flatten"
    output_dim = 2

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 4, IMAGE_WORDS)
        return ((inputs[0][0], 1, prod(inputs[0][1:])),)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        return []
