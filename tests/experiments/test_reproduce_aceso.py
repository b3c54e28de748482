"""Aceso's experiments: counting is exact, and the quick runs report what they should."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from experiments.reproduce.aceso import EXPERIMENTS, exp1, exp2, exp3, exp4, exp5, exp6, exp7, exp8
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


# Verdicts, from made-up rows on either side of what each claim asks for


def verdicts_of(
    module: ModuleType, rows: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> list[bool | None]:
    monkeypatch.setattr(module, "kept_rows", lambda *given, **options: list(rows), raising=False)
    monkeypatch.setattr(module, "converged", lambda *given: (pd.DataFrame(rows), {}), raising=False)
    report = module.run(Context(data=None, scratch=folder, quick=True, say=lambda line: None))
    return [verdict.holds for verdict in report.verdicts]


@pytest.mark.parametrize(
    ("gpt", "t5", "verdicts"),
    [
        (1.0, 1.64, [True, True, True]),
        (0.98, 1.36, [False, False, True]),
        (1.22, 1.66, [True, False, False]),
        (1.0, 1.34, [True, True, False]),
    ],
)
def test_speedups_over_megatron_are_judged_with_several_gpus(
    gpt: float, t5: float, verdicts: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never below 1; GPT-3 within 10 % of the printed 1.1, T5's largest of 1.5 times; one GPU does not count."""
    rows = [
        {"family": family, "model": family, "gpus": gpus, "speedup": speedup, "paper_speedup": printed}
        for family, gpus, speedup, printed in (
            ("gpt", 1, 0.5, None), ("gpt", 4, gpt, 1.1), ("t5", 1, 1.5, None), ("t5", 4, 1.01, None),
            ("t5", 8, t5, None),
        )
    ]  # fmt: skip
    assert verdicts_of(exp1, rows, monkeypatch, tmp_path) == verdicts
    assert verdicts_of(exp1, rows[:1], monkeypatch, tmp_path) == [None]


