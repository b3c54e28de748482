"""Rearrangements of image tokens: into windows and back, two by two, and their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kernels import Kernel, MemoryBound
from workloads.kinds.attributes import integer, require_rank, size_bytes
from workloads.kinds.base import BACKWARD_WEIGHT, FORWARD, Attributes, Kind, Local, Saved, Shape, Split, SplitTable
from workloads.kinds.registry import register


class _Rearrangement(Kind):
    """What the kinds of this file share: tokens of a square image, nothing kept, one pass over memory each way."""

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(1, 1, 0).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if phase == BACKWARD_WEIGHT:
            return []
        size = size_bytes(local, local.outputs)
        return [MemoryBound(size, size, "strided")]

    def _check(self, attributes: Attributes, shape: Shape) -> None:
        require_rank(self.name, shape, 3, "(samples, tokens, features)")
        side = integer(attributes, "side")
        if shape[1] != side * side:
            raise ValueError(f"{self.name} has side={side}, so {side * side} tokens, got an input of shape {shape}")


@register
class WindowOrder(_Rearrangement):
    """Tokens of an image row by row to window after window, or back: ``(B, S, H) -> (B, S, H)``.

    With a shift the image is rolled by that many rows and columns first (and back last), in a pass each: torch.roll
    over two dimensions is one after the other (aten/native/TensorTransformations.h, ``roll_common``).

    Attributes of the operator: ``side`` (tokens), ``window`` (side, tokens), ``shift``, ``reverse``.
    """

    name = "window_order"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        self._check(attributes, inputs[0])
        side, window = integer(attributes, "side"), integer(attributes, "window")
        if side % window:
            raise ValueError(f"window_order: the window must divide side={side}, got {window}")
        return (inputs[0],)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        return super().kernels(phase, local) * (3 if integer(local.attributes, "shift", 0) else 1)


@register
class PatchMerge(_Rearrangement):
    """Two by two neighbouring tokens side by side: ``(B, S, H) -> (B, S / 4, 4 H)`` (Swin, before its linear).

    Attributes of the operator: ``side`` (tokens, even).
    """

    name = "patch_merge"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        self._check(attributes, inputs[0])
        if integer(attributes, "side") % 2:
            raise ValueError(f"patch_merge needs an even side, got {attributes['side']}")
        samples, tokens, features = inputs[0]
        return ((samples, tokens // 4, 4 * features),)


@register
class TokenMean(Kind):
    """The mean over tokens: ``(B, S, H) -> (B, H)``; keeps nothing."""

    name = "token_mean"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 3, "(samples, tokens, features)")
        return ((inputs[0][0], inputs[0][2]),)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        return SplitTable(1, 1, 0).build()

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return ()

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        whole, mean = size_bytes(local, local.inputs), size_bytes(local, local.outputs)
        if phase == BACKWARD_WEIGHT:
            return []
        return [MemoryBound(whole, mean, "reduction") if phase == FORWARD else MemoryBound(mean, whole)]
