"""Constants times factors: each moves what it is named after, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_models.calibration_file import load_calibration, save_calibration
from hardware_models.cluster import parse_cluster
from hardware_models.machine_factors import FACTORS, named, with_factors
from hardware_models.model import HardwareModel
from workloads.kernels import FlashAttention, Matmul, MemoryBound

CLUSTER = parse_cluster("v100-32g-dgx1:2x8")
GPU = CLUSTER.gpu_types[0]
PRODUCT, COPY = Matmul(4096, 4096, 4096), MemoryBound(1e9, 1e9)


def seconds(hardware: HardwareModel) -> dict[str, float]:
    """Return what each factor is about, in seconds (or, of an overlap, what it costs a second)."""
    gpu = hardware.gpu(GPU)
    return {
        "products": hardware.kernel_time_s(GPU, PRODUCT, "fp16"),
        "memory": hardware.kernel_time_s(GPU, COPY, "fp16"),
        "host": hardware.host_factor(GPU),
        "links": hardware.collective("all_reduce", 1e9, range(8)).alone_s,
        "network": hardware.collective("all_gather", 4e9, range(16)).alone_s,
        "overlap": gpu.overlap_slowdown_computation - 1,
    }


@pytest.mark.parametrize("name", list(FACTORS))
def test_a_factor_moves_what_it_is_named_after_and_nothing_else(name: str) -> None:
    before = seconds(HardwareModel(CLUSTER))
    after = seconds(with_factors(CLUSTER, {name: 0.8}, "test").hardware(CLUSTER))
    ratio = after[name] / before[name]
    assert ratio == pytest.approx(0.8 if name in ("host", "overlap") else 1.25, rel=0.02)
    assert all(after[other] == before[other] for other in FACTORS if other != name)


def test_memory_moves_the_optimizer_and_overlap_moves_both_sides() -> None:
    before, after = (
        HardwareModel(CLUSTER), with_factors(CLUSTER, {"memory": 0.8, "overlap": 0.5}, "test").hardware(CLUSTER)
    )  # fmt: skip
    assert after.optimizer_step_s(GPU, 1e9) == pytest.approx(before.optimizer_step_s(GPU, 1e9) / 0.8)
    for name in ("overlap_slowdown_computation", "overlap_slowdown_communication"):
        lost = [getattr(hardware.gpu(GPU), name) - 1 for hardware in (before, after)]
        assert lost[1] == pytest.approx(0.5 * lost[0]) and lost[0] > 0


def test_what_has_factor_one_is_left_out_and_two_is_not() -> None:
    constants = with_factors(CLUSTER, {"memory": 0.8, "overlap": 1.0, "host": 1.0}, "test")
    assert set(constants.gpus[GPU].given()) == {"curves", "optimizer_bandwidth_fraction"}
    assert not constants.links and not constants.networks
    doubled = with_factors(CLUSTER, {"overlap": 2.0}, "test").gpus[GPU].given()
    gpu = CLUSTER.nodes[0].gpu
    assert doubled == {
        name: pytest.approx(1 + 2 * (getattr(gpu, name) - 1))
        for name in ("overlap_slowdown_computation", "overlap_slowdown_communication")
    }


def test_both_ways_of_attention_move_with_products() -> None:
    cluster = parse_cluster("a100-80g-dgx:1x8")
    before, after = HardwareModel(cluster), with_factors(cluster, {"products": 0.8}, "test").hardware(cluster)
    for backward in (False, True):
        kernel = FlashAttention(64, 4096, 4096, 128, True, backward)
        seconds = [hardware.kernel_time_s(cluster.gpu_types[0], kernel, "bf16") for hardware in (before, after)]
        assert seconds[1] == pytest.approx(seconds[0] / 0.8)


@given(st.dictionaries(st.sampled_from(sorted(FACTORS)), st.floats(0.2, 5.0), min_size=1))
def test_any_factors_give_a_file_that_is_read_as_written(tmp_path_factory, factors: dict[str, float]) -> None:
    found = with_factors(CLUSTER, factors, "test")
    path = tmp_path_factory.mktemp("factors") / "c.json"
    save_calibration(found, path)
    assert load_calibration(path) == found


def test_shares_of_a_peak_end_at_the_peak() -> None:
    hardware = with_factors(CLUSTER, {"products": 50.0, "memory": 50.0}, "test").hardware(CLUSTER)
    gpu = hardware.gpu(GPU)
    assert hardware.kernel_time_s(GPU, COPY, "fp16") >= COPY.total_bytes / gpu.memory_bytes_per_s
    assert hardware.kernel_time_s(GPU, PRODUCT, "fp16") >= PRODUCT.flop / gpu.peak("fp16")


def test_unknown_names_and_factors_that_are_not_above_zero_are_refused() -> None:
    assert named("all") == tuple(FACTORS)
    with pytest.raises(ValueError, match=r"must be all or one of products, memory.*got 'link'"):
        named("products, link")
    with pytest.raises(ValueError, match="must be above 0"):
        with_factors(CLUSTER, {"links": 0.0}, "test")
    with pytest.raises(ValueError, match="must be above 0 and of"):
        with_factors(CLUSTER, {"wheels": 2.0}, "test")
