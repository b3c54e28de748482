"""Numbers that no hardware has, most of them of another unit, are refused where they stand in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from hardware_models.calibrated import Calibration, GpuConstants, PipelineConstants
from hardware_models.calibration_file import calibration_mapping, load_calibration, save_calibration
from hardware_models.cluster import parse_cluster
from hardware_models.gpus import load_curves
from hardware_models.links import load_link, load_network
from hardware_models.runtime_files import RUNTIMES, load_runtime

GPU = "a100-sxm4-80gb"
CLUSTER = {
    "description": "a box", "gpu": GPU, "gpus_per_node": 4, "links": "nvswitch-a100", "network": "ib-100g",
    "nics_per_node": 2, "source": "the order form",
}  # fmt: skip


def changed(mapping: Any, path: Sequence[str | int], value: object) -> Any:
    """Return a copy with one value changed."""
    copy = json.loads(json.dumps(mapping))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def calibration() -> Calibration:
    """Return one with every part that has bounded numbers."""
    constants = GpuConstants(
        curves=load_curves("ampere"), kernel_floor_s=1e-6, launch_s=5e-6, host_factor=1.0,
        optimizer_bandwidth_fraction=0.8,
    )  # fmt: skip
    return Calibration(
        source="by hand",
        gpus={GPU: constants},
        links={"a100-80g-dgx": load_link("nvswitch-a100")},
        networks={"a100-80g-dgx": load_network("ib-100g")},
        pipeline=PipelineConstants(1.0, 0.0, "nothing"),
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 2.0**62) for name in ("parameter_bytes", "gathered_parameter_bytes", "gradient_bytes")),
        *((name, 2.0**62) for name in ("optimizer_bytes", "optimizer_workspace_bytes", "gradient_pass_bytes.0")),
        *((name, 5.0) for name in ("host_seconds_per_kernel", "host_seconds_per_operator.0", "host_seconds_per_pass")),
        *((name, 5.0) for name in ("host_seconds_per_collective.1", "handover_s", "host_seconds_per_list_entry")),
    ],
)
def test_a_runtime_in_another_unit_is_refused(tmp_path: Path, field: str, value: float) -> None:
    path: list[str | int] = [int(part) if part.isdigit() else part for part in field.split(".")]
    mapping = load_mapping(RUNTIMES / "megatron-lm-2021.yaml")
    mapping = mapping | {"gradient_pass_bytes": [2, 2], "host_seconds_per_list_entry": 0.0, "handover_s": 0.0}
    mapping["sources"] |= dict.fromkeys(("gradient_pass_bytes", "host_seconds_per_list_entry", "handover_s"), "a test")
    (file := tmp_path / "r.json").write_text(json.dumps(mapping))
    load_runtime(str(file))
    (other := tmp_path / "other.json").write_text(json.dumps(changed(mapping, path, value)))
    with pytest.raises(DataFileError, match=rf"other.json: {field}: must be less than or equal to (1|1024), got"):
        load_runtime(str(other))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("links.a100-80g-dgx.link_bytes_per_s", 120.0, "must be greater than or equal to 100000, got 120.0"),
        ("links.a100-80g-dgx.local_bytes_per_s.all_gather", 1e-300, "must be greater than or equal to 100000"),
        ("links.a100-80g-dgx.pair_fraction", 1e-300, "must be greater than or equal to 0.000001"),
        ("links.a100-80g-dgx.protocols.0.launch_s", 20.0, "must be less than or equal to 1, got 20.0"),
        ("networks.a100-80g-dgx.nominal_bytes_per_s", 12.5, "must be greater than or equal to 100000, got 12.5"),
        ("networks.a100-80g-dgx.point_to_point_latency_s", 17.0, "must be less than or equal to 1, got 17.0"),
        ("networks.a100-80g-dgx.tree_fill_bytes", 2e12, "must be less than or equal to 1000000000"),
        ("networks.a100-80g-dgx.relay_load", 14.0, "must be less than or equal to 1, got 14.0"),
        (f"gpus.{GPU}.kernel_floor_s", 2.5, "must be less than or equal to 1, got 2.5"),
        (f"gpus.{GPU}.launch_s", 9.0, "must be less than or equal to 1, got 9.0"),
        (f"gpus.{GPU}.host_factor", 1e12, "must be less than or equal to 1000"),
        (f"gpus.{GPU}.optimizer_bandwidth_fraction", 1e-300, "must be greater than or equal to 0.001"),
        (f"gpus.{GPU}.curves.matmul.fp16.limit", {}, "must have exactly the keys forward, data_gradient, weight_grad"),
        (f"gpus.{GPU}.curves.matmul.fp16.limit", {"forwards": 0.5}, "weight_gradient, got forwards"),
        (f"gpus.{GPU}.curves.memory.fraction", {"gather": 0.5}, "keys elementwise, reduction, random, gather, got gat"),
        (f"gpus.{GPU}.curves.matmul.fp16.half_waves", 1e4, "must be less than or equal to 1000, got 10000.0"),
        (f"gpus.{GPU}.curves.matmul.fp16.half_k", 1e6, "must be less than or equal to 100000, got 1000000.0"),
        (f"gpus.{GPU}.curves.memory.ramp_bytes", 2e12, "must be less than or equal to 1000000000"),
        (f"gpus.{GPU}.curves.attention.half_length", 1e6, "must be less than or equal to 100000"),
        (f"gpus.{GPU}.curves.attention.forward_half_waves", 1e4, "must be less than or equal to 1000"),
        (f"gpus.{GPU}.curves.attention.backward_half_waves", 1e4, "must be less than or equal to 1000"),
        ("gpus.a100-sxm-80gb", {"launch_s": 5e-6}, f"unknown GPU type, did you mean '{GPU}'"),
        ("pipeline.operator_factor", 1e-300, "must be greater than or equal to 0.001"),
        ("pipeline.pass_overhead_s", 1e308, "must be less than or equal to 60"),
    ],
)
def test_a_calibration_of_no_hardware_is_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    path: list[str | int] = [int(part) if part.isdigit() else part for part in field.split(".")]
    mapping = calibration_mapping(calibration())
    (file := tmp_path / "c.json").write_text(json.dumps(mapping))
    load_calibration(file)
    file.write_text(json.dumps(changed(mapping, path, value)))
    with pytest.raises(DataFileError) as caught:
        load_calibration(file)
    assert f"c.json: {field}: " in str(caught.value) and message in str(caught.value)


def test_a_calibration_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    (file := tmp_path / "c.json").write_text("kept")
    slow = replace(calibration(), gpus={GPU: GpuConstants(launch_s=9.0)})
    with pytest.raises(DataFileError, match=rf"what was measured, by hand: gpus.{GPU}.launch_s: must be less than"):
        save_calibration(slow, file)
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("nics_per_node", 1_000_000, "nics_per_node: must be less than or equal to 1024, got 1000000"),
        ("gpu", "a100", "GPU type must be a known one, got 'a100'"),
        ("links", "nvswitch", "links must be a known link type, got 'nvswitch'"),
        ("network", "ib-100", "network must be a known type, got 'ib-100'"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_said_of_its_file(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    (file := tmp_path / "box.json").write_text(json.dumps(CLUSTER | {field: value}))
    with pytest.raises(ValueError, match=r"box.json: ") as caught:
        parse_cluster(f"{file}:1x4")
    assert message in str(caught.value)
