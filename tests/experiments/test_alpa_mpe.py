"""Experiments on Alpa and MPE: the worked example, results that are kept, verdicts computed from tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.cases.galvatron_table2 import Run
from experiments.reproduce import swept
from experiments.reproduce.aceso.alpa import speedup_verdicts
from experiments.reproduce.alpa_mpe import aceso_search_cost, plans_found, worked_example
from experiments.reproduce.experiment import Context
from experiments.reproduce.galvatron import alpa as galvatron_alpa
from experiments.reproduce.galvatron.cells import Cell
from experiments.reproduce.galvatron.grid import cell_of
from searchers.mpe.holistic import shortest_path


def context(folder: Path) -> Context:
    return Context(data=None, scratch=folder, quick=True, workers=1, say=lambda line: None)


def test_the_worked_example_has_the_drawn_path_and_no_other(tmp_path: Path) -> None:
    report = worked_example.run(context(tmp_path))
    assert report.verdicts[0].holds
    path = report.tables["path"]
    assert list(zip(path["first_layer"], path["last_layer"], path["mesh"], strict=True)) == [
        (0, 0, "(2,2)"), (1, 4, "(4,1)"),
    ]  # fmt: skip
    assert path["seconds"].sum() == pytest.approx(0.6)
    # Without its second stage the path is another, and longer.
    seconds, fits = worked_example.stage_table()
    fits[1, 4, 2, 0] = False
    other = shortest_path(seconds, fits, np.array(worked_example.SIZES), worked_example.DEVICES)
    assert other is not None and other.objective > 0.6


def test_plans_found_are_kept_one_by_one_and_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_found, "PAIRS", (("gpt3-350m", "v100-32g-dgx1:1x2", 8, 2),))
    monkeypatch.setattr(plans_found, "QUICK_LAYERS", 3)
    report = plans_found.run(context(tmp_path))
    kept = sorted((tmp_path / "sweep" / "runs").iterdir())
    assert len(kept) == len(plans_found.SEARCHERS)
    frame = report.tables["plans"]
    assert list(frame["searcher"]) == list(plans_found.SEARCHERS)
    # Three layers on meshes of one and two devices: 2 + 3 logical meshes; every stage, or layers and pairs.
    by_name = frame.set_index("searcher")
    assert by_name.loc["alpa", "compilations"] == 6 * 5
    assert by_name.loc["mpe", "compilations"] == 5 * 5
    assert by_name.loc["naive", "compilations"] == 3 * 5
    pairs = report.tables["pairs"].iloc[0]
    assert pairs["mpe_over_alpa"] == pytest.approx(
        by_name.loc["mpe", "iteration_time_s"] / by_name.loc["alpa", "iteration_time_s"]
    )
    assert pairs["cost_share_without_reuse"] == pytest.approx(7 / 10)

    def refused(*args: object) -> None:
        raise AssertionError("a finished run is not made again")

    monkeypatch.setattr(swept, "open_workers", refused)
    again = plans_found.run(context(tmp_path))
    pd.testing.assert_frame_equal(again.tables["plans"], frame)
    kept[0].unlink()
    with pytest.raises(AssertionError, match="finished run"):
        plans_found.run(context(tmp_path))


def test_the_accounted_search_cost_is_within_twice_the_published(tmp_path: Path) -> None:
    report = aceso_search_cost.run(context(tmp_path))
    found = report.tables["search_cost"]
    assert found["ratio"].iloc[0] == pytest.approx(1.0)  # the row that sets the price of a layer
    assert list(found["published_s"]) == [4_179, 8_966, 5_664, 12_821]
    assert found["ratio"].iloc[1:].between(0.5, 2.0).all()


def test_speedups_over_alpa_are_judged_by_the_largest_with_several_gpus() -> None:
    table = pd.DataFrame(
        {
            "family": ["gpt", "gpt", "gpt", "resnet", "t5"],
            "gpus": [1, 4, 8, 4, 4],
            "speedup_over_alpa": [3.0, 1.20, 1.27, 1.80, np.nan],
        }
    )
    gpt, resnet = speedup_verdicts(table)
    assert gpt.holds and "1.20 to 1.27 in 2" in gpt.found
    assert resnet.holds is False and "+35%" in resnet.found
    assert list(speedup_verdicts(table.drop(columns="speedup_over_alpa"))) == []


def test_alpas_cell_in_galvatrons_tables_is_the_best_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(model="bert-huge-32", cluster="titan-rtx-pcie:1x2", memory_gb=16)
    asked: list[int] = []
    found = {2: 10.0, 4: 12.0, 8: 12.1, 16: 20.0}

    def cell_at(_: Run, batch: int) -> Cell:
        asked.append(batch)
        return Cell("alpa", throughput=found[batch], batch=batch)

    with monkeypatch.context() as patched:
        patched.setattr(galvatron_alpa, "_at", cell_at)
        assert cell_of(run, "alpa").batch == 8  # better by less than three per cent: the last that is tried
    assert asked == [2, 4, 8]
    real = galvatron_alpa._at(run, 2)
    assert real is not None and real.throughput is not None and real.microbatches is not None
    assert galvatron_alpa._at(Run(model="bert-huge-32", cluster="titan-rtx-pcie:1x2", memory_gb=3), 2) is None
