"""GPU types: peak rates, memory, and the constants of the efficiency curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import FileModel, validated
from hardware_models.schema import (
    Bytes,
    BytesPerS,
    Count,
    Factor,
    Fraction,
    HalfLength,
    HalfWaves,
    Positive,
    RampBytes,
    Ratio,
    Seconds,
    Share,
    Slowdown,
    Text,
)

HERE = Path(__file__).parent


MATMUL_ROLES = ("forward", "data_gradient", "weight_gradient")
AS_ANOTHER = {"strided": "elementwise", "row_norm": "reduction", "column_sum": "reduction"}
"""Patterns of access that few GPUs were measured with, and those that stand for them elsewhere."""

PATTERNS = ("elementwise", "reduction", "random", "gather", *AS_ANOTHER)


def _exactly(value: Mapping[str, float], keys: tuple[str, ...]) -> Mapping[str, float]:
    if set(value) != set(keys):
        raise ValueError(f"must have exactly the keys {', '.join(keys)}, got {', '.join(value) or 'none'}")
    return value


class MatmulCurve(FileModel):
    """How close matmuls of one dtype come to the peak, as a smooth function of their shape.

    time = flop / (peak * efficiency), with
    efficiency = limit[role] * waves / (waves + half_waves) * k / (k + half_k) * tile fill, where
    waves = tiles / multiprocessors and the tile fill counts the ragged last tiles.

    Attributes:
        limit: Share of the peak that large products reach, by role.
        half_waves: Waves of tiles at which half the limit is reached: an unfilled GPU.
        half_k: Reduction length at which half is reached: prologue and epilogue of a tile.
        tile_m, tile_n: Output tile in elements.
        bandwidth_fraction: Share of the memory bandwidth that operands and product move at.
        source: Where it comes from: fit script and rows, or a paper.
        misaligned_fraction: Share of that efficiency left to products of 16-bit matrices whose rows do not all start
            at multiples of 16 bytes (an odd vocabulary): tensor cores then load element by element.
        misaligned_source: Where that comes from.
    """

    limit: Mapping[str, Fraction]
    half_waves: HalfWaves
    half_k: HalfLength
    tile_m: Count
    tile_n: Count
    bandwidth_fraction: Fraction
    source: Text
    misaligned_fraction: Fraction = 1.0
    misaligned_source: Text = "not measured"

    @field_validator("limit")
    @classmethod
    def _complete(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        return _exactly(value, MATMUL_ROLES)


class MemoryCurve(FileModel):
    """Memory-bound kernels: share of the bandwidth by access pattern, and how small ones fall short.

    time = (bytes + ramp_bytes) / (bandwidth * fraction[pattern]) + rows * row_s[pattern]: ``ramp_bytes`` is what could
    have moved while the kernel starts and drains, ``row_s`` what blocks of threads wait for with each row beside memory
    (none: nothing is known of it). Patterns that were not measured are as others (``AS_ANOTHER``).
    """

    fraction: Mapping[str, Fraction]
    ramp_bytes: RampBytes
    source: Text
    row_s: Mapping[str, Seconds] = {}

    @field_validator("fraction")
    @classmethod
    def _complete(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        measured = tuple(name for name in PATTERNS if name in value or name not in AS_ANOTHER)
        return _exactly(value, measured)

    @field_validator("row_s")
    @classmethod
    def _known(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        if not set(value) <= set(PATTERNS):
            raise ValueError(f"keys must be among {', '.join(PATTERNS)}, got {', '.join(value)}")
        return value

    def share(self, pattern: str) -> float:
        """Return the share of the bandwidth that passes of a pattern reach.

        Raises:
            ValueError: If there is no such pattern.
        """
        if pattern not in PATTERNS:
            raise ValueError(f"pattern must be one of {', '.join(sorted(PATTERNS))}, got {pattern!r}")
        return self.fraction[pattern if pattern in self.fraction else AS_ANOTHER[pattern]]


class AttentionCurve(FileModel):
    """Fused attention: share of the matmul peak, and how short and few sequences fall short of it.

    efficiency = limit * keys / (keys + half_length) * waves / (waves + half_waves), where a wave is a tile of queries
    (backward: of keys) on each multiprocessor. Causal tiles are of unequal length, so the last ones leave much idle.

    Attributes:
        forward, backward: Limits.
        half_length: Keys at which half the limit is reached.
        source: Where it comes from.
        forward_half_waves, backward_half_waves: Waves at which half is reached, half as many without a causal mask; 0
            where few heads were not measured.
    """

    forward: Fraction
    backward: Fraction
    half_length: HalfLength
    source: Text
    forward_half_waves: HalfWaves = 0.0
    backward_half_waves: HalfWaves = 0.0


class ConvolutionFactors(FileModel):
    """What convolutions take beside the matrix products that they amount to.

    Attributes:
        slowness: Time of the implicit product over that of the matrix product, by role.
        half_k_share: ``half_k`` over that of the curve.
        few_channels_slowness: On top where the input has at most four channels; what padding them costs is part of it.
        transform_fraction: Share of the memory bandwidth that Winograd's transforms move at, and copies into the
            layout of tensor cores.
        source: Where it comes from.
        winograd_share: Of convolutions that Winograd's algorithm would be quicker for, those that the library's rules
            give to it, by role; in fp32, which alone has it.
    """

    slowness: Mapping[str, Slowdown]
    half_k_share: Ratio
    few_channels_slowness: Slowdown
    transform_fraction: Fraction
    source: Text
    winograd_share: Mapping[str, Share] = Field(default=dict.fromkeys(MATMUL_ROLES, 1.0))

    @field_validator("slowness", "winograd_share")
    @classmethod
    def _complete(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        return _exactly(value, MATMUL_ROLES)


class PowerCurve(FileModel):
    """What a GPU would draw at full clock, over its power limit; power falls with the clock to the ``exponent``.

    Attributes:
        memory: While nothing but memory is busy.
        products: While products run as fast as they can, by dtype; other dtypes are within the limit.
        exponent: 3 where the voltage is in proportion to the clock.
        source: Where it comes from.
    """

    memory: Share
    products: Mapping[str, Positive]
    exponent: Positive
    source: Text


class EfficiencyCurves(FileModel):
    """All curves of one GPU architecture; ``matmul`` and ``convolutions``, where they were measured, by dtype.

    ``power`` where products alone are beyond the power limit, which nothing else here knows.
    """

    matmul: Mapping[str, MatmulCurve]
    memory: MemoryCurve
    attention: AttentionCurve
    convolutions: Mapping[str, ConvolutionFactors] = {}
    power: PowerCurve | None = None

    @model_validator(mode="after")
    def _known_types(self) -> EfficiencyCurves:
        unknown = set(self.convolutions) - set(self.matmul)
        if unknown:
            known = ", ".join(self.matmul)
            found = ", ".join(sorted(unknown))
            raise ValueError(f"convolutions must be of types that matmul has ({known}), got {found}")
        return self


class DtypeError(ValueError):
    """A GPU type does not know a dtype.

    Attributes:
        known: Those that it knows.
    """

    def __init__(self, message: str, known: Iterable[str]) -> None:
        super().__init__(message)
        self.known = tuple(sorted(known))

    def __reduce__(self) -> tuple[type[DtypeError], tuple[str, tuple[str, ...]]]:
        """Return how another process makes it again."""
        return type(self), (str(self), self.known)


class GpuType(FileModel):
    """One GPU product.

    Attributes:
        name: As cluster presets write it.
        peak_flop_per_s: Dense peak by dtype, multiply and add counted.
        memory_bytes: Device memory that ``nvidia-smi`` shows.
        memory_bytes_per_s: Peak memory bandwidth.
        num_multiprocessors: Streaming multiprocessors: tiles in one wave.
        curves: Entry of ``kernel_curves.yaml``.
        kernel_floor_s: Shortest time any kernel occupies the device.
        launch_s: Host seconds per kernel launch from PyTorch.
        host_factor: What the host of such a GPU takes over what ``launch_s`` and the seconds of a runtime say: 1 for
            hosts like those that these were measured on.
        is_its_own_host: It computes what it dispatches (a process of the CPU): what a runtime's host spends on
            operators is in their time.
        optimizer_bandwidth_fraction: Share of the bandwidth of fused multi-tensor optimizer kernels.
        overlap_slowdown_computation, overlap_slowdown_communication: Factors while both run.
        matmul_workspace_bytes: What torch sets aside for cuBLAS for each thread that multiplies.
        calibrated_curves: A calibration's curves, in the place of the entry that ``curves`` names.
        source: Of the peaks; the others have ``*_source``.
    """

    name: Text
    peak_flop_per_s: Mapping[str, Positive]
    memory_bytes: Bytes
    memory_bytes_per_s: BytesPerS
    num_multiprocessors: Count
    curves: Text
    kernel_floor_s: Seconds
    launch_s: Seconds
    launch_source: Text
    optimizer_bandwidth_fraction: Fraction
    overlap_slowdown_computation: Slowdown
    overlap_slowdown_communication: Slowdown
    overlap_source: Text
    source: Text
    calibrated_curves: EfficiencyCurves | None = None
    host_factor: Factor = 1.0
    is_its_own_host: bool = False
    matmul_workspace_bytes: Bytes = 8_519_680

    def peak(self, dtype: str) -> float:
        """Return the peak of ``dtype`` in flop/s.

        Raises:
            ValueError: If the GPU has no such unit.
        """
        try:
            return self.peak_flop_per_s[dtype]
        except KeyError:
            known = ", ".join(sorted(self.peak_flop_per_s))
            raise DtypeError(
                f"dtype must be one that {self.name} computes in ({known}), got {dtype!r}", self.peak_flop_per_s
            ) from None


def _entries(file_name: str) -> Mapping[str, Mapping[str, object]]:
    table = load_mapping(HERE / file_name)
    for name, entry in table.items():
        assert isinstance(entry, dict), f"{file_name}: {name} must be a mapping"
    return table


@cache
def _gpu_table() -> Mapping[str, Mapping[str, object]]:
    return _entries("gpu_types.yaml")


def gpu_names() -> tuple[str, ...]:
    """Return the names of all shipped GPU types, sorted."""
    return tuple(sorted(_gpu_table()))


@cache
def load_gpu(name: str) -> GpuType:
    """Return a shipped GPU type.

    Raises:
        ValueError: If there is none of that name.
    """
    table = _gpu_table()
    if name not in table:
        raise ValueError(f"GPU type must be a known one, got {name!r}; {nearest(name, table)}")
    return validated(GpuType, {"name": name, **table[name]}, f"gpu_types.yaml: {name}")


def curves_of(gpu: GpuType) -> EfficiencyCurves:
    """Return the efficiency curves of a GPU: calibrated ones, else those shipped for its architecture."""
    return gpu.calibrated_curves if gpu.calibrated_curves is not None else load_curves(gpu.curves)


@cache
def load_curves(name: str) -> EfficiencyCurves:
    """Return the efficiency curves of one architecture (an entry of ``kernel_curves.yaml``)."""
    table = _entries("kernel_curves.yaml")
    if name not in table:
        raise ValueError(
            f"curves must name an entry of kernel_curves.yaml, got {name!r}; {nearest(name, table)}"
        )
    return validated(EfficiencyCurves, table[name], f"kernel_curves.yaml: {name}")
