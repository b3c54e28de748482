"""Fit the V100's fp16 curves to Aceso's GPT operators.

Rows used: database eurosys, gpt 350M and 2.6B, tensor-parallel 1 and 2, default split, longer than 100 us, no
collective inside, head and embedding excluded. All other GPT sizes and degrees are report rows.

Run: ``python -m hardware_models.calibration.fit_v100 --data DIR``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hardware_models.calibration.aceso_rows import gpt_rows
from hardware_models.calibration.kernel_fit import Parameter, fit, report
from hardware_models.gpus import load_curves, load_gpu

PARAMETERS = (
    Parameter("limit.forward", 0.8, 0.3, 1.0),
    Parameter("limit.data_gradient", 0.8, 0.3, 1.0),
    Parameter("limit.weight_gradient", 0.8, 0.3, 1.0),
    Parameter("half_waves", 0.1, 0.0, 5.0),
    Parameter("half_k", 100.0, 0.0, 500.0),
    Parameter("bandwidth_fraction", 0.8, 0.2, 1.0),
    Parameter("fraction.elementwise", 0.8, 0.2, 1.0),
    Parameter("fraction.reduction", 0.8, 0.2, 1.0),
    Parameter("fraction.random", 0.7, 0.2, 1.0),
    Parameter("ramp_bytes", 1e6, 0.0, 4e6),
)
EXCLUDED = ("embedding", "final_norm")


def main() -> None:
    """Fit, print the constants, then the residuals of fit rows and report rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds aceso_v100/ops.csv.gz")
    table = parser.parse_args().data / "aceso_v100" / "ops.csv.gz"
    gpu = load_gpu("v100-sxm2-32gb")
    fit_rows = [
        row
        for row in gpt_rows(table, sizes=("350M", "2_6B"), tensor_sizes=(1, 2))
        if not row.group.startswith(EXCLUDED)
    ]
    curves = fit(gpu, load_curves(gpu.curves), "fp16", PARAMETERS, fit_rows, source="this run")
    report("fit rows", gpu, curves, "fp16", fit_rows)
    report(
        "report rows: other sizes, tp 1-2",
        gpu,
        curves,
        "fp16",
        list(gpt_rows(table, sizes=("1_3B", "6_7B", "13B"), tensor_sizes=(1, 2))),
    )
    report(
        "report rows: all sizes, tp 4-8",
        gpu,
        curves,
        "fp16",
        list(gpt_rows(table, sizes=("350M", "1_3B", "2_6B", "6_7B", "13B"), tensor_sizes=(4, 8))),
    )


if __name__ == "__main__":
    main()
