"""Profiling: repeated often enough, resumed after an interrupt, never mixed with another machine's parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the profiler needs torch (extra: validation)")

from hardware_models.cluster import parse_cluster  # noqa: E402
from hardware_models.collective_table import CollectiveTable  # noqa: E402
from hardware_models.group_shapes import GroupShape  # noqa: E402
from hardware_models.model import HardwareModel  # noqa: E402
from hardware_models.runtime_files import load_runtime  # noqa: E402
from simulator.problem import Problem, ProblemSpec  # noqa: E402
from tests.experiments.commands import run  # noqa: E402
from tests.validation.test_faults import workers_of  # noqa: E402
from validation.execution.launch import Worker  # noqa: E402
from validation.measurement import Measurement  # noqa: E402
from validation.profiling import communication_times, operator_memory, profile_run  # noqa: E402
from validation.profiling.group_times import KINDS, measure_groups  # noqa: E402
from validation.profiling.machine_profile import load_machine_profile  # noqa: E402
from validation.profiling.profile_journal import Journal  # noqa: E402
from validation.profiling.profile_run import ProfileOptions, profile_work, run_profile  # noqa: E402
from validation.profiling.sampling import MIN_SAMPLES, is_enough, spread  # noqa: E402
from workloads.models.gpt import GPTSpec  # noqa: E402
from workloads.registry import build_from_spec  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "family: gpt\nname: small\nlayers: 2\nhidden: 64\nheads: 2\nseq_len: 32\nvocab: 128\n"
    "dropout: 0.0\nattention_dropout: 0.0\n"
)


def small() -> Problem:
    runtime = load_runtime("windtunnel-executor-fp32")
    spec = GPTSpec.model_validate(
        {"name": "small", "layers": 2, "hidden": 64, "heads": 2, "seq_len": 32, "vocab": 128, "dropout": 0.0,
         "attention_dropout": 0.0}
    )  # fmt: skip
    workload = build_from_spec(spec, runtime.attention)
    return Problem(workload, HardwareModel(parse_cluster("local-cpu:1x2")), runtime, 2)


# Often enough


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=30), st.integers(1, 40), st.floats(0.001, 0.5))
def test_sampling_stops_at_the_cap_and_never_before_three(samples: list[float], cap: int, wanted: float) -> None:
    enough = is_enough(samples, cap=cap, wanted=wanted)
    if len(samples) >= cap:
        assert enough
    elif len(samples) < MIN_SAMPLES:
        assert not enough
    else:
        assert enough == (spread(samples) <= wanted)


@given(st.lists(st.floats(0.99, 1.01), min_size=8, max_size=30), st.floats(2.0, 1e6))
def test_one_disturbed_sample_does_not_matter(samples: list[float], disturbed: float) -> None:
    assert spread([*samples, disturbed]) < 0.02


def test_the_spread_is_half_the_range_of_the_middle_half_over_the_median() -> None:
    """Of four samples all count; of nine the third to the seventh."""
    assert spread([2.0, 4.0, 4.0, 5.0]) == 1.5 / 4.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 99.0]) == 2.0 / 5.0
    assert spread([0.0, 0.0, 0.0]) == spread([3.0]) == 0.0


def test_a_larger_message_that_took_less_shows_what_smaller_ones_take() -> None:
    rows = [("all_reduce", 2, 1.0, 5.0), ("all_reduce", 2, 2.0, 3.0), ("all_reduce", 2, 4.0, 4.0)]
    others = [("all_reduce", 4, 8.0, 1.0), ("all_gather", 2, 8.0, 1.0)]
    lowered = [("all_reduce", 2, 1.0, 3.0), *rows[1:], *others]
    assert communication_times._no_smaller_is_slower([*rows, *others]) == lowered


# The journal

IDENTITY = {"machine": "this", "versions": "torch 1", "microbatch sizes": "[1]"}


def test_parts_are_kept_and_found_again(tmp_path: Path) -> None:
    first = Journal(tmp_path / "p", IDENTITY, "today")
    first.add({"a": 1})
    first.add({"b": [1.5, "x"], "c": None})
    again = Journal(tmp_path / "p", IDENTITY, "tomorrow")
    assert (again.results, again.date) == ({"a": 1, "b": [1.5, "x"], "c": None}, "today")
    assert "a" in again and "d" not in again
    again.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", list(IDENTITY))
def test_parts_of_something_else_are_refused_by_name(tmp_path: Path, what: str) -> None:
    Journal(tmp_path / "p", IDENTITY, "today").add({"a": 1})
    with pytest.raises(
        ValueError,
        match=rf"is of another {what} \({IDENTITY[what].replace('[', '.').replace(']', '.')}; this is other\)",
    ):
        Journal(tmp_path / "p", {**IDENTITY, what: "other"}, "today")
    assert Journal(tmp_path / "p", IDENTITY, "today").results == {"a": 1}


def test_a_truncated_partial_profile_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "p"
    Journal(path, IDENTITY, "today").add({"a": {"b": [1.0, 2.0]}})
    text = path.read_text()
    for cut in range(0, len(text) - 2, 7):
        path.write_text(text[:cut])
        with pytest.raises(ValueError, match="--restart"):
            Journal(path, IDENTITY, "today")
        assert path.read_text() == text[:cut]


def test_a_failed_write_keeps_the_old_parts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "p", IDENTITY, "today")
    journal.add({"a": 1})
    with pytest.raises(ValueError):
        journal.add({"b": float("nan")})
    assert Journal(tmp_path / "p", IDENTITY, "today").results == {"a": 1}


# The runner, with measuring replaced


def interrupt() -> None:
    raise KeyboardInterrupt


class Machine:
    """Counts what is measured, and interrupts at a given call, or does what else is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.stop_at = -1
        self.stop: Callable[[], None] = interrupt
        self.measured: list[str] = []
        self.times = lambda turn: 1.0
        self.turns: dict[str, int] = {}
        monkeypatch.setattr(
            profile_run, "measure_host", lambda **_: self._part("host", Plain(launch_s=1e-6, repeats=3, spread=0.0))
        )
        monkeypatch.setattr(
            profile_run, "measure_memory", lambda p, s, d, **_: self._part(f"memory {s} {d}", [("x", 1.0, 2.0, 3.0)])
        )
        monkeypatch.setattr(profile_run, "measure_groups", lambda w, n, **_: self._part(f"groups {n}", ([], [])))
        monkeypatch.setattr(profile_run, "measure_overlap", lambda **_: self._part("overlap", []))
        monkeypatch.setattr(profile_run, "execute_rounds", self._rounds)
        monkeypatch.setattr(profile_run, "_profile", lambda work, journal, rounds: rounds)

    def _part(self, name: str, value: Any) -> Any:
        self.calls += 1
        if self.calls == self.stop_at:
            self.stop()
        self.measured.append(name)
        return value

    def _rounds(self, jobs: Any, **_: Any) -> list[list[Measurement]]:
        hashes = [job.plan.canonical_hash(job.problem.workload) + str(job.measure_operators) for job in jobs]
        self._part("+".join(hashes), None)
        turn = []
        for each in hashes:
            self.turns[each] = self.turns.get(each, 0) + 1
            seconds = self.times(self.turns[each])
            turn.append(
                Measurement(
                    seconds, (seconds,), 1, 1, 1, (1.0,), (1.0,), 0.1, (1.0,), (), (), {}, each, "cpu", "none", {}
                )
            )
        return [turn]


