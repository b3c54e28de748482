"""Wrong input is refused at once, and the message names the file that it is in."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from experiments.commands.profile import counts
from hardware_models.runtime_files import RUNTIMES
from tests.experiments.commands import run

TINY = "{family: gpt, layers: 2, hidden: 256, heads: 4, seq_len: 64, vocab: 512}\n"
PROBLEM = ["-c", "v100-32g-dgx1:1x2", "-b", "4"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a plan of a tiny model beside it, in the folder at work."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    assert run(capsys, "plan", "-m", "tiny.yaml", *PROBLEM, "-o", "good.yaml")[0] == 0
    return Path("good.yaml")


@pytest.mark.parametrize("fingerprint", [True, False])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("model: tiny.yaml", "model: gpt3-1.3B", "bad.yaml: unknown model 'gpt3-1.3B': did you mean"),
        ("runtime: megatron-lm-2021", "runtime: megatron", "bad.yaml: runtime must be a known one"),
        ('cluster: "v100-32g-dgx1:1x2"', 'cluster: "v100"', "bad.yaml: a cluster must be written"),
        ('schedule: "1f1b"', "schedule: 2f2b", "bad.yaml: the plan is not legal:"),
        ("devices: [0, 1]", "devices: [0, 0]", "bad.yaml: the plan is not legal:"),
        ("global_batch: 4", "global_batch: 5", "bad.yaml: the plan is not legal:"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said_of_its_file(
    plan: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str, fingerprint: bool
) -> None:
    text = plan.read_text()
    assert old in text
    lines = [line for line in text.splitlines() if fingerprint or "fingerprint" not in line]
    Path("bad.yaml").write_text("\n".join(lines).replace(old, new))
    for arguments in (["simulate", "bad.yaml"], ["diff", "good.yaml", "bad.yaml"]):
        code, out, error = run(capsys, *arguments)
        assert (code, out) == (2, "") and message in error.replace("\n", " "), arguments


def test_no_name_is_not_the_folder_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "gpt2"}')
    assert run(capsys, "plan", "-m", ".", *PROBLEM)[0] == 0
    code, _, error = run(capsys, "plan", "-m", "", *PROBLEM)
    assert code == 2 and "unknown model ''" in error


@pytest.mark.parametrize("column", ["gpus", "tp", "microbatch", "global_batch"])
def test_a_run_of_astronomical_numbers_is_refused_by_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    row = {"model": "gpt3-350m", "gpus": "8", "tp": "1", "microbatch": "1", "global_batch": "8"} | {column: "1e308"}
    (table := tmp_path / "runs.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    code, _, error = run(capsys, "predict", table, "-c", "a100-80g-dgx", "-r", "megatron-lm-2021")
    assert code == 2 and f"row 1: {column} must be at most 1,000,000,000, got 1e308" in error.replace("\n", " ")


def test_a_run_too_large_to_simulate_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, row = "model,gpus,pp,microbatch,global_batch", "gpt3-350m,8,8,1,1000000000"
    (table := tmp_path / "runs.csv").write_text(f"{head}\n{row}\n")
    code, _, error = run(capsys, "predict", table, "-c", "a100-80g-dgx", "-r", "megatron-lm-2021")
    assert code == 2 and "error: runs.csv#1: a plan that is simulated in full must come to at most" in error


def test_what_is_wrong_with_a_foreign_plan_is_said_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = '{"submesh": [[1, 8]], "logical": [], "force_dp": [1], "num_microbatches": 1, "layers": "1x8"}'
    (tmp_path / "alpa.json").write_text(stated.replace("{", '{"n_auto_layers": 8, '))
    (kept := tmp_path / "plan.yaml").write_text("kept")
    problem = ["-m", "gpt3-1.3b", "-c", "p3.16xlarge:1x8", "-r", "alpa", "-b", "8"]
    code, _, error = run(capsys, "import-plan", "alpa", tmp_path / "alpa.json", *problem, "-o", kept)
    assert code == 2 and "alpa.json: logical and physical meshes must have equal sizes" in error.replace("\n", " ")
    assert kept.read_text() == "kept"


def test_links_in_a_circle_and_pipes_are_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("circle.json").symlink_to("circle.json")
    os.mkfifo("pipe.png")
    code, _, error = run(capsys, "simulate", "circle.json")
    assert code == 2 and "circle.json: cannot be read: Too many levels of symbolic links" in error
    code, _, error = run(capsys, "simulate", plan, "--timeline", "pipe.png")
    assert code == 2 and "output must be a file, got the device or pipe pipe.png" in error
    assert Path("pipe.png").is_fifo()


def test_a_folder_of_results_is_not_made_of_somebody_s_own(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("table.csv", "spec.yaml"):
        Path(name).write_text("mine")
    Path("sweep.yaml").write_text(
        "base: {model: tiny.yaml, cluster: 'v100-32g-dgx1:1x2', global_batch: 4, searcher: ddp, budget: '1'}"
    )
    for command in (["sweep", "sweep.yaml", "-j", "1"], ["compare", "-m", "tiny.yaml", *PROBLEM, "-s", "ddp"]):
        code, _, error = run(capsys, *command, "-o", ".")
        assert code == 2 and "would be written over; name another folder" in error, command
    assert Path("spec.yaml").read_text() == Path("table.csv").read_text() == "mine"


def test_the_base_of_a_runtime_is_not_written_over(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, base in (("ours", "theirs.yaml"), ("theirs", "megatron-lm-2021")):
        Path(f"{name}.yaml").write_text(f"description: {name}\nbase: {base}\nsources: {{}}\n")
    command = ["plan", "-m", "tiny.yaml", *PROBLEM, "-r", "ours.yaml", "-o"]
    for name in ("ours.yaml", "theirs.yaml"):
        before = Path(name).read_text()
        code, _, error = run(capsys, *command, name)
        assert code == 2 and name in error and Path(name).read_text() == before
    assert run(capsys, *command, "new.yaml")[0] == 0


def test_names_that_say_another_kind_of_file_are_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = ["search", "-m", "tiny.yaml", *PROBLEM, "-s", "ddp"]
    Path("runs.csv").write_text("model,gpus,global_batch,microbatch\ntiny.yaml,2,4,1\n")
    predict = ["predict", "runs.csv", "-c", "v100-32g-dgx1", "-r", "megatron-lm-2021"]
    for command, name, proposed in (
        (["plan", "-m", "tiny.yaml", *PROBLEM], "notes.md", "ends in .yaml or .yml or .json, got notes.md"),
        (search, "good.yaml.gz", "name it good.yaml"),
        (predict, "notes.md", "a table must be a file that ends in .csv, got notes.md; name it notes.csv"),
        (["calibrate", "runs", "runs.csv"], "notes.md", "name it notes.yaml"),
    ):
        Path(name).write_text("mine")
        code, _, error = run(capsys, *command, "-o", name)
        assert code == 2 and proposed in error.replace("\n", " "), command
        assert Path(name).read_text() == "mine"


def test_a_data_file_is_written_as_its_name_is_read(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("OTHER.JSON", "other.yml"):
        assert run(capsys, "plan", "-m", "tiny.yaml", *PROBLEM, "-o", name)[0] == 0
        assert run(capsys, "diff", plan, name)[0] == 0


def test_a_report_is_not_written_among_somebody_s_own_files(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder := Path("out/mpe-fig3")).mkdir(parents=True)
    (folder / "report.md").write_text("mine")
    code, _, error = run(capsys, "reproduce", "mpe-fig3", "-o", "out")
    assert code == 2 and "a report must have a folder of its own, got out/mpe-fig3 with report.md;" in error
    assert [file.name for file in folder.iterdir()] == ["report.md"] and (folder / "report.md").read_text() == "mine"
    (folder / "report.md").unlink()
    for _ in range(2):  # its own report it writes over
        assert run(capsys, "reproduce", "mpe-fig3", "-o", "out")[0] == 0


def test_a_seed_has_a_largest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "search", "-m", "gpt3-350m", *PROBLEM, "-s", "ddp", "--seed", "9" * 23)
    assert code == 2 and "9223372036854775807,got" in re.sub(r"[│\s]+", "", error)


def test_a_runtime_that_leaves_a_device_no_memory_is_refused(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (RUNTIMES / "megatron-lm-2021.yaml").read_text()
    Path("mine.yaml").write_text(text.replace("context_bytes: 524288000", "context_bytes: 40000000000"))
    code, _, error = run(capsys, "plan", "-m", "tiny.yaml", *PROBLEM, "-r", "mine.yaml", "-o", "other.yaml")
    assert code == 2 and not Path("other.yaml").exists()
    assert "must leave memory for tensors, got 37.55 GiB of the 31.75 GiB of v100-sxm2-32gb" in error


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 400])
def test_numbers_of_many_digits_are_refused_in_words(capsys: pytest.CaptureFixture[str], digits: str) -> None:
    search = ["search", "-m", "gpt3-350m", *PROBLEM, "-s", "ddp"]
    for arguments, message in (
        ([*search, "--memory-limit", digits], "a size must be like 28GiB"),
        ([*search, "--budget", digits], "a budget must be a time like 20s"),
        ([*search, "--budget", f"{digits}s"], "a budget must be a time like 20s"),
    ):
        code, _, error = run(capsys, *arguments)
        assert code == 2 and message in error and len(error) < 300, arguments
    with pytest.raises(ValueError, match="microbatches must be positive whole numbers such as 1,2,4, got '1,999"):
        counts(f"1,{digits}", "microbatches")
