"""`windtunnel reproduce` writes what an experiment found, and says clearly what it cannot do."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.reproduce import registry
from experiments.reproduce.experiment import QUICK, Context, Experiment, Report, Verdict

CALLS: list[Context] = []


def run(context: Context) -> Report:
    CALLS.append(context)
    figure, axes = plt.subplots()
    axes.plot([1, 2])
    plt.close(figure)
    return Report(
        tables={"cells": pd.DataFrame({"model": ["a|b", "<b>"], "ours_s": [1.23456, float("nan")]})},
        figures={"curve": figure},
        verdicts=[Verdict("a claim", "ours <= 2", "1.23", True), Verdict("another", "n > 1", "1", None)],
        notes=["a note"],
    )


def needs_data(context: Context) -> Report:
    context.data_file("nowhere/to/be.found")
    raise AssertionError("unreachable")


@pytest.fixture
def experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    known = {
        "paper-one": Experiment("paper-one", "Shows one.", "Paper, Table 1", f"{__name__}:run"),
        "paper-two": Experiment("paper-two", "Shows two.", "Paper, Table 2", f"{__name__}:needs_data"),
    }
    monkeypatch.setattr(registry, "EXPERIMENTS", known)


def test_partial_results_are_shared_with_an_experiment_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(each.shares in ("", *registry.EXPERIMENTS) for each in registry.EXPERIMENTS.values())
    sharing = Experiment("paper-three", "Shows three.", "Paper, Table 3", f"{__name__}:run", shares="paper-one")
    monkeypatch.setattr(registry, "EXPERIMENTS", {"paper-three": sharing})
    CALLS.clear()
    done = CliRunner().invoke(app, ["reproduce", "paper-three", "-o", str(tmp_path), "--quick"])
    assert done.exit_code == 0, done.output
    assert CALLS[0].scratch == tmp_path / "paper-one" / "partial"
    assert (tmp_path / "paper-three" / "report.html").is_file()


@pytest.mark.usefixtures("experiments")
def test_a_report_is_written_with_tables_figures_and_verdicts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "paper-one", "-o", str(tmp_path), "--quick", "--seed", "3"])
    assert done.exit_code == 0, done.output
    assert "holds: a claim" in done.output and "not decided: another" in done.output
    assert CALLS[0].quick and CALLS[0].seed == 3 and CALLS[0].scratch.is_dir()
    folder = tmp_path / "paper-one"
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert pd.read_csv(folder / "cells.csv")["ours_s"][0] == 1.23456
    html = (folder / "report.html").read_text()
    assert "data:image/png;base64," in html and "http:" not in html and "https:" not in html
    assert "&lt;b&gt;" in html and "<b>" not in html  # what comes from outside is escaped
    assert "a\\|b" in (folder / "report.md").read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["tables"]["cells"][1]["ours_s"] is None
    assert report["notes"][0] == QUICK and QUICK in (folder / "report.md").read_text()


@pytest.mark.usefixtures("experiments")
def test_one_experiment_that_cannot_run_is_an_error_and_among_many_a_message(tmp_path: Path) -> None:
    alone = CliRunner().invoke(app, ["reproduce", "paper-two", "-o", str(tmp_path)])
    assert isinstance(alone.exception, ValueError) and "needs nowhere/to/be.found" in str(alone.exception)
    among = CliRunner().invoke(app, ["reproduce", "paper", "-o", str(tmp_path), "--json"])
    assert among.exit_code == 0 and "paper-two did not run" in among.output


@pytest.mark.usefixtures("experiments")
def test_an_unknown_experiment_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="paper-one"):
        registry.experiments_named("paper-on")


def test_every_experiment_has_a_function_that_exists() -> None:
    import importlib

    for experiment in registry.EXPERIMENTS.values():
        module, _, function = experiment.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), experiment.name
