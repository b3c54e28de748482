"""Campaigns that are interrupted, continued, or given something else: nothing is lost, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

import typer  # noqa: E402

from datafiles.writer import dump_yaml  # noqa: E402
from experiments.commands.campaign import validate_campaign  # noqa: E402
from experiments.commands.validate import validate_file  # noqa: E402
from tests.validation.test_campaign_files import mapping  # noqa: E402
from tests.validation.test_faults import ROOT, wait_until, workers_of  # noqa: E402
from validation.campaigns import run as campaign_run  # noqa: E402
from validation.campaigns.definition import campaign_from_mapping, load_campaign  # noqa: E402
from validation.campaigns.profiles import load_calibrations, save_calibration  # noqa: E402
from validation.campaigns.run import fastest_round, finished_rounds, load_rounds, run_campaign  # noqa: E402
from validation.campaigns.work import campaign_work  # noqa: E402

ALONE = mapping(
    name="alone",
    cluster="local-cpu:1x1",
    options={"iterations": 1, "warmup": 0},
    calibration=[{"model": "gpt", "microbatch": 2, "num_microbatches": 3}],
    report=[{"model": "gpt", "microbatch": 2, "num_microbatches": 2}],
)
"""One process, so that a round is a few seconds."""


def command(campaign: Path, folder: Path, rounds: int) -> list[str]:
    code = "from experiments.cli import main; main()"
    return [sys.executable, "-c", code, "validate", str(campaign), "-o", str(folder), "--rounds", str(rounds)]


@pytest.mark.measured
def test_an_interrupted_campaign_keeps_what_is_finished_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign, folder = tmp_path / "alone.yaml", tmp_path / "out"
    campaign.write_text(dump_yaml(ALONE))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command(campaign, folder, 50), cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    first, second = folder / "rounds" / "001-gpt.json", folder / "rounds" / "002-gpt.json"
    workers: list[int] = []

    def under_way() -> bool:
        workers[:] = workers_of(process.pid)
        return first.exists() and not second.exists() and bool(workers)

    wait_until(under_way, 240)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C: to all of them
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert "interrupted after 1 of 50 rounds; the same command goes on" in errors
    assert "1 round: iteration time off by" in output
    wait_until(lambda: not any(Path(f"/proc/{number}").exists() for number in workers), 30)
    assert (folder / "summary.md").exists()

    stamp = first.stat().st_mtime_ns
    loaded = load_campaign(campaign)
    work = campaign_work(loaded)
    run_campaign(loaded, work, folder, rounds=2)
    assert first.stat().st_mtime_ns == stamp
    assert finished_rounds(loaded, work, folder) == 2
    rounds = list(load_rounds(loaded, work, folder))
    samples = [turn.measured["gpt"][-1].iteration_time_s for turn in rounds]
    assert fastest_round(rounds).measured["gpt"][-1].iteration_time_s == min(samples)

    # What is not this campaign's is refused, whole or damaged.
    other = campaign_from_mapping({**ALONE, "options": {"iterations": 2}}, "other")
    with pytest.raises(ValueError, match=r"has results of another campaign .* give another -o"):
        run_campaign(other, campaign_work(other), folder, rounds=1)
    second.write_text(first.read_text().replace('"plan_hash": "', '"plan_hash": "0', 1))
    with pytest.raises(ValueError, match="does not hold what the campaign runs; remove it to measure again"):
        list(load_rounds(loaded, work, folder))
    second.write_text("{")
    with pytest.raises(ValueError, match="malformed JSON"):
        list(load_rounds(loaded, work, folder))
    second.unlink()

    # A profile of another machine is refused before anything runs.
    from validation.campaigns.fit import fit_campaign

    (calibration,) = fit_campaign(work, rounds[:1]).values()
    save_calibration(calibration, tmp_path / "profiles", "gpt")
    assert load_calibrations(tmp_path / "profiles", work) == {"gpt": calibration}
    own = calibration.profile
    old = replace(own, versions={**own.versions, "torch": "1.0"})
    assert own.other_versions() == "" and "measured with torch 1.0, here 2" in old.other_versions()
    capsys.readouterr()
    run_command(campaign, profile=tmp_path / "profiles", dry_run=True)
    assert "by the profile; nothing is run" in " ".join(capsys.readouterr().out.split())
    rows = tuple(replace(row, parameter_bytes=4 * row.parameter_bytes) for row in own.operators.rows)
    wider = replace(calibration, profile=replace(own, operators=replace(own.operators, rows=rows)))
    save_calibration(wider, tmp_path / "profiles", "gpt")
    with pytest.raises(ValueError, match=r"the profile must be of .*, whose .* has .* weights"):
        load_calibrations(tmp_path / "profiles", work)
    elsewhere = replace(calibration, profile=replace(calibration.profile, machine="Pentium, 1 cores"))
    save_calibration(elsewhere, tmp_path / "profiles", "gpt")
    before = time.monotonic()
    with pytest.raises(ValueError, match=r"the profile is from another machine \(Pentium, 1 cores; this is "):
        run_command(campaign, profile=tmp_path / "profiles", output=tmp_path / "never")
    assert time.monotonic() - before < 60 and not (tmp_path / "never").exists()
    with pytest.raises(ValueError, match=r"the profile must be a folder with gpt\.json"):
        run_command(campaign, profile=tmp_path, output=tmp_path / "never")


def run_command(campaign: Path, *, profile: Path | None = None, output: Path | None = None, **options: object) -> None:
    validate_campaign(
        load_campaign(campaign),
        **{
            "profile": profile, "limit": None, "rounds": 1, "output": output, "dry_run": False,
            "write_cases": None, "as_json": False, **options,
        },  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.skipif(torch.cuda.device_count() >= 4, reason="here it would run")
def test_a_campaign_without_its_devices_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(Path("multi-gpu"))
    assert "skipped: the campaign multi-gpu needs 4 CUDA GPUs, this machine has" in capsys.readouterr().err
    run_command(Path("multi-gpu"), as_json=True)
    assert "needs 4 CUDA GPUs" in json.loads(capsys.readouterr().out)["skipped"]
    with pytest.raises(typer.Exit) as caught:
        run_command(Path("multi-gpu"), limit=0.1)
    assert caught.value.exit_code == 1
    assert "no plan ran" in capsys.readouterr().err


def test_a_dry_run_lists_every_run_and_starts_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(mapping(report=[{"model": "gpt", "pp": 2, "num_microbatches": 4, "schedule": "zb-h1"}])))
    run_command(path, dry_run=True)
    text = capsys.readouterr().out
    for word in ("gpt pp2 gpipe 4x1", "gpt pp2 zb-h1 4x1", "gpt operators 4x2 on 2", "operators in halves", "minutes"):
        assert word in text, word
    assert workers_of(os.getpid()) == []


def test_campaign_options_are_refused_for_a_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("windtunnel_plan: 1\n")
    with pytest.raises(ValueError, match=r"--cluster is for campaigns, got the plan .*; shipped ones are cpu-gloo"):
        validate_file(str(path), cluster="local-cpu:1x2")


def test_a_campaign_says_its_device_itself() -> None:
    with pytest.raises(ValueError, match=r"--device is for plans, got the campaign cpu-gloo, .* its own: cpu"):
        validate_file("cpu-gloo", device="cuda", dry_run=True)


def test_cases_are_of_campaigns_that_have_a_group(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(mapping()))
    with pytest.raises(ValueError, match=r"accuracy cases are of the campaigns cpu-gloo, .* got 'mine'"):
        run_command(path, write_cases=tmp_path / "cases.yaml")


def test_models_that_are_finished_are_reported_where_no_round_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that is lent for less than a round, and what it left behind, elsewhere."""
    models = {name: {**ALONE["models"]["gpt"], "layers": layers} for name, layers in (("first", 1), ("second", 2))}
    plans = {part: [{**ALONE[part][0], "model": list(models)}] for part in ("calibration", "report")}
    campaign = campaign_from_mapping({**ALONE, "models": models, **plans}, "two models")
    run_unit = campaign_run._run_unit

    def until_the_second(campaign, unit, folder, number):  # type: ignore[no-untyped-def]
        if unit.name.startswith("second"):
            raise KeyboardInterrupt
        return run_unit(campaign, unit, folder, number)

    def report() -> str:
        validate_campaign(
            campaign, profile=None, limit=None, rounds=1, output=tmp_path, dry_run=False, write_cases=None,
            as_json=False,
        )  # fmt: skip
        return capsys.readouterr().err

    monkeypatch.setattr(campaign_run, "_run_unit", until_the_second)
    with pytest.raises(typer.Exit) as ended:
        report()
    assert ended.value.exit_code == 130
    shown = capsys.readouterr()
    assert "no round has measured second" in shown.err
    assert "1 round: iteration time off by" in shown.out
    summary = (tmp_path / "summary.md").read_text()
    assert "first" in summary and "second" not in summary

    monkeypatch.setattr(campaign_run, "missing_devices", lambda _: "alone needs 9 CUDA GPUs, this machine has 0")
    assert "nothing is run, since the campaign alone needs 9 CUDA GPUs" in report()
