"""The command line: it works, it explains itself, and wrong input ends with one clear message."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partialmethod
from inspect import signature
from pathlib import Path

import pytest

from experiments import console
from experiments.cli import app
from experiments.sweep.values import DEFAULTS
from simulator.plan_file import load_plan
from simulator.result import SimulationResult
from tests.experiments.commands import run

PROBLEM = ["--model", "gpt3-350m", "--cluster", "v100-32g-dgx1:1x2"]


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "plans" / "plan.yaml"
    code, _, error = run(capsys, "plan", *PROBLEM, "--tp", 2, "-b", 4, "-o", path)
    assert code == 0, error
    return path


def test_help_shows_every_command_and_every_command_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    _, overview, _ = run(capsys, "--help")
    commands = [command.name for command in app.registered_commands]
    tour = ["list", "plan", "search", "simulate", "predict", "diff", "compare", "import-plan", "sweep", "profile"]
    assert commands == [*tour, "reproduce", "validate", "accuracy"]
    for command in commands:
        assert command in overview
        assert f"Example: windtunnel {command}" in run(capsys, command, "--help")[1]


def test_a_slip_in_what_to_list_is_answered_with_what_it_resembles(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "list", "modles")
    assert code == 2 and "did you mean 'models'?" in error


def test_terminals_break_the_lines_of_help() -> None:
    assert all("\n" not in part for each in app.registered_commands for part in (each.help or "").split("\n\n"))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, experiments.cli; "
        "heavy = ('numpy', 'pandas', 'scipy', 'matplotlib', 'simpy', 'yaml', 'pydantic'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("models", "gpt3-1.3b"),
        ("clusters", "v100-32g-dgx1"),
        ("gpus", "v100-sxm2-32gb"),
        ("links", "nvswitch-a100"),
        ("networks", "ib-200g"),
        ("runtimes", "megatron-lm-2021"),
        ("searchers", "megatron-grid"),
        ("experiments", "mpe-counts"),
        ("effects", "overlap-slowdown"),
    ],
)
def test_list_names_what_there_is(capsys: pytest.CaptureFixture[str], what: str, name: str) -> None:
    code, out, _ = run(capsys, "list", what)
    assert code == 0
    assert name in out
    rows = json.loads(run(capsys, "list", what, "--json")[1])
    assert any(name in next(iter(row.values())) for row in rows)
    assert all(cell not in ("", None) for row in rows for cell in row.values()), "no empty cells"


def test_numbers_are_numbers_and_layers_those_that_a_pipeline_divides(capsys: pytest.CaptureFixture[str]) -> None:
    models = {row["model"]: row for row in json.loads(run(capsys, "list", "models", "--json")[1])}
    assert models["gpt3-1.3b"]["repeated_layers"] == 24
    assert models["gpt3-1.3b"]["parameters_1e9"] == pytest.approx(1.3, rel=0.02)
    gpus = {row["gpu"]: row for row in json.loads(run(capsys, "list", "gpus", "--json")[1])}
    assert gpus["v100-sxm2-32gb"]["memory_gib"] == 31.7
    networks = {row["network"]: row for row in json.loads(run(capsys, "list", "networks", "--json")[1])}
    assert networks["ib-200g"]["nominal_gbit_per_s"] == 200
    assert "a100-80g-dgx" in networks["ib-200g"]["clusters"]


def test_a_plan_can_be_simulated(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = {word: tmp_path / "new" / word for word in ("trace.json.gz", "timeline.png", "memory.png")}
    options = [word for name, path in outputs.items() for word in (f"--{name.split('.')[0]}", path)]
    code, out, error = run(capsys, "simulate", plan_file, *options)
    assert code == 0, error
    assert out.startswith("iteration time")
    assert all(path.stat().st_size > 0 for path in outputs.values())


def test_a_trace_that_holds_a_part_says_so(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.json.gz"
    assert "the trace shows" not in run(capsys, "simulate", plan_file, "--trace", trace)[2]
    monkeypatch.setattr(SimulationResult, "write_trace", partialmethod(SimulationResult.write_trace, max_events=200))
    _, _, told = run(capsys, "simulate", plan_file, "--trace", trace)
    assert re.search(r"the trace shows the first \S+ s: a larger", told)


def test_json_is_json_and_effects_can_be_switched_off(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = json.loads(run(capsys, "simulate", plan_file, "--json")[1])
    less = json.loads(run(capsys, "simulate", plan_file, "--json", "--without", "tensor-parallel,host")[1])
    assert less["iteration_time_s"] < full["iteration_time_s"]
    assert less["switched_off"] == ["host", "tensor-parallel"]


def test_a_plan_without_output_is_printed_as_it_would_be_written(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = run(capsys, "plan", *PROBLEM, "--tp", 2, "-b", 4)
    assert code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(out)
    assert load_plan(printed) == load_plan(plan_file)
    assert "GiB" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tp", 2], "dp 2, microbatch 2 x 8, on all 4 GPUs"),
        (["--tp", 2, "--dp", 1], "on 2 of 4 GPUs (--dp 2 would use all)"),
        (["--pp", 3], "on 3 of 4 GPUs (tp * pp must divide 4 to use all, got 3)"),
    ],
)
def test_a_plan_uses_the_whole_cluster_or_says_what_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[object], words: str
) -> None:
    arguments = ["plan", "--model", "gpt3-350m", "--cluster", "v100-32g-dgx1:1x4", *options]
    code, out, error = run(capsys, *arguments, "-o", tmp_path / "plan.yaml")
    assert code == 0, error
    assert words in " ".join(out.split())
    found = json.loads(run(capsys, *arguments, "--json")[1])
    assert found["num_gpus"] == 4
    assert str(found["num_gpus_used"]) in words


def test_a_plan_says_when_gradients_are_reduced(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*options: str) -> tuple[str, bool]:
        found = json.loads(run(capsys, "plan", *PROBLEM, "--dp", 2, "--json", *options)[1])["plan"]
        return found["gradient_reduction"], found["overlap_gradient_sync"]

    assert planned("--zero", "1") == ("last", False)
    assert planned("--zero", "2") == ("every", False)
    assert planned("--zero", "2", "--gradient-reduction", "last", "--overlap-gradient-sync") == ("last", True)
    code, _, error = run(capsys, "plan", *PROBLEM, "--gradient-reduction", "never")
    assert code == 2
    assert "one of last, every" in error


def test_search_writes_the_best_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "best.yaml"
    arguments = ["search", *PROBLEM, "-b", 4, "--searcher", "megatron-grid", "--budget", "20", "-o", path]
    code, out, error = run(capsys, *arguments, "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["plans"][0]["objective"] <= found["plans"][-1]["objective"]
    assert found["counters"]["evaluations"] <= 20
    code, out, error = run(capsys, "simulate", path, "--json")
    assert code == 0, error
    assert json.loads(out)["iteration_time_s"] == found["simulated"]["iteration_time_s"]
    for budget, is_said in ((2, True), (1000, False)):
        code, out, error = run(capsys, "search", *PROBLEM, "-b", 4, "-s", "megatron-grid", "--budget", budget)
        assert code == 0, error
        assert ("the budget ended the search" in out) == is_said


BLIND = """
import windtunnel as wt


