"""The leaderboard: its table is what theory says, repeats byte for byte, resumes, and takes a user's searcher."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.reproduce.experiment import Context, Report
from experiments.reproduce.leaderboard import ablations, objective, run
from experiments.reproduce.leaderboard.figures import best_so_far
from experiments.reproduce.leaderboard.problems import NamedProblem, load_problems, sweep_text
from experiments.reproduce.leaderboard.table import per_problem, ranking, with_problems
from experiments.reproduce.registry import EXPERIMENTS
from experiments.reproduce.report import write_report
from experiments.sweep.run import load_sweep
from searchers.registry import searcher_class

TINY = tuple(
    NamedProblem(
        name=f"tiny-{batch}",
        values=(
            ("model", "gpt3-350m"),
            ("cluster", "v100-32g-dgx1:1x2"),
            ("runtime", "megatron-lm-2021"),
            ("global_batch", batch),
        ),
        source="none",
        quick=True,
    )
    for batch in (8, 16)
)
SEARCHERS = ("megatron-grid", "ddp", "deepspeed-3d")
MINE = '''
import windtunnel as wt


class Mine(wt.CandidateSearcher):
    """Two stages."""

    name = "mine"
    paper = "none"

    def candidates(self, problem, random, ledger):
        yield wt.uniform_plan(problem, pp=2, microbatch=1)
'''


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load_problems", lambda: TINY)
    monkeypatch.setattr(run, "searcher_names", lambda: SEARCHERS)


def context(folder: Path, *searchers: str) -> Context:
    folder.mkdir(exist_ok=True)
    return Context(None, folder, quick=True, workers=1, searchers=searchers, say=lambda line: None)


def repeatable(report: Report) -> str:
    """Return all tables but the seconds of searching, as text."""
    return "\n".join(frame.to_csv() for name, frame in report.tables.items() if name != "search_times")


def test_it_repeats_byte_for_byte_and_resumes_with_a_users_searcher(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    first = run.run(context(tmp_path / "a", f"{mine}:Mine"))
    again = run.run(context(tmp_path / "b", f"{mine}:Mine"))
    assert repeatable(first) == repeatable(again)
    runs = sorted((tmp_path / "a" / "sweep" / "runs").glob("*.json"))
    assert len(runs) == 2 * 4
    kept = {path: path.stat().st_mtime_ns for path in runs[2:]}
    for path in runs[:2]:  # as if it had been killed before these two ended
        path.unlink()
    resumed = run.run(context(tmp_path / "a", f"{mine}:Mine"))
    assert repeatable(resumed) == repeatable(first)
    assert all(path.stat().st_mtime_ns == moment for path, moment in kept.items())
    table = first.tables["ranking"].set_index("searcher")
    assert table.loc["mine.py:Mine", "solved"] == 2
    assert table.loc["deepspeed-3d", "not_applicable"] == 2  # it needs four devices, and says so itself
    assert first.verdicts[0].holds
    drawn = {"heat_map", "mean_times", "convergence", "best_plans", "timeline_tiny-8", "memory_tiny-8"}
    assert drawn <= set(first.figures)
    json.dumps(first.tables["runs"].to_dict("records"), default=str)
    # Runs without a plan have no number of evaluations: the whole report is written all the same.
    written = write_report(tmp_path / "report", EXPERIMENTS["leaderboard"], first)
    assert {"report.html", "report.md", "report.json"} <= {path.name for path in written}


def test_with_a_budget_of_seconds_every_searcher_still_has_its_row(tmp_path: Path) -> None:
    report = run.run_timed(context(tmp_path / "a"))
    assert "Budget: 2 seconds" in report.notes[0]
    ranked = report.tables["ranking"].set_index("searcher")
    assert set(ranked.index) == set(SEARCHERS)
    assert ranked.loc["megatron-grid", "solved"] == 2
    spec = (tmp_path / "a" / "leaderboard.yaml").read_text()
    assert "budget: 2s" in spec
    assert report.figures["convergence"].axes[0].get_xlabel() == "seconds"


def test_the_best_so_far_never_rises_and_begins_with_the_first_improvement() -> None:
    curve = best_so_far([(1.0, 4.0), (3.0, 2.0), (5.0, 3.0)], np.array([0.5, 1.0, 2.9, 3.0, 9.0]))
    assert curve.tolist() == [np.inf, 4.0, 4.0, 2.0, 2.0]


def test_ablations_judge_the_same_plans_again(tmp_path: Path) -> None:
    run.run(context(tmp_path / "a"))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "sweep" / "runs").iterdir()}
    report = ablations.run(context(tmp_path / "a"))
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "sweep" / "runs").iterdir()}
    plans = report.tables["plans"]
    full = plans[plans["without"] == "none"]["iteration_time_s"].to_numpy()
    for effect in ablations.EFFECTS:
        less = plans[plans["without"] == effect]["iteration_time_s"].to_numpy()
        assert (less <= full * (1 + 1e-9)).all()
    assert set(report.tables["changes"]["without"]) == set(ablations.EFFECTS)


def test_a_list_searched_with_the_simulator_as_objective_has_no_slower_plan(tmp_path: Path) -> None:
    report = objective.run(context(tmp_path / "o"))
    assert set(report.tables["by_searcher"]["searcher"]) == set(SEARCHERS)
    ratios = report.tables["runs"]["simulator_over_own"].dropna()
    assert len(ratios) >= len(TINY)
    assert (ratios <= 1 + 1e-9).all()


def test_what_wins_once_an_effect_is_left_out() -> None:
    rows = [
        {"problem": "p", "searcher": searcher, "without": effect, "iteration_time_s": seconds, "fits": fits}
        for searcher, effect, seconds, fits in (
            ("a", "none", 1.0, True),
            ("b", "none", 2.0, True),
            ("a", "overlap-slowdown", 0.9, True),
            ("b", "overlap-slowdown", 0.6, True),
            ("a", "allocator", 1.0, True),
            ("b", "allocator", 2.0, True),
            *((searcher, effect, 1.0, searcher == "a") for searcher in "ab" for effect in ("contention", "host")),
        )
    ]
    report = ablations.changes(pd.DataFrame(rows))
    winners = report.tables["winners"]
    assert winners[["problem", "without", "winner", "winner_without"]].to_numpy().tolist() == [
        ["p", "overlap-slowdown", "a", "b"]
    ]
    assert winners["winner_behind"].tolist() == [pytest.approx(1.5)]
    assert not report.verdicts[0].holds
    moved = report.tables["changes"].set_index("without")
    assert moved.loc["overlap-slowdown", "iteration_time_less_percent"] == pytest.approx(40)  # of 10 and 70
    assert moved["plans_that_fit_changed"].to_dict() == {
        "overlap-slowdown": 0, "allocator": 0, "contention": 1, "host": 1
    }  # fmt: skip
    means = report.tables["means"].set_index("searcher")
    assert means.loc["a", "all_effects"] == 1.0
    assert means.loc["a", "without_overlap-slowdown"] == pytest.approx(1.5)
    assert "b" not in means.index, "it solves no problem under every effect"


def test_relative_times_ranks_and_failures() -> None:
    rows = []
    for batch, times in ((8, (1.0, 2.0, None)), (16, (4.0, 1.0, None))):
        for searcher, seconds in zip(("a", "b", "c"), times, strict=True):
            rows.append(
                {
                    **dict(TINY[0].values),
                    "global_batch": batch,
                    "searcher": searcher,
                    "status": "ok" if seconds else "no plan",
                    "iteration_time_s": seconds,
                    "evaluations": 5,
                }
            )
    frame = with_problems(pd.DataFrame(rows), TINY)
    assert per_problem(frame).loc["a"].tolist() == [1.0, 4.0]
    table = ranking(frame, seed=0).set_index("searcher")
    assert list(table.index) == ["b", "a", "c"]
    assert table.loc["a", "relative_time"] == pytest.approx(2.0)
    assert table.loc["b", "relative_time"] == pytest.approx(np.sqrt(2.0))
    assert table.loc["a", "low"] == 1.0 and table.loc["a", "high"] == 4.0
    assert table.loc["c", "solved"] == 0 and table.loc["c", "no_plan"] == 2


def test_the_problem_set_is_as_wide_as_it_should_be(tmp_path: Path) -> None:
    problems = load_problems()
    assert len(problems) >= 16
    values = [dict(problem.values) for problem in problems]
    assert any("+" in value["cluster"] for value in values)
    assert any(value["model"] == "gpt-scale-1024" for value in values)
    assert sum(problem.quick for problem in problems) >= 3
    spec = tmp_path / "all.yaml"
    spec.write_text(sweep_text(problems, ("ddp",), budget="1", stochastic=(), seeds=1, seed=0))
    assert len(load_sweep(spec).jobs) == len(problems)  # every name in the file exists


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere.py:Mine", r"'nowhere\.py' does not exist; write path/to/file\.py:ClassName"),
        ("aceso", r"must be path/to/file\.py:Class, got 'aceso'"),
    ],
)
def test_a_searcher_that_is_not_there_is_named(tmp_path: Path, reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.run(context(tmp_path / "a", reference))


def test_searchers_in_files_of_one_name_both_take_part_with_what_they_import(tmp_path: Path) -> None:
    files = [tmp_path / name / "mine.py" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.write_text(f"import sys; sys.path.insert(0, {str(file.parent)!r}); import beside\n{MINE}")
        (file.parent / "beside.py").write_text(f"WHERE = {file.parent.name!r}")
    own = context(tmp_path / "a", *(f"{file}:Mine" for file in files))
    found = run.searchers_of(own)
    assert list(found.values())[-2:] == ["mine.py:Mine", f"{files[1]}:Mine"]
    loaded = [searcher_class(f"{file}:Mine") for file in files]
    assert [each.candidates.__globals__["beside"].WHERE for each in loaded] == ["one", "two"]  # type: ignore[attr-defined]
    copies = [own.scratch / spelled.rpartition(":")[0] for spelled in list(found)[-2:]]
    assert [copy.read_text() for copy in copies] == [file.read_text() for file in files]
    assert all((copy.parent / "beside.py").is_file() for copy in copies)
    spec = sweep_text(load_problems()[:1], tuple(found), budget="1", stochastic=tuple(found)[-2:], seeds=3, seed=0)
    assert spec.count("mine.py:Mine") == 2 * 3
    with pytest.raises(ValueError, match="named once"):
        run.searchers_of(context(tmp_path / "a", f"{files[0]}:Mine", str(files[0])))


def test_a_file_with_equal_names_is_refused(tmp_path: Path) -> None:
    row = "{name: a, model: gpt3-350m, cluster: 'v100-32g-dgx1:1x2', runtime: alpa, global_batch: 8, source: none}"
    path = tmp_path / "problems.yaml"
    path.write_text(f"problems:\n  - {row}\n  - {row}\n")
    with pytest.raises(ValueError, match="different names"):
        load_problems(path)