class Plain:
    """An object with these fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


OPTIONS = ProfileOptions((1, 2), (1,), group_sizes=(2,), chunk_s=0.0)


def test_an_interrupt_anywhere_is_resumed_and_nothing_is_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    work = profile_work(small(), OPTIONS)
    whole = Journal(tmp_path / "whole", work.identity, "today")
    assert run_profile(work, whole) == MIN_SAMPLES
    expected, count = sorted(machine.measured), machine.calls
    assert count == len(work.parts) + MIN_SAMPLES * len(work.job_s)
    for stop_at in range(1, count + 1):
        machine.calls, machine.measured, machine.turns, machine.stop_at = 0, [], {}, stop_at
        path = tmp_path / f"stopped{stop_at}"
        with pytest.raises(KeyboardInterrupt):
            run_profile(work, Journal(path, work.identity, "today"))
        machine.stop_at = -1
        resumed = Journal(path, work.identity, "tomorrow")
        assert run_profile(work, resumed) == MIN_SAMPLES
        assert sorted(machine.measured) == expected, stop_at
        assert set(resumed.results) == set(whole.results)


def test_a_profile_that_is_terminated_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Slurm ends a job whose time is over."""
    before = signal.getsignal(signal.SIGTERM)
    machine = Machine(monkeypatch)
    machine.stop_at, machine.stop = 3, lambda: os.kill(os.getpid(), signal.SIGTERM)
    model, output = tmp_path / "model.yaml", tmp_path / "machine.json"
    model.write_text(MODEL)
    code, _, error = run(capsys, "profile", "-m", model, "-c", "local-cpu:1x2", "-o", output)
    assert code == 130 and "interrupted; 2 parts are in" in error
    assert len(json.loads((tmp_path / "machine.json.partial").read_text())["results"]) == 2
    assert not output.exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_rounds_go_on_while_times_are_unsteady_and_end_at_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    work = profile_work(small(), replace(OPTIONS, max_rounds=7))
    machine.times = lambda turn: 1.0 if turn % 2 else 1.5
    assert run_profile(work, Journal(tmp_path / "a", work.identity, "today")) == 7
    machine.turns = {}
    machine.times = lambda turn: 1.5 if turn == 1 else 1.0  # the first is disturbed; steady from the fifth on
    assert run_profile(work, Journal(tmp_path / "b", work.identity, "today")) == 5


