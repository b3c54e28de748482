"""Fit the T4's curves and its links to the layer profile that AMP's authors took of one forward pass on g4dn.12xlarge.

Source: ``gpu_efficiency/layer_profiles_v100_t4.csv``, GPT-2 of 1,024, one sample, tensor-parallel 1, 2 and 4. No trial
of AMP's is used.

*Curves.* The head (one matrix product) and the cast of its result to fp32 (one pass over memory), at tensor-parallel 1.
The card meets its 70 W within that pass: the same layer takes 4.9 ms at first and 5.75 ms from the tenth on, and the
head behind them runs at four fifths of the rate that its halves and quarters reach at tensor-parallel 2 and 4, where
the card rests while it communicates. The head of tensor-parallel 1 is what training, which never pauses, is taken to
see. Other patterns of access keep the ratios to the streaming rate that they have on Volta (calibration.fit_v100).
Report: cast and head of the other degrees, and the whole layer, on whose kernels nothing was fitted.

*Links.* A layer and the embedding contain two and one all-reduces of 2 MiB at tensor-parallel 2 and 4. What is left of
their times without the kernels, and without what a device stands still around each (``handover_s`` of the runtime),
gives, for two sizes of group, seconds before data flow and the rate of a ring; both by least squares. Kernels of the
layer: the model's, scaled to the first layers of tensor-parallel 1. Kernels of the vocabulary-parallel look-up: what
they add on V100s, where NVLink costs next to nothing, times how much sooner this host is through with the two smallest
rows (a transposition, a norm).

Run: ``python -m hardware_models.calibration.fit_t4 --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from datafiles.tables import load_table
from hardware_models.calibration.kernel_fit import KernelRow, predict_s, report
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.links import load_link
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.base import FORWARD
from workloads.local import localize
from workloads.registry import build_workload

TABLE = "gpu_efficiency/layer_profiles_v100_t4.csv"
EMBEDDING, TRANSPOSITION, NORM, HEAD, CAST = 0, 26, 27, 28, 29
LAYERS, COLD_LAYERS, WARM_LAYERS = range(2, 26), range(2, 8), range(12, 26)
TOKENS, HIDDEN, VOCAB = 1024, 1024, 52256
MESSAGE_BYTES = 2 * TOKENS * HIDDEN
DEGREES = (2, 4)
RUNTIME = "megatron-deepspeed-2020"

Times = Mapping[tuple[int, int], float]
"""Seconds by ``(tensor-parallel degree, pipeline item)``."""


def measured(data: Path, gpu: str) -> Times:
    """Return one card's profile."""
    rows = load_table(data / TABLE, floats=("time_ms",), integers=("tp", "layer_index"))
    return {(row["tp"], row["layer_index"]): row["time_ms"] / 1e3 for row in rows if row["gpu"] == gpu}


