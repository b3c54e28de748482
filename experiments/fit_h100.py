"""Fit the H100's curves and the host of the executor to profiling runs of the campaign ``single-gpu``.

Used: the operators of GPT 350M and 2.6B and LLaMA 1B, one by one, as profiled on one H100 (``campaigns.CALIBRATED``;
torch 2.11, CUDA 13.0), times the factor that each unit's calibration plans gave them (1.00 to 1.07: in an iteration the
clock gets less rest). Their plans are in no group that is predicted without a profile. Reported: the operators of the
campaign's other models, those of a second H100, and those of ``single-gpu-families``. Left out: embeddings,
convolutions and what goes with them, and what takes less than 30 us.

The executor's host is that of GPT 350M's smallest microbatch in ``single-gpu-small`` (one H200), where operators were
timed host and all, times what calibration plans took of it (0.97 and 0.67). Held back one by one, as on the H100, an
operator's host takes up to twice what it takes in a row.

Run: ``python -m experiments.fit_h100`` (needs no data)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

import numpy as np

from experiments.cases.campaign_operators import measured_operators
from experiments.cases.campaigns import CALIBRATED, FOLDER
from hardware_models.calibration.fit_a100 import ATTENTION, MATMUL
from hardware_models.calibration.kernel_fit import (
    KernelRow,
    Parameter,
    Vector,
    build_curves,
    least,
    predict_s,
    report_errors,
)
from hardware_models.gpus import EfficiencyCurves, GpuType, load_curves, load_gpu
from hardware_models.power import clock_slowdown
from workloads.kernels import Kernel
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import host_calls

SOURCE = "this run"
GPU, CURVES, CAMPAIGN = "h100-sxm5-80gb", "hopper", "single-gpu"
HOST_CAMPAIGN, HOST_UNITS = "single-gpu-small", ("gpt-350m bf16", "gpt-350m bf16-flash")
REPORTED = ("single-gpu-second", "single-gpu-families")
CONVOLUTIONAL = ("conv2d", "batch_norm", "shortcut", "max_pool", "global_average_pool")
LEFT_OUT = (*CONVOLUTIONAL, "embedding", "patch_embedding", "classifier_loss")
SHORTEST_S = 30e-6
MEMORY = (
    Parameter("fraction.strided", 0.6, 0.2, 1.0),
    Parameter("row_ns.row_norm", 0.7, 0.0, 3.0),
    Parameter("row_ns.column_sum", 2.4, 0.0, 10.0),
)
"""The other fractions are the A100's, which these rows bear out (GELU -7 and -1 %, softmax backward +1)."""
GRADIENT = Parameter("limit.gradient", 0.8, 0.3, 1.0)
"""Of both gradients: a row of backward is their sum."""
POWER = Parameter("power.products", 1.4, 1.0, 2.0)
"""What nothing but memory draws cannot be told from it by these rows; 0.6 of the limit is assumed."""
PARAMETERS = {
    "bf16": (*MATMUL, GRADIENT, *MEMORY, *ATTENTION, POWER),
    "fp32": (MATMUL[0], Parameter("half_k", 100.0, 0.0, 400.0), GRADIENT),
}


def kernel_rows(campaign: str, dtype: str) -> Iterator[tuple[bool, KernelRow]]:
    """Yield the passes that a campaign's cases hold profiles of, and whether they are of models that are fitted on.

    On a second GPU, too, these are other figures of the same operators.
    """
    for each in measured_operators(FOLDER / f"{campaign}.yaml"):
        if each.problem.runtime.implementation.dtype != dtype or each.operator.kind in LEFT_OUT:
            continue
        of_fit = each.model in CALIBRATED[CAMPAIGN]
        for word, kernels, seconds in (
            ("forward", each.forward, each.row.forward_s),
            ("backward", each.backward, each.row.backward_s),
        ):
            if kernels and seconds > SHORTEST_S:
                label = f"{each.unit} {each.row.role} of {each.row.samples}"
                yield of_fit, KernelRow(f"{each.operator.kind} {word}", kernels, seconds, label, each.unit)


