"""A GPT layer's time on a V100 against Aceso's profile, on sizes and degrees that no constant was fitted on."""

from __future__ import annotations

from hardware_models.calibration.check_layers import layers, mean_absolute
from tests.hardware_models.data_folder import data_folder


def test_layers_of_other_sizes_and_degrees_are_met_within_four_percent() -> None:
    found = list(layers(data_folder("aceso_v100") / "ops.csv.gz"))
    reported = [layer for layer in found if not layer.is_fitted]
    assert (len(found), len(reported)) == (80, 64)
    assert mean_absolute(reported) < 0.04
    assert mean_absolute([layer for layer in reported if layer.tensor_size <= 2]) < 0.015
    # 350M at one sample is ruled by the profiler's own host time: 44 us for a norm, 0.93 ms for a GELU's backward.
    assert mean_absolute([layer for layer in reported if layer.tensor_size > 2]) < 0.055
    assert mean_absolute([layer for layer in reported if layer.size != "350M"]) < 0.025
