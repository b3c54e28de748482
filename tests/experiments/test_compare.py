"""A comparison keeps what it has, repeats nothing, and never fails because one searcher does."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from experiments import compare as compare_module
from experiments import compare_plots, judged, late
from experiments.compare import COLUMNS, compare
from experiments.compare_files import json_of
from searchers.budget import Budget
from searchers.registry import searcher_named
from simulator.fidelity import Fidelity
from simulator.plan_file import load_plan
from simulator.problem import ProblemSpec
from simulator.result import SimulationResult
from simulator.simulate import simulate_time_s

SPEC = ProblemSpec(model="gpt3-350m", cluster="v100-32g-dgx1:1x2", runtime="megatron-lm-2021", global_batch=4)
SEARCHERS = ("megatron-grid", "ddp", "deepspeed-3d")
BUDGET = Budget(evaluations=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("comparison") / "out"


@pytest.fixture(scope="module")
def table(folder: Path) -> pd.DataFrame:
    return compare(SPEC, SEARCHERS, budget=BUDGET, output=folder)


def test_the_table_has_a_row_per_searcher_fastest_first(table: pd.DataFrame) -> None:
    assert list(table.columns) == list(COLUMNS)
    assert set(table["searcher"]) == set(SEARCHERS)
    ran = table[table["status"] == "ok"]
    assert list(ran["iteration_time_s"]) == sorted(ran["iteration_time_s"])


def test_a_searcher_without_a_plan_is_a_row_with_the_reason(table: pd.DataFrame) -> None:
    row = table[table["searcher"] == "deepspeed-3d"].iloc[0]
    assert row["status"] == "not applicable"
    assert "multiple of 4 devices, got 2" in row["reason"]


def test_the_folder_holds_everything_to_repeat_the_run(table: pd.DataFrame, folder: Path) -> None:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "inputs.yaml",
        "table.csv",
        "table.json",
        "history.csv",
        "throughput.png",
        "convergence.png",
        "plans/megatron-grid.yaml",
        "plans/ddp.yaml",
        "timelines/megatron-grid.png",
        "timelines/ddp.png",
        "rows/megatron-grid.json",
        "rows/ddp.json",
        "rows/deepspeed-3d.json",
    }
    text = (folder / "inputs.yaml").read_text()
    assert all(word in text for word in ("gpt3-350m", "seed", "evaluations: 4", "numpy"))


def test_a_plan_on_disk_gives_the_time_in_the_table(table: pd.DataFrame, folder: Path) -> None:
    spec, plan = load_plan(folder / "plans" / "ddp.yaml")
    row = table[table["searcher"] == "ddp"].iloc[0]
    assert simulate_time_s(plan, spec.load()) == row["iteration_time_s"]


def test_csv_and_json_hold_the_same_rows(table: pd.DataFrame, folder: Path) -> None:
    from_csv = pd.read_csv(folder / "table.csv")
    from_json = json.loads((folder / "table.json").read_text())
    assert list(from_csv["searcher"]) == [row["searcher"] for row in from_json] == list(table["searcher"])


def test_a_second_call_repeats_nothing(table: pd.DataFrame, folder: Path) -> None:
    told: list[tuple[str, str]] = []
    again = compare(
        SPEC,
        SEARCHERS,
        budget=BUDGET,
        output=folder,
        listener=lambda searcher, state, num_tasks: told.append((searcher, state)),
    )
    assert told == [(searcher, "kept") for searcher in SEARCHERS]
    pd.testing.assert_frame_equal(again, table)


def test_a_damaged_row_is_made_again(tmp_path: Path) -> None:
    before = compare(SPEC, ("ddp",), budget=BUDGET, output=tmp_path)
    row = tmp_path / "rows" / "ddp.json"
    text = row.read_text()
    changed = text.replace('"search_s":', '"search_s": [], "other":')
    for damaged in (text[:100], text.replace('"row": {', '"other": {'), changed):
        row.write_text(damaged)
        again = compare(SPEC, ("ddp",), budget=BUDGET, output=tmp_path)
        assert list(again["iteration_time_s"]) == list(before["iteration_time_s"])
        assert '"row": {' in row.read_text()


@pytest.mark.parametrize("lost", ["plans/ddp.yaml", "timelines/ddp.png"])
def test_what_is_gone_from_a_folder_is_made_again(tmp_path: Path, lost: str) -> None:
    compare(SPEC, ("ddp",), budget=BUDGET, output=tmp_path)
    (tmp_path / lost).unlink()
    compare(SPEC, ("ddp",), budget=BUDGET, output=tmp_path)
    (tmp_path / lost).write_bytes(b"")
    compare(SPEC, ("ddp",), budget=BUDGET, output=tmp_path)
    assert (tmp_path / lost).stat().st_size


def test_a_searcher_can_be_added_later(folder: Path, table: pd.DataFrame) -> None:
    """The folder's table and plots keep those that are not asked for again."""
    told: list[tuple[str, str]] = []
    names = ("megatron-grid", "fsdp")
    found = compare(
        SPEC,
        names,
        budget=BUDGET,
        output=folder,
        listener=lambda searcher, state, num_tasks: told.append((searcher, state)),
    )
    assert ("megatron-grid", "kept") in told
    assert ("fsdp", "done") in told
    assert set(found["searcher"]) == set(names)
    whole = {*SEARCHERS, *names}
    assert set(pd.read_csv(folder / "table.csv")["searcher"]) == whole
    assert set(pd.read_csv(folder / "history.csv")["searcher"]) == whole - {"deepspeed-3d"}  # which does not apply


