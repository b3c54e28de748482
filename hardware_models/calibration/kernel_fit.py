"""Fits efficiency curves to measured operators: each row is a list of kernels and the seconds they took.

The parameters are bounded, the loss is robust (soft L1 on the logarithm of predicted over measured), so one
odd row moves little; long rows weigh more, since they make up the iteration. Every parameter is pulled
slightly towards its start value, so what the rows cannot tell apart (the two gradient matmuls of one backward
row) stays plausible. Rows never used in a fit are reported apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from hardware_models.compute import attention_s, convolution_factors, convolution_s, matmul_s, memory_bound_s
from hardware_models.gpus import (
    MATMUL_ROLES,
    PATTERNS,
    AttentionCurve,
    EfficiencyCurves,
    GpuType,
    MatmulCurve,
    MemoryCurve,
)
from workloads.kernels import Convolution, FlashAttention, Kernel, Matmul, MemoryBound

Vector = npt.NDArray[np.float64]
PULL = 0.02
"""Weight of the start values: a parameter 50 % off costs as much as all rows 1 % off."""

WEIGHT_RANGE = (0.3, 3.0)


@dataclass(frozen=True)
class KernelRow:
    """Kernels that ran one after the other, and the seconds they took together.

    Attributes:
        group: What is reported together, e.g. ``mlp_linear_1 forward``.
        kernels: In launch order.
        seconds: Measured.
        label: Row id.
        unit: Of a campaign: rows of one share a clock.
    """

    group: str
    kernels: tuple[Kernel, ...]
    seconds: float
    label: str
    unit: str = ""


@dataclass(frozen=True)
class Parameter:
    """One number to fit: its place in the curves, a start value and bounds."""

    place: str
    start: float
    low: float
    high: float


def predict_s(
    gpu: GpuType, curves: EfficiencyCurves, dtype: str, kernels: Iterable[Kernel], slowdown: float = 1.0
) -> float:
    """Return device seconds of ``kernels`` under ``curves`` (which need not be the GPU's shipped ones).

    ``slowdown``: that of the clock (`hardware_models.power`).
    """
    total = 0.0
    for kernel in kernels:
        if isinstance(kernel, Matmul):
            seconds = matmul_s(gpu, curves.matmul[dtype], kernel, dtype)
        elif isinstance(kernel, FlashAttention):
            seconds = attention_s(gpu, curves.attention, kernel, dtype)
        elif isinstance(kernel, Convolution):
            seconds = convolution_s(gpu, curves.matmul[dtype], kernel, dtype, convolution_factors(gpu, curves, dtype))
        else:
            seconds = memory_bound_s(gpu, curves.memory, kernel)
        clock = 1.0 if isinstance(kernel, MemoryBound) else slowdown
        total += clock * max(gpu.kernel_floor_s, seconds)
    return total


def build_curves(
    base: EfficiencyCurves, dtype: str, values: Mapping[str, float], source: str
) -> EfficiencyCurves:
    """Return ``base`` with the fitted values put in their places (``limit.forward`` ...).

    ``limit.gradient`` is that of both gradients, where rows do not tell them apart; ``row_ns`` are nanoseconds, since
    the fit takes steps of numbers near one.
    """
    old = base.matmul[dtype]
    limit = {role: values.get(f"limit.{role}", old.limit[role]) for role in MATMUL_ROLES}
    if "limit.gradient" in values:
        limit |= dict.fromkeys(("data_gradient", "weight_gradient"), values["limit.gradient"])
    matmul = MatmulCurve(
        limit=limit,
        half_waves=values.get("half_waves", old.half_waves),
        half_k=values.get("half_k", old.half_k),
        tile_m=old.tile_m,
        tile_n=old.tile_n,
        bandwidth_fraction=values.get("bandwidth_fraction", old.bandwidth_fraction),
        source=source,
        misaligned_fraction=old.misaligned_fraction,
        misaligned_source=old.misaligned_source,
    )
    memory = MemoryCurve(
        fraction={
            name: values.get(f"fraction.{name}", base.memory.share(name))
            for name in PATTERNS
            if name in base.memory.fraction or f"fraction.{name}" in values
        },
        ramp_bytes=values.get("ramp_bytes", base.memory.ramp_bytes),
        source=source,
        row_s={
            **base.memory.row_s,
            **{name: 1e-9 * values[f"row_ns.{name}"] for name in PATTERNS if f"row_ns.{name}" in values},
        },
    )
    attention = AttentionCurve(
        forward=values.get("attention.forward", base.attention.forward),
        backward=values.get("attention.backward", base.attention.backward),
        half_length=values.get("attention.half_length", base.attention.half_length),
        source=source,
        forward_half_waves=values.get("attention.forward_half_waves", base.attention.forward_half_waves),
        backward_half_waves=values.get("attention.backward_half_waves", base.attention.backward_half_waves),
    )
    power = base.power
    if power is not None and "power.products" in values:
        products = {**power.products, dtype: values["power.products"]}
        power = power.model_copy(update={"products": products, "source": source})
    return EfficiencyCurves(
        matmul={**base.matmul, dtype: matmul},
        memory=memory,
        attention=attention,
        convolutions=base.convolutions,
        power=power,
    )


def fit(
    gpu: GpuType,
    base: EfficiencyCurves,
    dtype: str,
    parameters: Sequence[Parameter],
    rows: Sequence[KernelRow],
    source: str,
    progress: Callable[[str], None] = print,
) -> EfficiencyCurves:
    """Return the curves that fit ``rows`` best, and print the constants."""

    def predict(values: Mapping[str, float]) -> Vector:
        curves = build_curves(base, dtype, values, source)
        return np.array([predict_s(gpu, curves, dtype, row.kernels) for row in rows])

    return build_curves(base, dtype, least(parameters, rows, predict, progress), source)


def least(
    parameters: Sequence[Parameter],
    rows: Sequence[KernelRow],
    predict: Callable[[Mapping[str, float]], Vector],
    progress: Callable[[str], None] = print,
) -> dict[str, float]:
    """Return the values of ``parameters`` with which ``predict`` comes closest to ``rows``, and print them."""
    names = [parameter.place for parameter in parameters]
    measured = np.array([row.seconds for row in rows])
    start = np.array([parameter.start for parameter in parameters])
    weight = np.clip(np.sqrt(measured / np.median(measured)), *WEIGHT_RANGE)

    def residuals(vector: Vector) -> Vector:
        predicted = predict(dict(zip(names, map(float, vector), strict=True)))
        pull = PULL * np.sqrt(len(rows)) * (vector - start) / start
        return np.concatenate([weight * np.log(predicted / measured), pull])

    found = least_squares(
        residuals,
        start,
        bounds=([parameter.low for parameter in parameters], [parameter.high for parameter in parameters]),
        x_scale=[max(abs(parameter.start), 1e-3) for parameter in parameters],
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=60,
    )
    values = dict(zip(names, map(float, found.x), strict=True))
    progress(f"fitted on {len(rows)} rows:")
    for name, value in values.items():
        progress(f"  {name}: {value:.4g}")
    return values


def report(
    title: str,
    gpu: GpuType,
    curves: EfficiencyCurves,
    dtype: str,
    rows: Sequence[KernelRow],
    progress: Callable[[str], None] = print,
) -> float:
    """Print signed errors by group and return the mean absolute relative error of all rows."""
    return report_errors(title, rows, [predict_s(gpu, curves, dtype, row.kernels) for row in rows], progress)


def report_errors(
    title: str, rows: Sequence[KernelRow], seconds: Sequence[float], progress: Callable[[str], None] = print
) -> float:
    """Print signed errors of predicted ``seconds`` by group and return the mean absolute one of all rows."""
    errors: dict[str, list[float]] = {}
    for row, predicted in zip(rows, seconds, strict=True):
        errors.setdefault(row.group, []).append(predicted / row.seconds - 1)
    every = np.concatenate([np.array(group) for group in errors.values()]) if errors else np.zeros(1)
    mean = float(np.mean(np.abs(every)))
    progress(
        f"{title}: {len(rows)} rows, mean absolute error {mean:.1%}, bias {float(np.mean(every)):+.1%}, "
        f"median {float(np.median(np.abs(every))):.1%}, "
        f"sum of all times {sum(seconds) / sum(row.seconds for row in rows) - 1:+.1%}"
    )
    for group, values in errors.items():
        progress(
            f"  {group:38s} {len(values):4d} rows  mean abs {np.mean(np.abs(values)):6.1%}  "
            f"bias {np.mean(values):+6.1%}  worst {max(values, key=abs):+6.1%}"
        )
    return mean
