"""Galvatron's experiments: what they compute from cells, and the quick ones whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.calibrate.fitted_constants import fit_constants, moved
from experiments.cases.galvatron_budget import STEP, within_budget
from experiments.cases.galvatron_table2 import SEARCHED, Run, num_microbatches
from experiments.reproduce.experiment import Context
from experiments.reproduce.galvatron import EXPERIMENTS, fig4, fig5, fig6, table1, table2, table5_calibration
from experiments.reproduce.galvatron.agreement import ordered_pairs, summary, winners
from experiments.reproduce.galvatron.calibration import GPIPE, errors, fitted_overlap
from experiments.reproduce.galvatron.cells import TITLES, at_batch, fixed_cell, searched_cell
from experiments.reproduce.galvatron.grid import Column, compute, frame_of
from experiments.reproduce.galvatron.machines import A100_RUNTIME, A100S_16
from experiments.reproduce.galvatron.table2 import MEMORIES, MODELS, STRATEGIES, printed_cells
from experiments.reproduce.galvatron.table5_calibration import FITTED, planned, printed_table5
from experiments.strategy_trees import draw_trees, save_trees
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.registry import searcher_names
from simulator.simulate import simulate
from tests.searchers.galvatron_problems import planner

VIT = Run(model="vit-huge-32", cluster="titan-rtx-pcie:1x8", memory_gb=8)


def context(folder: Path) -> Context:
    return Context(data=None, scratch=folder, quick=True, say=lambda line: None)


def cells() -> pd.DataFrame:
    rows = [
        (8, "a", "x", 10.0, 8, 10.0, 8), (8, "b", "x", 20.0, 16, 25.0, 8), (8, "c", "x", None, None, None, None),
        (12, "a", "x", 30.0, 8, 10.0, 8), (12, "b", "x", 20.0, 16, 25.0, 16),
    ]  # fmt: skip
    frame = pd.DataFrame(
        rows,
        columns=[
            "memory_gb", "strategy", "model", "samples_per_s", "batch", "paper_samples_per_s", "paper_batch"
        ],
    )  # fmt: skip
    frame["relative_difference"] = frame["samples_per_s"] / frame["paper_samples_per_s"] - 1
    frame["at_paper_batch_difference"] = frame["relative_difference"]
    frame["oom_agrees"] = frame["samples_per_s"].isna() == frame["paper_samples_per_s"].isna()
    return frame


def test_every_experiment_of_the_paper_is_there() -> None:
    names = {experiment.name for experiment in EXPERIMENTS}
    assert names == {f"galvatron-table{number}" for number in range(1, 7)} | {
        f"galvatron-fig{number}" for number in range(4, 8)
    }


def test_the_paper_has_352_cells_of_which_47_are_out_of_memory() -> None:
    printed = printed_cells()
    assert set(printed) == {(gb, model, name) for gb in MEMORIES for model in MODELS for name in STRATEGIES}
    assert len(printed) == 352
    assert sum(cell.throughput is None for cell in printed.values()) == 47
    assert len(printed_table5()) == 24
    assert set(SEARCHED) <= set(searcher_names())


def test_pairs_and_winners_count_what_differs_clearly() -> None:
    """Column 8: a-b right, both against the OOM of c right. Column 12: a-b wrong, and the wrong winner."""
    frame = cells()
    assert ordered_pairs(frame) == (3, 4)
    assert winners(frame) == (1, 2)
    lines = summary(frame).set_index("strategy")
    assert lines.loc["a", "mean_absolute_difference"] == pytest.approx(1.0)
    assert (lines.loc["c", "oom_right"], lines.loc["b", "batch_equal"], lines.loc["c", "batch_equal"]) == (1, 1, 1)


def test_the_same_plan_under_two_names_wins_for_both() -> None:
    frame = cells()
    frame.loc[3, "samples_per_s"] = frame.loc[4, "samples_per_s"]
    assert winners(frame) == (2, 2)


def test_the_overlap_factor_of_a_budget_is_recovered() -> None:
    true = replace(VIT, memory_gb=16, overlap=1.6)
    batches = {"ddp": 32, "fsdp": 64}
    rows = [
        {
            "memory_gb": 16,
            "model": true.model,
            "strategy": TITLES[strategy],
            "paper_samples_per_s": at_batch(true, strategy, batch).throughput,
        }
        for strategy, batch in batches.items()
    ]
    column = Column(run=replace(true, overlap=None), strategies=(), batches=batches)
    assert fitted_overlap([column], pd.DataFrame(rows)) == pytest.approx(1.6, abs=0.002)


def test_errors_of_the_other_budgets_use_the_factors_of_one() -> None:
    frame = pd.DataFrame(
        [
            {"memory_gb": gb, "model": "m", "strategy": strategy, "paper_samples_per_s": 10.0,
             "at_paper_batch_difference": 0.5}
            for gb in (12, 16)
            for strategy in (GPIPE, TITLES["ddp"])
        ]
    )  # fmt: skip
    ddp = TITLES["ddp"]
    found = {(12, "m", GPIPE): 12.0, (16, "m", GPIPE): 13.2, (12, "m", ddp): 99.0, (16, "m", ddp): 9.0}
    lines = errors(frame, found, 12).set_index("strategy")
    assert list(lines["cells"]) == [1, 1]
    assert list(lines["uncalibrated"]) == [0.5, 0.5]
    assert lines.loc[GPIPE, "calibrated"] == pytest.approx(0.1)
    assert lines.loc[ddp, "bias"] == pytest.approx(-0.1)


def test_constants_of_table_v_are_recovered_from_cells_that_have_them() -> None:
    true = {"host": 0.6, "products": 0.7}
    asked = [(key, printed) for key, printed in printed_table5().items() if key[0] == 8 and key[2].endswith("mem")]
    cells = [planned(key, printed) for key, printed in asked]
    for cell in cells:
        assert len(cell.run.plan.stages) == len(cell.printed.partition.split("-"))
        assert cell.run.plan.global_batch == cell.printed.batch
    theirs = [replace(cell.run, seconds=cell.run.seconds / (1 + cell.difference(true))) for cell in cells]
    assert cells[0].difference(true) == pytest.approx(
        simulate(cells[0].run.plan, moved(cells[0].run.problem, true)).samples_per_s
        / (cells[0].printed.throughput or 0)
        - 1
    )
    found = fit_constants(theirs, FITTED)
    assert abs(found.after).max() < 0.02
    assert found.factors == pytest.approx(true, rel=0.1)


def test_microbatches_of_the_pipelines_are_the_release_tables() -> None:
    assert [num_microbatches("bert-huge-32", batch) for batch in (8, 16, 24)] == [3, 4, 5]
    assert [num_microbatches("swin-huge-32", batch) for batch in (8, 24, 96, 104)] == [1, 2, 3, 4]


def test_the_largest_batch_of_a_fixed_strategy_is_found() -> None:
    cell = fixed_cell(VIT, "fsdp")
    assert cell.batch is not None and cell.throughput is not None
    assert at_batch(VIT, "fsdp", cell.batch).throughput == cell.throughput
    assert within_budget(VIT, "fsdp", cell.batch) and not within_budget(VIT, "fsdp", cell.batch + STEP)
    assert at_batch(VIT, "fsdp", 2 * cell.batch).fits is False, "the simulator agrees"
    assert fixed_cell(VIT, "ddp").throughput is None, "the paper prints OOM"


def test_cells_are_kept_between_runs(tmp_path: Path) -> None:
    column = Column(run=VIT, strategies=("megatron-tp",), batches={"galvatron-dp-tp": 32})
    first = compute(context(tmp_path), [column])
    path = next(tmp_path.glob("*.json"))
    stamp = path.stat().st_mtime_ns
    assert compute(context(tmp_path), [column]) == first
    assert path.stat().st_mtime_ns == stamp
    frame = frame_of([column], first, {})
    assert list(frame["strategy"]) == ["Megatron (TP)"] and frame["samples_per_s"].iloc[0] > 0


def test_table_1_and_figure_4_hold(tmp_path: Path) -> None:
    for module in (table1, fig4):
        report = module.run(context(tmp_path))
        assert all(verdict.holds for verdict in report.verdicts), [verdict.found for verdict in report.verdicts]


def test_table_1_counts_layers_as_the_paper_does(tmp_path: Path) -> None:
    """Embedding and head are no layers: BERT-Huge-32 had 34."""
    models = table1.run(context(tmp_path)).tables["models"].set_index("model")["layers"]
    assert models[["bert-huge-32", "t5-large-48", "swin-huge-48", "bert-xhuge", "galvatron-gpt3-15b"]].tolist() == [
        32, 48, 48, 128, 48
    ]  # fmt: skip


def test_figure_6_draws_layers_of_one_size_and_strategy_as_one_run() -> None:
    """Swin's layers with shifted windows are of another kind and of the same size: each was a run by itself."""
    own = planner("swin-huge-32", 24, Options(checkpoint=False))
    search = own.searches[1]
    plan = search.assess([search.layers], [[search.strategies[0]] * 32], 8, Cut(1, 8))
    assert plan is not None
    assert [len(layers) for _, layers, _ in fig6.runs_of(plan, own.profiles)] == [1, 1, 1, 1, 1, 25, 1, 1]


