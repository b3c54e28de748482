"""What one GPU kernel does, without saying how fast: matmuls, convolutions and memory-bound passes.

Operator kinds describe their work as lists of these; ``hardware_models`` turns each into seconds.
One entry is one kernel launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt

WINOGRAD_KERNEL, WINOGRAD_TILE = 3, 4
"""Side of the window that cuDNN has Winograd's algorithm for, and of the output tile of its variant with most
channels (``CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD_NONFUSED``; Lavin and Gray 2016)."""

CHANNELS_TOGETHER = 8
"""Channels of a pixel that tensor cores load at once, 16 bytes: cuDNN pads others with zeros ("Channels In And Out
Requirements" of NVIDIA's performance guide for convolutional layers)."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """A (batched) matrix product ``[batch, m, k] x [batch, k, n]``.

    Attributes:
        m, n, k: Matrix sizes in elements, >= 1.
        batch: Independent products in one launch.
        role: ``"forward"``, ``"data_gradient"`` or ``"weight_gradient"``: libraries use other
            layouts (TN, NN, NT) and accumulators for them, so their efficiency differs.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    role: str = "forward"

    @property
    def flop(self) -> float:
        """Floating point operations: a multiply and an add per element triple."""
        return 2.0 * self.batch * self.m * self.n * self.k

    def num_elements(self) -> float:
        """Elements read and written once: both operands and the product."""
        return float(self.batch) * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A two-dimensional convolution as libraries run it: an implicit matrix product, or Winograd's.

    Attributes:
        samples, in_channels, out_channels: Elements.
        in_pixels, out_pixels: Pixels of one channel before and after.
        kernel, stride: Side and step of the window.
        role: ``"forward"``, ``"data_gradient"`` or ``"weight_gradient"``.
        channels_last: Channels of a pixel are side by side, not pixels of a channel.
    """

    samples: int
    in_channels: int
    out_channels: int
    in_pixels: int
    out_pixels: int
    kernel: int
    stride: int = 1
    role: str = "forward"
    channels_last: bool = False

    @property
    def flop(self) -> float:
        """Floating point operations of the direct algorithm; the same in all three roles."""
        return 2.0 * self.samples * self.out_pixels * self.out_channels * self.in_channels * self.kernel**2

    @property
    def product(self) -> Matmul:
        """The matrix product with that many operations, in the role's layout; ``k`` is what is summed over.

        The data gradient has a row for each input pixel that a window reads, and of the filter's taps only those that
        meet it: with a stride, a pixel is read by a ``stride**2``-th of them.
        """
        pixels, taps = self.samples * self.out_pixels, self.kernel**2
        if self.role == "forward":
            return Matmul(m=pixels, n=self.out_channels, k=self.in_channels * taps)
        if self.role == "data_gradient":
            places = min(self.stride, self.kernel) ** 2
            k = ceil(self.out_channels * taps / places)
            return Matmul(m=pixels * places, n=self.in_channels, k=k, role=self.role)
        return Matmul(m=self.out_channels, n=self.in_channels * taps, k=pixels, role=self.role)

    @property
    def winograd_product(self) -> Matmul:
        """The products of Winograd's algorithm F(4x4, 3x3): one for each of the 36 places of a transformed tile.

        Tiles cover 4x4 output pixels, the last of a row or column in part; images are taken to be square.
        """
        tiles = self.samples * ceil(sqrt(self.out_pixels) / WINOGRAD_TILE) ** 2
        places = (WINOGRAD_TILE + WINOGRAD_KERNEL - 1) ** 2
        if self.role == "forward":
            return Matmul(m=tiles, n=self.out_channels, k=self.in_channels, batch=places)
        if self.role == "data_gradient":
            return Matmul(m=tiles, n=self.in_channels, k=self.out_channels, batch=places, role=self.role)
        return Matmul(m=self.out_channels, n=self.in_channels, k=tiles, batch=places, role=self.role)

    @property
    def padded(self) -> Convolution:
        """The convolution that tensor cores run: whole groups of channels."""
        return replace(
            self,
            in_channels=CHANNELS_TOGETHER * ceil(self.in_channels / CHANNELS_TOGETHER),
            out_channels=CHANNELS_TOGETHER * ceil(self.out_channels / CHANNELS_TOGETHER),
        )

    @property
    def is_reordered(self) -> bool:
        """Tensor cores want the channels of a pixel side by side: cuDNN copies both images there and back.

        Not where they are so, nor where a pixel is a window: the images are matrices as they are.
        """
        return not self.channels_last and (self.kernel > 1 or self.stride > 1)

    def image_elements(self) -> float:
        """Elements of both images."""
        return float(self.samples) * (self.in_channels * self.in_pixels + self.out_channels * self.out_pixels)

    def num_elements(self) -> float:
        """Elements read and written once: both images and the weight."""
        return self.image_elements() + float(self.in_channels) * self.out_channels * self.kernel**2


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """A fused attention kernel: two matmuls and a softmax that never leave the chip.

    Attributes:
        batch: Samples times query heads.
        query_length, key_length, head_dim: Elements.
        causal: True where the masked half is skipped.
        backward: The backward kernel does five matmuls where forward does two (recomputes scores).
        generation: 1 for the Triton port of the first FlashAttention (2022), 2 for FlashAttention-2.
    """

    batch: int
    query_length: int
    key_length: int
    head_dim: int
    causal: bool
    backward: bool = False
    generation: int = 2

    @property
    def flop(self) -> float:
        """FLOPs that are really done: the masked half is not counted when causal."""
        full = 2.0 * self.batch * self.query_length * self.key_length * self.head_dim
        return full * (5 if self.backward else 2) * (0.5 if self.causal else 1.0)


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """A pass over memory whose arithmetic is free: normalisation, activation, dropout, copies.

    Attributes:
        read_bytes, write_bytes: Bytes of device memory touched.
        pattern: ``"elementwise"``, ``"reduction"`` (norms, softmax, bias gradients), ``"random"``
            (draws random numbers: dropout), ``"gather"`` (embedding look-up and its scatter-add), ``"strided"``
            (torch's elementwise kernels on operands that are not contiguous: each thread reckons where its elements
            lie and loads them one by one; aten/native/cuda/CUDALoops.cuh, ``launch_legacy_kernel``), ``"row_norm"``
            (a block of threads for each row finds its mean and variance before it writes) or ``"column_sum"`` (a block
            for a few columns goes down all rows).
        rows: Rows of the tensor that blocks of threads take one after the other; 0 of the other patterns.
    """

    read_bytes: float
    write_bytes: float
    pattern: str = "elementwise"
    rows: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes read plus bytes written."""
        return self.read_bytes + self.write_bytes


Kernel = Matmul | Convolution | FlashAttention | MemoryBound