class Blind(wt.CandidateSearcher):
    name = "blind"
    paper = "none: it takes memory for free and long times for good ones"

    def candidates(self, problem, random, ledger):
        yield wt.uniform_plan(problem, dp=2, microbatch=4)
        yield wt.uniform_plan(problem, tp=2, recompute="full")

    def paper_objective(self, plan, problem):
        objective = float(len(plan.stages[0].recompute))
        return wt.Score(objective=objective, fits=True, peak_bytes=0.0, capacity_bytes=1.0, where="")
"""


def test_search_writes_the_first_plan_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's objectives know nothing of what an allocator loses; a plan beyond the memory is no answer."""
    searcher, path = tmp_path / "blind.py", tmp_path / "found.yaml"
    searcher.write_text(BLIND)
    arguments = ["search", *PROBLEM, "-b", 8, "-s", f"{searcher}:Blind", "--memory-limit", "6GiB", "-o", path]
    code, out, error = run(capsys, *arguments)
    assert code == 0, error
    assert "choice 2: those before it ran out of memory" in out
    assert json.loads(run(capsys, "simulate", path, "--json")[1])["fits"]


@pytest.mark.parametrize("command", ["simulate", "diff", "compare"])
def test_commands_choose_the_engine_by_default(command: str) -> None:
    (wanted,) = (each for each in app.registered_commands if each.name == command)
    assert wanted.callback is not None
    assert signature(wanted.callback).parameters["engine"].default == "auto"
    assert DEFAULTS["engine"] == "auto", "of a sweep"


