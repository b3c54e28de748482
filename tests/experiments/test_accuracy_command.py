"""``windtunnel accuracy``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from experiments.accuracy import baseline as accuracy_baseline
from experiments.accuracy import groups as accuracy_groups
from experiments.commands.accuracy import register

GROUP = ("--group", "aceso-gpt-modelled")


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> typer.Typer:
    """The command alone, without public data."""
    monkeypatch.setattr("experiments.cases.sources.BESIDE_REPOSITORY", tmp_path / "none")
    monkeypatch.delenv("WINDTUNNEL_DATA", raising=False)
    built = typer.Typer()
    built.callback()(lambda: None)
    register(built)
    return built


def test_json_has_groups_and_cases_and_nothing_else_on_standard_output(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [group["group"] for group in found["groups"]] == ["aceso-gpt-modelled"]
    assert found["groups"][0]["num_run"] == 1 and len(found["cases"]) == 1


def test_the_table_says_how_many_cases_ran(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--by", "model", "--cases"])
    assert result.exit_code == 0, result.output
    assert "aceso-gpt-modelled" in result.output and "1 case run" in result.output
    assert "aceso_gpt_1_3b.yaml#1" in result.output


def test_an_interrupt_says_that_nothing_is_kept(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.accuracy.run.run_case", interrupted)
    result = CliRunner().invoke(app, ["accuracy", *GROUP])
    assert result.exit_code == 130 and "interrupted; no case is kept" in result.output


def test_a_feature_that_no_run_has_is_refused(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--by", "colour"])
    assert isinstance(result.exception, ValueError)
    assert "--by must name features of the runs" in str(result.exception) and "'colour'" in str(result.exception)


def test_residuals_of_groups_that_miss_their_target(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {"dapple-table5": 0.0001, "aceso-gpt-modelled": 0.9}
    known = accuracy_groups.groups()
    changed = {name: known[name].model_copy(update={"target_time": target}) for name, target in targets.items()}
    monkeypatch.setattr(accuracy_groups, "groups", lambda: {**known, **changed})
    asked = ["accuracy", *GROUP, "--group", "dapple-table5", "--missed"]
    result = CliRunner().invoke(app, asked, env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "time error by feature: dapple-table5" in result.output
    assert "time error by feature: aceso-gpt-modelled" not in result.output
    lines = [line.split() for line in result.output.splitlines()]
    counts = {(line[0], line[1]): line[2] for line in lines if len(line) >= 7}
    assert counts["schedule", "gpipe"] == "3" and counts["microbatches", "16"] == "2"
    joint = CliRunner().invoke(app, [*asked, "--by", "schedule,recompute"], env={"COLUMNS": "140"})
    assert ["gpipe", "full", "2"] in [line.split()[:3] for line in joint.output.splitlines()]


def test_check_exits_with_one_where_a_group_is_worse(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strict = accuracy_baseline.Baseline(
        groups={"aceso-gpt-modelled": accuracy_baseline.GroupBaseline(num_run=1, time_mean_absolute=-1.0)}
    )
    monkeypatch.setattr(accuracy_baseline, "load_baseline", lambda: strict)
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--check"])
    assert result.exit_code == 1
    assert "accepted" in result.output
    assert "furthest off in time: aceso_gpt_1_3b.yaml#1 +" in result.output
    assert "one by one: windtunnel accuracy --group aceso-gpt-modelled --by " in result.output
    assert "time error by feature" not in result.output  # of one case


def test_a_group_that_is_worse_is_tabulated_before_and_now(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted = accuracy_baseline.load_baseline().groups["dapple-table5"]
    shown = accepted.error_by_feature["schedule"]
    assert shown and accepted.time_mean_absolute is not None
    better = accepted.model_copy(
        update={"time_mean_absolute": 0.0, "error_by_feature": {"schedule": dict.fromkeys(shown, 0.015)}}
    )
    monkeypatch.setattr(
        accuracy_baseline, "load_baseline", lambda: accuracy_baseline.Baseline(groups={"dapple-table5": better})
    )
    result = CliRunner().invoke(app, ["accuracy", "--group", "dapple-table5", "--check"], env={"COLUMNS": "140"})
    assert result.exit_code == 1 and "time error by feature: dapple-table5" in result.output
    lines = {tuple(line[:2]): line[2:] for line in map(str.split, result.output.splitlines()) if len(line) > 6}
    for value, error in shown.items():
        assert lines["schedule", value][1:5] == ["1.5", "%", f"{100 * error:.1f}", "%"]
    error, _, bias, _ = lines["recompute", "full"][1:]  # not in this baseline
    assert bias == f"-{error}"


def test_check_passes_on_the_committed_baseline(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--group", "dapple-table5", "--check"])
    assert result.exit_code == 0, result.output


def test_a_baseline_that_moves_for_no_reason_is_refused_before_cases_run(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.cases.sources.all_cases", lambda folder: pytest.fail("cases were made"))
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--accept", " "])
    assert isinstance(result.exception, ValueError) and "--accept must have a text" in str(result.exception)


@pytest.mark.parametrize("more", [["--check"], ["--accept", "why"]])
def test_switched_off_effects_never_meet_the_gate(app: typer.Typer, more: list[str]) -> None:
    result = CliRunner().invoke(app, ["accuracy", *GROUP, "--without", "host", *more])
    assert result.exit_code != 0
    assert isinstance(result.exception, ValueError) and "--without" in str(result.exception)
