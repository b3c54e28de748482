"""Fit the RTX TITAN's fp32 matmul limit to Galvatron's measured layer times.

Rows used: ``galvatron/titan_v1/layer_profiles.csv``, BERT-Large, BERT-Huge and T5-Large encoder. Report: the
ViT layers. The file gives forward milliseconds per layer and sample; 8 samples at once are assumed.

Run: ``python -m hardware_models.calibration.fit_titan --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from datafiles.tables import load_table
from hardware_models.calibration.kernel_fit import KernelRow, Parameter, fit, report
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.runtime import load_runtime
from workloads.kernels import Kernel
from workloads.kinds.base import FORWARD
from workloads.local import localize
from workloads.registry import build_workload

MODELS = {
    ("BERT-Large", "encoder"): "bert-large",
    ("BERT-Huge", "encoder"): "bert-huge-32",
    ("T5-Large", "encoder"): "t5-large-32",
    ("ViT-Large", "encoder"): "vit-large",
    ("ViT-Huge", "encoder"): "vit-huge-32",
}
SAMPLES = 8


def main() -> None:
    """Fit, print the constant and the residuals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds galvatron/titan_v1/")
    rows = list(_rows(parser.parse_args().data / "galvatron" / "titan_v1" / "layer_profiles.csv"))
    gpu = load_gpu("titan-rtx-24gb")
    fit_rows = [row for row in rows if not row.group.startswith("ViT")]
    parameters = (Parameter("limit.forward", 0.8, 0.3, 1.0),)
    curves = fit(gpu, load_curves(gpu.curves), "fp32", parameters, fit_rows, "this run")
    report("fit rows", gpu, curves, "fp32", fit_rows)
    report("report rows", gpu, curves, "fp32", [row for row in rows if row.group.startswith("ViT")])


def _rows(path: Path) -> Iterator[KernelRow]:
    for row in load_table(path, floats=("forward_ms_per_layer_per_sample",)):
        name = MODELS.get((row["model"], row["layer_type"]))
        if name is not None:
            seconds = SAMPLES * row["forward_ms_per_layer_per_sample"] / 1e3
            yield KernelRow(row["model"], _layer_kernels(name), seconds, row["model"])


def _layer_kernels(name: str) -> tuple[Kernel, ...]:
    """Return the forward kernels of the first repeated layer."""
    workload = build_workload(name)
    implementation = load_runtime("galvatron-v1").implementation
    layer = next(op.layer for op in workload.operators if op.role == "attention_qkv")
    kernels: list[Kernel] = []
    for index, op in enumerate(workload.operators):
        if op.layer == layer:
            shapes = workload.input_shapes(index, SAMPLES)
            local = localize(op.definition, op.attributes, shapes, [], implementation)
            kernels += op.definition.kernels(FORWARD, local)
    return tuple(kernels)


if __name__ == "__main__":
    main()