def test_a_profile_may_be_resumed_with_more_rounds_and_not_with_other_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch)
    machine.times = lambda turn: 1.0 if turn % 2 else 1.5
    work = profile_work(small(), replace(OPTIONS, max_rounds=3))
    run_profile(work, Journal(tmp_path / "p", work.identity, "today"))
    more = profile_work(small(), replace(OPTIONS, max_rounds=4))
    machine.measured = []
    assert run_profile(more, Journal(tmp_path / "p", more.identity, "today")) == 4
    assert len(machine.measured) == len(more.job_s)
    other = profile_work(small(), replace(OPTIONS, microbatch_sizes=(1,)))
    with pytest.raises(ValueError, match="another microbatch sizes"):
        Journal(tmp_path / "p", other.identity, "today")


def test_what_it_costs_grows_with_what_is_asked_for() -> None:
    few = profile_work(small(), ProfileOptions((1,), skip=("memory", "overlap")))
    many = profile_work(small(), ProfileOptions((1, 2, 4), (1, 2), group_sizes=(2,)))
    assert 0 < few.estimate_s()[0] < many.estimate_s()[0] < many.estimate_s()[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ProfileOptions((1,), group_sizes=(3,)), "2 to 2 ranks"),
        (ProfileOptions((1,), skip=("time",)), "must be of host, memory, groups, overlap"),
        (ProfileOptions(()), "at least one size"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(options: ProfileOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_work(small(), options)


# Measuring


def test_saved_and_temporary_bytes_are_measured() -> None:
    problem = small()
    worker = Worker(0, 1, None, torch.device("cpu"))  # type: ignore[arg-type]
    found = {role: rest for role, *rest in operator_memory._memory(worker, (problem, 2, 1))}
    assert set(found) == {op.role for op in problem.workload.operators}
    tokens, hidden, ffn = 2 * 32, 64, 256
    assert found["mlp_linear_1"][0] == 4 * tokens * hidden  # its input
    assert found["mlp_activation"][0] == 4 * tokens * ffn
    assert all(min(parts) >= 0 for parts in found.values())
    split = {role: rest for role, *rest in operator_memory._memory(worker, (problem, 2, 2))}
    assert split["mlp_activation"][0] == 4 * tokens * ffn // 2
    assert split["norm_1"] == found["norm_1"]  # every rank has the whole


def test_collectives_over_real_processes_are_a_table() -> None:
    rows, notes = measure_groups(2, 2, sizes=(1024, 65536), cap=4)
    table = CollectiveTable.from_rows(rows, "here")
    assert {kind for kind, _ in table.series} | {note.split(" over")[0] for note in notes} == set(KINDS)
    assert {"all_reduce", "transfer_intra_node"} <= {kind for kind, _ in table.series}
    for (_, shape), points in table.series.items():
        assert shape == GroupShape(2)
        assert points[0][1] <= points[1][1]


def windtunnel(*words: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from experiments.cli import main; main()", *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


@pytest.mark.measured
def test_a_profile_killed_in_the_middle_goes_on_and_leaves_no_process(tmp_path: Path) -> None:
    model, output = tmp_path / "model.yaml", tmp_path / "machine.json"
    model.write_text(MODEL)
    words = (
        "profile",
        "-m",
        model,
        "-c",
        "local-cpu:1x2",
        "--rounds",
        1,
        "--skip",
        "memory,groups,overlap",
        "-o",
        output,
    )
    partial = tmp_path / "machine.json.partial"
    first = windtunnel(*words)
    deadline = time.monotonic() + 120
    while not (partial.exists() and workers_of(first.pid)) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # the launch cost is measured; the plans' processes are starting
    workers = workers_of(first.pid)
    first.send_signal(signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 130, out + err
    assert workers, "it was interrupted while processes ran"
    assert "the same command goes on" in err.replace("\n", " ")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert not output.exists()
    launch_s = json.loads(partial.read_text())["results"]["host"]["launch_s"]

    stranger = tmp_path / "other.json"
    (tmp_path / "other.json.partial").write_text(partial.read_text().replace('"machine": "', '"machine": "not '))
    refused = windtunnel(*words[:-1], stranger)
    out, err = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "another machine (not " in err.replace("\n", " ")

    second = windtunnel(*words)
    out, err = second.communicate(timeout=180)
    assert second.returncode == 0, err
    assert "next: launches" not in err and "next: round 1" in err
    assert workers_of(os.getpid()) == []
    assert not partial.exists()
    profile = load_machine_profile(output)
    assert {each.name: each.value for each in profile.measurements}["host: one launch"] == launch_s
    spec = ProblemSpec(str(model), "local-cpu:1x2", "windtunnel-executor-fp32", 4, profile=str(output))
    assert spec.load().hardware.operator_profile == profile.operators
    profile.check_machine()
    for cut in range(100, output.stat().st_size - 2, 997):
        (tmp_path / "cut.json").write_bytes(output.read_bytes()[:cut])
        with pytest.raises(ValueError, match=r"cut\.json"):
            load_machine_profile(tmp_path / "cut.json")


def test_gpus_that_this_machine_lacks_are_told_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    words = ("-m", "gpt3-350m", "-c", "a100-80g-dgx:1x1", "-r", "windtunnel-executor", "-o", tmp_path / "machine.json")
    code, _, error = run(capsys, "profile", "--device", "cuda", *words)
    assert code == 2 and "error: 1 process on cuda needs 1 GPU, got 0" in error
    assert not list(tmp_path.iterdir())


def test_what_a_profile_would_cost_needs_no_file_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(MODEL)
    code, out, error = run(capsys, "profile", "-m", model, "-c", "local-cpu:1x2", "--dry-run", "--json")
    assert code == 0 and "minutes" in error
    assert 0 < json.loads(out)["least_s"] <= json.loads(out)["most_s"]
    code, _, error = run(capsys, "profile", "-m", "gpt3-175b", "-c", "local-cpu:1x2", "--dry-run")
    assert code == 0 and "gpt3-175b at tensor degree 1 take 2,602 GiB, of" in " ".join(error.split())
    code, _, error = run(capsys, "profile", "-m", model, "-c", "local-cpu:1x2")
    assert code == 2 and "error: a profile must have a file, got no --output" in error
    assert list(tmp_path.iterdir()) == [model]
