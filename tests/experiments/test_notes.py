"""What is said beside results: that a runtime could not run a plan, and what of a calibration is left out."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from datafiles.writer import dump_yaml
from hardware_models.calibrated import PipelineConstants
from hardware_models.calibration_file import load_calibration, save_calibration
from hardware_models.cluster import parse_cluster
from hardware_models.machine_factors import with_factors
from hardware_models.model import HardwareModel
from hardware_models.profile import ProfileRow
from hardware_models.runtime_files import load_runtime
from simulator.plan_file import load_plan
from simulator.problem import ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.experiments.commands import run
from tests.experiments.sweeps import BASE, MODEL, Place

OWN, OTHER = "v100-32g-dgx1", "p3.16xlarge"


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


def test_idle_gpus_are_said(folder: Path) -> None:
    problem = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x4", "megatron-lm-2021", 4).load()
    half, whole = (simulate(uniform_plan(problem, tp=2, dp=dp, microbatch=1), problem) for dp in (1, 2))
    assert whole.notes == ()
    (note,) = half.notes
    assert note.startswith("2 GPUs of the cluster's 4 without anything to do") and half.num_devices == 2


def test_it_moves_no_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "plan", *words("megatron-lm-2021"), "--tp", 2, "--sequence-parallel", "-o", "plan.yaml")
    spec, plan = load_plan(folder / "plan.yaml")
    problem = spec.load()
    able = replace(problem, runtime=replace(problem.runtime, has_sequence_parallelism=True))
    found = [simulate(plan, each) for each in (problem, able)]
    assert found[0].iteration_time_s == found[1].iteration_time_s
    assert found[0].peak_reserved_bytes == found[1].peak_reserved_bytes
    assert [len(each.notes) for each in found] == [1, 0]


@pytest.mark.parametrize(
    ("runtime", "recompute", "is_said"),
    [
        ("megatron-lm-2023-flash", "selective", True),
        ("megatron-lm-2023-flash", "full", False),
        ("megatron-core-2024", "selective", False),
        ("megatron-lm-2023", "selective", False),
    ],
)
def test_flash_attention_that_its_framework_never_recomputes_alone_is_noted(
    folder: Path, capsys: pytest.CaptureFixture[str], runtime: str, recompute: str, is_said: bool
) -> None:
    run(capsys, "plan", *words(runtime, cluster="a100-80g-dgx:1x2"), "--recompute", recompute, "-o", "plan.yaml")
    assert ("never computes flash attention again" in run(capsys, "simulate", "plan.yaml")[1]) is is_said


@pytest.mark.parametrize("name", ["megatron-lm-2021-fp32", "megatron-core-2024", "pytorch-fsdp2", "alpa"])
def test_runtimes_take_it_from_their_base(name: str) -> None:
    assert load_runtime(name).has_sequence_parallelism is (name != "megatron-lm-2021-fp32")


@pytest.fixture
def of_others(folder: Path) -> Path:
    """Return a calibration of a GPU that both presets have, and of the links of one."""
    factors = {"products": 0.9, "links": 0.2, "network": 0.2}
    calibration = with_factors(parse_cluster(f"{OTHER}:2x8"), factors, "test")
    (gpu,) = set(parse_cluster(f"{OWN}:1x8").gpu_types)
    save_calibration(replace(calibration, gpus={gpu: next(iter(calibration.gpus.values()))}), "others.json")
    return folder / "others.json"


SAID = f"links, networks of the calibration are left out: they are of {OTHER}, not of {OWN}, whose shipped ones are"


def test_every_command_says_which_measured_links_are_of_other_hardware(
    of_others: Path, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*words("megatron-lm-2021"), "--profile", of_others.name]
    assert SAID in run(capsys, "plan", *given, "-o", "plan.yaml")[2]
    assert SAID in run(capsys, "simulate", "plan.yaml")[1]
    assert SAID in run(capsys, "diff", "plan.yaml", "plan.yaml")[2]
    code, out, error = run(capsys, "search", *given, "--searcher", "ddp", "--json")
    assert code == 0 and SAID in error and SAID in json.loads(out)["notes"][0]
    code, _, error = run(capsys, "compare", *given, "--searchers", "ddp")
    assert code == 0 and SAID in error
    Path("runs.csv").write_text("tp,microbatch,global_batch\n2,1,8\n")
    own = ["-m", "tiny.yaml", "-c", OWN, "-r", "megatron-lm-2021"]
    assert f"note: 1 run: {SAID}" in run(capsys, "predict", "runs.csv", *own, "--profile", of_others.name)[2]
    base = {**BASE, "cluster": f"{OWN}:1x2", "profile": of_others.name}
    spec = place.write(grid={"global_batch": [8], "searcher": ["ddp"]}, base=base)
    code, _, error = run(capsys, "sweep", spec, "-o", place.output, "-j", 1)
    assert code == 0 and SAID in error
    assert SAID in next((place.output / "runs").glob("*.json")).read_text()


def test_what_is_left_out_moves_no_prediction_and_nothing_is_said_where_all_is_used(of_others: Path) -> None:
    calibration = load_calibration(of_others)
    cluster = parse_cluster(f"{OWN}:2x8")
    found = calibration.hardware(cluster)
    alone = replace(calibration, links={}, networks={}).hardware(cluster)
    assert len(found.left_out) == 1 and alone.left_out == ()
    assert found.cluster == alone.cluster
    (gpu,) = calibration.gpus
    assert calibration.hardware(parse_cluster(f"{OTHER}:2x8")).left_out == (
        f"GPU constants of the calibration are left out: they are of {gpu}, not of v100-sxm2-16gb, whose shipped ones "
        "are used; calibrate for it",
    )
    both = replace(calibration, links={**calibration.links, OWN: calibration.links[OTHER]}, networks={})
    assert both.hardware(cluster).left_out == ()
    assert HardwareModel(cluster).left_out == ()


def test_rows_of_no_operator_are_said_where_operators_lack_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt role would leave its operator to the model without a word; a table of some operators alone is fine."""
    columns = [field.name for field in fields(ProfileRow)][:15]
    row: dict[str, object] = dict.fromkeys(columns, 0)
    row |= {"samples": 8, "tensor_size": 1, "split": "default", "includes_collectives": False, "num_groups": 1}
    row |= {"source": "test", "forward_s": 1e-4, "backward_s": 2e-4}
    given = {"format": "windtunnel-operator-profile-1", "model": "tiny", "gpu_type": "v100-sxm2-32gb", "dtype": "fp16"}
    run(capsys, "plan", *words("megatron-lm-2021"), "-o", "plan.yaml")
    for role, is_said in (("mlp_linear_1", False), ("mlp_linear1", True)):
        rows = [list((row | {"role": own}).values()) for own in ("attention_qkv", role)]
        profile = {**given, "source": "test", "columns": columns, "rows": rows}
        (folder / "own.yaml").write_text(dump_yaml(profile))
        code, out, error = run(capsys, "simulate", "plan.yaml", "--profile", "own.yaml", "--json")
        assert code == 0, error
        notes = json.loads(out)["notes"]
        assert len(notes) == is_said
        if is_said:
            assert "rows of mlp_linear1 are of no operator of tiny; did you mean 'mlp_linear_1'?" in notes[0]


def test_constants_of_pipelines_are_said_to_be_left_out() -> None:
    factors = with_factors(parse_cluster(f"{OWN}:1x2"), {"products": 0.9}, "test")
    measured = replace(factors, pipeline=PipelineConstants(0.77, 0.0, "a plan"))
    (said,) = measured.hardware(parse_cluster(f"{OWN}:1x2")).left_out
    assert "operators take 0.77 times as long there" in said
    nothing = replace(factors, pipeline=PipelineConstants(1.0, 0.0, "no plan"))
    assert nothing.hardware(parse_cluster(f"{OWN}:1x2")).left_out == ()
