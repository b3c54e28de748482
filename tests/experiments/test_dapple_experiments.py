"""DAPPLE's tables and figures: quick runs come to the verdicts that the documentation states."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.reproduce.dapple.figures import control_edges
from experiments.reproduce.dapple.table6 import _same_stages
from experiments.reproduce.experiment import Context, Report
from experiments.reproduce.registry import EXPERIMENTS
from simulator.schedules.actions import Action, PipelineShape
from simulator.schedules.registry import schedule_named
from tests.hardware_models.data_folder import data_folder


def quick(name: str, scratch: Path, *, data: bool = False) -> Report:
    folder = data_folder("dapple").parent if data else None
    return EXPERIMENTS[f"dapple-{name}"](Context(folder, scratch, quick=True, say=lambda line: None))


@pytest.mark.parametrize(
    ("name", "verdicts"),
    [
        ("fig5", [True]),
        ("fig7", [True, False]),
        ("fig8", [True]),
        ("fig10", [True]),
        ("formula", [True, False, True]),
    ],
)
def test_figures_without_data_come_to_their_verdicts(name: str, verdicts: list[bool], tmp_path: Path) -> None:
    assert [verdict.holds for verdict in quick(name, tmp_path).verdicts] == verdicts


def test_control_edges_are_those_of_figure_10() -> None:
    def edges(count: int) -> list[tuple[Action, Action]]:
        return control_edges(schedule_named("1f1b").actions(PipelineShape(2, count, (0, 1))))

    assert edges(1) == []
    assert edges(2) == [(Action("F", 0, 1), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 1))]
    assert len(edges(3)) == 5


def test_the_plans_of_table_4_are_found_on_the_published_profiles(tmp_path: Path) -> None:
    report = quick("table4", tmp_path, data=True)
    plans = report.tables["plans"]
    assert list(plans["our plan"]) == ["DP", "DP", "15:1", "8:8", "straight", "straight"]
    assert plans["same"].all()
    assert report.verdicts[0].holds


def test_warm_up_b_is_never_slower(tmp_path: Path) -> None:
    report = quick("table3", tmp_path, data=True)
    assert report.verdicts[0].holds


def test_strategies_are_compared_up_to_the_number_of_the_first_state() -> None:
    assert _same_stages("(0,4)x2 (4,13)x6", "(0,5)x2 (5,14)x6")
    assert not _same_stages("(0,4)x2 (4,13)x6", "(0,5)x2 (5,13)x6")
    assert not _same_stages("(0,4)x2 (4,13)x6", "(0,4)x3 (4,13)x5")
    assert _same_stages("straight", " ".join(["(0,1)x1"] * 16))
    assert not _same_stages("straight", "(0,1)x1 (1,9)x3")


def test_without_the_data_folder_it_is_said_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs dapple/vgg19_b32.csv.*--data"):
        quick("table4", tmp_path)
