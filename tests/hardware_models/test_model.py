"""The hardware model with one of its constants changed."""

from __future__ import annotations

import pytest

from hardware_models.model import HardwareModel
from workloads.kernels import Matmul


def test_another_overlap_factor_changes_nothing_else() -> None:
    hardware = HardwareModel.from_name("titan-rtx-pcie:1x8")
    slower = hardware.with_overlap_slowdown(1.7)
    (gpu_type,) = {node.gpu.name for node in hardware.cluster.nodes}
    assert slower.overlap_slowdown(gpu_type) == (1.7, 1.7)
    assert slower.with_overlap_slowdown(hardware.overlap_slowdown(gpu_type)[0]) == hardware
    with pytest.raises(ValueError, match=r"must be at least 1, got 0\.9"):
        hardware.with_overlap_slowdown(0.9)


def test_another_rate_changes_products_of_that_type_only() -> None:
    hardware = HardwareModel.from_name("a100-40g-dgx:1x8")
    gpu = hardware.cluster.nodes[0].gpu.name
    half = hardware.with_rate("tf32", 0.5)
    product = Matmul(m=4096, n=4096, k=4096)
    assert half.kernel_time_s(gpu, product, "bf16") == hardware.kernel_time_s(gpu, product, "bf16")
    assert half.kernel_time_s(gpu, product, "tf32") > 1.5 * hardware.kernel_time_s(gpu, product, "tf32")
    with pytest.raises(ValueError, match=r"has rates for .*got 'int3'"):
        hardware.with_rate("int3", 0.5)
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        hardware.with_rate("tf32", 0)