def test_figure_6_counts_one_microbatch_and_has_one_colour_for_a_strategy() -> None:
    own = planner("swin-huge-32", 24, Options(checkpoint=False))
    search = own.searches[1]
    first, other = search.strategies[:2]
    plans = {}
    for title, chosen in (("one", [first] * 32), ("mixed", [other] * 16 + [first] * 16)):
        plan = search.assess([search.layers], [chosen], 8, Cut(1, 8))
        assert plan is not None
        plans[title] = (plan, own.profiles)
    figure = fig6.draw(plans)
    assert [axes.get_title() for axes in figure.axes] == [f"{each}: batch 8, 1 microbatch, 1 stage" for each in plans]
    colours = [
        {patch.get_label(): patch.get_facecolor() for patch in axes.patches if str(first) == patch.get_label()}
        for axes in figure.axes
    ]
    assert colours[0] == colours[1] and colours[0]


def test_trees_are_drawn(tmp_path: Path) -> None:
    save_trees(tmp_path / "trees.png", 8)
    assert (tmp_path / "trees.png").read_bytes().startswith(b"\x89PNG")
    figure = draw_trees(4)
    drawn = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert len(drawn) == 7 + 3 + 1 and "dp 2 > tp 2" in drawn


def test_factors_of_a_run_move_what_plans_are_chosen_by_and_what_they_are_judged_by() -> None:
    run = Run(model="bert-huge-32", cluster=A100S_16, memory_gb=16, runtime=A100_RUNTIME)
    slower = replace(run, factors=(("products", 0.5),))
    shipped, moved_cell = (at_batch(each, "galvatron", 24) for each in (run, slower))
    judged = slower.searched("galvatron", 24)
    again = simulate(judged[1](judged[0]()), moved(run.problem(24), {"products": 0.5}), engine="compiled")
    assert moved_cell.throughput == pytest.approx(again.samples_per_s, rel=1e-9)
    assert moved_cell.throughput is not None and shipped.throughput is not None
    assert moved_cell.throughput < 0.9 * shipped.throughput
    assert moved_cell.estimated == pytest.approx(moved_cell.throughput, rel=0.1)
    names = {Column(run=each, strategies=(), batches={}).name for each in (run, slower)}
    assert len(names) == 2, "each has its own kept file"


