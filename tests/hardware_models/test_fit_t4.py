"""The T4's constants are what the fit makes of AMP's published layer profile; the fit finds back what it is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_models.calibration import fit_t4
from hardware_models.gpus import load_curves
from hardware_models.links import load_link
from hardware_models.runtime_files import load_runtime
from tests.hardware_models.data_folder import data_folder


def test_shipped_constants_are_those_of_the_fit() -> None:
    data = data_folder("gpu_efficiency").parent
    times = fit_t4.measured(data, "T4-16GB")
    limit, rate = fit_t4.fit_curves(times)
    curves = load_curves("turing-t4")
    assert curves.matmul["fp16"].limit["forward"] == pytest.approx(limit, rel=0.005)
    assert curves.memory.fraction["elementwise"] == pytest.approx(rate, rel=0.005)
    launch_s, bytes_per_s = fit_t4.fit_links(fit_t4.all_reduce_times(times, fit_t4.measured(data, "V100-SXM2-16GB")))
    link = load_link("pcie3-t4")
    assert link.protocols[0].launch_s == pytest.approx(launch_s, rel=0.005)
    assert link.link_bytes_per_s == pytest.approx(bytes_per_s, rel=0.005)


def test_other_patterns_keep_voltas_ratios() -> None:
    volta, turing = load_curves("volta").memory.fraction, load_curves("turing-t4").memory.fraction
    for pattern in ("reduction", "random", "gather"):
        assert turing[pattern] / turing["elementwise"] == pytest.approx(volta[pattern] / volta["elementwise"], rel=0.01)


@given(st.floats(1e-5, 2e-3), st.floats(1e9, 2e10))
def test_a_launch_and_a_rate_are_found_back(launch_s: float, bytes_per_s: float) -> None:
    step_s = load_link("pcie3-t4").protocols[0].step_s
    before_s = load_runtime(fit_t4.RUNTIME).handover_s + launch_s
    left = {
        (tp, item): before_s + 2 * (tp - 1) * step_s + 2 * (tp - 1) / tp * fit_t4.MESSAGE_BYTES / bytes_per_s
        for tp in fit_t4.DEGREES
        for item in ("layer", "embedding")
    }
    assert fit_t4.fit_links(left) == pytest.approx((launch_s, bytes_per_s), rel=1e-6)


def test_a_forward_pass_of_the_layer_comes_near_the_profile_without_a_constant_of_its_own() -> None:
    """No kernel of the layer took part in the fit: 11 % below what the warm card takes."""
    times = fit_t4.measured(data_folder("gpu_efficiency").parent, "T4-16GB")
    gpu, curves = fit_t4.load_gpu("t4-16gb"), load_curves("turing-t4")
    predicted = fit_t4.predict_s(gpu, curves, "fp16", fit_t4.layer(1))
    assert predicted == pytest.approx(fit_t4.mean(times, 1, fit_t4.WARM_LAYERS), rel=0.15)
