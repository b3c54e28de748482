"""Fits find back what data were made from, and say how far off they are."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datafiles.tables import load_table
from hardware_models.calibration.communication_fit import communication_parts, far_rates
from hardware_models.calibration.kernel_calibration import as_shipped, fit_curves
from hardware_models.calibration.kernel_fit import KernelRow, build_curves, predict_s, report_errors
from hardware_models.calibration.outcome import Point, fit_record
from hardware_models.calibration.series_fit import SeriesLaw, fit_series
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import Row
from hardware_models.compute import kernel_time_s
from hardware_models.gpus import curves_of, load_gpu
from hardware_models.group_shapes import GroupShape
from hardware_models.importers.aceso_folder import collectives_in, models_in
from hardware_models.machine_factors import with_factors
from tests.hardware_models.data_folder import data_folder
from workloads.kernels import Convolution, FlashAttention, Kernel, Matmul, MemoryBound

SIZES = [2.0**power for power in range(10, 31, 2)]


@settings(deadline=None, max_examples=15)
@given(st.floats(5e-6, 2e-4), st.floats(1e8, 5e11))
def test_one_latency_and_bandwidth_are_found_back(latency_s: float, rate: float) -> None:
    law = fit_series([(size, latency_s + size / rate) for size in SIZES])
    predicted = law.seconds(np.array(SIZES))
    measured = np.array([latency_s + size / rate for size in SIZES])
    assert np.abs(predicted / measured - 1).max() < 0.01


def test_two_regimes_are_found_back() -> None:
    true = SeriesLaw(20e-6, 5e9, 120e-6, 100e9)
    sizes = np.array([2.0**power for power in range(8, 31)])
    law = fit_series(list(zip(sizes, true.seconds(sizes), strict=True)))
    assert np.abs(law.seconds(sizes) / true.seconds(sizes) - 1).max() < 0.02
    assert law.latency_s == pytest.approx(20e-6, rel=0.05)
    assert law.large_bytes_per_s == pytest.approx(100e9, rel=0.02)


EIGHT = np.array([256.0, 4096.0, 65536.0, 262144.0, 524288.0, 1048576.0, 4194304.0, 16777216.0])


def test_a_line_through_two_points_gives_no_rate_that_no_link_has() -> None:
    """Transfers of a busy machine: without bounds, 7.8 MB/s for small messages beside 3.75 GB/s for large ones."""
    seconds = np.array([60e-6, 550e-6, 1.5e-3, 1.6e-3, 1.65e-3, 1.8e-3, 2.7e-3, 5.9e-3])
    law = fit_series(list(zip(EIGHT, seconds, strict=True)))
    assert 45e-6 < law.latency_s < 60e-6
    assert law.bytes_per_s > 0.005 * law.large_bytes_per_s
    assert law.large_bytes_per_s == pytest.approx(3.75e9, rel=0.05)


@pytest.mark.parametrize("power", [0.0, -0.1, 1.0, 1.3])
def test_constants_are_within_what_points_can_say(power: float) -> None:
    """Times that do not grow, that fall, that have no latency, that grow faster than sizes."""
    seconds = 20e-6 * (EIGHT / 256) ** power
    law = fit_series(list(zip(EIGHT, seconds, strict=True)))
    assert law.latency_s >= 0.0099 * seconds.min()
    assert law.large_bytes_per_s <= 101 * (EIGHT / seconds).max()
    assert law.knows_rate(EIGHT, seconds) == (power > 0)


def test_times_that_do_not_grow_and_rates_far_from_the_presets_are_said() -> None:
    flat: list[Row] = [("all_reduce", GroupShape(8, 1, 1), size, 2e-5) for size in SIZES]
    (note,) = communication_parts(flat, "test", None).notes
    assert note.startswith("times of all_reduce, 8 ranks must grow with size to have a rate")
    milliseconds: list[Row] = [("all_reduce", GroupShape(8, 1, 1), size, 20 + size / 1e8) for size in SIZES]
    note, kept = communication_parts(milliseconds, "test", "a100-80g-dgx").notes
    assert note.startswith("links.rate must be near the preset's, got 0.001 times a100-80g-dgx: check --cluster")
    assert kept == "nothing over several nodes was measured: their network is the preset's"


def test_rates_are_far_off_beyond_ten_times_either_way() -> None:
    rates = {"links.rate": 0.099, "network.rate": 10.1, "links.host_rate": 0.11, "links.simple.launch_s": 1e-6}
    assert [note.split()[0] for note in far_rates("p3.16xlarge", rates)] == ["links.rate", "network.rate"]


def test_two_sizes_have_a_law_and_one_has_none() -> None:
    rows: list[Row] = [("all_reduce", 2, 2.0**20, 1e-4), ("all_reduce", 2, 2.0**24, 1e-3), ("all_gather", 2, 1.0, 1.0)]
    found = communication_parts(rows, "made up", None)
    assert [fit.what for fit in found.fits if fit.how == "fitted"] == ["all_reduce, 2 ranks"]


@pytest.mark.parametrize("dtype", ["fp16", "tf32"])
def test_a_fit_prices_kernels_as_predictions_do(dtype: str) -> None:
    gpu = load_gpu("a100-sxm4-80gb")
    kernels = [
        Matmul(4096, 1024, 512),
        Convolution(32, 64, 64, 56 * 56, 56 * 56, 3),
        MemoryBound(1e8, 1e8, "reduction"),
        FlashAttention(64, 2048, 2048, 128, True, backward=True),
        Matmul(1, 1, 1),  # no kernel is quicker than the shortest
    ]
    for kernel in kernels:
        assert predict_s(gpu, curves_of(gpu), dtype, [kernel]) == kernel_time_s(gpu, kernel, dtype)
    assert predict_s(gpu, curves_of(gpu), dtype, kernels) == pytest.approx(
        sum(kernel_time_s(gpu, kernel, dtype) for kernel in kernels)
    )


def test_one_limit_of_gradients_is_that_of_both() -> None:
    """Layers timed backward as a whole do not tell them apart (``fit_titan``)."""
    shipped = curves_of(load_gpu("titan-rtx-24gb"))
    limit = build_curves(shipped, "fp32", {"limit.gradient": 0.5}, "test").matmul["fp32"].limit
    forward = shipped.matmul["fp32"].limit["forward"]
    assert limit == {"forward": forward, "data_gradient": 0.5, "weight_gradient": 0.5}


def test_a_report_returns_the_mean_of_all_rows_errors_without_signs() -> None:
    rows = [KernelRow("copy", (), 2.0, ""), KernelRow("copy", (), 1.0, ""), KernelRow("product", (), 4.0, "")]
    said: list[str] = []
    assert report_errors("these", rows, [3.0, 1.0, 3.0], said.append) == pytest.approx((0.5 + 0.0 + 0.25) / 3)
    assert said[0].startswith("these: 3 rows, mean absolute error 25.0%, bias +8.3%, median 25.0%")


def test_a_law_of_one_size_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 sizes"):
        fit_series([(1024.0, 1e-5)])


def test_communication_gives_a_table_a_law_for_each_series_and_links() -> None:
    rows: list[Row] = [("all_reduce", GroupShape(8, 1, 1), size, 2e-5 + size / 1e11) for size in SIZES]
    found = communication_parts(rows, "test", "a100-80g-dgx")
    words = [(fit.what, fit.how, fit.num_points) for fit in found.fits]
    assert words[:2] == [
        ("all_reduce, table, each size left out", "interpolated", len(SIZES) - 2),
        ("all_reduce, 8 ranks", "fitted", len(SIZES)),
    ]
    assert all(fit.median is not None and fit.median < 0.02 for fit in found.fits[:2])
    assert found.fits[0].worst == pytest.approx(0, abs=1e-6)
    assert found.links is not None
    assert found.network is None
    assert communication_parts(rows, "test", None).links is None


def test_residuals_are_median_ninety_percent_and_worst() -> None:
    points = [Point("x", 1.0, 1.0 + 0.01 * step) for step in range(11)]
    record = fit_record("x", "fitted", points, {"a": 1.0})
    assert (record.median, record.p90, record.worst, record.num_points) == (0.05, 0.09, 0.1, 11)


def test_a_fit_of_no_rows_has_no_residuals() -> None:
    found = fit_record("x", "fitted", [])
    assert (found.num_points, found.median, found.p90, found.worst) == (0, None, None, None)


def test_acesos_folder_holds_models_and_collectives(tmp_path: Path) -> None:
    for name in ("gpt_1_3B_mbs1_tp2_algo0.csv", "gpt_350M_mbs1_tp1_algo0.csv", "t5_3B_mbs1_tp1_algo0.csv"):
        (tmp_path / name).write_text("")
    (tmp_path / "prim_gpt_1_3B_all_reduce_4gpus.csv").write_text("data_size,time\n0,0.05\n1,0.1\n1024,1000000000\n")
    (tmp_path / "prim_gpt_1_3B_all_gather_4gpus.csv").write_text("data_size,time\n1,0.2\n")
    (tmp_path / "p2p_inter_node.csv").write_text("size,bandwidth\n1,4\n1024,5.44\n")
    assert models_in(tmp_path) == [("gpt", "1_3B"), ("gpt", "350M"), ("t5", "3B")]
    assert collectives_in(tmp_path) == [
        ("transfer_inter_node", 2, 2.0**20, pytest.approx(1 / 4096)),
        ("transfer_inter_node", 2, 2.0**30, pytest.approx(1 / 5.44)),
        ("all_gather", 4, 4 * 2.0**20, pytest.approx(2e-4)),
        ("all_reduce", 4, 2.0**20, pytest.approx(1e-4)),
    ]


@given(st.binary(max_size=60))
def test_any_bytes_in_acesos_files_end_in_success_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "prim_gpt_1_3B_all_reduce_4gpus.csv").write_bytes(b"size,time\n" + data)
    try:
        collectives_in(folder)
    except ValueError as error:
        assert "prim_gpt" in str(error)


@pytest.mark.parametrize("text", ["a,b\n1\n", "a,b\n1,x\n", "a,b\n1,0\n", "a,b\n-1,1\n", "a,b\n1,.nan\n"])
def test_a_bad_row_of_acesos_files_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "p2p_intra_node.csv").write_text(text)
    with pytest.raises(ValueError, match=r"p2p_intra_node\.csv:2"):
        collectives_in(tmp_path)


@pytest.mark.parametrize(
    ("machine", "gpu"), [("p3_16xlarge_osdi22", "v100-sxm2-16gb"), ("a100_8gpu", "a100-sxm4-80gb")]
)
def test_published_square_matmuls_and_copies_are_fitted_within_five_percent(machine: str, gpu: str) -> None:
    words = {"f16": "fp16", "f32": "fp32"}
    rows: list[tuple[Kernel, str, float]] = []
    for row in load_table(data_folder("alpa_v100") / "device_ops.csv", floats=("seconds",), integers=("n_or_bytes",)):
        n = row["n_or_bytes"]
        if row["source"] == machine and row["op"] == "dot_nxnxn" and n >= 64:
            rows.append((Matmul(n, n, n), words[row["dtype"]], row["seconds"]))
        elif row["source"] == machine and row["op"] == "local-copy" and n >= 2**20:
            rows.append((MemoryBound(float(n), float(n)), "", row["seconds"]))
    found = fit_curves(load_gpu(gpu), rows, "test")
    assert found is not None
    for group in {point.group for point in found[2]}:
        record = fit_record(group, "fitted", [point for point in found[2] if point.group == group])
        print(f"{machine} {group}: {record.num_points} points, median {100 * (record.median or 0):.1f} %")
        assert record.median is not None
        assert record.median < 0.05


def test_tf32_products_take_twice_as_long_as_fp16_products_as_measured() -> None:
    """One table has both; what it reaches of either peak is above what training's operands do, the ratio is not."""
    gpu, measured = load_gpu("a100-sxm4-80gb"), dict[tuple[str, int], float]()
    for row in load_table(data_folder("alpa_v100") / "device_ops.csv", floats=("seconds",), integers=("n_or_bytes",)):
        if row["source"] == "a100_8gpu" and row["op"] == "dot_nxnxn":
            measured[row["dtype"], row["n_or_bytes"]] = row["seconds"]
    empty_loop = {dtype: measured[dtype, 0] for dtype in ("f16", "f32")}
    found, predicted = [], []
    for n in sorted({n for _, n in measured if n >= 1280}):
        found.append((measured["f32", n] - empty_loop["f32"]) / (measured["f16", n] - empty_loop["f16"]))
        product = Matmul(n, n, n)
        predicted.append(kernel_time_s(gpu, product, "tf32") / kernel_time_s(gpu, product, "fp16"))
    assert median(found) == pytest.approx(2.0, rel=0.02)
    assert median(predicted) == pytest.approx(median(found), rel=0.02)


