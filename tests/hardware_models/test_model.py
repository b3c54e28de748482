"""The hardware model with one of its constants changed."""

from __future__ import annotations

import pytest

from hardware_models.model import HardwareModel


def test_another_overlap_factor_changes_nothing_else() -> None:
    hardware = HardwareModel.from_name("titan-rtx-pcie:1x8")
    slower = hardware.with_overlap_slowdown(1.7)
    (gpu_type,) = {node.gpu.name for node in hardware.cluster.nodes}
    assert slower.overlap_slowdown(gpu_type) == (1.7, 1.7)
    assert slower.with_overlap_slowdown(hardware.overlap_slowdown(gpu_type)[0]) == hardware
    with pytest.raises(ValueError, match=r"must be at least 1, got 0\.9"):
        hardware.with_overlap_slowdown(0.9)
