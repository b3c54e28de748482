"""AMP's trials: its printed estimates are reproduced exactly, items become operators, and what the trials must show."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datafiles.tables import load_table
from experiments.cases import amp
from experiments.reproduce.amp.trials import (
    EMBEDDING_PARAMETERS,
    LAYER_PARAMETERS,
    layer_seconds,
    printed_estimate_s,
    run,
)
from experiments.reproduce.experiment import Context
from simulator.uniform import repeated_layers
from tests.hardware_models.data_folder import data_folder
from workloads.registry import build_workload

WORKLOAD = build_workload("amp-gpt2")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    data = data_folder("measured_runs").parent
    data_folder("gpu_efficiency")
    return dict(run(Context(data, tmp_path_factory.mktemp("amp"), say=lambda line: None)).tables)


def test_amps_printed_estimates_follow_from_its_own_profile() -> None:
    """The printed estimate of every trial, to its four digits: so the items are what we take them for."""
    folder = data_folder("measured_runs")
    profile = layer_seconds(data_folder("gpu_efficiency") / "layer_profiles_v100_t4.csv")
    integers = ("global_batch", "micro_batch", "tp", "dp", "pp")
    rows = load_table(folder / "amp_homogeneous.csv", floats=("predicted",), integers=integers)
    assert len(rows) == 52
    for row in rows:
        estimate = printed_estimate_s(
            profile[row["tp"]],
            amp.item_cuts(row["partition"]),
            tp=row["tp"],
            dp=row["dp"],
            microbatch=row["micro_batch"],
            num_microbatches=row["global_batch"] // (row["micro_batch"] * row["dp"]),
        )
        assert estimate == pytest.approx(row["predicted"], abs=2e-4)


def test_the_parameters_of_the_estimate_are_the_models_less_biases_norms_and_positions() -> None:
    counted = 24 * LAYER_PARAMETERS + EMBEDDING_PARAMETERS
    assert counted < WORKLOAD.num_parameters < 1.005 * counted


@given(st.sets(st.integers(2, 26), min_size=1, max_size=15))
def test_stages_hold_the_layers_of_their_items_and_cover_the_model(inside: set[int]) -> None:
    cuts = [0, *sorted(inside), 30]
    found = amp.operator_cuts(WORKLOAD, cuts)
    assert found[0] == 0 and found[-1] == len(WORKLOAD)
    starts = [start for start, _ in repeated_layers(WORKLOAD)]
    for (first, last), (begin, end) in zip(pairwise(cuts), pairwise(found), strict=True):
        layers = sum(begin <= start < end for start in starts)
        assert layers == max(0, min(last, 26) - max(first, 2))


def test_a_transposition_alone_gets_a_norm_and_a_stage_of_nothing_is_refused() -> None:
    start = repeated_layers(WORKLOAD)[0][0]
    assert amp.operator_cuts(WORKLOAD, [0, 1, 2, 3, 30])[:3] == [0, start, start + 1]
    with pytest.raises(ValueError, match="items 26 to 26 have none"):
        amp.operator_cuts(WORKLOAD, [0, 26, 27, 30])


def test_the_simulator_orders_the_trials_better_than_amp_does(report: dict[str, pd.DataFrame]) -> None:
    found = report["predictors"].set_index("predictor")["Spearman"]
    assert found["AMP, printed"] == pytest.approx(0.935, abs=0.001)
    assert found["our simulator"] >= 0.96
    assert found["our simulator"] > found["AMP's formula on our tables"] > found["AMP, printed"]


def test_failed_trials_do_not_fit_with_two_false_alarms_at_most(report: dict[str, pd.DataFrame]) -> None:
    trials = report["trials"]
    failed = trials["measured, s"].isna()
    assert failed.sum() == 5 and not trials["fits"][failed].any()
    assert (~trials["fits"][~failed]).sum() <= 2


def test_without_the_data_the_cases_are_skipped(tmp_path: Path) -> None:
    (skipped,) = amp.cases(tmp_path)
    assert "amp_homogeneous" in skipped.reason
