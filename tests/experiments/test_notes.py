"""What is said beside results: that a runtime could not run a plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from datafiles.writer import dump_yaml
from hardware_models.runtime_files import load_runtime
from simulator.plan_file import load_plan
from simulator.simulate import simulate
from tests.experiments.commands import run
from tests.experiments.sweeps import MODEL

OWN = "v100-32g-dgx1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tiny.yaml").write_text(dump_yaml(MODEL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(runtime: str, *, cluster: str = f"{OWN}:1x2") -> list[object]:
    return ["-m", "tiny.yaml", "-c", cluster, "-r", runtime, "-b", 8]


@pytest.mark.parametrize(
    ("runtime", "is_said"),
    [("megatron-lm-2021", True), ("megatron-deepspeed-timed", True), ("megatron-lm-2022", False)],
)
def test_sequence_parallelism_of_a_runtime_that_has_none_is_said(
    runtime: str, is_said: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = f"{runtime} has no sequence parallelism, which the plan has"
    parallel = [*words(runtime), "--tp", 2, "--sequence-parallel"]
    code, out, error = run(capsys, "plan", *parallel, "-o", "plan.yaml", "--json")
    assert code == 0 and (said in error) is is_said
    assert len(json.loads(out)["notes"]) == is_said
    assert (said in run(capsys, "simulate", "plan.yaml")[1]) is is_said
    assert len(json.loads(run(capsys, "simulate", "plan.yaml", "--json")[1])["notes"]) == is_said
    (folder / "runs.csv").write_text("tp,microbatch,global_batch,sequence_parallel\n2,1,8,1\n2,2,8,1\n2,2,8,0\n")
    _, _, error = run(capsys, "predict", "runs.csv", "-m", "tiny.yaml", "-c", OWN, "-r", runtime)
    assert (f"note: 2 runs: {said}" in error) is is_said
    code, _, error = run(capsys, "plan", *words(runtime), "--tp", 2, "-o", "without.yaml")
    assert code == 0 and "note" not in error
    assert (said in run(capsys, "diff", "without.yaml", "plan.yaml")[2]) is is_said


def test_it_moves_no_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "plan", *words("megatron-lm-2021"), "--tp", 2, "--sequence-parallel", "-o", "plan.yaml")
    spec, plan = load_plan(folder / "plan.yaml")
    problem = spec.load()
    able = replace(problem, runtime=replace(problem.runtime, has_sequence_parallelism=True))
    found = [simulate(plan, each) for each in (problem, able)]
    assert found[0].iteration_time_s == found[1].iteration_time_s
    assert found[0].peak_reserved_bytes == found[1].peak_reserved_bytes
    assert [len(each.notes) for each in found] == [1, 0]


@pytest.mark.parametrize("name", ["megatron-lm-2021-fp32", "megatron-core-2024", "pytorch-fsdp2", "alpa"])
def test_runtimes_take_it_from_their_base(name: str) -> None:
    assert load_runtime(name).has_sequence_parallelism is (name != "megatron-lm-2021-fp32")
