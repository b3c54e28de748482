"""How commands end that cannot write, or are interrupted: said at once, and what there is is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.console import fail
from experiments.interrupts import one_interrupt
from experiments.run_files import files_of_runs
from experiments.run_table import Common
from searchers.megatron_grid import MegatronGrid
from searchers.pure import DistributedDataParallel
from simulator.plan_file import load_plan
from tests.experiments.commands import run

ROOT = Path(__file__).parents[2]
MODEL, CLUSTER = ["--model", "gpt3-350m"], ["--cluster", "v100-32g-dgx1:1x2"]
PROBLEM = [*MODEL, *CLUSTER, "-b", "16"]
TINY = "{family: gpt, layers: 2, hidden: 256, heads: 4, seq_len: 64, vocab: 512}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", *PROBLEM, "-o"],
        ["search", *PROBLEM, "-s", "ddp", "-o"],
        ["simulate", "plan.yaml", "--trace"],
        ["simulate", "plan.yaml", "--timeline"],
        ["simulate", "plan.yaml", "--memory"],
        ["diff", "a.yaml", "b.yaml", "--plot"],
        ["calibrate", "runs", "runs.csv", "-o"],
        ["calibrate", "runs", "runs.csv", "--plot"],
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_any_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "file").write_text("kept")
    code, out, error = run(capsys, *arguments, file / "below")
    assert (code, out) == (2, "")
    assert f"error: output must be a folder, got the file {file}" in error.replace("\n", "")
    assert file.read_text() == "kept"


@pytest.mark.parametrize(
    "arguments",
    [["simulate", "plan.yaml", "--trace", "{}", "--timeline"], ["predict", "{}", "-c", "a100-80g-dgx", "-r",
     "megatron-lm-2021", "-o", "{}", "--plot"]],
)  # fmt: skip
def test_two_outputs_are_two_files(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, row = "model,microbatch,global_batch,gpus,iteration_time_s", "gpt3-350m,1,8,8,0.5"
    (same := tmp_path / "same").write_text(f"{head}\n{row}\n")
    code, _, error = run(capsys, *(word.format(same) for word in arguments), same)
    assert code == 2 and "outputs must be files of their own" in error
    assert same.read_text().endswith(f"{row}\n"), "untouched"


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "{}", "--trace"],
        ["diff", "{}", "other.yaml", "--plot"],
        ["predict", "{}", "-c", "a100-80g-dgx", "-r", "megatron-lm-2021", "-o"],
        ["predict", "{}", "-c", "a100-80g-dgx", "-r", "megatron-lm-2021", "--plot"],
        ["calibrate", "alpa", "{}", "-o"],
        ["calibrate", "galvatron", "other.json", "{}", "-o"],
        ["calibrate", "kineto", "{}", "--plot"],
        ["calibrate", "machine", "{}", "-o"],
        ["calibrate", "nccl-tests", "other.txt", "{}", "-c", "a100-80g-dgx", "-o"],
        ["calibrate", "runs", "{}", "-c", "a100-80g-dgx", "-o"],
        ["import-plan", "aceso", "{}", *PROBLEM, "-o"],
    ],
)
def test_what_is_read_is_not_written_over(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, row = "model,microbatch,global_batch,gpus,iteration_time_s", "gpt3-350m,1,8,8,0.5"
    (same := tmp_path / "same").write_text(f"{head}\n{row}\n")
    code, _, error = run(capsys, *(word.format(same) for word in arguments), tmp_path / "." / "same")
    assert code == 2 and "outputs must be files of their own" in error
    assert same.read_text() == f"{head}\n{row}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", *CLUSTER, "-m", "{}", "-o"],
        ["plan", *MODEL, "-c", "{}:1x2", "-o"],
        ["plan", *MODEL, *CLUSTER, "-r", "{}", "-o"],
        ["plan", *MODEL, *CLUSTER, "--profile", "{}", "-o"],
        ["search", *CLUSTER, "-m", "{}", "-b", "8", "-s", "ddp", "-o"],
        ["import-plan", "aceso", "plan.json", *CLUSTER, "-m", "{}", "-b", "8", "-o"],
        ["calibrate", "galvatron", "other.json", "-m", "{}", "-o"],
        ["calibrate", "nccl-tests", "log.txt", "-c", "{}", "-o"],
    ],
)
def test_files_that_options_name_are_not_written_over(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (same := tmp_path / "same.yaml").write_text("kept")
    code, _, error = run(capsys, *(word.format(same) for word in arguments), same)
    assert code == 2 and "which is an input too; name another file" in error.replace("\n", " ")
    assert same.read_text() == "kept"


def test_a_searcher_of_ones_own_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own := tmp_path / "mine.py").write_text("raise RuntimeError('was run')")
    code, _, error = run(capsys, "search", *PROBLEM, "-s", f"{own}:Mine", "-o", own)
    assert code == 2 and "which is an input too" in error.replace("\n", " ")


def test_what_a_plan_or_a_table_names_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model := tmp_path / "tiny.yaml").write_text(TINY)
    plan, other, table = tmp_path / "plan.yaml", tmp_path / "other.yaml", tmp_path / "runs.csv"
    assert run(capsys, "plan", *CLUSTER, "-m", model, "-o", plan)[0] == 0
    other.write_text(before := plan.read_text())
    table.write_text("plan,iteration_time_s\nplan.yaml,0.5\n")
    for arguments in (
        ["simulate", plan, "--trace", model],
        ["diff", plan, other, "--plot", model],
        ["predict", table, "-o", plan],
        ["predict", table, "-o", model],
        ["calibrate", "runs", table, "-o", model],
        ["calibrate", "runs", table, "-o", plan],
    ):
        code, _, error = run(capsys, *arguments)
        assert code == 2 and "which is an input too" in error.replace("\n", " "), arguments
    assert (model.read_text(), plan.read_text()) == (TINY, before)


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        (["simulate", "plan.yaml", "--timeline"], "t.svg", "a picture must be a file that ends in .png, got"),
        (["simulate", "plan.yaml", "--trace"], "t.json", "a trace must be a file that ends in .json.gz, got"),
        (["simulate", "plan.yaml", "--trace"], "t.gz", "t.gz; name it"),
        (["diff", "plan.yaml", "plan.yaml", "--plot"], "why", "why; name it"),
        (["predict", "runs.csv", "--plot"], "p.pdf", "ends in .png"),
        (["calibrate", "runs", "runs.csv", "--plot"], "p.jpg", "ends in .png"),
        (["calibrate", "nccl-tests", "log.txt", "-c", "a100-80g-dgx", "--plot"], "p.yaml", "ends in .png"),
        (["list", "strategies", "-o"], "trees.txt", "ends in .png"),
    ],
)
def test_a_picture_or_trace_under_another_name_is_refused_before_any_work(
    arguments: list[str], name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "plan", *PROBLEM, "-o", "plan.yaml")[0] == 0
    Path("runs.csv").write_text("plan,iteration_time_s\nplan.yaml,0.5\n")
    monkeypatch.setattr("simulator.simulate.simulate", None)
    code, out, error = run(capsys, *arguments, name)
    assert (code, out) == (2, "")
    assert words in error and f"name it {'t.json.gz' if 'trace' in error else Path(name).with_suffix('.png')}" in error
    assert not Path(name).exists()


def test_a_table_names_files_by_batch_by_node_and_beside_itself(tmp_path: Path) -> None:
    (table := tmp_path / "runs.csv").write_text("model,cluster\ntiny.yaml@4,v100-32g-dgx1:1x2+node.yaml:1x4\n")
    assert {tmp_path / "tiny.yaml", tmp_path / "node.yaml"} <= set(files_of_runs(table, Common()))


def test_an_error_of_the_system_names_the_file_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "compare", *PROBLEM, "-s", "ddp", "-o", "/proc/comparison")
    assert code == 2 and "got /proc/comparison (No such file" in error and "Errno" not in error
    assert fail(FileNotFoundError(2, "No such file or directory", "plan.yaml")) == 2
    assert "error: plan.yaml: No such file or directory" in capsys.readouterr().err


def test_an_interrupted_search_gives_what_it_has_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    score = MegatronGrid.score
    scored: list[object] = []

    def interrupted(self: MegatronGrid, plan: object, problem: object) -> object:
        if len(scored) == 3:
            raise KeyboardInterrupt
        scored.append(score(self, plan, problem))  # type: ignore[arg-type]
        return scored[-1]

    monkeypatch.setattr(MegatronGrid, "score", interrupted)
    code, out, error = run(capsys, "search", *PROBLEM, "-s", "megatron-grid", "-o", tmp_path / "plan.yaml")
    assert code == 130
    assert "3 evaluations" in out and "interrupted; what had been found is simulated" in error
    assert load_plan(tmp_path / "plan.yaml")[1].global_batch == 16


def test_an_interrupt_before_anything_was_found_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DistributedDataParallel, "score", interrupted)
    code, out, error = run(capsys, "search", *PROBLEM, "-s", "ddp", "-o", tmp_path / "plan.yaml")
    assert (code, out) == (130, "") and "interrupted; no plan that fits had been found" in error
    assert not (tmp_path / "plan.yaml").exists()


def compiled_code_that_is_interrupted(*_: object) -> None:
    """Fail as CPython does when a compiled function returns while an interrupt is pending."""
    raise SystemError("returned a result with an exception set") from KeyboardInterrupt()


def test_an_interrupt_inside_compiled_code_is_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), one_interrupt():
        compiled_code_that_is_interrupted()
    with pytest.raises(SystemError), one_interrupt():
        raise SystemError("a mistake of ours")
    monkeypatch.setattr(DistributedDataParallel, "score", compiled_code_that_is_interrupted)
    code, _, error = run(capsys, "compare", *PROBLEM, "-s", "fsdp,ddp", "-o", tmp_path / "out")
    assert code == 130 and "finished searchers are kept in" in error
    assert [path.name for path in (tmp_path / "out" / "rows").iterdir()] == ["fsdp.json"], "not ddp, as its mistake"


def class_that_is_interrupted_as_it_is_made(*_: object) -> None:
    """Fail as CPython 3.11 does when an interrupt falls into ``__set_name__``, which dataclasses' fields have."""
    raise RuntimeError("Error calling __set_name__ on 'Field' instance") from KeyboardInterrupt()


