"""The commands profile and validate, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.commands.validate import parse_share, require_torch
from hardware_models.calibration_file import load_calibration
from simulator.plan_file import save_plan
from simulator.problem import ProblemSpec
from simulator.uniform import uniform_plan

ROOT = Path(__file__).parents[2]
MODEL = (
    "family: gpt\nname: small\nlayers: 2\nhidden: 64\nheads: 2\nseq_len: 32\nvocab: 128\n"
    "dropout: 0.0\nattention_dropout: 0.0\n"
)


def windtunnel(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from experiments.cli import main; main()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=180)


def test_without_torch_one_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install"):
        require_torch()


@pytest.mark.parametrize("text", ["", "twenty", "-3%", "0", "nan"])
def test_a_limit_is_a_positive_share(text: str) -> None:
    with pytest.raises(ValueError, match="20%"):
        parse_share(text)


def test_a_misspelt_campaign_is_answered_with_the_nearest() -> None:
    pytest.importorskip("torch")
    done = windtunnel("validate", "cpu-glo")
    assert done.returncode == 2
    assert "got 'cpu-glo'; did you mean 'cpu-gloo'?" in done.stderr


@pytest.mark.measured
def test_a_machine_is_profiled_and_a_plan_validated(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, profile, plan = tmp_path / "model.yaml", tmp_path / "out" / "machine.json", tmp_path / "plan.yaml"
    model.write_text(MODEL)
    done = windtunnel("profile", "-m", model, "-c", "local-cpu:1x2", "--microbatches", "2", "--rounds", "1",
                      "--skip", "host,memory,groups,overlap", "-o", profile, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["output"] == str(profile)
    assert summary["operator_rows"] == len(load_calibration(profile).operators.rows)
    spec = ProblemSpec(str(model), "local-cpu:1x2", "windtunnel-executor-fp32", 6)
    save_plan(plan, spec, uniform_plan(spec.load(), pp=2, microbatch=2))
    words = ("--profile", profile, "-o", tmp_path / "out", "--rounds", "1")
    done = windtunnel("validate", plan, *words, "--limit", "0.0000001%", "--json")
    assert done.returncode == 1, done.stderr
    (report,) = json.loads(done.stdout)["plans"]
    names = [f"stage {stage} {word}" for stage in (0, 1) for word in ("forward", "backward")]
    assert [each["name"] for each in report["quantities"]] == ["iteration", *names]
    assert all(each["measured_s"] > 0 and each["predicted_s"] > 0 for each in report["quantities"])
    assert report["measured_share"] > 0.99
    # The same folder goes on: nothing is executed again, and a person gets the split as a table.
    done = windtunnel("validate", plan, *words)
    assert done.returncode == 0, done.stderr
    assert "1 of them kept from an earlier call" in done.stderr.replace("\n", " ")
    assert "stage 1 backward" in done.stdout and "cause forward" in done.stdout
    assert (tmp_path / "out" / "traces" / "plan.json.gz").is_file()
    stranger = tmp_path / "stranger.json"
    stranger.write_text(json.dumps({**json.loads(profile.read_text()), "machine": "Pentium"}))
    done = windtunnel("validate", plan, "--profile", stranger)
    assert done.returncode == 2
    assert "another machine (Pentium" in done.stderr.replace("\n", " ")
