"""Operator profiles, their file format, and Aceso's importers."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.import_aceso import aceso_role, import_collectives, import_folder, import_table
from hardware_models.model import HardwareModel
from hardware_models.profile import OPTIONAL, OperatorProfile
from hardware_models.profile_file import profile_from_mapping, profile_mapping
from tests.hardware_models.data_folder import data_folder

OPS = """db,model,size,mbs,tp,algo,op_index,op,fwd_ms,bwd_ms,\
input_mib,output_mib,weight_mib,activation_mib,fwd_reserved_mib,bwd_reserved_mib
eurosys,gpt,1_3B,1,2,0,2,enc-attention-qkv,1.0,2.0,8,24,6,12,4,5
eurosys,gpt,1_3B,4,2,0,2,enc-attention-qkv,4.0,8.0,32,96,6,48,16,20
eurosys,gpt,1_3B,1,2,1,2,enc-attention-qkv,1.5,2.5,8,24,6,12,4,5
"""
FOLDER_FILE = """op_name,forward-compute,backward-compute,input_size,output_size,\
weights,activations,fwd_reserved,bwd_reserved
enc-attention-qkv,1000,2000,8,24,6,12,4,5
"""
COMM = """db,collective,group_size,dtype,message_mib,message_bytes,ms,link,source
eurosys,all_reduce,2,fp16,0,0,0.05,intra_node,gpt
eurosys,all_reduce,2,fp16,1,1048576,0.08,intra_node,gpt
eurosys,all_reduce,2,fp16,1,1048576,0.06,intra_node,t5
eurosys,all_reduce,2,fp16,4,4194304,0.24,intra_node,gpt
eurosys,all_gather,2,fp16,1,1048576,0.1,intra_node,gpt
eurosys,p2p,2,fp16,1,1048576,0.25,inter_node,gpt
"""


@pytest.fixture
def profile(tmp_path: Path) -> OperatorProfile:
    path = tmp_path / "ops.csv.gz"
    path.write_bytes(gzip.compress(OPS.encode()))
    return import_table(path, model="gpt", size="1_3B")


def test_a_measured_row_is_returned_as_it_is(profile: OperatorProfile) -> None:
    found = profile.lookup("attention_qkv", 1, 2)
    assert found is not None
    assert found.source == "measured"
    assert (found.row.forward_s, found.row.backward_s) == (1e-3, 2e-3)
    assert found.row.saved_bytes == 12 * 2**20
    assert found.row.includes_collectives


def test_between_rows_times_and_sizes_are_linear_in_samples(profile: OperatorProfile) -> None:
    found = profile.lookup("attention_qkv", 2, 2)
    assert found is not None
    assert found.source == "interpolated"
    assert found.row.forward_s == pytest.approx(2e-3)
    assert found.row.saved_bytes == pytest.approx(24 * 2**20)
    assert found.row.parameter_bytes == 6 * 2**20


def test_the_alternative_split_is_kept_apart(profile: OperatorProfile) -> None:
    found = profile.lookup("attention_qkv", 1, 2, "alternative")
    assert found is not None
    assert found.row.forward_s == 1.5e-3


@pytest.mark.parametrize("query", [("attention_qkv", 8, 2), ("attention_qkv", 1, 4), ("lm_loss", 1, 2)])
def test_outside_the_table_nothing_is_said(profile: OperatorProfile, query: tuple[str, int, int]) -> None:
    assert profile.lookup(*query) is None


@pytest.mark.parametrize("name", ["profile.yaml", "profile.json"])
def test_a_profile_survives_its_file(profile: OperatorProfile, tmp_path: Path, name: str) -> None:
    profile.save(tmp_path / name)
    assert OperatorProfile.load(tmp_path / name) == profile


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0.001,", "-0.001,", "forward_s must be finite and not negative"),
        ("0.001,", ".nan,", r"(?i)nan"),
        ("0.001,", "fast,", "forward_s has the wrong type"),
        ("default", "other", "split must be one of"),
        ("fp16", "fp16\nspeed: 3", "speed: unknown key"),
    ],
)
def test_a_bad_profile_file_is_refused(
    profile: OperatorProfile, tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "profile.yaml"
    profile.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        OperatorProfile.load(path)


def test_a_row_of_a_profile_file_with_a_cell_too_few_is_named(profile: OperatorProfile) -> None:
    mapping = profile_mapping(profile)
    mapping["rows"][1] = mapping["rows"][1][:-1]
    cells = len(mapping["columns"])
    with pytest.raises(ValueError, match=f"mine: row 2 must have {cells} cells, got {cells - 1}"):
        profile_from_mapping(mapping, "mine")


@pytest.mark.parametrize("name", ["profile.yaml", "profile.json"])
@pytest.mark.parametrize("what", ["host_s", "taken_bytes"])
def test_what_not_every_profile_knows_is_in_a_file_where_a_row_has_it(
    profile: OperatorProfile, tmp_path: Path, name: str, what: str
) -> None:
    assert not set(profile_mapping(profile)["columns"]) & set(OPTIONAL)
    first, *others = profile.rows
    values: dict[str, Any] = {f"forward_{what}": 1e-4, f"backward_{what}": 2e-4}
    known = replace(profile, rows=(replace(first, **values), *others))
    known.save(tmp_path / name)
    assert OperatorProfile.load(tmp_path / name) == known
    mapping = profile_mapping(known)
    assert set(mapping["columns"]) & set(OPTIONAL) == set(values)
    place = mapping["columns"].index(f"backward_{what}")
    for table in (mapping["columns"], *mapping["rows"]):
        del table[place]
    unknown: dict[str, Any] = {f"backward_{what}": None}
    assert profile_from_mapping(mapping, "mine").rows[0] == replace(known.rows[0], **unknown)
    mapping["rows"][0][mapping["columns"].index(f"forward_{what}")] = -1.0
    with pytest.raises(ValueError, match=rf"row 1: .*forward_{what} must be finite and not negative, got -1"):
        profile_from_mapping(mapping, "mine")
    mapping["rows"][0][mapping["columns"].index("forward_s")] = None
    with pytest.raises(ValueError, match="row 1: forward_s has the wrong type, got None"):
        profile_from_mapping(mapping, "mine")


def test_the_nearest_degree_is_the_largest_that_is_not_above(profile: OperatorProfile) -> None:
    """Of rows without collectives: the degree of the row that has them is passed over."""
    rows = [replace(profile.rows[0], tensor_size=size, includes_collectives=size == 4) for size in (2, 4, 8)]
    table = replace(profile, rows=tuple(rows))
    asked = {size: table.nearest_degree("attention_qkv", size, "alternative") for size in (1, 2, 7, 8, 16)}
    assert asked == {size: (found, "default") for size, found in ((1, 2), (2, 2), (7, 2), (8, 8), (16, 8))}
    assert table.nearest_degree("lm_loss", 2) is None


def test_an_unknown_model_gets_the_nearest_names(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text(OPS)
    with pytest.raises(ValueError, match="eurosys gpt 1_3B"):
        import_table(path, model="gpt", size="1_3")


def test_acesos_own_folder_gives_the_same_rows(tmp_path: Path, profile: OperatorProfile) -> None:
    (tmp_path / "gpt_1_3B_mbs1_tp2_algo0.csv").write_text(FOLDER_FILE)
    (tmp_path / "prim_gpt_1_3B_all_reduce_2gpus.csv").write_text("x\n")
    (row,) = import_folder(tmp_path, model="gpt", size="1_3B").rows
    assert (row.role, row.samples, row.tensor_size, row.split) == ("attention_qkv", 1, 2, "default")
    found = profile.lookup("attention_qkv", 1, 2)
    assert found is not None
    assert (row.forward_s, row.saved_bytes) == (found.row.forward_s, found.row.saved_bytes)


def test_decoder_operators_get_their_own_roles() -> None:
    assert aceso_role("dec-2nd-layernorm") == "decoder_norm_2"
    assert aceso_role("dec-attention-dense-1") == "decoder_attention_dense"
    assert aceso_role("dec-post-attention-dropout-2") == "decoder_post_cross_attention_dropout"
    assert aceso_role("dec-MLP-gelu") == "decoder_mlp_activation"
    assert aceso_role("layer1.0-conv1") == "layer1.0-conv1"


def test_measured_collectives_replace_the_model_and_keep_the_minimum(tmp_path: Path) -> None:
    path = tmp_path / "comm.csv"
    path.write_text(COMM)
    table = import_collectives(path)
    hardware = HardwareModel(parse_cluster("v100-32g-dgx1:2x8"), collective_table=table)
    exact = hardware.collective("all_reduce", 2**20, (0, 1))
    assert exact.source == "measured"
    assert exact.alone_s == pytest.approx(0.06e-3)
    middle = hardware.collective("all_reduce", 2**21, (0, 1))
    assert middle.source == "interpolated"
    assert middle.alone_s == pytest.approx(0.12e-3)
    assert hardware.collective("all_gather", 2**21, (0, 1)).alone_s == pytest.approx(0.1e-3)
    assert hardware.transfer(2**20, 0, 8).alone_s == pytest.approx(0.25e-3)
    for modelled in (
        hardware.collective("all_reduce", 2**10, (0, 1)),
        hardware.collective("all_reduce", 2**20, (0, 8)),
        hardware.collective("reduce_scatter", 2**20, (0, 1)),
    ):
        assert modelled.source == "modelled"


def test_a_collective_row_without_size_or_time_is_refused() -> None:
    with pytest.raises(ValueError, match="positive size and finite time"):
        CollectiveTable.from_rows([("all_reduce", 2, 1024.0, float("inf"))], "test")


def test_the_whole_published_profile_imports() -> None:
    folder = data_folder("aceso_v100")
    profile = import_table(folder / "ops.csv.gz", model="gpt", size="1_3B")
    assert len(profile.rows) == 512
    assert len(profile.roles) == 16
    assert import_table(folder / "ops.csv.gz", model="t5", size="3B").lookup(
        "decoder_cross_attention_score", 1, 1
    )
    found = import_collectives(folder / "comm.csv").lookup("all_reduce", 8, 2**26)
    assert found is not None
    assert found[0] == pytest.approx(1.01e-3, rel=0.01)
    assert found[1] == "measured"
