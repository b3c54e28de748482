"""Fit the T4's curves to the layer profile that AMP's authors took of one forward pass of GPT-2 on g4dn.12xlarge.

Rows used: ``gpu_efficiency/layer_profiles_v100_t4.csv``, T4: the head (one matrix product) and the cast of its result
to fp32 (one pass over memory), at tensor-parallel 1. The card meets its 70 W within that pass: the same layer takes
4.90 ms at first and 5.75 ms from the tenth on, and the head at tensor-parallel 1, behind them, runs at four fifths of
the rate that its halves and quarters reach behind the shorter passes of tensor-parallel 2 and 4. The head of
tensor-parallel 1 is therefore what training, which never pauses, is taken to see. Each row is charged what two kernels
beside it take when they have next to nothing to do (row 26, a transposition of 2 MiB).

Report: the cast and the head of the other degrees, and the whole layer, whose kernels no constant was fitted on.

Run: ``python -m hardware_models.calibration.fit_t4 --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from datafiles.tables import load_table
from hardware_models.calibration.kernel_fit import KernelRow, predict_s, report
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.runtime import load_runtime
from workloads.kernels import Kernel, Matmul, MemoryBound
from workloads.kinds.base import FORWARD
from workloads.local import localize
from workloads.registry import build_workload

TABLE = "gpu_efficiency/layer_profiles_v100_t4.csv"
HEAD, CAST, TRANSPOSITION = 28, 29, 26
WARM_LAYERS = range(12, 26)
TOKENS, HIDDEN, VOCAB = 1024, 1024, 52256


def measured(data: Path, gpu: str = "T4-16GB") -> Mapping[tuple[int, int], float]:
    """Return seconds by ``(tensor-parallel degree, pipeline item)``."""
    rows = load_table(data / TABLE, floats=("time_ms",), integers=("tp", "layer_index"))
    return {(row["tp"], row["layer_index"]): row["time_ms"] / 1e3 for row in rows if row["gpu"] == gpu}


def head(tp: int) -> tuple[Kernel, ...]:
    """Return the kernels of item 28."""
    return (Matmul(m=TOKENS, n=VOCAB // tp, k=HIDDEN),)


def cast(tp: int) -> tuple[Kernel, ...]:
    """Return the kernels of item 29: fp16 logits read, fp32 logits written."""
    logits = float(TOKENS * VOCAB // tp)
    return (MemoryBound(2 * logits, 4 * logits),)


def layer() -> tuple[Kernel, ...]:
    """Return the forward kernels of one transformer layer on one GPU."""
    workload = build_workload("amp-gpt2")
    implementation = load_runtime("megatron-deepspeed-2020").implementation
    number = next(op.layer for op in workload.operators if op.role == "attention_qkv")
    kernels: list[Kernel] = []
    for index, op in enumerate(workload.operators):
        if op.layer == number:
            local = localize(op.definition, op.attributes, workload.input_shapes(index, 1), [], implementation)
            kernels += op.definition.kernels(FORWARD, local)
    return tuple(kernels)


def fractions(times: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """Return the share of the matmul peak and of the memory bandwidth that the two fitted rows stand for.

    The first is ``limit`` of the curve (its shortfall at this reduction length taken out), the second ``elementwise``.
    """
    gpu = load_gpu("t4-16gb")
    curves = load_curves(gpu.curves)
    idle = times[1, TRANSPOSITION]
    limit = curves.matmul["fp16"].limit["forward"] * predict_s(gpu, curves, "fp16", head(1)) / (times[1, HEAD] - idle)
    rate = curves.memory.fraction["elementwise"] * predict_s(gpu, curves, "fp16", cast(1)) / (times[1, CAST] - idle)
    return limit, rate


def main() -> None:
    """Fit, print the constants and the residuals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds gpu_efficiency/")
    times = measured(parser.parse_args().data)
    limit, rate = fractions(times)
    print(f"limit: {limit:.3g}\nfraction.elementwise: {rate:.3g}")
    gpu = load_gpu("t4-16gb")
    rows = [
        KernelRow(f"{name}, tensor parallel {tp}", kernels(tp), times[tp, item], f"{tp}/{item}")
        for name, item, kernels in (("head", HEAD, head), ("cast", CAST, cast))
        for tp in (1, 2, 4)
    ]
    rows += [KernelRow("warm layer", layer(), times[1, item], f"1/{item}") for item in WARM_LAYERS]
    report("shipped constants, all rows", gpu, load_curves(gpu.curves), "fp16", rows)


if __name__ == "__main__":
    main()