def test_what_no_row_is_about_moves_with_what_shares_its_units() -> None:
    """A GPU of half the tensor cores' rate and 0.6 of the memory's, measured in fp16 and by copies."""
    gpu = load_gpu("a100-sxm4-80gb")
    hidden = with_factors(parse_cluster("a100-80g-dgx:1x1"), {"products": 0.5, "memory": 0.6}, "hidden").gpus
    true = gpu.model_copy(update={"calibrated_curves": hidden[gpu.name].curves})
    rng = np.random.default_rng(1)
    squares: list[Kernel] = [Matmul(n, n, n) for n in range(512, 8193, 256)]
    copies: list[Kernel] = [MemoryBound(2.0**power, 2.0**power) for power in range(22, 31)]
    rows = [
        (kernel, "fp16", kernel_time_s(true, kernel, "fp16") * float(np.exp(rng.normal(0, 0.03))))
        for kernel in (*squares, *copies)
    ]
    found = fit_curves(gpu, rows, "test")
    assert found is not None
    fitted = gpu.model_copy(update={"calibrated_curves": found[0]})
    asked: list[tuple[Kernel, str]] = [
        *((Matmul(4096, 12288, 4096, role=role), dtype)
          for role in ("forward", "weight_gradient") for dtype in ("bf16", "tf32")),
        (Matmul(16, 16384, 16384), "bf16"),  # bound by memory
        (FlashAttention(128, 2048, 2048, 128, causal=True), "bf16"),
        (FlashAttention(128, 2048, 2048, 128, causal=True, backward=True), "fp16"),
        *((MemoryBound(2e8, 2e8, pattern), "bf16") for pattern in ("reduction", "random", "gather")),
    ]  # fmt: skip
    for kernel, dtype in asked:
        assert kernel_time_s(fitted, kernel, dtype) == pytest.approx(kernel_time_s(true, kernel, dtype), rel=0.05)
    assert as_shipped(gpu, found[1]) == ["products in fp32"]
    assert as_shipped(gpu, {"fp32.limit.forward": 0.9}) == [
        "products in bf16", "products in fp16", "products in tf32", "fused attention", "kernels bound by memory"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "v100-sxm2-32gb", "h100-sxm5-80gb"])