def test_an_interrupt_inside_a_class_statement_is_an_interrupt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistributedDataParallel, "score", class_that_is_interrupted_as_it_is_made)
    code, out, error = run(capsys, "search", *PROBLEM, "-s", "ddp", "-o", tmp_path / "plan.yaml")
    assert (code, out) == (130, "") and "Traceback" not in error
    with pytest.raises(RuntimeError), one_interrupt():
        raise RuntimeError("a mistake of ours")
    (tmp_path / "mine.py").write_text(
        "class Interrupted:\n    def __set_name__(self, owner, name):\n        raise KeyboardInterrupt\n"
        "class Mine:\n    field = Interrupted()\n"
    )
    code, _, error = run(capsys, "search", *PROBLEM, "-s", tmp_path / "mine.py:Mine")
    assert code == 130 and "must run as Python" not in error


def unread(*words: str, unbuffered: bool = False) -> tuple[int, str]:
    """Return exit code and standard error of Python with a standard output that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", [["list", "models", "--json"], ["list", "models"], ["--version"]])
def test_output_that_nobody_reads_is_no_limit_that_was_not_met(arguments: list[str], unbuffered: bool) -> None:
    assert unread("-m", "windtunnel", *arguments, unbuffered=unbuffered) == (141, "")


def test_what_goes_wrong_is_told_though_nobody_reads_the_output() -> None:
    code = (
        "import sys, experiments.cli as cli\n"
        "@cli.app.command('prints')\n"
        "def prints(): print('something'); raise ValueError('what is wrong')\n"
        "sys.argv = ['windtunnel', 'prints']; cli.main()"
    )
    assert "error: what is wrong" in unread("-c", code)[1]


def test_a_searcher_file_that_exits_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)\n")
    code, _, error = run(capsys, "search", *PROBLEM, "-s", tmp_path / "mine.py:Mine")
    assert code == 2 and "it raised SystemExit: 3" in error


TERMINATED = """
import os, signal
from searchers.base import CandidateSearcher
from simulator.uniform import uniform_plan


