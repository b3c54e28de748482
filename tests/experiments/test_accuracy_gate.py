"""The gate: what worsened against the accepted errors is found, and they move for a reason alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from experiments.accuracy import baseline as gate
from experiments.accuracy import calibration_rows as fitted
from experiments.accuracy.calibration_rows import calibration_rows, named_rows, saw
from experiments.accuracy.errors import ErrorReport, RankReport
from experiments.accuracy.groups import groups
from experiments.accuracy.run import GroupReport


def report(error: float = 0.05, *, count: int = 4, name: str = "megatron-sc21-table1", **more: object) -> GroupReport:
    errors = ErrorReport({f"row{number}": error for number in range(count)}) if count else None
    fields: dict[str, object] = {
        "num_run": count,
        "num_skipped": 0,
        "reasons": (),
        "time": errors,
        "memory": None,
        "num_fits_asked": count,
        "num_fits_right": count,
        "num_wrong_fits": 0,
        "rank": None,
        "error_by_feature": {},
        **more,
    }
    return GroupReport(name=name, **fields)  # type: ignore[arg-type]


@pytest.fixture
def baseline(tmp_path: Path) -> Iterator[gate.Baseline]:
    path = tmp_path / "baseline.json"
    before, after = gate.accept([report()], "first", path=path, today=date(2026, 1, 2))
    assert before.groups == {} and after == gate.load_baseline(path)
    yield after


def test_the_same_figures_pass(baseline: gate.Baseline) -> None:
    assert gate.findings([report()], baseline, with_data=False) == []


def test_a_worsening_within_the_tolerance_passes_and_beyond_it_fails(baseline: gate.Baseline) -> None:
    tolerance = groups()["megatron-sc21-table1"].tolerance
    assert gate.findings([report(0.05 + 0.9 * tolerance)], baseline, with_data=False) == []
    (found,) = gate.findings([report(0.05 + 1.1 * tolerance)], baseline, with_data=False)
    assert found.group == "megatron-sc21-table1" and "accepted 5.00 %" in found.message


def test_an_improvement_passes(baseline: gate.Baseline) -> None:
    assert gate.findings([report(0.01)], baseline, with_data=False) == []


@pytest.mark.parametrize(("error", "count", "moved"), [(0.03, 1, True), (0.045, 1, False), (0.03, 3, False)])
def test_of_a_case_or_two_an_error_that_shrinks_is_no_improvement_yet(
    tmp_path: Path, error: float, count: int, moved: bool
) -> None:
    path = tmp_path / "baseline.json"
    _, accepted = gate.accept([report(count=count)], "first", path=path)
    found = gate.findings([report(error, count=count)], accepted, with_data=False)
    assert [each.message.startswith("time moved from 5.00 % to 3.00 % off") for each in found] == [True] * moved


def test_a_group_that_lost_its_cases_fails(baseline: gate.Baseline) -> None:
    other = report(name="dapple-table5")
    messages = [found.message for found in gate.findings([report(count=0), other], baseline, with_data=False)]
    assert any("no case ran" in message for message in messages)


def test_fewer_cases_fail(baseline: gate.Baseline) -> None:
    (found,) = gate.findings([report(count=3)], baseline, with_data=False)
    assert "3 cases ran, 4 did" in found.message


def test_no_case_at_all_fails() -> None:
    (found,) = gate.findings([], gate.Baseline(groups={}), with_data=False)
    assert "no case ran" in found.message


def test_a_case_predicted_to_fit_that_did_not_fails(baseline: gate.Baseline) -> None:
    worse = report(num_fits_right=3, num_wrong_fits=1)
    words = " ".join(found.message for found in gate.findings([worse], baseline, with_data=False))
    assert "out of memory" in words and "predicted to fit" in words


def test_groups_that_need_data_are_only_asked_for_with_data(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    _, accepted = gate.accept([report(), report(name="megatron-dgx2")], "both", path=path)
    alone = [report(), report(count=0, name="megatron-dgx2")]
    assert gate.findings(alone, accepted, with_data=False) == []
    assert [found.group for found in gate.findings(alone, accepted, with_data=True)] == ["megatron-dgx2"]


def test_accepting_keeps_groups_that_did_not_run_and_shows_what_moved(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    gate.accept([report(), report(0.2, name="megatron-dgx2")], "both", path=path)
    before, after = gate.accept([report(0.04)], "softmax reads half", path=path)
    assert after.groups["megatron-dgx2"] == before.groups["megatron-dgx2"]
    assert [entry.reason for entry in after.accepted] == ["both", "softmax reads half"]
    moved = gate.changes(before, after)
    assert ("megatron-sc21-table1", "time mean absolute", "5.00 %", "4.00 %") in moved
    assert {row[0] for row in moved} == {"megatron-sc21-table1"}


@pytest.mark.parametrize("reason", ["", "  ", "\0\n"])
def test_accepting_without_a_reason_is_refused(tmp_path: Path, reason: str) -> None:
    with pytest.raises(ValueError, match="reason"):
        gate.accept([report()], reason, path=tmp_path / "baseline.json")


def test_accepting_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no case ran"):
        gate.accept([report(count=0)], "why", path=tmp_path / "baseline.json")


def test_the_committed_baseline_is_of_known_groups_and_covers_all_that_a_clean_clone_runs() -> None:
    committed = gate.load_baseline()
    assert set(committed.groups) <= set(groups())
    assert {name for name, group in groups().items() if not group.needs_data} <= set(committed.groups)


def messages(before: GroupReport, now: GroupReport, folder: Path) -> list[str]:
    _, accepted = gate.accept([before], "first", path=folder / "baseline.json")
    return [found.message for found in gate.findings([now], accepted, with_data=False)]


@pytest.mark.parametrize("word", ["memory", "rank", "out of memory"])
def test_every_figure_is_held_to_the_tolerance(word: str, tmp_path: Path) -> None:
    """Of 10,000 cases, pairs or questions, so that the tolerance of 0.2 % (twice that of a correlation) can be met."""
    assert groups()["megatron-sc21-table1"].tolerance == 0.002

    def made(worse: float) -> GroupReport:
        wrong = round(10_000 * worse)
        if word == "memory":
            return report(memory=ErrorReport({"a": 0.1 + worse, "b": -0.1 - worse, "c": 0.1 + worse}))
        if word == "rank":
            return report(rank=RankReport(10_000, 9_000 - wrong // 2, 0.9))
        return report(num_fits_asked=10_000, num_fits_right=10_000 - wrong)

    assert messages(made(0.0), made(0.0018), tmp_path) == messages(made(0.0), made(0.0), tmp_path) == []
    (found,) = messages(made(0.0), made(0.0024), tmp_path)
    assert word in found
    assert messages(made(0.01), made(0.0), tmp_path) == []


def test_figures_that_are_no_longer_there_are_findings(tmp_path: Path) -> None:
    before = report(memory=ErrorReport({"a": 0.1}), rank=RankReport(10, 9, 0.9))
    found = messages(before, report(num_fits_asked=0, num_fits_right=0, memory=None, rank=None, time=None), tmp_path)
    assert len(found) == 4 and all("none" in each for each in found)


@pytest.mark.parametrize(("bias", "moved"), [(0.06, True), (0.055, False), (0.04, False), (0.03, True)])
def test_memory_of_a_case_or_two_may_not_move_either_way(bias: float, moved: bool, tmp_path: Path) -> None:
    before, now = (report(count=1, memory=ErrorReport({"a": each})) for each in (0.0451, bias))
    found = messages(before, now, tmp_path)
    assert any(each.startswith("memory moved from 4.51 %") for each in found) is moved


def test_only_the_groups_asked_for_are_looked_at_and_new_and_removed_ones_are_said(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    _, accepted = gate.accept([report(), report(name="dapple-table5")], "both", path=path)
    worse = [report(0.2), report(0.3, name="dapple-table5")]
    assert {each.group for each in gate.findings(worse, accepted, with_data=False)} == {each.name for each in worse}
    (found,) = gate.findings(worse, accepted, with_data=False, only=["dapple-table5"])
    assert found.group == "dapple-table5"
    (new,) = gate.findings([report()], gate.Baseline(groups={}), with_data=False)
    assert "no baseline" in new.message
    gone = gate.Baseline(groups={**accepted.groups, "of-old": accepted.groups["dapple-table5"]})
    (removed,) = gate.findings([report(), report(name="dapple-table5")], gone, with_data=False)
    assert (removed.group, "no longer has the group" in removed.message) == ("of-old", True)


def test_a_baseline_has_five_digits_what_ran_and_why(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(gate.Baseline(groups={"of-old": gate.GroupBaseline(num_run=1)}).model_dump_json())
    ran = report(0.123456789, rank=RankReport(3, 2, 0.5), memory=ErrorReport({"a": -0.5, "b": 0.25, "c": 0.0}))
    reports = [report(count=0, name="dapple-table5"), ran]
    _, after = gate.accept(reports, " a reason ", path=path, today=date(2026, 1, 2))
    assert after.groups == {
        ran.name: gate.GroupBaseline(
            num_run=4, time_mean_absolute=0.12346, time_median_absolute=0.12346, time_bias=0.12346,
            memory_mean_absolute=0.25, memory_bias=-0.08333, memory_agreement=1.0, rank_correlation=0.33333,
        )
    }  # fmt: skip
    entry = after.accepted[-1]
    assert (entry.on, entry.reason, entry.groups) == ("2026-01-02", "a reason", (ran.name,))


# Rows that constants were fitted on


@pytest.fixture
def constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Constants whose texts name rows, and fits that some groups alone have or have others in place of."""
    (tmp_path / "gpus").mkdir()
    (tmp_path / "links.yaml").write_text("a100: {source: 'fitted on m/t.csv#1-3, by hand'}\n")
    (tmp_path / "gpus" / "t4.yaml").write_text("notes: [one, {text: m/o.csv#7}, {text: m/t.csv#3}]\n")
    (tmp_path / "fits.json").write_text(
        """{"fits": [
            {"constants": "x", "source": "m/t.csv", "rows": [2, 3, 9], "replaced_in": ["g"], "files": ["links.yaml"]},
            {"constants": "y", "source": "m/u.csv", "rows": [4], "used_in": ["h"]}
        ]}"""
    )
    monkeypatch.setattr(fitted, "CONSTANTS", tmp_path)
    monkeypatch.setattr(fitted, "FILE", tmp_path / "fits.json")
    calibration_rows.cache_clear()
    yield
    calibration_rows.cache_clear()


