"""Seconds that one kernel occupies a GPU when it runs alone, from its shape and fitted curves.

Nothing here knows the host: launches are priced by the engine from ``GpuType.launch_s``.
"""

from __future__ import annotations

from math import ceil, sqrt

from hardware_models.gpus import (
    AttentionCurve,
    ConvolutionFactors,
    DtypeError,
    EfficiencyCurves,
    GpuType,
    MatmulCurve,
    MemoryCurve,
    curves_of,
    load_curves,
)
from workloads.kernels import WINOGRAD_KERNEL, Convolution, FlashAttention, Kernel, Matmul, MemoryBound
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
        factors = convolution_factors(gpu, curves, dtype)
        seconds = convolution_s(gpu, _matmul_curve(curves, gpu, dtype), kernel, dtype, factors)
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
    misaligned = is_misaligned(kernel, DTYPE_BYTES[dtype])
    if misaligned:
        traffic /= curve.misaligned_fraction
    return max(_arithmetic_s(gpu, curve, kernel, dtype, misaligned=misaligned), traffic)


def _arithmetic_s(gpu: GpuType, curve: MatmulCurve, kernel: Matmul, dtype: str, *, misaligned: bool) -> float:
    elements, waves = _tiled(gpu, curve, kernel)
    efficiency = (
        curve.limit[kernel.role] * waves / (waves + curve.half_waves) * kernel.k / (kernel.k + curve.half_k)
    )
    if misaligned:
        efficiency *= curve.misaligned_fraction
    return 2.0 * kernel.batch * elements * kernel.k / (gpu.peak(dtype) * efficiency)


def _tiled(gpu: GpuType, curve: MatmulCurve, kernel: Matmul) -> tuple[int, float]:
    """Return the elements of one product in whole tiles, and the waves of all its tiles."""
    tiles_m, tiles_n = ceil(kernel.m / curve.tile_m), ceil(kernel.n / curve.tile_n)
    # A library has narrower tiles for narrow products: a dimension below the tile is not padded up to it.
    rows = kernel.m if kernel.m < curve.tile_m else tiles_m * curve.tile_m
    columns = kernel.n if kernel.n < curve.tile_n else tiles_n * curve.tile_n
    elements = rows * columns
    return elements, kernel.batch * elements / (curve.tile_m * curve.tile_n) / gpu.num_multiprocessors


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


CONVOLUTION_TILE_N = 64
"""Columns of the narrower tile that cuDNN has for convolutions (kernels ``volta_scudnn_128x64``)."""

FEW_CHANNELS = 4
"""Colour images: what a window reads of one pixel fills no vector load."""

PARTIAL_BYTES = 2 * 4
"""Partial sums are written and read again, in fp32."""


ELSEWHERE_MEASURED = ("volta", "fp32")
"""The curves and the type whose factors stand for those of GPUs and types where no convolution was measured."""


def convolution_factors(gpu: GpuType, curves: EfficiencyCurves, dtype: str) -> ConvolutionFactors:
    """Return what convolutions of a type take beside their products on a GPU.

    Args:
        gpu: Whose shipped factors count where ``curves`` have none (a calibration knows nothing of convolutions).
        curves: Of the GPU.
        dtype: Of images and weights.
    """
    for known in (curves, load_curves(gpu.curves)):
        if dtype in known.convolutions:
            return known.convolutions[dtype]
    name, measured = ELSEWHERE_MEASURED
    return load_curves(name).convolutions[measured]


def convolution_s(
    gpu: GpuType, curve: MatmulCurve, kernel: Convolution, dtype: str, factors: ConvolutionFactors
) -> float:
    """Return seconds of a convolution: of its implicit product or by Winograd's algorithm, whichever is quicker.

    cuDNN has the latter for fp32, windows of 3x3 and stride 1. Libraries never write the windows to memory: pixels
    that overlap count once, as the images, and nothing is quicker than that traffic. In 16 bits whole groups of
    channels are worked on, in a layout of their own that images are copied into and out of.
    """
    curve = curve.model_copy(
        update={
            "half_k": curve.half_k * factors.half_k_share,
            "tile_n": CONVOLUTION_TILE_N,
            "half_waves": curve.half_waves * curve.tile_n / CONVOLUTION_TILE_N,  # as many elements
        }
    )
    is_padded = DTYPE_BYTES[dtype] == DTYPE_BYTES["fp16"]
    whole = kernel.padded if is_padded else kernel
    seconds = _implicit_product_s(gpu, curve, whole.product, dtype) * factors.slowness[kernel.role]
    if kernel.in_channels <= FEW_CHANNELS:
        seconds *= max(1.0, factors.few_channels_slowness * kernel.in_channels / whole.in_channels)
    if kernel.kernel == WINOGRAD_KERNEL and kernel.stride == 1 and dtype == "fp32":
        share = factors.winograd_share[kernel.role]
        winograd_s = _winograd_s(gpu, curve, kernel, dtype, factors)
        seconds = min(seconds, share * winograd_s + (1.0 - share) * seconds)
    num_bytes = kernel.num_elements() * DTYPE_BYTES[dtype]
    seconds = max(seconds, num_bytes / (gpu.memory_bytes_per_s * curve.bandwidth_fraction))
    if is_padded and kernel.is_reordered:
        moved = (kernel.image_elements() + whole.image_elements()) * DTYPE_BYTES[dtype]
        seconds += moved / (gpu.memory_bytes_per_s * factors.transform_fraction)
    return seconds


