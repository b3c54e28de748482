from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.reports.breakdown import PARTS
from simulator.reports.difference import difference
from simulator.result import SimulationResult, format_bytes, format_s
from tests.simulator.results import pipeline_result


@pytest.fixture(scope="module")
def a() -> SimulationResult:
    return pipeline_result()


@pytest.fixture(scope="module")
def b() -> SimulationResult:
    return pipeline_result(recompute=False, collective_s=1e-3, fits=False)


def test_causes_add_up_to_the_difference_of_iteration_times(a: SimulationResult, b: SimulationResult) -> None:
    change = difference(a, b)
    assert math.fsum(row.a for row in change.time) == pytest.approx(a.iteration_time_s, rel=1e-12)
    assert math.fsum(row.difference for row in change.time) == pytest.approx(
        b.iteration_time_s - a.iteration_time_s, rel=1e-10
    )
    assert change.table()["difference_s"].sum() == pytest.approx(b.iteration_time_s - a.iteration_time_s)


def test_consumers_add_up_to_the_difference_of_peaks(a: SimulationResult) -> None:
    first = a.memory[0]
    smaller = replace(
        a,
        memory=(replace(first, peak_allocated_bytes=10 * 2**30 + 512, consumers={"parameters": 10 * 2**30}),),
    )
    change = difference(a, smaller)
    assert sum(row.a for row in change.memory) == first.peak_allocated_bytes
    assert sum(row.b for row in change.memory) == 10 * 2**30 + 512
    table = change.memory_table().set_index("consumer")
    assert table.loc["parameters", "difference_bytes"] == 8 * 2**30
    assert table.loc["rounding and other", "b_bytes"] == 512
    assert "b needs 50.0 % less memory, mainly: -12.0 GiB saved activations" in change.describe()


def test_text_names_the_main_causes_and_what_does_not_fit(a: SimulationResult, b: SimulationResult) -> None:
    text = difference(a, b, names=("before", "after")).describe()
    share = 100 * (1 - b.iteration_time_s / a.iteration_time_s)
    assert text.startswith(f"after takes {share:.1f} % less time, mainly: -220.0 ms recomputation, -41.00 ms tensor")
    assert "after does not fit into memory" in text
    assert "before does not fit" not in text
    assert difference(b, a).describe().startswith("b takes ")
    assert "more time, mainly: +220.0 ms recomputation" in difference(b, a).describe()


def test_the_largest_peak_is_compared_and_said_where_another_gpu_is_nearer_to_its_capacity(
    a: SimulationResult,
) -> None:
    """3 GiB of 80 and 2 GiB of 16: the second is what may not fit, the first is what JSON has."""
    near, large = (
        replace(a.memory[0], peak_allocated_bytes=peak, capacity_bytes=capacity, consumers={"parameters": 1})
        for peak, capacity in ((2 << 30, 16 << 30), (3 << 30, 80 << 30))
    )
    mixed = replace(a, memory=(near, large))
    assert difference(mixed, replace(a, memory=(large,))).peak_bytes == (3 << 30, 3 << 30)
    assert mixed.summary()["peak_allocated_bytes"] == 3 << 30
    told = mixed.describe()
    assert "2.00 GiB live" in told and "(nearest to its capacity; most is 3.00 GiB live of 80.0 GiB, stage 0)" in told
    assert "nearest to its capacity" not in a.describe()


def test_a_plan_against_itself_changes_nothing(a: SimulationResult) -> None:
    text = difference(a, a).describe()
    assert "b takes as long as before" in text
    assert "b needs as much memory" in text


def test_waterfall_is_a_png(a: SimulationResult, b: SimulationResult, tmp_path: Path) -> None:
    difference(a, b).plot_waterfall(tmp_path / "waterfall.png")
    difference(a, a).plot_waterfall(tmp_path / "same.png", title="nothing")
    difference(replace(a, memory=()), replace(b, memory=())).plot_waterfall(tmp_path / "no_memory.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")


def test_summaries_are_json(a: SimulationResult, b: SimulationResult) -> None:
    assert json.loads(json.dumps(difference(a, b).summary()))["names"] == ["a", "b"]
    summary = json.loads(json.dumps(a.summary(), allow_nan=False))
    for row in summary["breakdown"]:
        assert sum(row[part] for part in PARTS) == pytest.approx(summary["iteration_time_s"], rel=1e-12)
    assert summary["iteration_time_s"] == a.iteration_time_s
    assert sum(row["time_s"] for row in summary["critical_path"]) == pytest.approx(a.iteration_time_s)


def test_rates_follow_from_the_iteration_time(a: SimulationResult) -> None:
    assert a.samples_per_s * a.iteration_time_s == pytest.approx(64)
    assert a.tokens_per_s_per_device == pytest.approx(a.samples_per_s * 1024 / 4)
    assert a.mfu == pytest.approx(2e14 / a.iteration_time_s / (4 * 1.25e14))
    assert a.hfu == pytest.approx(1.25 * a.mfu)


def test_first_screen_names_the_essentials(a: SimulationResult, b: SimulationResult) -> None:
    lines = a.describe().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["iteration", "throughput", "MFU", "memory"]
    assert "tokens/s per GPU" in lines[1]
    assert "20.0 GiB live" in lines[3]
    text = b.describe()
    assert "OUT OF MEMORY on 4 of 4 GPUs" in text
    assert "saved activations 12.0 GiB" in text
    assert "3.00 GiB could not be allocated" in text


def test_switched_off_effects_are_named(a: SimulationResult) -> None:
    without = replace(a, fidelity=a.fidelity.without("contention", "host"))
    assert "without         host, contention" in without.describe()
    assert without.summary()["switched_off"] == ["host", "contention"]


def test_units_suit_the_size() -> None:
    assert [format_s(s) for s in (12.3456, 0.0123456, 4.2e-5, 0.0)] == [
        "12.35 s",
        "12.35 ms",
        "42.00 us",
        "0.000 s",
    ]
    assert [format_bytes(b) for b in (3 * 2**29, 12)] == ["1.50 GiB", "12 B"]


def test_plans_of_different_batches_are_compared_by_samples_a_second(a: SimulationResult) -> None:
    """A quarter of the samples in half the time is half as fast."""
    quarter = replace(a, global_batch=a.global_batch // 4, iteration_time_s=a.iteration_time_s / 2)
    lines = difference(a, quarter).describe().splitlines()
    assert lines[0].startswith("samples per iteration differ: a 64, b 16; by samples/s b is 50.0 % slower (a ")
    assert not any("faster" in line for line in lines)
    assert lines[1].startswith("iterations change by -")
    assert "by samples/s b is 100.0 % faster" in difference(quarter, a).describe()
    even = replace(quarter, iteration_time_s=a.iteration_time_s / 4)
    assert "by samples/s b is as fast as before" in difference(a, even).describe()
    summary = difference(a, quarter).summary()
    assert summary["global_batch"] == [64, 16]
    assert summary["samples_per_s"][1] == pytest.approx(summary["samples_per_s"][0] / 2)
