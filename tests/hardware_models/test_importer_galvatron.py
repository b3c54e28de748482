"""Galvatron's JSONs: kinds of files, units, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardware_models.importers.galvatron import MIB, read_galvatron
from tests.hardware_models.data_folder import data_folder


def written(tmp_path: Path, mapping: Any) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(mapping))
    return path


def test_coefficients_of_version_one_are_of_ring_traffic_with_all_groups_at_once(tmp_path: Path) -> None:
    found = read_galvatron(written(tmp_path, {"1_8_1": 0.2, "2_4_1": 0.25, "1_2_0": 0.5}))
    assert found.what == "all-reduce bandwidth"
    assert [(b.stages, b.size, b.consecutive, b.all_at_once) for b in found.bandwidths] == [
        (1, 8, True, True), (2, 4, True, True), (1, 2, False, True)
    ]  # fmt: skip
    assert found.bandwidths[0].bytes_per_s == pytest.approx(MIB / 0.2e-3)


def test_later_bandwidths_are_of_one_group(tmp_path: Path) -> None:
    (found,) = read_galvatron(written(tmp_path, {"allreduce_size_4_consec_0": 155.0})).bandwidths
    assert (found.size, found.consecutive, found.all_at_once, found.bytes_per_s) == (4, False, False, 155e9)


def test_transfers_come_as_times_or_as_rates(tmp_path: Path) -> None:
    old = read_galvatron(written(tmp_path, {"pp_deg_2": 0.5})).bandwidths[0]
    new = read_galvatron(written(tmp_path, {"pp_size_2": 160.0})).bandwidths[0]
    assert (old.kind, old.bytes_per_s, new.bytes_per_s) == ("transfer", pytest.approx(MIB / 0.5e-3), 160e9)


def test_times_by_size_and_the_overlap_coefficient(tmp_path: Path) -> None:
    found = read_galvatron(written(tmp_path, {"allreduce_size_8_64MB_time": 0.657, "all2all_size_8_1MB_time": 0.1}))
    assert found.times == (
        ("all_reduce", 8, 64 * MIB, pytest.approx(0.657e-3)),
        ("all_to_all", 8, MIB, pytest.approx(0.1e-3)),
    )
    assert read_galvatron(written(tmp_path, {"overlap_coe": 1.3})).overlap == 1.3


layer_s = st.floats(1e-4, 1.0)


@given(st.lists(layer_s, min_size=1, max_size=3), layer_s)
def test_layers_are_the_differences_of_runs(
    tmp_path_factory: pytest.TempPathFactory, layers: list[float], rest: float
) -> None:
    """Runs of 2 layers of each kind, then 4 of one: a layer is half their difference."""
    runs = {}
    for more in (None, *range(len(layers))):
        counts = [4 if kind == more else 2 for kind in range(len(layers))]
        seconds = rest + sum(n * s for n, s in zip(counts, layers, strict=True))
        lengths = ",".join("512" for _ in layers)
        runs[f"layernum[{','.join(map(str, counts))}]_bsz8_seq[{lengths}]"] = 1e3 * seconds
    found = read_galvatron(written(tmp_path_factory.mktemp("layers"), runs)).layers
    assert [time.layer_type for time in found] == [*range(len(layers)), -1]
    for time, seconds in zip(found, [*layers, rest], strict=True):
        assert time.seconds == pytest.approx(seconds, rel=1e-6, abs=1e-9)
        assert (time.samples, time.seq_len) == (8, "512")


def test_memory_is_in_mib_by_degree(tmp_path: Path) -> None:
    part = {"parameter_size": 48.0, "tp_activation_per_bsz_dict": {"1": 85.0, "2": 47.0, "ckpt": 2.0}}
    (plain,) = read_galvatron(written(tmp_path, {"layertype_0": part, "other_memory_pp_off": {}})).memory
    assert (plain.parameter_bytes, plain.saved_bytes, plain.sequence_parallel) == (
        48 * MIB, {1: 85 * MIB, 2: 47 * MIB}, False
    )  # fmt: skip
    (split,) = read_galvatron(written(tmp_path, {"layertype_1_sp": {"512": part}})).memory
    assert (split.layer_type, split.seq_len, split.sequence_parallel) == (1, "512", True)


def test_sizes_are_in_mib_and_times_in_milliseconds(tmp_path: Path) -> None:
    part = {"parameter_size": 48.0, "tp_activation_per_bsz_dict": {"1": 0.5}}
    (memory,) = read_galvatron(written(tmp_path, {"layertype_0": part})).memory
    assert (memory.parameter_bytes, memory.saved_bytes) == (50_331_648, {1: 524_288})
    ((_, _, num_bytes, seconds),) = read_galvatron(written(tmp_path, {"allreduce_size_8_64MB_time": 657.0})).times
    assert (num_bytes, seconds) == (67_108_864, pytest.approx(0.657))


def test_where_runs_do_not_differ_layer_times_are_those_that_the_file_states(tmp_path: Path) -> None:
    """Stated for one sample, in milliseconds."""
    stated = {"layertype_0_bsz8_seq512": 5.0, "layertype_0_bsz4_seq512": 7.0, "layertype_0_bsz8_seq128": 9.0}
    (found,) = read_galvatron(written(tmp_path, {"layernum[2]_bsz8_seq512": 100.0, **stated})).layers
    assert (found.layer_type, found.samples, found.seq_len) == (0, 8, "512")
    assert found.seconds == pytest.approx(8 * 5e-3)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "are those of none"),
        ({"speed": 1.0}, "are those of none"),
        ({"1_8_1": 0.2, "pp": 1}, "are those of none"),
        ({"1_8_1": {"layernum1_bsz8_rank0_ms": 918.9}}, "are those of none"),  # hetu-galvatron 0.0.2's raw runs
        ({"1_8_1": 0}, "must be positive"),
        ({"1_8_1": "fast"}, "must be a number"),
        ({"1_1_1": 0.1}, "at least 2 ranks"),
        ({"overlap_coe": 0.5}, "slowdown of 1 to 10"),
        ({"overlap_coe": 1.3, "1_8_1": 0.2}, "are those of none"),
        ({"layernum[2]_bsz1_seq8": 1.0}, "runs must differ"),
        ({"layernum[2]_bsz1_seq8": 1.0, "hello": 2}, "unknown key"),
        ({"layernum[2]_bsz1_seq8": 1.0, "layernum[2,2]_bsz1_seq8": 2.0}, "as many kinds"),
        ({"layertype_0": {"parameter_size": 1.0}}, "tp_activation_per_bsz_dict"),
        ({"allreduce_size_8_0MB_time": 1.0}, "at least 1 MB"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_galvatron(written(tmp_path, mapping))


keys = st.sampled_from(
    ["1_8_1", "pp_deg_2", "overlap_coe", "layernum[2]_bsz1_seq8", "layernum[4]_bsz1_seq8", "layertype_0", "x",
     "allreduce_size_8_1MB_time", "allreduce_size_2_consec_1", "layernum[,]_bsz0"]
)  # fmt: skip
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(allow_nan=False), st.integers(), st.text(max_size=5)),
    lambda inner: st.dictionaries(
        st.sampled_from(["parameter_size", "tp_activation_per_bsz_dict", "1", "512", "-1"]), inner, max_size=3
    ),
    max_leaves=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.one_of(st.dictionaries(keys, values, max_size=4).map(lambda m: json.dumps(m).encode()), st.binary(max_size=99))
)
def test_any_bytes_end_in_success_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "profile.json"
    path.write_bytes(data)
    try:
        assert read_galvatron(path).what
    except ValueError as error:
        assert "profile.json" in str(error)


def test_the_published_profiles_are_read() -> None:
    folder = data_folder("galvatron")
    kinds: dict[str, int] = {}
    refused = []
    for path in sorted([*(folder / "profiles_raw").glob("*.json"), *(folder / "titan_v1").glob("raw_[!f]*.json")]):
        try:
            what = read_galvatron(path).what
            kinds[what] = kinds.get(what, 0) + 1
        except ValueError:
            refused.append(path.name)
    assert kinds["layer times"] >= 29
    assert kinds["layer memory"] >= 28
    assert kinds["all-reduce bandwidth"] == 2
    # Two network summaries without their collective, a run without differences, two memory profiles without results,
    # a mixture of attention and layer times, and a visualizer's own file.
    assert len(refused) == 7, refused


def test_a_published_layer_time_is_the_one_the_file_derived() -> None:
    (path,) = (data_folder("galvatron") / "profiles_raw").glob("T5__computation*")
    stated = json.loads(path.read_text())
    found = {(time.layer_type, time.samples): time.seconds for time in read_galvatron(path).layers}
    for samples in range(1, 9):
        for kind in (0, 1):
            per_sample_ms = stated[f"layertype_{kind}_bsz{samples}_seq512"]
            assert found[kind, samples] / samples == pytest.approx(per_sample_ms * 1e-3, rel=1e-6)


@pytest.mark.parametrize("key", ["1_8_1", "allreduce_size_4_consec_0", "pp_size_2", "allreduce_size_8_64MB_time"])
def test_what_nobody_can_have_measured_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=f"profile.json: {key}: must be positive, 1e-09 or more, got 1e-300"):
        read_galvatron(written(tmp_path, {key: 1e-300}))
