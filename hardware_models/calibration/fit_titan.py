"""Fit the RTX TITAN's fp32 matmul limits to Galvatron's measured layer times.

Rows used: ``galvatron/titan_v1/layer_profiles.csv``, BERT, ViT and the decoder of T5-Large, forward and backward.
Report: Swin, and the encoder of T5-Large, whose figure is BERT-Large's to the last digit. The file gives forward
milliseconds per layer and sample, of which backward takes twice as many (the release's cost model, see its data
README). How many samples ran at once is not stated: 4 texts or 16 images are assumed, the release's microbatches.

Run: ``python -m hardware_models.calibration.fit_titan --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from datafiles.tables import load_table
from hardware_models.calibration.kernel_fit import KernelRow, Parameter, fit, report
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.runtime_files import load_runtime
from workloads.kernels import Kernel
from workloads.kinds.base import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from workloads.local import localize
from workloads.registry import build_workload

MODELS = {
    ("BERT-Large", "encoder"): ("bert-large", 0),
    ("BERT-Huge", "encoder"): ("bert-huge-32", 0),
    ("T5-Large", "encoder"): ("t5-large-32", 0),
    ("T5-Large", "decoder"): ("t5-large-32", 16),
    ("ViT-Large", "encoder"): ("vit-large", 0),
    ("ViT-Huge", "encoder"): ("vit-huge-32", 0),
    ("Swin-Huge", "stage0"): ("swin-huge-32", 1),
    ("Swin-Huge", "stage1"): ("swin-huge-32", 3),
    ("Swin-Huge", "stage2"): ("swin-huge-32", 5),
    ("Swin-Huge", "stage3"): ("swin-huge-32", 31),
}
"""Model and layer type in the file; our model and the number of a layer of that type."""

FITTED = (
    "BERT-Large encoder", "BERT-Huge encoder", "T5-Large decoder", "ViT-Large encoder", "ViT-Huge encoder"
)  # fmt: skip
PHASES = {"forward": ((FORWARD,), 1.0), "backward": ((BACKWARD_INPUT, BACKWARD_WEIGHT), 2.0)}
SAMPLES = {"BERT": 4, "T5": 4, "ViT": 16, "Swin": 16}
PARAMETERS = (Parameter("limit.forward", 0.8, 0.3, 1.0), Parameter("limit.gradient", 0.8, 0.3, 1.0))


def main() -> None:
    """Fit, print the constants and the residuals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds galvatron/titan_v1/")
    rows = list(_rows(parser.parse_args().data / "galvatron" / "titan_v1" / "layer_profiles.csv"))
    gpu = load_gpu("titan-rtx-24gb")
    fit_rows = [row for row in rows if row.label in FITTED]
    curves = fit(gpu, load_curves(gpu.curves), "fp32", PARAMETERS, fit_rows, "this run")
    report("fit rows", gpu, curves, "fp32", fit_rows)
    report("report rows", gpu, curves, "fp32", [row for row in rows if row.label not in FITTED])


def _rows(path: Path) -> Iterator[KernelRow]:
    for row in load_table(path, floats=("forward_ms_per_layer_per_sample",)):
        place = MODELS.get((row["model"], row["layer_type"]))
        if place is None:
            continue
        for name, (phases, share) in PHASES.items():
            samples = SAMPLES[row["model"].split("-")[0]]
            seconds = share * samples * row["forward_ms_per_layer_per_sample"] / 1e3
            label = f"{row['model']} {row['layer_type']}"
            yield KernelRow(f"{label} {name}", _layer_kernels(*place, phases, samples), seconds, label)


def _layer_kernels(name: str, number: int, phases: tuple[str, ...], samples: int) -> tuple[Kernel, ...]:
    """Return the kernels of a repeated layer."""
    workload = build_workload(name)
    implementation = load_runtime("galvatron-v1").implementation
    layers = list(dict.fromkeys(op.layer for op in workload.operators if op.definition.name == "softmax"))
    kernels: list[Kernel] = []
    for index, op in enumerate(workload.operators):
        if op.layer == layers[number]:
            shapes = workload.input_shapes(index, samples)
            local = localize(op.definition, op.attributes, shapes, [], implementation)
            for phase in phases:
                kernels += op.definition.kernels(phase, local)
    return tuple(kernels)


if __name__ == "__main__":
    main()
