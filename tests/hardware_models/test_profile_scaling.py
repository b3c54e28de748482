"""Scaled profiles."""

from hardware_models.profile import OperatorProfile, ProfileRow
from hardware_models.profile_scaling import ProfileScaling


def row(role: str) -> ProfileRow:
    return ProfileRow(role, 1, 1, "default", 2.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, False, 1, "test")


def test_times_are_scaled_by_role_and_none_is_below_zero() -> None:
    profile = OperatorProfile("m", "g", "fp32", (row("norm"), row("matmul")), "test")
    scaled = ProfileScaling(0.5, {"norm": 1.5}, 0.25, -10.0).apply(profile)
    assert [each.forward_s for each in scaled.rows] == [1.25, 1.25]
    assert [each.backward_s for each in scaled.rows] == [0.0, 0.0]
    scaled = ProfileScaling(0.5, {"norm": 1.5}).apply(profile)
    assert [each.backward_s for each in scaled.rows] == [3.0, 2.0]
    assert ProfileScaling().apply(profile) == profile
