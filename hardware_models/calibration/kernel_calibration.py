"""From measured kernels to the efficiency curves of a GPU type, and from overlapping kernels to its slowdown."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from hardware_models.calibration.kernel_fit import KernelRow, Parameter, fit, predict_s
from hardware_models.calibration.outcome import Point
from hardware_models.gpus import MATMUL_ROLES, EfficiencyCurves, GpuType, load_curves
from hardware_models.importers.kineto import Collective, GpuKernel
from workloads.kernels import Kernel, Matmul, MemoryBound

MIN_SECONDS = 20e-6
"""Shorter kernels are mostly start and end; they say nothing about rates."""

ENOUGH = 6
"""Rows of a kind below which its shape parameters keep their values and only the limit is fitted."""

ABOVE_PEAK = 1.02
"""Times the peak: above, the row is of another number format or GPU."""

TENSOR_FORMATS = ("bf16", "fp16", "tf32")
"""What runs on tensor cores, as fused attention does. An A100's products in tf32 take twice those in fp16, as the peaks
have it, to 2 % (alpa_v100/device_ops.csv)."""

COVERED, FREE = 0.95, 0.0
"""Shares of a kernel's time beside a communication, for it to count as overlapped and as alone."""


def fit_curves(
    gpu: GpuType, rows: Sequence[tuple[Kernel, str, float]], source: str
) -> tuple[EfficiencyCurves, dict[str, float], list[Point]] | None:
    """Return curves fitted to kernels, the constants that were fitted, and the points.

    What no row is about moves as much as what shares its units: other access patterns and the traffic of matmuls with
    the memory's bandwidth, other number formats and fused attention with the tensor cores' rate.

    Args:
        gpu: Whose peaks and shipped curves are the start.
        rows: ``(kernel, dtype of a matmul, seconds)``.
        source: For the curves.

    Returns:
        None where no row can be used: too short, of a dtype without a curve, or faster than the GPU's peak.
    """
    shipped = curves = load_curves(gpu.curves)
    rows = _possible(gpu, curves, rows)
    moved: dict[str, float] = {}
    points: list[Point] = []
    formats = Counter(dtype for kernel, dtype, _ in rows if isinstance(kernel, Matmul))
    jobs = [(dtype, Matmul) for dtype in sorted(formats) if dtype in curves.matmul and dtype in gpu.peak_flop_per_s]
    for dtype, kind in [("", MemoryBound), *jobs]:
        own = [
            KernelRow(f"{kind.__name__} {dtype}".strip(), (kernel,), seconds, "")
            for kernel, word, seconds in rows
            if isinstance(kernel, kind) and (kind is MemoryBound or word == dtype) and seconds >= MIN_SECONDS
        ]
        if not own:
            continue
        name = dtype or next(iter(curves.matmul))
        parameters = _parameters(curves, name, own)
        fitted = fit(gpu, curves, name, parameters, own, source, progress=lambda text: None)
        if kind is MemoryBound:
            curves = _same_memory(curves, fitted)
        else:
            curves = _same_for_unseen_roles(curves, fitted, name, {p.place for p in parameters})
        values = _values(curves, name)
        moved |= {f"{name}.{p.place}" if kind is Matmul else p.place: values[p.place] for p in parameters}
        points += [Point(row.group, row.seconds, predict_s(gpu, curves, name, row.kernels)) for row in own]
    seen = fitted_formats(moved)
    if on_tensor_cores := [dtype for dtype in seen if dtype in TENSOR_FORMATS]:
        curves = _same_tensor_cores(shipped, curves, seen, max(on_tensor_cores, key=formats.__getitem__))
    return (curves, moved, points) if points else None


def fitted_formats(moved: Mapping[str, float]) -> list[str]:
    """Return the number formats among fitted constants."""
    return list(dict.fromkeys(name.partition(".")[0] for name in moved if ".limit." in name))


def as_shipped(gpu: GpuType, moved: Mapping[str, float]) -> list[str]:
    """Return what neither was fitted nor moves with what was, in words."""
    seen = fitted_formats(moved)
    known = {*seen, *(TENSOR_FORMATS if set(seen) & set(TENSOR_FORMATS) else ())}
    kept = [f"products in {dtype}" for dtype in load_curves(gpu.curves).matmul if dtype not in known]
    kept += [] if set(seen) & set(TENSOR_FORMATS) else ["fused attention"]
    return kept + ([] if "fraction.elementwise" in moved else ["kernels bound by memory"])


