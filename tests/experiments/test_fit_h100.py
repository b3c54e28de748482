"""The H100's constants against the profiled operators that they come from, and those that they do not."""

from __future__ import annotations

from statistics import fmean

import pytest

from experiments.cases.campaigns import CALIBRATED, FOLDER, cases_of
from experiments.fit_h100 import (
    CAMPAIGN,
    CURVES,
    GPU,
    executor_host,
    fitted_curves,
    kernel_rows,
    predicted_s,
    unit_passes,
)
from hardware_models.gpus import load_curves, load_gpu
from hardware_models.runtime_files import load_runtime


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_shipped_curves_are_those_of_the_fit(dtype: str) -> None:
    fitted, shipped = fitted_curves(dtype, progress=lambda line: None), load_curves(CURVES)
    own, theirs = fitted.matmul[dtype], shipped.matmul[dtype]
    assert own.limit == pytest.approx(theirs.limit, rel=0.01)
    assert own.half_waves == pytest.approx(theirs.half_waves, rel=0.02)
    assert own.half_k == pytest.approx(theirs.half_k, rel=0.02)
    assert own.bandwidth_fraction == pytest.approx(theirs.bandwidth_fraction, rel=0.01)
    if dtype == "bf16":
        assert fitted.memory.fraction == pytest.approx(shipped.memory.fraction, rel=0.01)
        assert fitted.memory.row_s == pytest.approx(shipped.memory.row_s, rel=0.01)
        assert fitted.power is not None and shipped.power is not None
        assert fitted.power.products[dtype] == pytest.approx(shipped.power.products[dtype], rel=0.01)
        for name in ("forward", "backward", "forward_half_waves", "backward_half_waves"):
            assert getattr(fitted.attention, name) == pytest.approx(getattr(shipped.attention, name), rel=0.01)


@pytest.mark.parametrize(
    ("dtype", "campaign", "mean", "together"),
    [("bf16", CAMPAIGN, 0.08, 0.03), ("fp32", CAMPAIGN, 0.1, 0.02), ("bf16", "single-gpu-second", 0.1, 0.06)],
)
def test_operators_not_fitted_on_are_predicted(dtype: str, campaign: str, mean: float, together: float) -> None:
    gpu, curves = load_gpu(GPU), load_curves(CURVES)
    rows = [row for of_fit, row in kernel_rows(campaign, dtype) if not of_fit]
    assert len(rows) > 80
    predicted = predicted_s(gpu, curves, dtype, rows, unit_passes(campaign, dtype))
    assert fmean(abs(own / row.seconds - 1) for own, row in zip(predicted, rows, strict=True)) < mean
    assert sum(predicted) == pytest.approx(sum(row.seconds for row in rows), rel=together)


def test_plans_of_models_that_were_fitted_on_are_not_reported_without_a_profile() -> None:
    cases = cases_of(FOLDER / f"{CAMPAIGN}.yaml")
    reported = {case.features["model"] for case in cases if "modelled" in case.groups[0]}
    assert len(reported) == 5 and not reported & set(CALIBRATED[CAMPAIGN])


def test_the_executors_host_is_that_of_operators_whose_kernels_are_short() -> None:
    forward_s, backward_s = executor_host()
    assert load_runtime("windtunnel-executor").host_seconds_per_operator == pytest.approx(
        (forward_s, backward_s), rel=0.01
    )
    assert 30e-6 < forward_s < backward_s < 300e-6
