"""Convolutions, batch norm and the shortcut of a residual block; images are ``(B, C, Y, X)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from workloads.kernels import Convolution, Kernel, MemoryBound
from workloads.kinds.attributes import flag, integer, require_rank, size_bytes
from workloads.kinds.base import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    DTYPE_BYTES,
    FORWARD,
    KEPT,
    LIBRARY,
    RESULTS,
    Attributes,
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

IMAGE_WORDS = "(samples, channels, rows, columns)"


def window_side(extent: int, kernel: int, stride: int, padding: int) -> int:
    """Return how many places a window takes along one side.

    >>> window_side(224, kernel=7, stride=2, padding=3)
    112
    """
    return (extent + 2 * padding - kernel) // stride + 1


def windowed(kind: str, attributes: Attributes, shape: Shape) -> tuple[int, int]:
    """Return rows and columns after a window of ``kernel``, ``stride`` and ``padding``.

    Raises:
        ValueError: If the window does not fit.
    """
    require_rank(kind, shape, 4, IMAGE_WORDS)
    kernel, stride = integer(attributes, "kernel"), integer(attributes, "stride", 1)
    padding = integer(attributes, "padding", 0)
    if min(shape[2:]) + 2 * padding < kernel or min(kernel, stride) < 1:
        raise ValueError(f"{kind} needs images of at least its kernel={kernel} (padding={padding}), got {shape}")
    return window_side(shape[2], kernel, stride, padding), window_side(shape[3], kernel, stride, padding)


def _phases(phase: str) -> str:
    return {FORWARD: "forward", BACKWARD_INPUT: "data_gradient", BACKWARD_WEIGHT: "weight_gradient"}[phase]


@register
class Conv2d(Kind):
    """``(B, in, Y, X) -> (B, out, Y', X')`` with a weight ``(out, in, kernel, kernel)``.

    Split by output channels like a column split, by input channels like a row split.

    Attributes of the operator: ``in``, ``out``, ``kernel``, ``stride`` (1), ``padding`` (0), ``bias`` (false);
    ``reads_data`` (false): the input is training data, which needs no gradient.
    """

    name = "conv2d"
    takes_library_memory = True

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        sides = windowed(self.name, attributes, inputs[0])
        if inputs[0][1] != integer(attributes, "in"):
            raise ValueError(f"conv2d has in={attributes['in']} channels, got an input of shape {inputs[0]}")
        return ((inputs[0][0], integer(attributes, "out"), *sides),)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        kernel, out = integer(attributes, "kernel"), integer(attributes, "out")
        weight = Parameter("weight", (out, integer(attributes, "in"), kernel, kernel))
        return (weight, Parameter("bias", (out,))) if flag(attributes, "bias") else (weight,)

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        count = 1 + flag(attributes, "bias")
        own = {
            "out_channel": Split((REPLICATE,), (Shard(1),), (Shard(0),) * count),
            "in_channel": Split((Shard(1),), (PARTIAL,), (Shard(1), REPLICATE)[:count], whole_gradients=(1,)),
        }
        return SplitTable(1, 1, count, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return {"out_channel": integer(attributes, "out"), "in_channel": integer(attributes, "in")}.get(split)

    def saved(self, local: Local) -> tuple[Saved, ...]:
        return (Saved("input:0"),)

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        if phase == BACKWARD_INPUT and flag(local.attributes, "reads_data"):
            return ()
        return reordered_images(local.inputs[0], local.outputs[0], local, phase)

    def memory_steps(self, phase: str, local: Local) -> tuple[MemoryStep, ...]:
        """Results first, then what the library works in, which is given back at once."""
        taken = [MemoryStep(LIBRARY, each) for each in self.workspace(phase, local)]
        given = [MemoryStep(step.name, gives=True) for step in taken]
        kept = (MemoryStep(KEPT), MemoryStep(KEPT, gives=True)) if phase == FORWARD else ()
        return (MemoryStep(RESULTS), *taken, *given, *kept)

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        if phase == BACKWARD_INPUT and flag(local.attributes, "reads_data"):
            return []
        product = convolution(local.inputs[0], local.outputs[0], local, phase)
        if not flag(local.attributes, "bias") or phase == BACKWARD_INPUT:
            return [product]
        size = size_bytes(local, local.outputs)
        if phase == FORWARD:
            return [product, MemoryBound(size, size)]
        return [product, MemoryBound(size, float(local.outputs[0][1] * local.element_bytes), "reduction")]


def convolution(source: Shape, target: Shape, local: Local, phase: str) -> Convolution:
    """Return the kernel of one phase of an operator's convolution from ``source`` to ``target``, local shapes."""
    return Convolution(
        samples=source[0],
        in_channels=source[1],
        out_channels=target[1],
        in_pixels=source[2] * source[3],
        out_pixels=target[2] * target[3],
        kernel=integer(local.attributes, "kernel", 1),
        stride=integer(local.attributes, "stride", 1),
        role=_phases(phase),
        channels_last=local.implementation.channels_last,
    )


def reordered_images(source: Shape, target: Shape, local: Local, phase: str) -> tuple[tuple[Shape, str], ...]:
    """Return what a convolution of 16-bit numbers is worked on in: copies of both images, one allocation.

    See `Convolution.is_reordered`.
    """
    kernel = convolution(source, target, local, phase)
    if local.element_bytes != DTYPE_BYTES["fp16"] or not kernel.is_reordered:
        return ()
    return (((int(kernel.padded.image_elements()),), "activation"),)


