"""A profile is used for the model that it is of; another's is refused, not taken for this one's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.calibrate.layers import calibrate_layers
from experiments.run_table import Common, load_runs
from hardware_models.calibrated import Calibration
from hardware_models.calibration_file import load_calibration, save_calibration
from hardware_models.collective_table import CollectiveTable
from hardware_models.importers.galvatron import GalvatronFile, LayerTime
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile
from simulator.problem import Problem, ProblemSpec

CLUSTER = "a100-80g-dgx:1x4"
SHAPE = {"family": "gpt", "layers": 2, "hidden": 256, "heads": 4, "seq_len": 128, "vocab": 1024, "num_positions": 256}


def model(folder: Path, **changes: Any) -> str:
    path = folder / f"gpt-{'-'.join(map(str, changes.values()))}.json"
    path.write_text(json.dumps({**SHAPE, **changes}))
    return str(path)


def profile(folder: Path, **parts: Any) -> str:
    """Write a profile of the model without changes, in fp16."""
    times = (LayerTime(0, 1, 1e-3), LayerTime(0, 4, 3e-3), LayerTime(-1, 1, 1e-3))
    found = calibrate_layers([GalvatronFile(layers=times)], model(folder), CLUSTER, "megatron-lm-2021", "test")
    save_calibration(Calibration(source="test", operators=found.operators, **parts), folder / "profile.json")
    return str(folder / "profile.json")


def load(name: str, path: str, runtime: str = "megatron-lm-2021") -> Problem:
    return ProblemSpec(name, CLUSTER, runtime, 8, profile=path).load()


@pytest.mark.parametrize("changes", [{}, {"layers": 6}, {"vocab_multiple": 32, "vocab": 1023}])
def test_a_profile_is_of_a_model_of_any_number_of_layers(tmp_path: Path, changes: dict[str, int]) -> None:
    assert load(model(tmp_path, **changes), profile(tmp_path)).hardware.operator_profile is not None


@pytest.mark.parametrize("changes", [{"hidden": 512}, {"hidden": 320, "heads": 5}, {"ffn": 2048}, {"vocab": 2048}])
def test_a_profile_of_other_weights_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"the profile must be of gpt-\S+, whose \w+ has .* weights of 2 or 4 bytes"):
        load(model(tmp_path, **changes), profile(tmp_path))


@pytest.mark.parametrize("tokens", [64, 96, 256])
def test_a_profile_of_other_sequences_is_refused(tmp_path: Path, tokens: int) -> None:
    with pytest.raises(ValueError, match=rf"samples of {tokens} tokens, got .* its sequences have another length"):
        load(model(tmp_path, seq_len=tokens), profile(tmp_path))


def test_a_profile_that_nothing_would_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the number format that megatron-lm-2021-fp32 trains in, fp32, got fp16"):
        load(model(tmp_path), profile(tmp_path), "megatron-lm-2021-fp32")
    with pytest.raises(ValueError, match=r"must be of operators of resnet-50 \(\w+.*\), got norm_1, attention_qkv"):
        load("resnet-50", profile(tmp_path))
    nothing = Calibration(source="x", operators=OperatorProfile("x", "a100-sxm4-80gb", "fp16", (), "x"))
    save_calibration(nothing, tmp_path / "empty.json")
    with pytest.raises(ValueError, match=r"must be of operators of resnet-50 .*, got none;"):
        load("resnet-50", str(tmp_path / "empty.json"))


def test_operators_of_another_format_may_come_beside_collectives(tmp_path: Path) -> None:
    table = CollectiveTable.from_rows([("all_reduce", 2, 1024.0, 1e-5)], "test")
    found = load(model(tmp_path), profile(tmp_path, collectives=table), "megatron-lm-2021-fp32")
    assert found.hardware.collective_table == table


def changed(folder: Path, seconds: Callable[[float], float], size: int = 1) -> str:
    """Write the profile with other times, as if it were of another tensor-parallel degree."""
    path = profile(folder)
    found = load_calibration(path)
    assert found.operators is not None
    rows = tuple(
        replace(row, tensor_size=size, forward_s=seconds(row.forward_s), backward_s=seconds(row.backward_s))
        for row in found.operators.rows
    )
    save_calibration(replace(found, operators=replace(found.operators, rows=rows)), path)
    return path


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("unit", [1e3, 1e6])
def test_operators_in_other_units_are_refused(tmp_path: Path, unit: float, size: int) -> None:
    path = changed(tmp_path, lambda seconds: unit * seconds, size)
    with pytest.raises(ValueError, match=rf"^{path}: times of operators must be seconds, got .* convert them"):
        load(model(tmp_path), path)


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_operators_of_a_machine_several_times_quicker_or_slower_are_not(tmp_path: Path, factor: float) -> None:
    assert load(model(tmp_path), changed(tmp_path, lambda seconds: factor * seconds)).hardware.operator_profile


def test_operators_that_take_no_time_are_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda seconds: 0.0)
    with pytest.raises(ValueError, match=rf"^{path}: times of operators with work must be above 0 s, got 0 for \w+ wi"):
        load(model(tmp_path), path)


def test_collectives_in_other_units_are_refused(tmp_path: Path) -> None:
    """Also where the links that come with them are fitted to them."""
    hardware, sizes = HardwareModel.from_name(CLUSTER), (2.0**16, 2.0**20, 2.0**26)
    for unit, refused in ((1.0, False), (1e3, True), (1e6, True)):
        seconds = ((size, unit * hardware.collective("all_reduce", size, (0, 1)).alone_s) for size in sizes)
        table = CollectiveTable.from_rows([("all_reduce", 2, size, each) for size, each in seconds], "test")
        links = hardware.cluster.nodes[0].links
        slow = links.model_copy(update={"link_bytes_per_s": links.link_bytes_per_s / unit})
        path = profile(tmp_path, collectives=table, links={"a100-80g-dgx": slow})
        if refused:
            with pytest.raises(ValueError, match=rf"^{path}: times of collectives must be seconds, got .*; convert"):
                load(model(tmp_path), path)
        else:
            assert load(model(tmp_path), path).hardware.collective_table == table


def test_a_table_of_runs_refuses_times_in_other_units(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda seconds: 1e3 * seconds)
    table = tmp_path / "runs.csv"
    table.write_text("tp,dp,pp,microbatch_size,global_batch,iteration_time_s\n1,4,1,1,8,1.0\n")
    common = Common(model=model(tmp_path), cluster=CLUSTER, runtime="megatron-lm-2021", profile=path)
    with pytest.raises(ValueError, match="times of operators must be seconds"):
        for case in load_runs(table, common):
            case.problem()