def test_diff_explains_two_plans(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, picture = tmp_path / "pipeline.yaml", tmp_path / "why.png"
    assert run(capsys, "plan", *PROBLEM, "--pp", 2, "-b", 4, "-o", other)[0] == 0
    code, out, error = run(capsys, "diff", plan_file, other, "--plot", picture)
    assert code == 0, error
    assert "pipeline takes" in out
    assert picture.stat().st_size > 0
    found = json.loads(run(capsys, "diff", plan_file, other, "--json")[1])
    total = sum(row["b"] - row["a"] for row in found["time_s"])
    assert total == pytest.approx(found["iteration_time_s"][1] - found["iteration_time_s"][0])


def test_a_table_is_cut_into_several_where_the_terminal_is_narrow(
    plan_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["compare", *PROBLEM, "-b", 4, "--searchers", "ddp,gpipe", "--budget", "5"]
    wide = run(capsys, *arguments)[1]
    assert wide.count("searcher") == 1
    monkeypatch.setattr(console, "WIDTH_IN_FILES", 80)
    narrow = run(capsys, *arguments)[1]
    assert narrow.count("searcher") == 2 and "pp 2, microbatch 1 x 4, gpipe" in narrow
    assert max(map(len, narrow.splitlines())) <= 80
    group = "dapple-table5"
    found = run(capsys, "accuracy", "--group", group)[1]
    assert found.count(group) == 2 and "10/11" in found


@pytest.mark.parametrize(("option", "known"), [("engine", "auto, simpy, compiled"), ("objective", "paper, simulator")])
def test_compare_refuses_a_misspelt_choice_before_it_makes_a_folder(
    option: str, known: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", *PROBLEM, "-b", 4, "--searchers", "ddp", "--budget", "5", "-o", tmp_path / "out"]
    code, _, error = run(capsys, *arguments, f"--{option}", "fast")
    assert code == 2 and f"{option} must be one of {known}, got 'fast'" in " ".join(error.split())
    assert not (tmp_path / "out").exists()


def test_compare_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", *PROBLEM, "-b", 4, "--searchers", "ddp,deepspeed-3d", "--budget", "5"]
    code, out, error = run(capsys, *arguments, "-o", tmp_path / "out")
    assert code == 0, error
    assert "dp 2" in out
    assert "not applicable: deepspeed-3d" in out
    rows = json.loads(run(capsys, *arguments, "--json")[1])
    assert {row["searcher"]: row["status"] for row in rows} == {"ddp": "ok", "deepspeed-3d": "not applicable"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--model", "gpt3-1.3x", "--cluster", "v100-32g-dgx1:1x4"], ["model", "gpt3-1.3b"]),
        (["plan", "--model", "gpt3-350m", "--cluster", "v100-32g-dgx2:1x4"], ["cluster", "v100-32g-dgx1"]),
        (["plan", "--model", "gpt3-350m", "--cluster", "v100-32g-dgx1"], ["NODESxGPUS"]),
        (["plan", "-m", "gpt3-350m", "-c", "own.yaml:1x4"], ["cluster: no such file: own.yaml; looked in /"]),
        (["plan", "-m", "gpt3-350m", "-c", "own.yaml"], ["NODESxGPUS", "own.yaml:2x1"]),
        (["plan", *PROBLEM, "--runtime", "megatron"], ["runtime", "megatron-lm-2021"]),
        (["plan", *PROBLEM, "--tp", "4"], ["tp * pp * dp", "2 devices", "smaller degrees"]),
        (["plan", *PROBLEM, "--microbatch", "3", "-b", "4"], ["microbatch", "global batch 4", "try"]),
        (["plan", *PROBLEM, "--recompute", "some"], ["recompute", "'some'", "selective"]),
        (["plan", *PROBLEM, "--schedule", "interleaved"], ["interleaved needs chunks", "got 1", "1f1b"]),
        (["plan", *PROBLEM, "--memory-limit", "28 apples"], ["28GiB", "'28 apples'"]),
        (["plan", *PROBLEM, "--memory-limit", "16"], ["at least 1 MiB", "'16'", "16GiB"]),
        (["plan", *PROBLEM, "--memory-limit", "40GiB"], ["at most the 31.75 GiB", "got 40.00 GiB", "leave it out"]),
        (["plan", *PROBLEM, "--memory-limit", "700MiB"], ["0.78 GiB that megatron", "got 0.68 GiB", "raise it"]),
        (["search", *PROBLEM, "-b", "4", "--searcher", "megatron"], ["searcher", "megatron-grid", "path"]),
        (["search", *PROBLEM, "-b", "4", "-s", "ddp", "--budget", "soon"], ["budget", "20s", "'soon'"]),
        (["search", *PROBLEM, "-b", "4", "-s", "ddp", "--memory-limit", "3GB"], ["out of memory", "GiB"]),
        (["search", *PROBLEM, "-b", "4", "-s", "ddp", "--objective", "luck"], ["objective", "paper"]),
        (["compare", *PROBLEM, "-b", "4", "--searchers", ""], ["at least one searcher"]),
        (["compare", *PROBLEM, "-b", "4", "--without", "contentoin"], ["contention"]),
        (["compare", *PROBLEM, "-b", "0"], ["global_batch", "at least 1"]),
        (["simulate", "nowhere.yaml"], ["nowhere.yaml: no such file; looked in /"]),
        (["list", "models", "-o", "models.png"], ["only strategies are drawn", "leave it out"]),
        (["reproduce", "mpe-counts", "--searcher", "mine.py:Mine"], ["--searcher is for the leaderboard"]),
        (["reproduce", "mpe-counts", "-o", "pyproject.toml/out"], ["must be a folder, got the file pyproject.toml"]),
        (["accuracy", "--plots", "pyproject.toml"], ["must be a folder, got the file pyproject.toml"]),
        (["validate", "cpu-gloo", "--device", "tpu"], ["device must be one of cpu, cuda, got 'tpu'"]),
        (["predict", "runs.csv", "--limit", "10"], ["above 1 must be a percentage, got '10'; write 10% if"]),
    ],
)
def test_wrong_input_ends_with_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    code, out, error = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert "Traceback" not in error
    assert error.startswith("error: ")
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("stages:", "stages: [", ["plan.yaml:"]),
        (
            "num_microbatches: 4",
            "num_microbatches: 4\n  num_microbatches: 4",
            ["duplicate key", "plan.yaml:"],
        ),
        ("num_microbatches: 4", "num_microbatches: -4", ["num_microbatches"]),
        ("num_microbatches: 4", "num_microbatches: .nan", ["num_microbatches"]),
        ("num_microbatches: 4", "num_microbatches: 5", ["num_microbatches", "global batch 4"]),
        ("count: 315", "count: 1e12", ["count"]),
        ("devices: [0, 1]", "devices: [0, 7]", ["devices", "0..1"]),
        ("tensor, 2", "head, 2", ["head"]),
    ],
)
def test_a_broken_plan_file_is_explained(
    plan_file: Path, capsys: pytest.CaptureFixture[str], before: str, after: str, words: list[str]
) -> None:
    text = plan_file.read_text()
    assert before in text
    plan_file.write_text(text.replace(before, after, 1))
    code, _, error = run(capsys, "simulate", plan_file)
    assert code == 2
    assert "Traceback" not in error
    for word in words:
        assert word in error


