"""Layer profiles: what is read, what is refused, and that a workload made of one keeps times, sizes and branches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hardware_models.data_folder import data_folder
from workloads.kinds.base import PHASES, Implementation
from workloads.layer_profile import LayerProfile, load_layer_profile
from workloads.local import check_workload, localize, saved_bytes
from workloads.registry import build_workload

HEADER = "node,layer,fw_ms,bw_ms,output_activation_bytes,param_bytes,preds"
DIAMOND = f"""{HEADER}
d,join,1,2,40,0,b c
a,Input,0.0,0.0,8,0,
b,left,1,2,80,400,a
c,right,3,4,160,800,a
"""


@pytest.fixture
def diamond(tmp_path: Path) -> Path:
    path = tmp_path / "diamond_b4.csv"
    path.write_text(DIAMOND)
    return path


def test_a_branched_profile_is_a_workload_with_its_times_sizes_and_branches(diamond: Path) -> None:
    workload = build_workload(str(diamond))
    check_workload(workload, Implementation())
    assert [name.split(":")[0] for name in workload.layer_names] == ["a", "b", "c", "d"]
    assert len(workload.operators[3].inputs) == 2
    assert workload.num_parameters == 300
    left = workload.operators[1].attributes
    assert (left["forward_s"], left["backward_s"], left["output_bytes"]) == (1e-3 / 4, 2e-3 / 4, 20)
    assert build_workload(f"{diamond}@8").operators[1].attributes["output_bytes"] == 10


def test_an_operator_of_a_profile_takes_and_keeps_its_share_of_the_batch(diamond: Path) -> None:
    """Of four samples: three and four milliseconds and 160 bytes for ``right``."""
    right = build_workload(str(diamond)).operators[2]
    local = localize(right.definition, right.attributes, [(2, 8)], [], Implementation())
    seconds = [right.definition.stated_time_s(phase, local) for phase in PHASES]
    assert seconds == [pytest.approx(1.5e-3), pytest.approx(2e-3), 0.0]
    assert saved_bytes(right.definition, local) == 80


def test_inputs_and_side_inputs_can_be_left_out(diamond: Path) -> None:
    profile = load_layer_profile(diamond)
    assert [node.name for node in profile.without_inputs().nodes] == ["d", "b", "c"]
    assert [node.name for node in profile.without_side_inputs().nodes] == ["d", "b", "c"]
    assert [node.name for node in profile.topological()] == ["a", "b", "c", "d"]


def test_activations_of_a_known_total_are_spread_as_the_forward_time(diamond: Path) -> None:
    profile = load_layer_profile(diamond).with_saved_bytes(1000.0)
    assert {node.name: node.saved_bytes for node in profile.nodes} == {"a": 0, "b": 800, "c": 2400, "d": 800}


def test_blocks_are_joined_and_keep_only_what_leaves_them(tmp_path: Path) -> None:
    path = tmp_path / "blocks_b1.csv"
    path.write_text(f"{HEADER},block\na,x,1,1,10,4,,one\nb,x,1,1,20,4,a,one\nc,x,1,1,30,4,b,two\n")
    joined = load_layer_profile(path).by_block()
    assert [(node.name, node.output_bytes, node.predecessors) for node in joined.nodes] == [
        ("one", 20.0, ()),
        ("two", 0.0, ("one",)),
    ]
    assert [(node.forward_s, node.backward_s, node.parameter_bytes, node.saved_bytes) for node in joined.nodes] == [
        (2e-3, 2e-3, 8.0, 30.0),
        (1e-3, 1e-3, 4.0, 30.0),
    ]
    assert joined.num_parameters == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", DIAMOND, "batch of a profile must be known"),
        ("x.CSV@b", DIAMOND, r"got b: name the file like vgg19_b32.csv or write .*x.CSV@32"),
        ("x.csv@0", DIAMOND, r"must be known \(1..1000000\), got 0:"),
        ("x_b1.csv", HEADER.replace(",preds", "") + "\na,b,1,1,1,1\n", "column 'preds' is missing"),
        ("x_b1.csv", f"{HEADER}\na,l,-1,1,1,1,\n", "must be 0 or more"),
        ("x_b1.csv", f"{HEADER}\na,l,1,1,1,1,z\n", "reads 'z', which is no node"),
        ("x_b1.csv", f"{HEADER}\na,l,1,1,1,1,\na,l,1,1,1,1,\n", "a name of its own"),
        ("x_b1.csv", f"{HEADER}\na,l,1,1,1,1,b\nb,l,1,1,1,1,a\n", "waits for itself"),
        ("x_b1.csv", f"{HEADER}\n", "at least one node"),
        ("x_b1.csv", f"{HEADER}\na,l,1,1,1,1e308,\n", r"node 'a': param_bytes must be at most 1e\+15, got 1e\+308"),
        ("x_b1.csv", f"{HEADER}\na,l,1e308,1,1,1,\n", r"node 'a': fw_ms must be at most 1e\+15, got 1e\+308"),
    ],
)
def test_what_is_wrong_with_a_profile_is_said(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        build_workload(str(path))


def test_an_input_of_piper_is_a_workload_too(tmp_path: Path) -> None:
    option = {"id": "vanilla", "timePerSample": 3.0, "parameterSize": 8.0, "memoryUsageA": 5.0, "memoryUsageB": 1.0}
    option |= {"syncTimeFw": {}, "syncTimeBw": {}}
    nodes = [{"id": number, "name": "layer", "TMPCs": {"1": [option]}} for number in (0, 1)]
    content = {"maxDevices": 2, "maxMemoryPerDevice": 9.0, "bandwidth": 1.0, "mbsInBatch": 4, "nodes": nodes}
    content["edges"] = [{"sourceId": 0, "destId": 1, "communicationCost": 6.0}]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(content))
    workload = build_workload(str(path))
    assert [op.attributes["output_bytes"] for op in workload.operators] == [6, 0]
    assert workload.operators[0].attributes["forward_s"] == 1.0
    del nodes[0]["TMPCs"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not an input of Piper"):
        build_workload(str(path))


@pytest.mark.parametrize(
    ("file", "num_parameters_millions"),
    [("vgg19_b32", 137), ("gnmt16_b64", 291), ("bert48_b2", 640), ("xlnet36_b1", 500), ("amoebanet36_b1", 933)],
)
def test_published_profiles_have_the_parameters_of_dapples_table_1(file: str, num_parameters_millions: float) -> None:
    profile: LayerProfile = load_layer_profile(data_folder("dapple") / f"{file}.csv")
    assert profile.num_parameters / 1e6 == pytest.approx(num_parameters_millions, rel=0.01)
