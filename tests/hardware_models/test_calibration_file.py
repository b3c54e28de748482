"""One file for everything measured: round trips, what it is about, what older files still mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardware_models.calibrated import Calibration, FitRecord, GpuConstants, PipelineConstants, Quantity
from hardware_models.calibration_file import calibration_mapping, load_calibration, save_calibration
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.gpus import load_curves
from hardware_models.group_shapes import GroupShape
from hardware_models.links import load_link, load_network
from hardware_models.profile import OperatorProfile, ProfileRow
from simulator.problem import ProblemSpec
from workloads.kernels import Matmul

ROW = ProfileRow("mlp_linear_1", 1, 1, "default", 1e-3, 2e-3, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, False, 1, "test")
OPERATORS = OperatorProfile("gpt", "v100-sxm2-32gb", "fp16", (ROW,), "test")


def full() -> Calibration:
    curves = load_curves("volta")
    slow = curves.model_copy(update={"memory": curves.memory.model_copy(update={"ramp_bytes": 1e9})})
    table = CollectiveTable.from_rows(
        [("all_reduce", GroupShape(4, 2, 1, 4), 1024.0, 1e-3), ("transfer_inter_node", 2, 2048.0, 1e-4)], "test"
    )
    return Calibration(
        source="test",
        operators=OPERATORS,
        collectives=table,
        collectives_of="v100-32g-dgx1",
        gpus={"v100-sxm2-32gb": GpuConstants(curves=slow, launch_s=1e-3, overlap_slowdown_computation=1.5)},
        links={"v100-32g-dgx1": load_link("nvlink2-v100").model_copy(update={"link_bytes_per_s": 1e9})},
        networks={"v100-32g-dgx1": load_network("ib-100g")},
        pipeline=PipelineConstants(1.1, 1e-6, "a plan"),
        measurements=(Quantity("launch", 1e-6, "s", 9, 0.01),),
        fits=(FitRecord("all_reduce", "fitted", 3, {"latency_s": 1e-5}, 0.01, 0.0, 0.03),),
        machine="here",
        date="2024-01-01",
        versions={"torch": "2.0"},
    )


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_a_calibration_survives_its_file(tmp_path: Path, name: str) -> None:
    save_calibration(full(), tmp_path / name)
    assert load_calibration(tmp_path / name) == full()


def test_parts_are_optional(tmp_path: Path) -> None:
    save_calibration(Calibration(source="nothing"), tmp_path / "c.yaml")
    assert load_calibration(tmp_path / "c.yaml") == Calibration(source="nothing")


def test_every_part_reaches_the_hardware_model() -> None:
    cluster = parse_cluster("v100-32g-dgx1:2x8")
    before, after = full().hardware(cluster), Calibration(source="x", operators=OPERATORS).hardware(cluster)
    assert before.operator_profile is OPERATORS
    assert before.launch_s("v100-sxm2-32gb") == 1e-3
    assert before.overlap_slowdown("v100-sxm2-32gb")[0] == 1.5
    assert before.cluster.nodes[1].links.link_bytes_per_s == 1e9
    big = Matmul(m=4096, n=4096, k=4096)
    assert before.kernel_time_s("v100-sxm2-32gb", big, "fp16") == after.kernel_time_s("v100-sxm2-32gb", big, "fp16")
    assert before.transfer(2048, 0, 8).alone_s == pytest.approx(1e-4)
    assert after.launch_s("v100-sxm2-32gb") != 1e-3


def test_a_calibration_of_other_hardware_is_refused() -> None:
    with pytest.raises(ValueError, match=r"about the cluster.*a100-80g.*v100-sxm2-32gb"):
        full().hardware(parse_cluster("a100-80g-dgx:1x8"))
    with pytest.raises(ValueError, match="holds nothing that prices anything; leave --profile out"):
        Calibration(source="none").hardware(parse_cluster("a100-80g-dgx:1x8"))


def test_a_row_that_is_there_twice_is_refused_with_its_file(tmp_path: Path) -> None:
    OPERATORS.save(tmp_path / "o.json")
    mapping = json.loads((tmp_path / "o.json").read_text())
    mapping["rows"] *= 2
    (tmp_path / "o.json").write_text(json.dumps(mapping))
    with pytest.raises(ValueError, match=r"o\.json: profile of gpt: each .* must appear once"):
        load_calibration(tmp_path / "o.json")


def test_a_table_of_no_collectives_is_refused(tmp_path: Path) -> None:
    save_calibration(full(), tmp_path / "c.json")
    mapping = json.loads((tmp_path / "c.json").read_text())
    mapping["collectives"]["rows"] = []
    (tmp_path / "c.json").write_text(json.dumps(mapping))
    with pytest.raises(ValueError, match=r"c\.json: collectives\.rows must hold at least one"):
        load_calibration(tmp_path / "c.json")


def test_a_profile_of_operators_alone_still_loads_through_a_problem(tmp_path: Path) -> None:
    row = replace(ROW, output_bytes=2.0 * 2048 * 8192, parameter_bytes=2.0 * (2048 + 1) * 8192)  # as the model's own
    operators = replace(OPERATORS, rows=(row,))
    operators.save(tmp_path / "operators.yaml")
    spec = ProblemSpec(
        "gpt3-1.3b", "v100-32g-dgx1:1x4", "megatron-lm-2021", 8, profile=str(tmp_path / "operators.yaml")
    )
    assert spec.load().hardware.operator_profile == operators


def test_a_machine_profile_of_an_earlier_version_still_loads(tmp_path: Path) -> None:
    from hardware_models.profile_file import profile_mapping

    old = {
        "format": "windtunnel-machine-profile-1",
        "machine": "here", "date": "2024", "versions": {}, "units": {}, "fitted_on": "a plan",
        "operator_factor": 1.2, "pass_overhead_s": 1e-4, "optimizer_bandwidth_fraction": 1.5,
        "communication": [["all_reduce", 2, 256.0, 1e-4], ["transfer_intra_node", 2, 256.0, 5e-5]],
        "operators": profile_mapping(OPERATORS),
    }  # fmt: skip
    (tmp_path / "old.json").write_text(json.dumps(old))
    found = load_calibration(tmp_path / "old.json")
    assert found.pipeline == PipelineConstants(1.2, 1e-4, "a plan")
    assert found.gpus["v100-sxm2-32gb"].optimizer_bandwidth_fraction == 1.5
    assert found.collectives is not None
    assert found.collectives.lookup("all_reduce", 2, 256) == (1e-4, "measured")


def test_an_overhead_below_zero_of_an_earlier_version_is_none(tmp_path: Path) -> None:
    save_calibration(Calibration(source="x", pipeline=PipelineConstants(1.2, -3e-4, "a plan")), tmp_path / "c.yaml")
    assert load_calibration(tmp_path / "c.yaml").pipeline == PipelineConstants(1.2, 0.0, "a plan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other-1"}, "format must be"),
        ({"speed": 3}, "speed: unknown key"),
        ({"collectives": {"source": "x", "columns": ["a"], "rows": []}}, "columns must be"),
        ({"gpus": {"x": {"launch_s": -1.0}}}, "launch_s"),
        ({"fits": [{"what": "x", "how": "guessed", "num_points": 1}]}, "how"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps({**calibration_mapping(full()), **change}))
    with pytest.raises(ValueError, match=message):
        load_calibration(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["all_reduce", 3, 2, 1, 1, 8.0, 1.0], "row 1: a group must have"),
        (["gossip", 2, 1, 1, 1, 8.0, 1.0], "row 1: must be one of"),
        (["all_reduce", 2, 1, 1, 1, 8.0], "rows"),
    ],
)
def test_a_bad_collective_row_is_refused(tmp_path: Path, row: list[object], message: str) -> None:
    mapping = calibration_mapping(full())
    mapping["collectives"]["rows"] = [row]
    (tmp_path / "c.json").write_text(json.dumps(mapping))
    with pytest.raises(ValueError, match=message):
        load_calibration(tmp_path / "c.json")


def test_a_truncated_file_is_refused_with_its_line(tmp_path: Path) -> None:
    save_calibration(full(), tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()
    for cut in range(0, len(text) - 2, 97):
        (tmp_path / "c.json").write_text(text[:cut])
        with pytest.raises(ValueError, match=r"c\.json"):
            load_calibration(tmp_path / "c.json")


def test_a_calibration_replaced_in_one_part_keeps_the_others(tmp_path: Path) -> None:
    save_calibration(replace(full(), operators=None), tmp_path / "c.yaml")
    assert load_calibration(tmp_path / "c.yaml").collectives == full().collectives


PLACES = [
    ("gpus",), ("gpus", "v100-sxm2-32gb", "curves"), ("links", "v100-32g-dgx1", "protocols"), ("pipeline",),
    ("fits", 0), ("collectives", "rows", 0, 0), ("collectives", "rows", 0, 3), ("collectives", "rows", 1, 5),
    ("operators", "rows", 0, 4), ("operators", "columns"), ("machine",), ("measurements", 0, "value"),
]  # fmt: skip
junk = st.one_of(st.none(), st.booleans(), st.integers(-3, 2**40), st.floats(allow_nan=False, allow_infinity=False),
                 st.text(max_size=5), st.just([]), st.just({}), st.just([[1, 2]]))  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.one_of(st.binary(max_size=80), st.tuples(st.sampled_from(PLACES), junk)))
def test_any_bytes_end_in_success_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, case: bytes | tuple[tuple[str | int, ...], object]
) -> None:
    path = tmp_path_factory.mktemp("any") / "c.json"
    if isinstance(case, bytes):
        path.write_bytes(case)
    else:
        mapping = json.loads(json.dumps(calibration_mapping(full())))
        target = mapping
        for part in case[0][:-1]:
            target = target[part]
        target[case[0][-1]] = case[1]
        path.write_text(json.dumps(mapping))
    try:
        found = load_calibration(path)
    except ValueError as error:
        assert "c.json" in str(error)
    else:
        save_calibration(found, path)
        assert load_calibration(path) == found


def test_a_file_of_one_part_is_about_what_that_part_is_of() -> None:
    """Operators of a GPU, a table of a preset; a cluster of others is refused, with both named."""
    other = parse_cluster("g4dn.12xlarge:1x4")
    table = CollectiveTable.from_rows([("all_reduce", 2, 1024.0, 1e-3)], "test")
    for part, name in (
        (Calibration(source="test", operators=OPERATORS), "v100-sxm2-32gb"),
        (Calibration(source="test", collectives=table, collectives_of="v100-32g-dgx1"), "v100-32g-dgx1"),
    ):
        assert part.about == name
        assert part.hardware(parse_cluster("v100-32g-dgx1:1x2")).cluster.num_devices == 2
        with pytest.raises(ValueError, match=f"t4-16gb.*{name}"):
            part.hardware(other)


def test_a_file_without_collectives_has_no_table(tmp_path: Path) -> None:
    save_calibration(Calibration(source="test", operators=OPERATORS), tmp_path / "c.yaml")
    found = load_calibration(tmp_path / "c.yaml")
    assert found.collectives is None and found.operators == OPERATORS
