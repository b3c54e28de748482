"""Strategy files of Galvatron's releases as plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from searchers.galvatron.import_plan import import_plan
from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.plans import from_plan
from simulator.costs import CostTables
from simulator.plan import Axis
from simulator.problem import Problem
from simulator.validate import validate
from tests.searchers.tiny import tiny_problem

FILE = {
    "pp_deg": 2,
    "tp_sizes_enc": "1,2",
    "tp_consecutive_flags": "1,0",
    "dp_types_enc": "1,0",
    "checkpoint": "1,0",
    "global_bsz": 8,
    "chunks": 2,
    "pp_division": "1,1",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "ddp",
}


def read(folder: Path, problem: Problem, **changes: object) -> object:
    path = folder / "plan.json"
    path.write_text(json.dumps({**FILE, **changes}))
    return import_plan(path, problem)


def test_a_strategy_file_becomes_a_plan(tmp_path: Path) -> None:
    problem = tiny_problem(8, 8)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(FILE))
    plan = import_plan(path, problem)
    validate(plan, problem)
    assert (plan.schedule, plan.num_microbatches, plan.microbatch_size) == ("1f1b", 2, 4)
    stages = from_plan(plan, LayerProfiles(CostTables(problem)).layers)
    assert stages is not None
    assert [[str(strategy) for strategy in chosen] for _, chosen in stages] == [["sdp 4 + ckpt"], ["tp 2 > dp 2"]]
    assert [stage.devices for stage in plan.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_embedding_and_head_have_their_own_degree(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**FILE, "vtp": 2, "embed_sdp": 1}))
    plan = import_plan(path, tiny_problem(8, 8))
    assert plan.stages[0].shardings[0][1] == (Axis("batch", 2, 3), Axis("tensor", 2))
    assert plan.stages[1].shardings[-1][1] == (Axis("batch", 2, 3), Axis("tensor", 2))


def test_chunks_that_do_not_divide_are_cut_as_pytorch_cuts_them(tmp_path: Path) -> None:
    """8 samples of 4 replicas are 2 each; 3 chunks of ceil(2 / 3) = 1 make 2 microbatches of 4."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**FILE, "chunks": 3}))
    assert import_plan(path, tiny_problem(8, 8)).num_microbatches == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_sizes_enc": "1,2,2"}, "tp_sizes_enc must have a number for each of the 2 layers of tiny, got 3"),
        ({"tp_sizes_enc": "1,3"}, "tp_sizes_enc must divide the 4 devices of a stage, got 3 in layer 1"),
        ({"pp_division": "2,1"}, "pp_division must be 2 positive numbers that add up to the 2 layers"),
        ({"checkpoint": "2,0"}, "checkpoint must be 0 or 1 for each layer, got 2"),
        ({"global_bsz": 16}, "the file's global_bsz is 16, which must be the batch, got 8; try -b 16"),
        ({"pp_deg": 3}, "pp_deg must divide the cluster's 8 devices, got 3"),
        ({"use_sp": "0,1"}, "layer 1 uses Ulysses"),
        ({"pipeline_type": "interleaved"}, "pipeline_type must be one of gpipe, pipedream_flush"),
        ({"checkpoint": 1}, "checkpoint must be whole numbers between commas"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"chunks": 0}, "chunks must be a whole number of at least 1"),
    ],
)
def test_a_file_that_does_not_fit_says_what_must_hold(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tiny_problem(8, 8), **changes)


def test_a_file_for_another_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must divide the 2 devices of a stage, got 4"):
        read(tmp_path, replace(tiny_problem(4, 8)), tp_sizes_enc="4,2")


@pytest.mark.parametrize("value", [[], {}, None, 1, "ddpp", True])
@pytest.mark.parametrize("key", ["pipeline_type", "default_dp_type"])
def test_a_word_must_be_one_of_those_known(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"plan.json: {key} must be one of "):
        read(tmp_path, tiny_problem(8, 8), **{key: value})


@pytest.mark.parametrize("text", ["9" * 5000 + ",1", "\u00b2,1", "1_0,1"])
def test_numbers_between_commas_are_plain_and_short(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"plan.json: tp_sizes_enc must be whole numbers between commas"):
        read(tmp_path, tiny_problem(8, 8), tp_sizes_enc=text)


@pytest.mark.parametrize("key", ["tp_consecutive_flags", "dp_types_enc", "checkpoint", "use_sp"])
def test_flags_are_0_or_1(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match=f"plan.json: {key} must be 0 or 1 for each layer, got 9"):
        read(tmp_path, tiny_problem(8, 8), **{key: "1,9"})


@pytest.mark.parametrize("value", ["no", None, 7, True, 1.0])
def test_whether_embeddings_are_sharded_is_0_or_1(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match=r"plan.json: embed_sdp must be 0 or 1, got "):
        read(tmp_path, tiny_problem(8, 8), vtp=2, embed_sdp=value)