def head(tp: int) -> tuple[Kernel, ...]:
    """Return the kernels of the head."""
    return (Matmul(m=TOKENS, n=VOCAB // tp, k=HIDDEN),)


def cast(tp: int) -> tuple[Kernel, ...]:
    """Return the kernels of the cast: fp16 logits read, fp32 logits written."""
    logits = float(TOKENS * VOCAB // tp)
    return (MemoryBound(2 * logits, 4 * logits),)


def layer(tp: int) -> tuple[Kernel, ...]:
    """Return the forward kernels of one transformer layer on one rank."""
    workload = build_workload("amp-gpt2")
    implementation = load_runtime(RUNTIME).implementation
    number = next(op.layer for op in workload.operators if op.role == "attention_qkv")
    kernels: list[Kernel] = []
    for index, op in enumerate(workload.operators):
        if op.layer == number:
            axes = [(op.tensor_split, tp)]
            local = localize(op.definition, op.attributes, workload.input_shapes(index, 1), axes, implementation)
            kernels += op.definition.kernels(FORWARD, local)
    return tuple(kernels)


def fit_curves(times: Times) -> tuple[float, float]:
    """Return ``limit`` of the fp16 matmul curve and the ``elementwise`` share of the memory bandwidth."""
    gpu = load_gpu("t4-16gb")
    curves = load_curves(gpu.curves)
    limit = curves.matmul["fp16"].limit["forward"] * predict_s(gpu, curves, "fp16", head(1)) / times[1, HEAD]
    rate = curves.memory.fraction["elementwise"] * predict_s(gpu, curves, "fp16", cast(1)) / times[1, CAST]
    return limit, rate


def all_reduce_times(times: Times, on_v100: Times) -> dict[tuple[int, str], float]:
    """Return what is left for one all-reduce of 2 MiB, by degree and the item that it was taken from, in seconds."""
    gpu = load_gpu("t4-16gb")
    curves = load_curves(gpu.curves)
    scale = mean(times, 1, COLD_LAYERS) / predict_s(gpu, curves, "fp16", layer(1))
    nvlink = HardwareModel.from_name("p3.8xlarge:1x4")
    host = fmean(times[1, item] / on_v100[1, item] for item in (TRANSPOSITION, NORM))
    found = {}
    for tp in DEGREES:
        kernels = scale * predict_s(gpu, curves, "fp16", layer(tp))
        found[tp, "layer"] = (mean(times, tp, LAYERS) - kernels) / 2
        look_up = on_v100[tp, EMBEDDING] - on_v100[1, EMBEDDING]
        look_up -= nvlink.collective("all_reduce", MESSAGE_BYTES, range(tp)).alone_s + load_runtime(RUNTIME).handover_s
        found[tp, "embedding"] = times[tp, EMBEDDING] - times[1, EMBEDDING] - host * look_up
    return found


def fit_links(left: Mapping[tuple[int, str], float]) -> tuple[float, float]:
    """Return seconds before data flow, steps left out, and bytes per second of a ring."""
    step_s = load_link("pcie3-t4").protocols[0].step_s
    handover_s = load_runtime(RUNTIME).handover_s
    rows = [(1.0, 2 * (tp - 1) / tp * MESSAGE_BYTES) for tp, _ in left]
    seconds = [value - handover_s - 2 * (tp - 1) * step_s for (tp, _), value in left.items()]
    (launch_s, per_byte_s), *_ = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)
    return float(launch_s), 1 / float(per_byte_s)


def mean(times: Times, tp: int, items: Iterable[int]) -> float:
    """Return the mean over items."""
    return fmean(times[tp, item] for item in items)


def main() -> None:
    """Fit, print the constants and the residuals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds gpu_efficiency/")
    data = parser.parse_args().data
    times = measured(data, "T4-16GB")
    limit, rate = fit_curves(times)
    print(f"limit: {limit:.3g}\nfraction.elementwise: {rate:.3g}")
    gpu = load_gpu("t4-16gb")
    rows = [
        KernelRow(f"{name}, tensor parallel {tp}", kernels(tp), times[tp, item], f"{tp}/{item}")
        for name, item, kernels in (("head", HEAD, head), ("cast", CAST, cast))
        for tp in (1, *DEGREES)
    ]
    rows += [KernelRow("warm layer", layer(1), times[1, item], f"1/{item}") for item in WARM_LAYERS]
    report("shipped curves, all rows", gpu, load_curves(gpu.curves), "fp16", rows)
    left = all_reduce_times(times, measured(data, "V100-SXM2-16GB"))
    launch_s, bytes_per_s = fit_links(left)
    print(f"launch_s: {launch_s:.3g}\nlink_bytes_per_s: {bytes_per_s:.3g}")
    shipped = HardwareModel.from_name("g4dn.12xlarge:1x4")
    for (tp, item), seconds in left.items():
        predicted = shipped.collective("all_reduce", MESSAGE_BYTES, range(tp)).alone_s
        predicted += load_runtime(RUNTIME).handover_s
        print(f"  2 MiB among {tp}, from the {item}: {seconds * 1e3:.2f} ms, shipped {predicted * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