def test_a_gpu_that_reaches_its_peaks_is_fitted_with_no_more_than_them(name: str) -> None:
    """All but at the peaks, which the shipped curves stay below: what no row is about ends at its peak too."""
    gpu = load_gpu(name)
    products = [Matmul(n, n, n) for n in range(2048, 8193, 512)]
    copies = [MemoryBound(2.0**power, 2.0**power) for power in range(25, 31)]
    rows: list[tuple[Kernel, str, float]]
    rows = [(each, "fp16", each.flop / (0.995 * gpu.peak("fp16"))) for each in products]
    rows += [(each, "", each.total_bytes / (0.995 * gpu.memory_bytes_per_s)) for each in copies]
    found = fit_curves(gpu, rows, "test")
    assert found is not None and found[1]["fp16.limit.forward"] > 0.95
    curves = found[0]
    shares = [share for curve in curves.matmul.values() for share in (*curve.limit.values(), curve.bandwidth_fraction)]
    shares += [*curves.memory.fraction.values(), curves.attention.forward, curves.attention.backward]
    assert len(shares) >= 14 and max(shares) <= 1


def test_published_products_in_fp16_tell_those_in_tf32() -> None:
    """The shipped curve is 22 % off these A100s in the median, in tf32 as in fp16."""
    gpu = load_gpu("a100-sxm4-80gb")
    fp16: list[tuple[Kernel, str, float]] = []
    tf32: list[tuple[Kernel, float]] = []
    for row in load_table(data_folder("alpa_v100") / "device_ops.csv", floats=("seconds",), integers=("n_or_bytes",)):
        n = row["n_or_bytes"]
        if row["source"] == "a100_8gpu" and row["op"] == "dot_nxnxn" and n >= 64:
            if row["dtype"] == "f16":
                fp16.append((Matmul(n, n, n), "fp16", row["seconds"]))
            elif row["seconds"] > 1e-4:
                tf32.append((Matmul(n, n, n), row["seconds"]))
    found = fit_curves(gpu, fp16, "test")
    assert found is not None
    fitted = gpu.model_copy(update={"calibrated_curves": found[0]})
    assert median(abs(kernel_time_s(fitted, product, "tf32") / seconds - 1) for product, seconds in tf32) < 0.06