def _implicit_product_s(gpu: GpuType, curve: MatmulCurve, product: Matmul, dtype: str) -> float:
    seconds = _arithmetic_s(gpu, curve, product, dtype, misaligned=False)
    if product.role == "weight_gradient":
        seconds = min(seconds, _split_s(gpu, curve, product, dtype))
    return seconds


def _split_s(gpu: GpuType, curve: MatmulCurve, product: Matmul, dtype: str) -> float:
    """Return seconds of a product split along its inner dimension into the best number of parts, two at least.

    ``s`` parts fill the GPU ``s`` times better; each has to start (``half_k``) and leaves a partial result. With ``t``
    seconds for each element summed over on a full GPU, that is ``t (k + s half_k) (1 + half_waves / (s waves)) + s
    partial_s``: least beside ``s = sqrt(t k half_waves / waves / (t half_k + partial_s))``.
    """
    elements, waves = _tiled(gpu, curve, product)
    rate = gpu.peak(dtype) * curve.limit[product.role]
    full_s, lack = 2.0 * product.batch * elements / rate, curve.half_waves / waves
    partial_bytes = product.batch * product.m * product.n * PARTIAL_BYTES
    partial_s = partial_bytes / (gpu.memory_bytes_per_s * curve.bandwidth_fraction)
    best = int(sqrt(full_s * product.k * lack / (full_s * curve.half_k + partial_s)))
    return min(
        full_s * (product.k + parts * curve.half_k) * (1 + lack / parts) + parts * partial_s
        for parts in (max(2, best), max(2, best + 1))
    )


def _winograd_s(
    gpu: GpuType, curve: MatmulCurve, kernel: Convolution, dtype: str, factors: ConvolutionFactors
) -> float:
    """Return seconds of Winograd's algorithm in three steps: transforms, the products of their results, and back.

    The transforms move images and filter once in their own size and once in that of the products' operands and
    results.
    """
    product = kernel.winograd_product
    moved = (kernel.num_elements() + product.num_elements()) * DTYPE_BYTES[dtype]
    transforms = moved / (gpu.memory_bytes_per_s * factors.transform_fraction)
    return transforms + matmul_s(gpu, curve, product, dtype)


def _matmul_curve(curves: EfficiencyCurves, gpu: GpuType, dtype: str) -> MatmulCurve:
    if dtype not in curves.matmul:
        known = ", ".join(sorted(curves.matmul))
        words = f"dtype must be one that {gpu.name} has matmul curves for ({known}), got {dtype!r}"
        raise DtypeError(words, curves.matmul)
    return curves.matmul[dtype]


def memory_bound_s(gpu: GpuType, curve: MemoryCurve, kernel: MemoryBound) -> float:
    """Return seconds of a pass over memory; a curve that knows nothing of rows has those of the GPU's shipped ones."""
    rate = gpu.memory_bytes_per_s * curve.share(kernel.pattern)
    seconds = (kernel.total_bytes + curve.ramp_bytes) / rate
    if kernel.rows:
        row_s = curve.row_s or load_curves(gpu.curves).memory.row_s
        seconds += kernel.rows * row_s.get(kernel.pattern, 0.0)
    return seconds


FLASH_SLOWNESS = {1: (1.4, 2.0), 2: (1.0, 1.0)}
"""Time forward and backward by generation of the kernel. The first is its Triton port, over which FlashAttention-2 is
1.3 to 1.5 times faster forward and about twice backward (Dao 2023, section 4.1; the middle is taken). The curves are
those of the second generation."""


ATTENTION_TILE = 128
"""Queries of one head that a block of FlashAttention-2 works on forward, keys backward (Dao 2023, section 3.2)."""

ATTENTION_WIDTHS = {1: (16, 32, 64, 128), 2: (32, 64, 96, 128, 192, 256)}
"""Head sizes that its kernels are built for, by generation; others are worked on as the next one. The Triton port
rounds up to powers of two (``flash_attn_triton.py``, ``BLOCK_HEADDIM``), the second has templates
(``csrc/flash_attn/src/static_switch.h``, ``HEADDIM_SWITCH``)."""


def _whole_tiles(kernel: FlashAttention) -> float:
    """Return what blocks of tiles work on over what the kernel is for: keys and queries of the last tile, head sizes
    between two, and the half of a tile on the diagonal that a causal mask hides."""
    rows, columns = (ceil(length / ATTENTION_TILE) for length in (kernel.query_length, kernel.key_length))
    whole = rows * columns * ATTENTION_TILE**2 / (kernel.query_length * kernel.key_length)
    widths = ATTENTION_WIDTHS[kernel.generation]
    wide = next((width for width in widths if width >= kernel.head_dim), kernel.head_dim)
    diagonal = 1.0 + 1.0 / columns if kernel.causal else 1.0
    return whole * diagonal * wide / kernel.head_dim


def attention_s(gpu: GpuType, curve: AttentionCurve, kernel: FlashAttention, dtype: str) -> float:
    """Return seconds of a fused attention kernel; its traffic never bounds it at training lengths."""
    limit, half_waves, length = curve.forward, curve.forward_half_waves, kernel.query_length
    if kernel.backward:
        limit, half_waves, length = curve.backward, curve.backward_half_waves, kernel.key_length
    if not kernel.causal:
        half_waves /= 2  # fitted on causal tiles, the last of which are twice as long as the mean; these are all alike
    waves = kernel.batch * ceil(length / ATTENTION_TILE) / gpu.num_multiprocessors
    efficiency = limit * kernel.key_length / (kernel.key_length + curve.half_length) * waves / (waves + half_waves)
    flop = kernel.flop * _whole_tiles(kernel)
    return flop / (gpu.peak(dtype) * efficiency) * FLASH_SLOWNESS[kernel.generation][kernel.backward]