def _possible(
    gpu: GpuType, curves: EfficiencyCurves, rows: Sequence[tuple[Kernel, str, float]]
) -> list[tuple[Kernel, str, float]]:
    """Return the rows without matmuls above the GPU's peak; fp32 ones above its fp32 peak were TF32, all of them."""

    def is_above(kernel: Kernel, dtype: str, seconds: float) -> bool:
        peak = gpu.peak_flop_per_s.get(dtype)
        return isinstance(kernel, Matmul) and peak is not None and kernel.flop > ABOVE_PEAK * peak * seconds

    has_tf32 = "tf32" in curves.matmul and "tf32" in gpu.peak_flop_per_s
    if has_tf32 and any(dtype == "fp32" and is_above(kernel, dtype, seconds) for kernel, dtype, seconds in rows):
        rows = [(kernel, "tf32" if dtype == "fp32" else dtype, seconds) for kernel, dtype, seconds in rows]
    return [row for row in rows if not is_above(*row)]


def num_of_another(gpu: GpuType, rows: Sequence[tuple[Kernel, str, float]]) -> int:
    """Return how many rows `fit_curves` leaves out as faster than the GPU's peak, or of a number format without one."""
    curves = load_curves(gpu.curves)
    known = [
        kernel
        for kernel, dtype, _ in _possible(gpu, curves, rows)
        if not isinstance(kernel, Matmul) or (dtype in curves.matmul and dtype in gpu.peak_flop_per_s)
    ]
    return len(rows) - len(known)


def _values(curves: EfficiencyCurves, dtype: str) -> dict[str, float]:
    matmul, memory = curves.matmul[dtype], curves.memory
    found = {f"limit.{role}": share for role, share in matmul.limit.items()}
    found |= {"half_waves": matmul.half_waves, "half_k": matmul.half_k, "bandwidth_fraction": matmul.bandwidth_fraction}
    return (
        found
        | {f"fraction.{name}": share for name, share in memory.fraction.items()}
        | {"ramp_bytes": memory.ramp_bytes}
    )


def _parameters(curves: EfficiencyCurves, dtype: str, rows: Sequence[KernelRow]) -> list[Parameter]:
    values = _values(curves, dtype)
    kernels = [row.kernels[0] for row in rows]
    if isinstance(kernels[0], Matmul):
        found = {each.role for each in kernels if isinstance(each, Matmul)}
        roles = [role for role in MATMUL_ROLES if role in found]
        names = [(f"limit.{role}", 0.02, 1.0) for role in roles]
        if len(set(kernels)) >= ENOUGH:
            names += [("half_waves", 0.0, 5.0), ("half_k", 0.0, 2000.0)]
    else:
        names = [("fraction.elementwise", 0.02, 1.0)]
        if len(set(kernels)) >= ENOUGH:
            names.append(("ramp_bytes", 0.0, 1e8))
    return [Parameter(name, max(values[name], low + 1e-6, 1e-6), low, high) for name, low, high in names]


def _same_for_unseen_roles(
    old: EfficiencyCurves, new: EfficiencyCurves, dtype: str, fitted: set[str]
) -> EfficiencyCurves:
    """Return the new curves with limits of roles that no row is about moved by as much as a fitted one's."""
    seen = [role for role in MATMUL_ROLES if f"limit.{role}" in fitted]
    if not seen:
        return new
    # Of the two gradients only one is recorded; it is the better guide to the other.
    guide = seen[-1]
    factor = new.matmul[dtype].limit[guide] / old.matmul[dtype].limit[guide]
    limit = {
        role: new.matmul[dtype].limit[role] if role in seen else min(1.0, old.matmul[dtype].limit[role] * factor)
        for role in MATMUL_ROLES
    }
    changed = new.matmul[dtype].model_copy(update={"limit": limit})
    return new.model_copy(update={"matmul": {**new.matmul, dtype: changed}})


