"""Bounds on what consistent tables of parts can reach, on tables whose answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import attainable
from experiments.accuracy.run import run_case
from experiments.attainable import conflicts, least_error, parts_of, ranked_pairs, replica_steps, step_per_parameter
from experiments.cases import vtrain
from experiments.cases.sources import data_folder


def row(microbatch: int, batch: int, *, hidden: int = 1024, tp: int = 2, pp: int = 1, dp: int = 1, layers: int = 12):
    return {
        "hidden": hidden, "layers": layers, "tp": tp, "pp": pp, "dp": dp, "gpus": tp * pp * dp,
        "microbatch": microbatch, "global_batch": batch,
    }  # fmt: skip


def test_a_row_counts_every_part_as_often_as_1f1b_runs_it() -> None:
    found = parts_of(row(2, 16, pp=4, dp=2))
    assert found["layer", 1024, 2, 2] == 3 * (4 + 4 - 1)  # three layers a stage, m + p - 1 times
    assert (found["head", 1024, 2, 2], found["embedding", 1024, 2, 2]) == (4, 1)
    assert found["once", 2, 4, 1024, 2, 12] == found["send", 2, 4, 1024, 2] == 1


@st.composite
def consistent(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[float]]:
    """Draw rows, and their times under a table that is consistent by construction."""
    rows = draw(
        st.lists(
            st.builds(
                lambda samples, m, hidden, tp, pp, dp, layers: row(
                    samples, samples * m * dp, hidden=hidden, tp=tp, pp=pp, dp=dp, layers=layers
                ),
                st.sampled_from([1, 2, 4]),
                st.sampled_from([2, 4, 8]),
                st.sampled_from([1024, 2048]),
                st.sampled_from([1, 2, 4, 8]),
                st.sampled_from([1, 2, 4]),
                st.sampled_from([1, 2]),
                st.sampled_from([12, 24]),
            ),
            min_size=2,
            max_size=12,
        )
    )
    fixed, slope, wide = (draw(st.floats(low, 1.0)) for low in (0.01, 0.01, 0.01))

    def price(name: str, *key: int) -> float:
        if name == "once":
            return sum(key)
        if name in ("send", "wait"):
            return key[2] * key[3] * slope
        hidden, tp, samples = key
        return fixed + samples * slope / tp + wide * (hidden == 2048)

    times = [sum(count * price(*part) for part, count in parts_of(each).items()) for each in rows]  # type: ignore[arg-type]
    return rows, times


@settings(max_examples=40, deadline=None)
@given(consistent())
def test_times_of_a_consistent_table_are_met_and_ordered(drawn) -> None:
    rows, times = drawn
    assert least_error(rows, times)[0] == pytest.approx(0.0, abs=1e-6)
    assert conflicts(rows, ranked_pairs(rows, times)) == []


def test_two_samples_that_cost_more_than_twice_one_are_missed_by_what_a_median_leaves() -> None:
    """One sample eight times must not be quicker than two samples four times: the best answer to both is one time."""
    rows, times = [row(1, 8), row(2, 8)], [1.0, 1.5]
    error, _ = least_error(rows, times)
    assert error == pytest.approx(min(abs(x / 1.0 - 1) + abs(x / 1.5 - 1) for x in np.linspace(1, 1.5, 501)) / 2)
    pairs = ranked_pairs(rows, times)
    assert pairs == [(1, 0)]
    assert conflicts(rows, pairs) == [[0]]
    assert attainable.attainable(rows, times).most_correlation == -1.0
    consistent = attainable.attainable([row(1, 8, tp=tp, dp=4 // tp) for tp in (1, 2, 4)], [4.0, 2.0, 1.0])
    assert (consistent.num_pairs, consistent.least_error) == (3, pytest.approx(0.0, abs=1e-6))
    assert consistent.correlation == consistent.most_correlation == 1.0


def test_the_wider_model_must_not_be_quicker() -> None:
    rows, times = [row(1, 8), row(1, 8, hidden=2048)], [2.0, 1.0]
    assert least_error(rows, times)[0] == pytest.approx(0.25)  # both 1: half off on one of two
    assert ranked_pairs(rows, times) == []  # different models are no rivals
    assert least_error(rows, times[::-1])[0] == pytest.approx(0.0, abs=1e-9)


def test_unfused_softmax_may_make_one_sample_longer_than_two() -> None:
    rows, times = [row(1, 2, tp=8), row(2, 4, tp=8)], [2.0, 1.0]
    assert least_error(rows, times)[0] == pytest.approx(0.0, abs=1e-9)
    rows = [row(1, 2, tp=4), row(2, 4, tp=4)]
    assert least_error(rows, times)[0] == pytest.approx(0.25)


def test_rows_that_differ_in_replicas_alone_show_the_reduction() -> None:
    rows = [
        {**row(samples, samples * m * dp, dp=dp), "value": 100.0 * m * samples + 7.0 * dp}
        for samples, m in ((1, 4), (2, 8))
        for dp in (1, 4)
    ]
    steps = replica_steps(rows)
    assert list(steps) == [(1024, 12, 2, 1, 1, 4)]
    assert steps[1024, 12, 2, 1, 1, 4] == pytest.approx([0.021, 0.021])


def test_the_optimizer_step_is_what_grows_with_layers_and_not_with_microbatches() -> None:
    """A row takes 3 ms a layer and microbatch, 5 a microbatch, 7 at all, and 20 ps for each of 12 * 1024^2 / 2."""
    step = 20e-12 * 12 * 1024**2 / 2
    rows = [
        {**row(4, 4 * m, layers=layers), "value": 1e3 * (m * (0.003 * layers + 0.005) + 0.007 + layers * step)}
        for layers in (12, 16, 24)
        for m in (2, 8)
    ]
    rows += [{**row(4, 8 * dp, dp=dp), "value": 1.0} for dp in (2, 4)]
    found = step_per_parameter(rows)
    assert list(found) == [(1024, 2)]
    assert found[1024, 2] == pytest.approx([20e-12])


def test_the_simulator_is_one_of_the_consistent_tables() -> None:
    data = data_folder(None)
    if data is None or not (data / vtrain.TABLE).exists():
        pytest.skip("needs a copy of vTrain's rows")
    rows = vtrain.rows(data)[::12]
    times = [run_case(vtrain.case_of(each)).iteration_time_s for each in rows]
    assert least_error(rows, times)[0] < 1e-4
