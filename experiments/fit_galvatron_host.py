"""Fit what Galvatron spends on the host per operator on A100s, from its released forward times of short layers.

A layer of BERT takes 1.8 to 2.1 ms forward from 128 to 1,024 tokens of one sample, in both widths: the host sets the
pace, not the device. Rows used: one sample of at most 1,024 tokens, BERT (hidden 768 and 1024) and T5 (encoder and
decoder). The host's seconds per operator are the mean over the four kinds of layer of what launches leave of the mean
time, over the layer's operators. The files are of 2023 and 2024 and name no GPU (A100 by speed); backward was not
measured and is taken to cost the host as much.

Run: ``python -m experiments.fit_galvatron_host --data DIR``
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean

from datafiles.tables import load_table
from hardware_models.gpus import load_gpu
from hardware_models.runtime_files import load_runtime
from workloads.kinds.base import FORWARD
from workloads.local import localize
from workloads.registry import build_workload

RUNTIME, GPU = "galvatron-v1-bf16", "a100-sxm4-40gb"
MAX_TOKENS = 1024
KINDS = {
    ("bert_hf", "hidden768", "0"): ("bert-large", "mlp_linear_1"),
    ("bert_hf", "hidden1024", "0"): ("bert-large", "mlp_linear_1"),
    ("T5", "t5-3B", "0"): ("t5-770m", "mlp_linear_1"),
    ("T5", "t5-3B", "1"): ("t5-770m", "decoder_mlp_linear_1"),
}
"""File name parts and layer type; a model of ours with the same operators, and an operator of such a layer."""


def operators_and_kernels(model: str, role: str) -> tuple[int, int]:
    """Return operators and forward kernels of the second layer that has an operator of a role."""
    runtime = load_runtime(RUNTIME)
    workload = build_workload(model, attention=runtime.attention)
    layer = [op.layer for op in workload.operators if op.role == role][1]
    indices = [index for index, op in enumerate(workload.operators) if op.layer == layer]
    kernels = 0
    for index in indices:
        op = workload.operators[index]
        local = localize(
            op.definition, op.attributes, workload.input_shapes(index, 1), [], runtime.implementation, operator=op.name
        )
        kernels += len(op.definition.kernels(FORWARD, local))
    return len(indices), kernels


def measured_s(path: Path) -> dict[tuple[str, str, str], list[float]]:
    """Return forward seconds of one layer by kind, of the rows used."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    columns = ("forward_ms_per_layer_per_sample",)
    for row in load_table(path, integers=("batch_size",), floats=columns):
        for key in KINDS:
            family, size, layer_type = key
            if not row["profile"].startswith(f"{family}__") or size not in row["profile"]:
                continue
            if row["layer_type"] == layer_type and row["batch_size"] == 1 and int(row["seq_len"]) <= MAX_TOKENS:
                found[key].append(row[columns[0]] / 1e3)
    return found


def host_seconds_per_operator(path: Path) -> dict[tuple[str, str, str], float]:
    """Return the host's seconds per operator beside its launches, by kind of layer."""
    launch_s = load_gpu(GPU).launch_s
    found = {}
    for key, times in measured_s(path).items():
        operators, kernels = operators_and_kernels(*KINDS[key])
        found[key] = (mean(times) - kernels * launch_s) / operators
    return found


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds galvatron/a100/")
    found = host_seconds_per_operator(parser.parse_args().data / "galvatron" / "a100" / "layer_forward_times.csv")
    for (family, size, layer_type), seconds in found.items():
        print(f"{family} {size}, layer type {layer_type}: {seconds * 1e6:.1f} us per operator")
    print(f"mean: {mean(found.values()) * 1e6:.1f} us per operator")


if __name__ == "__main__":
    main()