def test_a_variant_of_bmw_finds_the_printed_batch_and_throughput_of_a_cell() -> None:
    """Microbatches are capped, so that memory ends the exploration: 480 samples and 88.9 samples/s are printed."""
    cell, _ = searched_cell(replace(VIT, memory_gb=16), "galvatron-1f1b-bi")
    printed = printed_cells()[16, VIT.model, "galvatron-1f1b-bi"]
    assert printed.throughput is not None and printed.batch is not None and cell.batch is not None
    assert cell.throughput == pytest.approx(printed.throughput, rel=0.03)
    assert cell.batch == pytest.approx(printed.batch, rel=0.1) and cell.microbatches == 8


def test_bmw_starts_from_bases_result() -> None:
    """Base's GPipe plan on one stage is none of BMW's own."""
    run = Run(model="bert-huge-48", cluster="titan-rtx-pcie:1x8", memory_gb=8)
    base, bmw = (searched_cell(run, name)[0] for name in ("galvatron-base", "galvatron-bmw"))
    assert base.estimated is not None and bmw.estimated is not None and bmw.estimated >= base.estimated
    assert searched_cell(run, "galvatron-1f1b-bi")[0].throughput is None, "nothing fits without recomputation"


# Verdicts, from made-up cells on either side of what each claim asks for