def test_an_interrupted_comparison_keeps_its_finished_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(searcher: str, state: str, num_tasks: int | None) -> None:
        if searcher == "megatron-tp":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(SPEC, ("ddp", "megatron-tp"), budget=BUDGET, output=tmp_path, listener=interrupt)
    assert list(pd.read_csv(tmp_path / "table.csv")["searcher"]) == ["ddp"]
    searched: list[str] = []
    real = compare_module.searcher_named
    monkeypatch.setattr(
        compare_module,
        "searcher_named",
        lambda name, **options: searched.append(name) or real(name, **options),
    )
    assert len(compare(SPEC, ("ddp", "megatron-tp"), budget=BUDGET, output=tmp_path)) == 2
    assert searched == ["megatron-tp"]


def test_a_folder_of_another_problem_is_refused(folder: Path, table: pd.DataFrame) -> None:
    other = ProblemSpec(**{**SPEC.to_mapping(), "global_batch": 8})
    with pytest.raises(ValueError, match="with another problem: global_batch 4 instead of 8;"):
        compare(other, SEARCHERS, budget=BUDGET, output=folder)


def test_so_is_one_of_other_content_in_a_file_or_its_base(tmp_path: Path) -> None:
    own, base = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    text = "description: x\nbase: {}\ngradient_clipping: false\nsources: {{gradient_clipping: read}}\n"
    own.write_text("description: ours\nbase: theirs.yaml\nsources: {}\n")
    base.write_text(text.format("megatron-lm-2021"))
    spec = ProblemSpec(**{**SPEC.to_mapping(), "runtime": str(own)})
    for _ in range(2):
        assert len(compare(spec, ("ddp",), budget=BUDGET, output=tmp_path / "out")) == 1
    base.write_text(text.format("megatron-lm-2023-fp16"))
    with pytest.raises(ValueError, match=r"with another file content: .*theirs.yaml"):
        compare(spec, ("ddp",), budget=BUDGET, output=tmp_path / "out")


def test_rows_of_other_code_are_made_again(
    folder: Path, table: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.compare_files._own_files_hash", lambda: "changed")
    told: list[str] = []
    compare(
        SPEC,
        ("ddp",),
        budget=BUDGET,
        output=folder,
        listener=lambda searcher, state, num_tasks: told.append(state),
    )
    assert "kept" not in told


def test_a_limit_that_nothing_fits_gives_rows_not_errors(tmp_path: Path) -> None:
    spec = ProblemSpec(**{**SPEC.to_mapping(), "memory_limit_bytes": 3 * 10**9})
    found = compare(spec, ("ddp", "megatron-grid"), budget=BUDGET, output=tmp_path)
    assert set(found["status"]) == {"no plan"}
    assert all("out of memory" in reason and "GiB" in reason for reason in found["reason"])


def test_a_searcher_beyond_its_time_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "import time\nfrom searchers.pure import DistributedDataParallel\n"
        "class Slow(DistributedDataParallel):\n"
        "    def search(self, problem, budget=None, seed=0):\n"
        "        time.sleep(1.0)\n"
        "        return super().search(problem, budget, seed)\n"
    )
    monkeypatch.setattr(late, "PATIENCE_S", 0.1)
    told: list[tuple[str, str]] = []
    compare(
        SPEC,
        (f"{tmp_path}/mine.py:Slow",),
        budget=Budget(seconds=0.1),
        listener=lambda searcher, state, num_tasks: told.append((searcher.rpartition(":")[2], state)),
    )
    assert told.count(("Slow", "late")) == 1
    assert told[:2] == [("Slow", "searching"), ("Slow", "late")]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_in_time_is_not_late_and_no_budget_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "PATIENCE_S", 0.1)
    told: list[str] = []
    for budget in (Budget(seconds=0.05), Budget(seconds=3e15), Budget(evaluations=1)):
        with late.told_when_late(budget, lambda: told.append("late")):
            time.sleep(0.01)  # So that a timer's thread has begun to wait.
    time.sleep(0.4)
    assert not told


def test_nothing_is_late_while_the_clock_of_searches_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does while something compiles; the thread looks again, and tells once that is over."""
    monkeypatch.setattr(late, "PATIENCE_S", 0.1)
    monkeypatch.setattr(late, "LOOK_AGAIN_S", 0.01)
    now_s = 5.0
    monkeypatch.setattr(late, "moment_s", lambda: now_s)
    told: list[str] = []
    with late.told_when_late(Budget(seconds=0.05), lambda: told.append("late")):
        time.sleep(0.5)
        assert not told
        now_s = 6.0
        time.sleep(0.5)
    assert told == ["late"]


def test_a_searcher_that_raises_is_a_row_that_says_where(tmp_path: Path) -> None:
    text = """
