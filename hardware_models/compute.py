"""Seconds that one kernel occupies a GPU when it runs alone, from its shape and fitted curves.

Nothing here knows the host: launches are priced by the engine from ``GpuType.launch_s``.
"""

from __future__ import annotations

from math import ceil

from hardware_models.gpus import (
    AttentionCurve,
    EfficiencyCurves,
    GpuType,
    MatmulCurve,
    MemoryCurve,
    curves_of,
)
from workloads.kernels import Convolution, FlashAttention, Kernel, Matmul, MemoryBound
from workloads.kinds.base import DTYPE_BYTES


def kernel_time_s(gpu: GpuType, kernel: Kernel, dtype: str) -> float:
    """Return device seconds of one kernel.

    Args:
        gpu: Where it runs.
        kernel: What it does, in local shapes.
        dtype: Type of the matmul operands ("fp16", "bf16", "tf32", "fp32"); memory-bound kernels carry bytes.

    Raises:
        ValueError: If the GPU or its curves do not know the dtype.
    """
    curves = curves_of(gpu)
    if isinstance(kernel, MemoryBound):
        seconds = memory_bound_s(gpu, curves.memory, kernel)
    elif isinstance(kernel, Matmul):
        seconds = matmul_s(gpu, _matmul_curve(curves, gpu, dtype), kernel, dtype)
    elif isinstance(kernel, Convolution):
        seconds = convolution_s(gpu, _matmul_curve(curves, gpu, dtype), kernel, dtype)
    else:
        seconds = attention_s(gpu, curves.attention, kernel, dtype)
    return max(gpu.kernel_floor_s, seconds)


def matmul_s(gpu: GpuType, curve: MatmulCurve, kernel: Matmul, dtype: str) -> float:
    """Return seconds of a matmul: the larger of arithmetic and memory traffic.

    Arithmetic counts whole tiles, and falls short by ``waves / (waves + half_waves)`` where tiles do not
    fill the GPU and by ``k / (k + half_k)`` where each tile has little to do.
    """
    num_bytes = kernel.num_elements() * DTYPE_BYTES[dtype]
    traffic = num_bytes / (gpu.memory_bytes_per_s * curve.bandwidth_fraction)
    return max(_arithmetic_s(gpu, curve, kernel, dtype), traffic)


def _arithmetic_s(gpu: GpuType, curve: MatmulCurve, kernel: Matmul, dtype: str) -> float:
    tiles_m, tiles_n = ceil(kernel.m / curve.tile_m), ceil(kernel.n / curve.tile_n)
    # A library has narrower tiles for narrow products: a dimension below the tile is not padded up to it.
    rows = kernel.m if kernel.m < curve.tile_m else tiles_m * curve.tile_m
    columns = kernel.n if kernel.n < curve.tile_n else tiles_n * curve.tile_n
    waves = kernel.batch * (rows * columns) / (curve.tile_m * curve.tile_n) / gpu.num_multiprocessors
    efficiency = (
        curve.limit[kernel.role] * waves / (waves + curve.half_waves) * kernel.k / (kernel.k + curve.half_k)
    )
    if is_misaligned(kernel, DTYPE_BYTES[dtype]):
        efficiency *= curve.misaligned_fraction
    return 2.0 * kernel.batch * rows * columns * kernel.k / (gpu.peak(dtype) * efficiency)


ALIGNED_BYTES = 16
"""Rows that tensor cores load at full width start at multiples of this (cuBLAS, "Tensor Core usage")."""


def is_misaligned(kernel: Matmul, element_bytes: int) -> bool:
    """Return whether rows of a 16-bit operand or of the product start anywhere but at multiples of 16 bytes.

    Rows are as long as: forward, the inputs (k) and the outputs (n); data gradient, the outputs (k) and the inputs
    (n); weight gradient, the outputs (m) and the inputs (n), since tokens are what is summed over.
    """
    if element_bytes != DTYPE_BYTES["fp16"]:
        return False
    lengths = (kernel.m, kernel.n) if kernel.role == "weight_gradient" else (kernel.k, kernel.n)
    return any(length * element_bytes % ALIGNED_BYTES for length in lengths)


CONVOLUTION_SLOWNESS = {"forward": 1.23, "data_gradient": 1.09, "weight_gradient": 1.09}
"""Time of a convolution over that of the matrix product it amounts to. Median over the 1x1 convolutions of Aceso's
profile (aceso_v100/ops.csv.gz, db eurosys, resnet 500M, tp 1, fp32, over 100 us); backward as measured together."""

WINOGRAD_SPEEDUP = {"forward": 2.31, "data_gradient": 2.68, "weight_gradient": 2.68}
"""The product's time over that of an fp32 3x3 convolution with stride 1, for which cuDNN has Winograd's algorithm
(2.25 times fewer multiplications on 2x2 tiles, 4 times on 4x4). Median over the same profile's 3x3 convolutions."""


def convolution_s(gpu: GpuType, curve: MatmulCurve, kernel: Convolution, dtype: str) -> float:
    """Return seconds of a convolution: relative to its matrix product, or the images' traffic if that is longer.

    Libraries never write the product's windows to memory: their overlapping pixels count once, as the images.
    """
    product = _arithmetic_s(gpu, curve, kernel.product, dtype)
    if kernel.kernel == 3 and kernel.stride == 1 and dtype == "fp32":
        product /= WINOGRAD_SPEEDUP[kernel.role]
    else:
        product *= CONVOLUTION_SLOWNESS[kernel.role]
    num_bytes = kernel.num_elements() * DTYPE_BYTES[dtype]
    return max(product, num_bytes / (gpu.memory_bytes_per_s * curve.bandwidth_fraction))


def _matmul_curve(curves: EfficiencyCurves, gpu: GpuType, dtype: str) -> MatmulCurve:
    if dtype not in curves.matmul:
        known = ", ".join(sorted(curves.matmul))
        raise ValueError(f"dtype must be one that {gpu.name} has matmul curves for ({known}), got {dtype!r}")
    return curves.matmul[dtype]


def memory_bound_s(gpu: GpuType, curve: MemoryCurve, kernel: MemoryBound) -> float:
    """Return seconds of a pass over memory."""
    if kernel.pattern not in curve.fraction:
        known = ", ".join(sorted(curve.fraction))
        raise ValueError(f"pattern must be one of {known}, got {kernel.pattern!r}")
    rate = gpu.memory_bytes_per_s * curve.fraction[kernel.pattern]
    return (kernel.total_bytes + curve.ramp_bytes) / rate


FLASH_SLOWNESS = {1: (1.4, 2.0), 2: (1.0, 1.0)}
"""Time forward and backward by generation of the kernel. The first is its Triton port, over which FlashAttention-2 is
1.3 to 1.5 times faster forward and about twice backward (Dao 2023, section 4.1; the middle is taken). The curves are
those of the second generation."""


def attention_s(gpu: GpuType, curve: AttentionCurve, kernel: FlashAttention, dtype: str) -> float:
    """Return seconds of a fused attention kernel; its traffic never bounds it at training lengths."""
    limit = curve.backward if kernel.backward else curve.forward
    efficiency = limit * kernel.key_length / (kernel.key_length + curve.half_length)
    return kernel.flop / (gpu.peak(dtype) * efficiency) * FLASH_SLOWNESS[kernel.generation][kernel.backward]