def test_out_of_memory_is_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    assert run(capsys, "plan", *PROBLEM, "--memory-limit", "3GB", "-b", 4, "-o", path)[0] == 0
    code, out, _ = run(capsys, "simulate", path)
    assert code == 0
    assert out.startswith("DOES NOT FIT")
    assert "OUT OF MEMORY" in out
    assert "optimizer states" in out
    code, out, _ = run(capsys, "simulate", path, "--json")
    assert code == 0
    assert json.loads(out)["fits"] is False
    assert "does not fit is a result too" in " ".join(run(capsys, "simulate", "--help")[1].split())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("family: gpt\nlayers: 2", "this is a model file, not a plan; windtunnel plan"),
        ("gpus_per_node: 8", "this is a cluster file, not a plan"),
        ("stages: []", "this is a file without windtunnel_plan, not a plan"),
    ],
)
def test_another_file_in_the_place_of_a_plan_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: str
) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(content)
    code, _, error = run(capsys, "simulate", path)
    assert code == 2
    assert words in error
    assert error.count("\n") == 1


def test_what_an_option_refuses_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "plan", *PROBLEM, "--tp", "eight")
    assert code == 2
    assert "--tp" in error
    assert "got 'eight'" in error


def test_an_imported_plan_can_be_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, found, output = tmp_path / "two.yaml", tmp_path / "galvatron.json", tmp_path / "plan.yaml"
    model.write_text("family: gpt\nlayers: 2\nhidden: 256\nheads: 4\nseq_len: 128\nvocab: 1024\n")
    strategy = {"pp_deg": 2, "tp_sizes_enc": "1,2", "tp_consecutive_flags": "1,0", "dp_types_enc": "1,0",
                "checkpoint": "1,0", "global_bsz": 8, "chunks": 2, "pp_division": "1,1",
                "pipeline_type": "pipedream_flush", "default_dp_type": "ddp"}  # fmt: skip
    found.write_text(json.dumps(strategy))
    problem = ["-m", model, "-c", "v100-32g-dgx1:1x8", "-b", 8]
    code, out, error = run(capsys, "import-plan", "galvatron", found, *problem, "-o", output, "--json")
    assert code == 0, error
    summary = json.loads(out)
    assert summary["output"] == str(output)
    assert len(summary["plan"]["stages"]) == 2
    assert output.is_file()


