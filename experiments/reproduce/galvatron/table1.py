"""Galvatron-BMW's Table I: parameters and activations of all fifteen models."""

from __future__ import annotations

import pandas as pd

from experiments.reproduce.experiment import Context, Report, Verdict
from hardware_models.runtime_files import load_runtime
from simulator.uniform import repeated_layers
from workloads.local import localize, range_saved_bytes
from workloads.operators import Workload
from workloads.registry import build_workload

MIB = 2**20
RUNTIME = "galvatron-v1"
HALF_RUNTIME = "megatron-lm-2021"
"""16-bit activations, fused kernels."""

# Printed: parameters in millions, activation MB per sample.
PRINTED = {
    "bert-huge-32": (672, 3149.39),
    "bert-huge-48": (987, 4657.51),
    "bert-xhuge": (10200, 24210.05),
    "vit-huge-32": (632, 646.5),
    "vit-huge-48": (947, 968.59),
    "vit-xhuge": (10100, 5313.9),
    "t5-large-32": (502, 4119.66),
    "t5-large-48": (737, 6107.75),
    "t5-512-4-32": (502, 1777.06),
    "t5-512-4-48": (737, 2473.10),
    "swin-huge-32": (701, 726.59),
    "swin-huge-48": (1016, 1016.8),
    "galvatron-gpt3-15b": (15400, 32889.04),
    "galvatron-gpt3-39b": (39100, 58645.34),
    "galvatron-gpt3-65b": (64900, 97557.98),
}
UNKNOWN_STACK = ("t5-512", "galvatron-gpt3")
"""Models whose printed activations no known precision and sequence length explains (see the notes)."""


def run(context: Context) -> Report:
    """Return parameters and activations of each model beside the paper's."""
    rows = []
    for model, (millions, megabytes) in PRINTED.items():
        workload = build_workload(model)
        ours = workload.num_parameters / 1e6
        activation = activation_bytes(workload) / MIB
        rows.append(
            {
                "model": model,
                "layers": len(repeated_layers(workload)),
                "parameters_1e6": ours,
                "paper_parameters_1e6": millions,
                "parameters_difference": ours / millions - 1,
                "activation_mib_per_sample": activation,
                "paper_activation_mb_per_sample": megabytes,
                "activation_difference": activation / megabytes - 1,
                "activation_16_bit_mib": activation_bytes(workload, HALF_RUNTIME) / MIB,
            }
        )
    frame = pd.DataFrame(rows)
    worst = float(frame["parameters_difference"].abs().max())
    known = frame[~frame["model"].str.startswith(UNKNOWN_STACK)]
    name, difference = max(
        zip(known["model"], known["activation_difference"], strict=True), key=lambda pair: abs(pair[1])
    )
    return Report(
        tables={"models": frame},
        verdicts=[
            Verdict("the models have the printed parameters", "all within 0.5 %", f"worst {worst:.2%}", worst <= 0.005),
            Verdict(
                "activations per sample are the printed ones",
                "within 3 % where precision and length are known",
                f"worst {difference:.1%} ({name})",
                abs(difference) <= 0.03,
            ),
        ],
        notes=[
            "Activations are what one sample leaves for the backward pass: fp32, unfused attention, head included.",
            "T5-512/4 and the GPT3 models are printed for a software stack that is not named; ours is fp32, and "
            "beside it 16 bit with fused kernels.",
        ],
    )


def activation_bytes(workload: Workload, runtime: str = RUNTIME) -> float:
    """Return what one sample keeps for the backward pass, on one device."""
    implementation = load_runtime(runtime).implementation
    locals_by_operator = {
        index: localize(op.definition, op.attributes, workload.input_shapes(index, 1), (), implementation)
        for index, op in enumerate(workload.operators)
    }
    return float(sum(range_saved_bytes(workload, locals_by_operator).values()))