def table_2() -> pd.DataFrame:
    """Return 352 cells that are 5 % too fast in every strategy, each strategy 30 % faster than the one before."""
    keys = [(gb, model, name) for gb in MEMORIES for model in MODELS for name in STRATEGIES]
    frame = pd.DataFrame(keys, columns=["memory_gb", "model", "name"])
    frame["strategy"] = frame["name"].map(TITLES)
    frame["paper_samples_per_s"] = [10.0 * 1.3 ** STRATEGIES.index(name) for name in frame["name"]]
    frame["samples_per_s"] = 1.05 * frame["paper_samples_per_s"]
    return frame.assign(
        batch=8.0, paper_batch=8.0, oom_agrees=True, relative_difference=9.0, at_paper_batch_difference=-0.05
    )


def holds(frame: pd.DataFrame) -> list[bool | None]:
    return [verdict.holds for verdict in table2._verdicts(frame, summary(frame))]


@pytest.mark.parametrize(
    ("of", "within", "beyond", "place"),
    [("ddp", 0.069, 0.071, 0), ("galvatron-dp-tp", 0.059, 0.061, 3), ("galvatron-bmw", 0.119, 0.121, 4)],
)
def test_throughputs_of_table_2_are_judged_at_the_printed_batch(
    of: str, within: float, beyond: float, place: int
) -> None:
    frame = table_2()
    groups = {0: table2.PURE, 3: ("galvatron-dp-tp", "galvatron-dp-pp", "galvatron"),
              4: ("galvatron-base", "galvatron-1f1b-bi", "galvatron-bmw")}  # fmt: skip
    assert of in groups[place]
    for error, right in ((within, True), (beyond, False)):
        frame.loc[frame["name"].isin(groups[place]), "at_paper_batch_difference"] = -error
        assert holds(frame) == [True] * place + [right] + [True] * (6 - place)


@pytest.mark.parametrize(
    ("column", "value", "allowed", "place"), [("oom_agrees", False, 2, 1), ("batch", 16.0, 8, 2)]
)
def test_cells_of_pure_strategies_are_counted(column: str, value: object, allowed: int, place: int) -> None:
    frame = table_2()
    for name, count, right in ((STRATEGIES[-1], 32, True), ("ddp", allowed, True), ("ddp", allowed + 1, False)):
        own = frame.index[frame["name"] == name][:count]
        frame.loc[own, column] = value
        assert holds(frame) == [True] * place + [right] + [True] * (6 - place)


def test_order_and_winners_of_table_2_are_counted_by_pairs_and_columns() -> None:
    """88 of 32 columns' 1,760 pairs may be wrong (ten strategies reversed are 45), and the winner of four columns."""
    frame = table_2()
    for column, right in ((0, True), (1, False)):
        own = frame.index[column * 11 : column * 11 + 10]
        frame.loc[own, "samples_per_s"] = frame.loc[own, "samples_per_s"].to_numpy()[::-1]
        assert holds(frame) == [True] * 5 + [right, True]
    frame = table_2()
    frame.loc[[11 * column for column in range(4)], "samples_per_s"] = 1e6
    assert holds(frame) == [True] * 7
    frame.loc[44, "samples_per_s"] = 1e6
    assert holds(frame) == [True] * 6 + [False]


def test_the_calibration_is_judged_by_the_mean_over_cells_of_pure_strategies() -> None:
    names = [TITLES[name] for name in ("ddp", "fsdp", "galvatron-bmw")]
    for error, right in ((0.0599, True), (0.0601, False)):  # with two cells of 3 % the mean of three is 4 %
        lines = pd.DataFrame({"strategy": names, "cells": [1, 2, 9], "calibrated": [error, 0.03, 0.9]})
        assert table2._calibration_verdict(1.3, lines).holds is right