def test_a_small_plan_is_told_in_units_that_suit_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "small.yaml"
    model.write_text("{family: gpt, name: small, layers: 2, hidden: 64, heads: 2, seq_len: 32, vocab: 128}\n")
    path = tmp_path / "plan.yaml"
    options = ["--model", model, "--cluster", "v100-32g-dgx1:1x1", "-b", 1, "-o", path]
    code, out, error = run(capsys, "plan", *options)
    assert code == 0, error
    words = " ".join(out.split())
    assert " ms for 1 sample of 32 tokens, peak " in words and " MiB, fits" in words
    assert "tokens/s per GPU (1 GPU)" in run(capsys, "simulate", path)[1]


def test_pictures_have_no_tokens_and_quick_runs_all_their_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = ["-m", "resnet-50", "-c", "h100-dgx:1x8", "-b", 256]
    assert run(capsys, "plan", *problem, "--microbatch", 32, "-o", tmp_path / "plan.yaml")[0] == 0
    words = run(capsys, "simulate", tmp_path / "plan.yaml")[1]
    assert "tokens" not in words and re.search(r"throughput +\d\d,\d{3} samples/s \(8 GPUs\)", words), words
    row = run(capsys, "compare", *problem, "--searchers", "ddp", "--budget", 5)[1].splitlines()[-2].split()
    assert re.fullmatch(r"0\.0\d{3,4}", row[1]) and re.fullmatch(r"\d\d,\d{3}\.\d\d", row[2]) and row[3] == "-", row
