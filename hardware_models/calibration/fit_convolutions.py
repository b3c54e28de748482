"""Fit what convolutions take beside their matrix products to Aceso's Wide-ResNet operators.

Rows used: database eurosys, resnet 500M, tensor-parallel 1, fp32, longer than 100 us, every convolution: forward of the
alternative split and backward of the default one, which hold no copies (`aceso_rows.convolution_rows`). All other
sizes are report rows, and the 500M is in none of the groups on modelled kernels.

A backward row is both gradients. The data gradient is a product of the forward one's shape, so one factor stands for
both; what remains is the weight gradient's.

Run: ``python -m hardware_models.calibration.fit_convolutions --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hardware_models.calibration.aceso_rows import convolution_rows
from hardware_models.calibration.kernel_fit import KernelRow, Parameter, Vector, least, predict_s, report_errors
from hardware_models.gpus import MATMUL_ROLES, ConvolutionFactors, load_curves, load_gpu

FITTED = "500M"
GPU, DTYPE = "v100-sxm2-32gb", "fp32"
PARAMETERS = (
    Parameter("slowness.forward", 1.1, 1.0, 2.0),
    Parameter("slowness.weight_gradient", 1.1, 1.0, 2.0),
    Parameter("half_k_share", 0.6, 0.0, 2.0),
    Parameter("few_channels_slowness", 1.5, 1.0, 4.0),
    Parameter("transform_fraction", 0.8, 0.2, 1.0),
)


def factors_of(values: Mapping[str, float], source: str = "this run") -> ConvolutionFactors:
    """Return factors from values by parameters' places.

    ``slowness.gradient`` and ``winograd_share.gradient`` are those of both gradients, where rows do not tell them
    apart; else a data gradient is as slow as the forward pass.
    """
    both = values.get("slowness.gradient", values["slowness.forward"])
    slowness = {role: values.get(f"slowness.{role}", both) for role in MATMUL_ROLES}
    gradient = values.get("winograd_share.gradient", 1.0)
    return ConvolutionFactors(
        slowness=slowness,
        half_k_share=values["half_k_share"],
        few_channels_slowness=values["few_channels_slowness"],
        transform_fraction=values["transform_fraction"],
        source=source,
        winograd_share={
            "forward": values.get("winograd_share.forward", 1.0), "data_gradient": gradient, "weight_gradient": gradient
        },
    )  # fmt: skip


def predicted_s(
    rows: Sequence[KernelRow], factors: ConvolutionFactors, gpu_name: str = GPU, dtype: str = DTYPE
) -> Vector:
    """Return the seconds of each row: of its convolutions, and of what they have with them (a bias)."""
    gpu = load_gpu(gpu_name)
    base = load_curves(gpu.curves)
    curves = base.model_copy(update={"convolutions": {**base.convolutions, dtype: factors}})
    return np.array([predict_s(gpu, curves, dtype, row.kernels) for row in rows])


def shipped_factors() -> ConvolutionFactors:
    """Return the constants that these rows gave."""
    return load_curves(load_gpu(GPU).curves).convolutions[DTYPE]


def main() -> None:
    """Fit, print the constants, then the residuals of fit rows; `check_convolutions` has the other sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds aceso_v100/ops.csv.gz")
    table = parser.parse_args().data / "aceso_v100" / "ops.csv.gz"
    rows = list(convolution_rows(table, size=FITTED))
    factors = factors_of(least(PARAMETERS, rows, lambda values: predicted_s(rows, factors_of(values))))
    report_errors("fit rows", rows, predicted_s(rows, factors).tolist())
    report_errors("fit rows, shipped constants", rows, predicted_s(rows, shipped_factors()).tolist())


if __name__ == "__main__":
    main()