@pytest.mark.parametrize(
    ("of", "rows"),
    [
        ((), {"m/t.csv#1", "m/t.csv#2", "m/t.csv#3", "m/t.csv#9", "m/o.csv#7"}),
        (("g",), {"m/t.csv#1", "m/t.csv#3", "m/o.csv#7"}),  # the third is named by other constants as well
        (("g", "i"), {"m/t.csv#1", "m/t.csv#2", "m/t.csv#3", "m/t.csv#9", "m/o.csv#7"}),
        (("h",), {"m/t.csv#1", "m/t.csv#2", "m/t.csv#3", "m/t.csv#9", "m/o.csv#7", "m/u.csv#4"}),
    ],
)
@pytest.mark.usefixtures("constants")
def test_rows_are_known_from_texts_and_from_fits_of_a_cases_groups(of: tuple[str, ...], rows: set[str]) -> None:
    assert calibration_rows(of) == rows
    assert all(saw(row, of) and saw(f"{row} on another machine", of) for row in rows)
    assert not saw("m/t.csv#12", of) and not saw("m/t.csv#4", of)


def test_a_range_of_rows_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted, "MAX_RANGE", 3)
    assert len(list(named_rows(["x.csv#1-3"]))) == 3
    with pytest.raises(ValueError, match=r"at most 3, got x\.csv#1-4"):
        list(named_rows(["x.csv#1-4"]))
