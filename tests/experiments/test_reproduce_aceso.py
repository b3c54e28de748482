"""Aceso's experiments: counting is exact, and the quick runs report what they should."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from experiments.reproduce.aceso import EXPERIMENTS
from experiments.reproduce.aceso.fig1 import configurations
from experiments.reproduce.aceso.setting import GPT, T5, WIDE_RESNET, Setting, paper_search
from experiments.reproduce.experiment import Context, Report
from searchers.aceso.multihop import SearchOptions
from tests.workloads.graphs import SHARED_DATA

NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}


def report_of(name: str, tmp_path: Path, data: Path | None = SHARED_DATA) -> Report:
    return NAMES[name](Context(data=data, scratch=tmp_path, quick=True, say=lambda line: None))


def test_the_paper_has_a_figure_and_nine_experiments() -> None:
    assert set(NAMES) == {"aceso-fig1", *(f"aceso-exp{number}" for number in range(1, 10))}


@pytest.mark.parametrize(("layers", "devices"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_configurations_are_counted_exactly(layers: int, devices: int) -> None:
    """Against listing them all."""
    listed = 0
    for cuts in product((False, True), repeat=layers - 1):
        lengths, size = [], 1
        for cut in cuts:
            if cut:
                lengths.append(size)
                size = 0
            size += 1
        lengths.append(size)
        for gpus in product([2**power for power in range(devices.bit_length())], repeat=len(lengths)):
            if sum(gpus) == devices:
                ways = 1
                for length, each in zip(lengths, gpus, strict=True):
                    ways *= each.bit_length() ** length
                listed += ways
    assert configurations(layers, 3, devices) == listed
    assert configurations(layers, 4, devices) == listed * 2**layers


def test_figure_1_needs_no_data(tmp_path: Path) -> None:
    report = report_of("aceso-fig1", tmp_path, data=None)
    assert report.verdicts[0].holds
    assert len(report.tables["configurations"]) == 4


def test_without_data_the_others_say_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs aceso_v100/ops.csv.gz; give the folder"):
        report_of("aceso-exp8", tmp_path, data=None)


@pytest.mark.skipif(not (SHARED_DATA / "aceso_v100").exists(), reason="Aceso's published profile is not here")
@pytest.mark.parametrize("name", ["aceso-exp6", "aceso-exp7", "aceso-exp9"])
def test_quick_runs_have_tables_figures_and_decided_verdicts(name: str, tmp_path: Path) -> None:
    report = report_of(name, tmp_path)
    assert report.figures
    assert all(len(table) for table in report.tables.values())
    assert all(verdict.holds is not None and verdict.found for verdict in report.verdicts)


@pytest.mark.parametrize(("setting", "fine_tunes"), [(GPT[2], False), (T5[1], False), (WIDE_RESNET[4], True)])
def test_the_papers_search_has_none_of_our_additions(setting: Setting, fine_tunes: bool) -> None:
    searcher = paper_search(setting, max_hops=3)
    assert searcher.options == SearchOptions(
        max_hops=3,
        balances=False,
        breadth=1,
        uniform_starts=False,
        exchanges=False,
        iteration_evaluations=None,
        fine_tunes=fine_tunes,
    )
    assert (searcher.races, searcher.judge) == (False, 0)
