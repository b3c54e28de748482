"""Plans as Alpa's benchmark files state them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from datafiles.errors import DataFileError
from searchers.alpa.import_plan import import_plan
from simulator.problem import Problem, ProblemSpec

STATED = {
    "n_auto_layers": 8,
    "submesh": [[1, 4], [1, 4]],
    "logical": [[1, 4], [1, 4]],
    "force_dp": [1, 1],
    "num_microbatches": 128,
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return ProblemSpec(model="gpt3-1.3b", cluster="p3.16xlarge:1x8", runtime="alpa", global_batch=128).load()


def stated(folder: Path, layers: object) -> Path:
    """Return a file that states these layers."""
    path = folder / "plan.json"
    path.write_text(json.dumps(STATED | {"layers": layers}))
    return path


def test_stages_and_groups_of_each_are_the_same_plan_as_the_groups_listed(tmp_path: Path, problem: Problem) -> None:
    plan = import_plan(stated(tmp_path, "2x4"), problem)
    assert plan == import_plan(stated(tmp_path, [[0, 1, 2, 3], [4, 5, 6, 7]]), problem)
    assert [stage.num_operators() for stage in plan.stages] == [1 + 12 * 13, 12 * 13 + 2]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            "4by2",
            "layers: must be a list of groups for each stage, or stages and groups of each as in \"16x1\", got '4by2'",
        ),
        ("0x3", "as in \"16x1\", got '0x3'"),
        ("999999x999999", "as in \"16x1\", got '999999x999999'"),
        (5, "layers: must be a list, got 5"),
        ([], "layers: "),
        ([[], [0, 1, 2, 3, 4, 5, 6, 7]], "layers.0: "),
        ([0, 1], "layers.0: must be a list, got 0"),
        ([[0, 1], [2, "a"]], "layers.1.1: must be a valid integer, got 'a'"),
        ([[1, 0, 2, 3], [4, 5, 6, 7]], "stages must hold the groups of layers 0 to 7 in order"),
    ],
)
def test_other_layers_are_refused_in_words(tmp_path: Path, problem: Problem, layers: object, message: str) -> None:
    with pytest.raises((DataFileError, ValueError)) as refused:
        import_plan(stated(tmp_path, layers), problem)
    assert message in str(refused.value)
    assert "tuple[" not in str(refused.value)


@pytest.mark.parametrize(
    ("layers", "meshes", "message"),
    [
        ("2x4", [[2**20, 2**20]] * 2, "the cluster must have the 2,199,023,255,552 devices of the plan, got 8"),
        ("65536x1", [[1, 4]] * 2, "stages must hold the groups of layers 0 to 7 in order, got ((0,), (1,), "),
    ],
)
def test_what_is_far_too_large_is_refused_in_few_words(
    tmp_path: Path, problem: Problem, layers: str, meshes: list[list[int]], message: str
) -> None:
    (path := tmp_path / "plan.json").write_text(
        json.dumps(STATED | {"layers": layers, "submesh": meshes, "logical": meshes})
    )
    with pytest.raises(ValueError) as refused:
        import_plan(path, problem)
    assert message in str(refused.value) and len(str(refused.value)) < 400