class Mine(CandidateSearcher):
    name, paper = "mine", "none"

    def candidates(self, problem, random, ledger):
        yield uniform_plan(problem)
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_search_that_is_terminated_keeps_what_it_had_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Slurm ends a job whose time is over."""
    before = signal.getsignal(signal.SIGTERM)
    (tmp_path / "mine.py").write_text(TERMINATED)
    code, _, error = run(capsys, "search", *PROBLEM, "-s", tmp_path / "mine.py:Mine", "-o", tmp_path / "plan.yaml")
    assert code == 130 and "what had been found is simulated" in error
    assert (tmp_path / "plan.yaml").exists()
    assert signal.getsignal(signal.SIGTERM) is before


SLOW_TO_LOAD = """
import time
print("loading", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("start", [["-m", "windtunnel"], ["-c", "from experiments.entry import main; main()"]])
def test_an_interrupt_while_the_command_loads_is_told_without_a_traceback(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(SLOW_TO_LOAD)  # found first: the command is caught in the middle of its imports
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen(
        [sys.executable, *start, "list", "models"],
        env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "interrupted\n")


def test_an_ignored_interrupt_stays_ignored_and_a_command_that_runs_raises_it() -> None:
    code = (
        "import signal; from experiments.interrupts import end_at_interrupt, raise_interrupts; "
        "signal.signal(signal.SIGINT, signal.SIG_IGN); end_at_interrupt(); raise_interrupts(); "
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); end_at_interrupt(); raise_interrupts(); "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_interrupt_that_falls_into_a_callback_is_raised_again() -> None:
    """Python drops what is raised there, and the command would run on."""
    code = """
import time
from experiments.interrupts import end_at_interrupt, raise_interrupts

class Ending:
    def __del__(self):
        raise KeyboardInterrupt

end_at_interrupt()
raise_interrupts()
try:
    Ending()
    time.sleep(20)
except KeyboardInterrupt:
    raise SystemExit(130)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["simulate", "plan.yaml", "--without", "host", "--without", "contention"], "separate its values by commas"),
        (["compare", *PROBLEM, "-s", "ddp", "--searchers", "fsdp"], "separate its values by commas"),
        (["reproduce", "leaderboard", "--searcher", "a.py:A", "--searcher", "b.py:B"], "separate its values by commas"),
        (["plan", *PROBLEM, "--tp", "2", "--tp", "4"], "leave out all but one"),
    ],
)
def test_an_option_given_twice_is_refused(
    arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, *arguments)
    told = " ".join(error.replace("│", " ").split())
    assert code == 2 and f"must be given once, got it 2 times; {remedy}" in told
