"""What a layer keeps beside what was measured on A100s."""

from __future__ import annotations

import pytest

from experiments.check_activations import PROFILES, Profile, measured_mib, predicted_mib
from tests.hardware_models.data_folder import data_folder


@pytest.mark.parametrize("profile", PROFILES, ids=lambda each: f"{each.name}-{each.code_name}-{each.sequence_parallel}")
def test_a_layer_keeps_what_was_measured(profile: Profile) -> None:
    """Within 0.7 % for every tensor-parallel degree; no constant is fitted."""
    folder = data_folder("galvatron") / "profiles_raw"
    for tp in (1, 2, 4, 8):
        assert predicted_mib(profile, tp) == pytest.approx(measured_mib(profile, tp, folder), rel=0.007), tp