def executor_host() -> tuple[float, float]:
    """Return seconds of the executor's host per operator forward and backward, beside launches: the mean of HOST_UNITS.

    Operators were timed with their host there, which sets the pace of what kernels take less than half of.
    """
    found: dict[str, list[list[float]]] = {}
    for each in measured_operators(FOLDER / f"{HOST_CAMPAIGN}.yaml"):
        hardware, dtype = each.problem.hardware, each.problem.runtime.implementation.dtype
        own = found.setdefault(each.unit, [[], []])
        smallest = min(row.samples for row in hardware.operator_profile.rows) if hardware.operator_profile else 0
        if each.unit not in HOST_UNITS or each.row.samples > smallest:
            continue
        kind, gpu = each.operator.definition, each.problem.gpu_types[0]
        for place, seconds, kernels, phases in (
            (0, each.row.forward_s, each.forward, (FORWARD,)),
            (1, each.row.backward_s, each.backward, (BACKWARD_INPUT, BACKWARD_WEIGHT)),
        ):
            busy_s = sum(hardware.kernel_time_s(gpu, kernel, dtype) for kernel in kernels)
            calls = sum(host_calls(kind, phase, each.local) for phase in phases)
            if calls and busy_s < seconds / 2:
                beside_s = (seconds - len(kernels) * hardware.launch_s(gpu)) / calls
                own[place] += [beside_s] * (calls * each.count)
    forward, backward = (mean(mean(found[unit][place]) for unit in HOST_UNITS) for place in range(2))
    return forward, backward


def fitted_curves(dtype: str, progress: Callable[[str], None] = print) -> EfficiencyCurves:
    """Return the curves that fit best, of one type of numbers."""
    gpu, base = load_gpu(GPU), load_curves(CURVES)
    rows = [row for of_fit, row in kernel_rows(CAMPAIGN, dtype) if of_fit]
    passes = unit_passes(CAMPAIGN, dtype)

    def predict(values: Mapping[str, float]) -> Vector:
        return np.array(predicted_s(gpu, build_curves(base, dtype, values, SOURCE), dtype, rows, passes))

    return build_curves(base, dtype, least(PARAMETERS[dtype], rows, predict, progress), SOURCE)


def unit_passes(campaign: str, dtype: str) -> dict[str, list[tuple[Kernel, int]]]:
    """Return all kernels of a forward and a backward pass, by unit of a campaign, at the most samples profiled."""
    most: dict[str, int] = {}
    found: dict[str, list[tuple[Kernel, int]]] = {}
    for each in measured_operators(FOLDER / f"{campaign}.yaml"):
        if each.problem.runtime.implementation.dtype != dtype or each.row.samples < most.get(each.unit, 0):
            continue
        if each.row.samples > most.get(each.unit, 0):
            most[each.unit], found[each.unit] = each.row.samples, []
        found[each.unit] += [(kernel, each.count) for kernel in (*each.forward, *each.backward)]
    return found


def predicted_s(
    gpu: GpuType,
    curves: EfficiencyCurves,
    dtype: str,
    rows: Sequence[KernelRow],
    passes: Mapping[str, Sequence[tuple[Kernel, int]]],
) -> list[float]:
    """Return seconds of rows under curves, with the clock that each unit's passes leave."""

    def seconds_of(kernel: Kernel) -> float:
        return predict_s(gpu, curves, dtype, [kernel])

    slowdown = {unit: clock_slowdown(gpu, curves, dtype, kernels, seconds_of) for unit, kernels in passes.items()}
    return [predict_s(gpu, curves, dtype, row.kernels, slowdown[row.unit]) for row in rows]


def main() -> None:
    """Fit, and print constants and residuals."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gpu = load_gpu(GPU)
    for dtype in PARAMETERS:
        curves = fitted_curves(dtype)
        for campaign in (CAMPAIGN, *REPORTED):
            rows, passes = list(kernel_rows(campaign, dtype)), unit_passes(campaign, dtype)
            for is_fitted, models in ((True, "models fitted on"), (False, "other models")):
                chosen = [row for of_fit, row in rows if of_fit == is_fitted]
                if chosen:
                    seconds = predicted_s(gpu, curves, dtype, chosen, passes)
                    report_errors(f"{dtype}, {campaign}, {models}", chosen, seconds)
    forward_s, backward_s = executor_host()
    print(f"host_seconds_per_operator: [{forward_s:.3g}, {backward_s:.3g}]")


if __name__ == "__main__":
    main()