@pytest.mark.parametrize(
    ("rows", "factor", "verdicts"),
    [
        (slice(0), 1.0, [True] * 4),
        (slice(4, 5), 4.0, [False, True, True, True]),  # 12 GB, not the most layers
        (slice(3, 6), 4.0, [True, False, True, True]),  # 12 GB, all layers
        (slice(10, 11), 1.03, [True, True, False, True]),
        (slice(11, 12), 1.01, [True, True, False, True]),
        (slice(12, 13), 1.25, [True, True, True, False]),
    ],
)
def test_growth_of_search_time_is_judged_by_lines_and_by_twice_the_printed_growth(
    rows: slice, factor: float, verdicts: list[bool]
) -> None:
    """Linear in layers at each budget and in memory; 16 GPUs at most 4.4 times eight, 64 at most 18.4 times; 5 s."""
    lines = [
        ("layers and memory", layers, gb, 8, 0.01 * layers * gb) for gb in (8, 12, 16) for layers in (16, 32, 64)
    ]
    lines += [("devices", 48, 16, devices, seconds) for devices, seconds in ((8, 1.0), (16, 4.3), (64, 18.3))]
    lines += [("all batches", 48, 16, 8, 4.0)]
    frame = pd.DataFrame(lines, columns=["about", "layers", "memory_gb", "devices", "cpu_s"])
    frame.loc[frame.index[rows], "cpu_s"] *= factor
    assert [verdict.holds for verdict in fig5._verdicts(frame)] == verdicts


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [True] * 3),
        ({(1, "time_balance"): 0.719}, [False, True, True]),
        ({(0, "memory_balance"): 0.719}, [True, False, True]),
        ({(2, "fits"): False}, [True, True, False]),
        ({(2, "estimated_samples_per_s"): 9.9}, [True, True, False]),
    ],
)
def test_pipelines_of_figure_4_are_near_their_balance_and_the_third_fits_and_is_no_slower(
    changes: dict[tuple[int, str], object], verdicts: list[bool]
) -> None:
    rows = [
        {"model": model, "balanced_by": word, "time_balance": time, "memory_balance": memory, "fits": fits,
         "estimated_samples_per_s": rate}
        for model in fig4.CASES
        for word, time, memory, fits, rate in (
            ("memory", 0.5, 0.721, True, 10.0), ("time", 0.721, 0.5, False, 12.0), ("both", 0.6, 0.6, True, 10.0)
        )
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    for (row, column), value in changes.items():
        frame.loc[row, column] = value
    assert [verdict.holds for verdict in fig4._verdicts(frame)] == verdicts


@pytest.mark.parametrize(("error", "holds"), [(0.19, True), (0.22, False)])
def test_cells_of_a_budget_are_judged_by_constants_of_the_other_alone(
    error: float, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cells a budget, one 10 % too fast and one too slow by the error: 15 % on average in both."""
    of = {(gb, "bert-huge-32", f"galvatron-1f1b-{word}") for gb in (8, 16) for word in ("mem", "bi")}
    printed = {key: value for key, value in printed_table5().items() if key in of}

    def planned_cell(key: tuple[int, str, str], value: object) -> SimpleNamespace:
        def difference(factors: dict[str, float]) -> float:
            assert factors.get("budget", 24 - key[0]) == 24 - key[0]  # 8 or 16
            return 0.1 if key[2].endswith("mem") else -error

        return SimpleNamespace(key=key, printed=value, run=key[0], difference=difference)

    def fit(runs: list[int], names: object) -> SimpleNamespace:
        assert len(runs) == 2 and len(set(runs)) == 1
        return SimpleNamespace(factors={"budget": runs[0]})

    monkeypatch.setattr(table5_calibration, "planned", planned_cell)
    monkeypatch.setattr(table5_calibration, "fit_constants", fit)
    frame, verdict = table5_calibration.calibrated(printed, lambda line: None)
    assert verdict.holds is holds
    assert sorted(frame["memory_gb"]) == [8, 8, 16, 16]
