"""Fit what convolutions take on an H100 to the campaign ``single-gpu-convolutions``: cuDNN 9 by its own rules.

Used: the convolutions of its six units that take 30 us or more (not those within shortcuts), forward and backward, as
profiled on one H100 (torch 2.11, CUDA 13.0), times the factor that each unit's calibration plans gave them. Channels
and images are of no model that is reported: the campaign's plans are in no group that is predicted without a profile.
Reported: convolutions of ``single-gpu-families`` (ResNet-50, VGG-16, Wide-ResNet). A row of backward is both gradients,
which in fp32 it does not tell apart.

Run: ``python -m experiments.fit_h100_convolutions`` (needs no data)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from experiments.cases.campaign_operators import measured_operators
from experiments.cases.campaigns import FOLDER
from experiments.fit_h100 import GPU, SHORTEST_S
from hardware_models.calibration.fit_convolutions import factors_of, predicted_s
from hardware_models.calibration.kernel_fit import KernelRow, Parameter, least, report_errors
from hardware_models.gpus import ConvolutionFactors

CAMPAIGN, REPORTED = "single-gpu-convolutions", "single-gpu-families"
_BOTH = (
    Parameter("slowness.forward", 1.2, 1.0, 4.0),
    Parameter("half_k_share", 0.3, 0.0, 3.0),
    Parameter("few_channels_slowness", 3.0, 1.0, 10.0),
    Parameter("transform_fraction", 0.6, 0.1, 1.0),
)
PARAMETERS = {
    "bf16": (*_BOTH, Parameter("slowness.weight_gradient", 1.3, 1.0, 6.0)),
    "fp32": (
        *_BOTH,
        Parameter("slowness.gradient", 1.3, 1.0, 6.0),
        Parameter("winograd_share.forward", 0.3, 0.0, 1.0),
        Parameter("winograd_share.gradient", 0.6, 0.0, 1.0),
    ),
}


def convolution_rows(campaign: str, dtype: str) -> Iterator[KernelRow]:
    """Yield the passes of convolutions that a campaign's cases hold profiles of."""
    for each in measured_operators(FOLDER / f"{campaign}.yaml"):
        if each.problem.runtime.implementation.dtype != dtype or each.operator.kind != "conv2d":
            continue
        side = each.operator.attributes["kernel"]
        for word, kernels, seconds in (
            ("forward", each.forward, each.row.forward_s),
            ("backward", each.backward, each.row.backward_s),
        ):
            if kernels and seconds > SHORTEST_S:
                label = f"{each.unit} {each.row.role} of {each.row.samples}"
                yield KernelRow(f"{side}x{side} {word}", kernels, seconds, label)


def fitted_factors(dtype: str) -> ConvolutionFactors:
    """Return the factors that fit best, of one type of numbers."""
    rows = list(convolution_rows(CAMPAIGN, dtype))
    return factors_of(
        least(PARAMETERS[dtype], rows, lambda values: predicted_s(rows, factors_of(values), GPU, dtype))
    )


def main() -> None:
    """Fit, and print constants and residuals."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for dtype in PARAMETERS:
        factors = fitted_factors(dtype)
        for campaign, words in ((CAMPAIGN, "fitted on"), (REPORTED, "report rows")):
            rows = list(convolution_rows(campaign, dtype))
            report_errors(f"{dtype}, {campaign}, {words}", rows, predicted_s(rows, factors, GPU, dtype).tolist())


if __name__ == "__main__":
    main()