@register
class BatchNorm(Kind):
    """Normalisation over samples and pixels of each channel; keeps its input and fp32 statistics per channel.

    Every rank of a batch axis takes the statistics of its own samples, as torch's DistributedDataParallel does.
    Running averages are no part of a training step's plan and are left out.

    Attributes of the operator: ``channels``; ``relu`` (false): a ReLU in place follows, which keeps the output.
    """

    name = "batch_norm"

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        require_rank(self.name, inputs[0], 4, IMAGE_WORDS)
        if inputs[0][1] != integer(attributes, "channels"):
            raise ValueError(f"batch_norm has channels={attributes['channels']}, got an input of shape {inputs[0]}")
        return (inputs[0],)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        channels = integer(attributes, "channels")
        return Parameter("weight", (channels,)), Parameter("bias", (channels,))

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        own = {"channel": Split((Shard(1),), (Shard(1),), (Shard(0),) * 2)}
        return SplitTable(1, 1, 2, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return integer(attributes, "channels") if split == "channel" else None

    def saved(self, local: Local) -> tuple[Saved, ...]:
        kept = (Saved("input:0"), Saved("statistics", (2, local.inputs[0][1]), "fp32"))
        return (*kept, Saved("output:0")) if flag(local.attributes, "relu") else kept

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.inputs)
        found = norm_kernels(phase, size, local)
        if flag(local.attributes, "relu") and phase == FORWARD:
            found.append(MemoryBound(size, size))
        if flag(local.attributes, "relu") and phase == BACKWARD_INPUT:
            found.insert(0, MemoryBound(2 * size, size))
        return found


def norm_kernels(phase: str, size: float, local: Local) -> list[Kernel]:
    """Return the kernels of a batch norm of ``size`` bytes; weight gradients come out of the input's.

    In bf16, which cuDNN's are not for, PyTorch's own load one number a thread: two bytes as slowly as four
    (``aten/src/ATen/native/Normalization.cpp``, ``cuda/Normalization.cuh``; no vectors where pixels come last).
    """
    if local.implementation.dtype == "bf16":
        size *= DTYPE_BYTES["fp32"] / DTYPE_BYTES["bf16"]
    if phase == FORWARD:  # statistics, then the normalised tensor
        return [MemoryBound(2 * size, size, "reduction")]
    return [MemoryBound(4 * size, size, "reduction")] if phase == BACKWARD_INPUT else []


@register
class Shortcut(Kind):
    """``x + batch_norm(conv1x1(residual))``: a residual block's end where shapes change.

    Inputs ``(x (B, out, Y, X), residual (B, in, stride Y, stride X))``. Keeps the residual, the convolution's
    result and the statistics.

    Attributes of the operator: ``in``, ``out``, ``stride`` (1).
    """

    name = "shortcut"
    takes_library_memory = True
    num_inputs = 2

    def outputs(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Shape, ...]:
        sides = windowed(self.name, {**attributes, "kernel": 1, "padding": 0}, inputs[1])
        wanted = (inputs[1][0], integer(attributes, "out"), *sides)
        if tuple(inputs[0]) != wanted or inputs[1][1] != integer(attributes, "in"):
            raise ValueError(
                f"shortcut needs a branch of shape {wanted} and a residual of {attributes['in']} channels, got "
                f"{inputs[0]} and {inputs[1]}"
            )
        return (inputs[0],)

    def parameters(self, attributes: Attributes, inputs: Sequence[Shape]) -> tuple[Parameter, ...]:
        out = integer(attributes, "out")
        return (
            Parameter("projection", (out, integer(attributes, "in"), 1, 1)),
            Parameter("weight", (out,)),
            Parameter("bias", (out,)),
        )

    def splits(self, attributes: Attributes) -> Mapping[str, Split]:
        own = {"out_channel": Split((Shard(1), REPLICATE), (Shard(1),), (Shard(0),) * 3)}
        return SplitTable(2, 1, 3, own).build()

    def split_limit(self, attributes: Attributes, split: str) -> int | None:
        return integer(attributes, "out") if split == "out_channel" else None

    def saved(self, local: Local) -> tuple[Saved, ...]:
        channels = local.outputs[0][1]
        return (
            Saved("input:1"),
            Saved("projected", local.outputs[0]),
            Saved("statistics", (2, channels), "fp32"),
        )

    def kernels(self, phase: str, local: Local) -> list[Kernel]:
        size = size_bytes(local, local.outputs)
        found: list[Kernel] = [convolution(local.inputs[1], local.outputs[0], local, phase)]
        if phase == FORWARD:
            return [*found, *norm_kernels(phase, size, local), MemoryBound(2 * size, size)]
        if phase == BACKWARD_INPUT:
            residual = size_bytes(local, local.inputs[1:])
            # The gradients of the block's two readers of the residual are added.
            return [*norm_kernels(phase, size, local), *found, MemoryBound(2 * residual, residual)]
        return found

    def workspace(self, phase: str, local: Local) -> tuple[tuple[Shape, str], ...]:
        # The normalised projection, before the sum; its gradient in backward.
        made = () if phase == BACKWARD_WEIGHT else ((local.outputs[0], "activation"),)
        return (*made, *reordered_images(local.inputs[1], local.outputs[0], local, phase))