def _same_memory(old: EfficiencyCurves, new: EfficiencyCurves) -> EfficiencyCurves:
    """Return the new curves with all that the memory's bandwidth rules moved by as much as elementwise kernels."""
    factor = new.memory.fraction["elementwise"] / old.memory.fraction["elementwise"]
    fraction = {pattern: min(1.0, share * factor) for pattern, share in old.memory.fraction.items()}
    matmul = {
        dtype: curve.model_copy(update={"bandwidth_fraction": min(1.0, curve.bandwidth_fraction * factor)})
        for dtype, curve in old.matmul.items()
    }
    return new.model_copy(update={"matmul": matmul, "memory": new.memory.model_copy(update={"fraction": fraction})})


def _same_tensor_cores(
    old: EfficiencyCurves, new: EfficiencyCurves, seen: Sequence[str], guide: str
) -> EfficiencyCurves:
    """Return the new curves with formats that no row is about, and fused attention, moved as much as a fitted one."""
    before, after, matmul = old.matmul[guide], new.matmul[guide], dict(new.matmul)
    factor = {role: after.limit[role] / before.limit[role] for role in MATMUL_ROLES}
    for dtype in set(TENSOR_FORMATS) & set(matmul) - set(seen):
        curve = matmul[dtype]
        changed = {
            "limit": {role: min(1.0, curve.limit[role] * factor[role]) for role in MATMUL_ROLES},
            "half_waves": curve.half_waves * after.half_waves / before.half_waves,
            "half_k": curve.half_k * after.half_k / before.half_k,
            "source": after.source,
        }
        matmul[dtype] = curve.model_copy(update=changed)
    limits = {name: min(1.0, getattr(old.attention, name) * factor["forward"]) for name in ("forward", "backward")}
    attention = new.attention.model_copy(update={**limits, "source": after.source})
    return new.model_copy(update={"matmul": matmul, "attention": attention})


def overlap_slowdowns(
    kernels: Sequence[GpuKernel], collectives: Sequence[Collective]
) -> tuple[list[float], list[float]]:
    """Return slowdowns of computation and of communication while both run, one per kind of equal work.

    Work that was seen both covered by the other side and alone is compared, median with median.
    """
    computing = [kernel for kernel in kernels if kernel.kind not in ("collective", "copy")]
    talking = [kernel for kernel in kernels if kernel.kind == "collective"]
    beside_talk, beside_work = _Cover(talking), _Cover(computing)
    return (
        _ratios([(each.key, each.seconds, beside_talk.share(each.start_s, each.seconds)) for each in computing]),
        _ratios(
            [
                ((each.kind, each.num_bytes, each.ranks, each.group_size), each.seconds,
                 beside_work.share(each.start_s, each.seconds))
                for each in collectives
            ]
        ),
    )  # fmt: skip


def _ratios(rows: Sequence[tuple[tuple[object, ...], float, float]]) -> list[float]:
    by_key: dict[tuple[object, ...], tuple[list[float], list[float]]] = {}
    for key, seconds, share in rows:
        if seconds >= MIN_SECONDS and (share >= COVERED or share <= FREE):
            by_key.setdefault(key, ([], []))[share >= COVERED].append(seconds)
    return [
        statistics.median(covered) / statistics.median(alone) for alone, covered in by_key.values() if alone and covered
    ]


class _Cover:
    """How much of a span lies within the spans of some kernels."""

    def __init__(self, kernels: Sequence[GpuKernel]) -> None:
        self.spans: list[tuple[float, float]] = []
        for kernel in sorted(kernels, key=lambda each: each.start_s):
            start, end = kernel.start_s, kernel.start_s + kernel.seconds
            if self.spans and start <= self.spans[-1][1]:
                self.spans[-1] = (self.spans[-1][0], max(end, self.spans[-1][1]))
            else:
                self.spans.append((start, end))

    def share(self, start_s: float, seconds: float) -> float:
        end_s, covered = start_s + seconds, 0.0
        place = max(0, bisect_left(self.spans, (start_s, 0.0)) - 1)
        while place < len(self.spans) and self.spans[place][0] < end_s:
            covered += max(0.0, min(end_s, self.spans[place][1]) - max(start_s, self.spans[place][0]))
            place += 1
        return covered / seconds if seconds > 0 else 0.0