from searchers.base import CandidateSearcher


class Mine(CandidateSearcher):
    name = "mine"
    paper = "none"

    def candidates(self, problem, random, ledger):
        yield [].pop()
"""
    (tmp_path / "mine.py").write_text(text)
    found = compare(SPEC, (f"{tmp_path}/mine.py:Mine", "ddp"), budget=BUDGET)
    assert list(found["status"]) == ["ok", "failed"]
    reason = found["reason"].iloc[1]
    assert "raised IndexError: pop from empty list" in reason and "line 10, in candidates" in reason


def test_the_convergence_says_whose_seconds_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of 51.2 ms is not one of 0.1 s, and what a searcher believes is not what the simulator says."""
    drawn: list[Figure] = []
    monkeypatch.setattr(compare_plots, "_save", lambda figure, path: drawn.append(figure))
    for objective in ("paper", "simulator"):
        compare_plots.plot_convergence(
            {"mine": [(0.1, 1, 0.05123)]}, tmp_path / "x.png", title="", objective=objective
        )
    paper, simulated = (figure.axes[0] for figure in drawn)
    assert [text.get_text() for text in paper.texts] == ["mine  0.0512 s, 1 evaluation"]
    assert paper.get_ylabel().endswith("(each searcher's own estimate)")
    assert simulated.get_ylabel().endswith("(simulated)")


def test_a_search_that_its_budget_ended_is_told_from_one_that_was_through() -> None:
    ended = {}
    for evaluations in (2, 1000):
        found = compare(SPEC, ("megatron-grid", "deepspeed-3d"), budget=Budget(evaluations=evaluations))
        ended[evaluations] = found.set_index("searcher")["budget_ended"].to_dict()
    assert [each["megatron-grid"] for each in ended.values()] == [True, False]
    assert ended[2]["deepspeed-3d"] is None


def test_the_convergence_says_which_plans_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(compare_plots, "_save", lambda figure, path: drawn.append(figure))
    histories = {"mine": [(0.1, 1, 1.0)], "theirs": [(0.1, 1, 2.0)]}
    compare_plots.plot_convergence(histories, tmp_path / "x.png", title="", misfits={"mine"})
    words = [text.get_text() for text in drawn[0].axes[0].texts]
    assert words == ["mine  1.00 s, 1 evaluation, does not fit", "theirs  2.00 s, 1 evaluation"]


def test_rates_beside_the_bars_have_as_many_digits(
    table: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(compare_plots, "_save", lambda figure, path: drawn.append(figure))
    rates = table.assign(samples_per_s=[56.0, 55.5, None])
    compare_plots.plot_throughput(rates, tmp_path / "x.png", title="")
    words = [text.get_text() for text in drawn[0].axes[0].texts]
    assert [word.split()[0] for word in words if "MFU" in word] == ["56.0/s", "55.5/s"]
    compare_plots.plot_throughput(rates.assign(mfu=None), tmp_path / "x.png", title="")  # of a layer profile
    words = [text.get_text() for text in drawn[1].axes[0].texts]
    assert [word.split()[0] for word in words if "/s " in word] == ["56.0/s", "55.5/s"]
    assert not any("MFU" in word for word in words)


def test_a_searcher_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="every searcher must be named once, got ddp again"):
        compare(SPEC, ("ddp", "megatron-grid", "ddp"), budget=BUDGET)


@pytest.mark.parametrize(
    ("fits", "chosen", "reason"),
    [
        ((True, True), 0, ""),
        ((False, True), 1, "choice 2: those before it ran out of memory"),
        ((False, False), 0, "of the search's 2 plans none fits"),
    ],
)
def test_plans_are_judged_in_the_searchers_order_until_one_fits(
    fits: tuple[bool, bool], chosen: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = SPEC.load()
    found = searcher_named("megatron-grid", keep=2).search(problem, BUDGET)
    assert len(found.plans) == 2
    real, answers = judged.simulate, iter(fits)

    def simulated(*given: Any, **options: Any) -> SimulationResult:
        result = real(*given, **options)
        fit = next(answers)
        return replace(result, memory=tuple(replace(each, fits=fit) for each in result.memory))

    monkeypatch.setattr(judged, "simulate", simulated)
    of = judged.first_that_fits(found, problem, Fidelity(), "compiled")
    assert (of.plan, of.objective, of.reason) == (found.plans[chosen].plan, found.plans[chosen].objective, reason)
    assert of.result.plan_hash == of.plan.canonical_hash(problem.workload)
    row = of.row(found, Budget(evaluations=1000))
    assert row["status"] == ("ok" if any(fits) else "out of memory")
    assert row["peak_reserved_bytes"] == max(each.peak_reserved_bytes for each in of.result.memory)
    assert len(list(answers)) == (1 if fits[0] else 0)


def test_json_keeps_every_number_to_its_last_bit(table: pd.DataFrame) -> None:
    listed = json.loads(json_of(table))
    assert [row["iteration_time_s"] for row in listed[:2]] == list(table["iteration_time_s"][:2])
    assert listed[-1]["iteration_time_s"] is None