@pytest.mark.parametrize(
    ("wall_s", "verdicts"), [(4.9, [True, True]), (5.1, [False, True]), (10.1, [False, False]), (5.0, [False, True])]
)
def test_search_takes_less_than_a_twentieth_of_alpas(
    wall_s: float, verdicts: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 s printed and 200 s accounted, in the worst of two settings."""
    monkeypatch.setattr(exp2, "accounted_column", lambda table: [200.0, 200.0])
    rows = [
        {"model": "a", "gpus": 4, "wall_s": each, "paper_aceso_s": 200, "paper_alpa_s": 100} for each in (1.0, wall_s)
    ]
    assert verdicts_of(exp2, rows, monkeypatch, tmp_path) == verdicts


@pytest.mark.parametrize(
    ("aceso_s", "grid_s", "verdicts"),
    [((1.0, 2.0), (1.0, 3.0), [True, True]), ((1.0, 2.0), (2.0, 1.9), [True, False]),
     ((1.0, None), (1.0, 1.0), [False, True]), ((1.0, 2.0), (None, None), [True, None])],
)  # fmt: skip
def test_every_depth_has_a_plan_no_slower_than_the_grids(
    aceso_s: tuple[float | None, ...], grid_s: tuple[float | None, ...], verdicts: list[bool | None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows = [
        {"layers": layers, "aceso_s": ours, "grid_s": theirs, "samples_per_s": 1.0}
        for layers, ours, theirs in zip((8, 64), aceso_s, grid_s, strict=True)
    ]
    assert verdicts_of(exp3, rows, monkeypatch, tmp_path) == verdicts


@pytest.mark.parametrize(
    ("best_s", "configurations", "stages", "verdicts"),
    [(1.01, 100, 100, [True] * 3), (1.02, 100, 100, [False, True, True]),
     (1.0, 101, 100, [True, False, True]), (1.0, 100, 101, [True, True, False])],
)  # fmt: skip
def test_aceso_is_held_against_the_programs_distinct_stages(
    best_s: float, configurations: int, stages: int, verdicts: list[bool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The program prices 10,000 stages in a thousand times as many configurations; one per cent is 100."""
    program = {"approach": exp4.PROGRAM, "best_s": 1.0, "configurations": 10_000_000, "stages_priced": 10_000}
    ours = {"best_s": best_s, "configurations": configurations, "stages_priced": stages}
    worse = {"best_s": 9.0, "configurations": 10**9, "stages_priced": 10**9}
    rows = [program, {"approach": exp4.RELAYS, **ours}, {"approach": exp4.BORDERS, **worse}]
    found = verdicts_of(exp4, [{"model": "m", **row} for row in rows], monkeypatch, tmp_path)
    assert found == [*verdicts, False, False, False]


@pytest.mark.parametrize(
    ("tried", "hops", "randoms", "verdicts"),
    [((8, 2), (41, 59), (0.99, 1.01), [True, True, True]), ((79, 21), (43, 57), (0.98, 1.01), [False, False, False]),
     ((9, 1), (23, 77), (1.0, 1.0), [True, True, False]), ((9, 1), (21, 79), (1.0, 2.0), [True, False, True])],
)  # fmt: skip
def test_iterations_are_judged_by_the_first_bottleneck_and_by_hops(
    tried: tuple[int, int], hops: tuple[int, int], randoms: tuple[float, float], verdicts: list[bool], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """First bottleneck and single hop, and the others, of so many iterations; random orders over Heuristic 2's time."""
    row = {
        "model": "m", "iterations_failed": 3, "bottlenecks_tried": [1] * tried[0] + [2] * tried[1],
        "hops": [1] * hops[0] + [3] * hops[1],
    }  # fmt: skip
    monkeypatch.setattr(exp5, "kept_rows", lambda *given, **options: [row])
    orders = pd.DataFrame({"best_s": [1.0, *randoms]})
    monkeypatch.setattr(exp5, "converged", lambda *given: (orders, {}))
    report = exp5.run(Context(data=None, scratch=tmp_path, quick=True, say=lambda line: None))
    assert [verdict.holds for verdict in report.verdicts] == verdicts
    iterations = report.tables["iterations"].iloc[0]
    assert iterations["first_bottleneck_share"] == tried[0] / sum(tried)
    assert iterations["several_hops_share"] == hops[1] / sum(hops)
    assert report.tables["distributions"]["hops"].tolist() == [hops[0], 0, hops[1], 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("one", "seven", "verdicts"),
    [(1.006, 1.02, [True, True]), (1.004, 1.0, [True, False]), (1.006, 1.021, [False, True])],
)
def test_hops_and_starts_are_held_against_the_best_of_a_model(
    one: float, seven: float, verdicts: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {("a", 1): one, ("a", 3): 1.0, ("a", 7): 1.0, ("b", 1): 10.0, ("b", 3): 10.0, ("b", 7): 10.0 * seven}
    rows = [{"model": model, "variant": f"MaxHops {hops}", "best_s": each} for (model, hops), each in times.items()]
    assert verdicts_of(exp6, rows, monkeypatch, tmp_path) == verdicts
    starts = [{"model": model, "best_s": each} for model, each in (("a", 1.0), ("a", one), ("b", 9.0))]
    assert verdicts_of(exp7, starts, monkeypatch, tmp_path) == [True]
    starts.append({"model": "b", "best_s": 9.3})
    assert verdicts_of(exp7, starts, monkeypatch, tmp_path) == [False]


def test_predictions_are_judged_by_the_papers_model_within_half_as_much_again() -> None:
    """2.7 % of the paper's own."""
    for error, holds in ((0.0404, True), (0.0406, False)):
        table = pd.DataFrame({"run": [1, 2], "measured_s": [1.0, 2.0], "release_model_s": 9.0, "simulated_s": 9.0})
        table["paper_model_s"] = [1.0 + error, 2.0 * (1.0 - error)]
        (verdict,) = exp8._report(table, "s", exp8.PAPER_TIME, "time").verdicts
        assert verdict.holds is holds
