"""Galvatron's dynamic programming against exhaustive search."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from searchers.galvatron.dynamic_programming import LayerTable, search, search_as_printed

UNIT = 4.0


@st.composite
def tables(draw: st.DrawFn) -> LayerTable:
    """Small tables whose memory needs are whole units, so that rounding loses nothing."""
    layers, options, layouts = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (layers, options)
    forward: NDArray[np.float64] = UNIT * random.integers(0, 6, shape).astype(np.float64)
    cost = random.uniform(1, 9, shape)
    cost[random.random(shape) < 0.1] = np.inf
    transition = random.uniform(0, 4, (layers, layouts, layouts))
    for layer in transition:
        np.fill_diagonal(layer, 0.0)
    transition[0] = 0.0
    return LayerTable(
        cost_s=cost,
        kept_bytes=forward + UNIT * random.integers(0, 4, shape),
        backward_bytes=(UNIT * draw(st.integers(0, 1))) * random.integers(0, 5, shape).astype(np.float64),
        forward_bytes=forward,
        layout=random.integers(0, layouts, options),
        transition_s=transition,
    )


def exhaustive(table: LayerTable, budget: float, *, simple_peak: bool) -> float:
    """Return the least seconds over all strategies of all layers; infinity if none fits.

    ``simple_peak``: what is kept plus the largest backward need over what layers behind hold at least, the bound that
    the search keeps; else Eq. 2.
    """
    layers, options = table.cost_s.shape
    best = np.inf
    behind = [sum(table.forward_bytes[later].min() for later in range(layer + 1, layers)) for layer in range(layers)]
    for choice in itertools.product(range(options), repeat=layers):
        chosen = np.array(choice)
        rows = np.arange(layers)
        if simple_peak:
            over = max(0.0, (table.backward_bytes[rows, chosen] - behind).max())
            peak = table.kept_bytes[rows, chosen].sum() + over
        else:
            peak = table.peak_bytes(chosen)
        if peak <= budget:
            best = min(best, table.total_s(chosen))
    return float(best)


@settings(max_examples=150, deadline=None)
@given(table=tables(), units=st.integers(0, 30))
def test_the_search_is_exact_and_within_the_budget(table: LayerTable, units: int) -> None:
    budget = units * UNIT
    found = search(table, budget, UNIT, max_reserves=None)
    wanted = exhaustive(table, budget, simple_peak=True)
    if found is None:
        assert wanted == np.inf
        return
    assert table.total_s(found) == pytest.approx(wanted)
    assert table.peak_bytes(found) <= budget
    assert table.total_s(found) >= exhaustive(table, budget, simple_peak=False) - 1e-9


def test_the_least_that_every_layer_can_do_with_is_set_aside_however_few_levels_are_tried() -> None:
    """Eight levels are below what the second layer needs at least; only with exactly that do two layers fit."""
    rungs = np.arange(1.0, 41.0)
    backward = np.stack([rungs, np.where(rungs < 9, np.inf, rungs)])
    cost = np.where(np.isfinite(backward), 50.0 - rungs, np.inf)
    kept, forward = np.ones_like(cost), np.zeros_like(cost)
    table = LayerTable(cost, kept, backward, forward, np.zeros(40, dtype=np.int64), np.zeros((2, 1, 1)))
    for most in (1, 2, 8):
        found = search(table, 11.0, 1.0, max_reserves=most)
        assert found is not None and found.tolist() == [8, 8]


def test_what_later_layers_hold_is_not_set_aside_for_an_earlier_one() -> None:
    """One layer keeps nothing and needs 4 while the other's 4 are still to come: 4 are enough for both, not 8."""
    table = LayerTable(
        cost_s=np.ones((2, 1)),
        kept_bytes=np.array([[0.0], [4.0]]),
        backward_bytes=np.array([[4.0], [0.0]]),
        forward_bytes=np.array([[0.0], [4.0]]),
        layout=np.zeros(1, dtype=np.int64),
        transition_s=np.zeros((2, 1, 1)),
    )
    assert table.peak_bytes(np.array([0, 0])) == 4.0
    assert search(table, 4.0, 1.0) is not None


@settings(max_examples=100, deadline=None)
@given(table=tables(), units=st.integers(0, 30), step=st.sampled_from([1.0, 3.0, 10.0]))
def test_a_coarse_step_costs_time_but_never_memory(table: LayerTable, units: int, step: float) -> None:
    budget = units * UNIT
    found = search(table, budget, step * UNIT, max_reserves=2)
    if found is not None:
        assert table.peak_bytes(found) <= budget
        assert table.total_s(found) >= exhaustive(table, budget, simple_peak=False) - 1e-9


@settings(max_examples=100, deadline=None)
@given(table=tables(), units=st.integers(0, 30))
def test_the_printed_recurrence_is_never_better(table: LayerTable, units: int) -> None:
    budget = units * UNIT
    printed = search_as_printed(table, budget, UNIT) if np.isfinite(table.cost_s).any(axis=1).all() else None
    if printed is not None and np.isfinite(table.total_s(printed)):
        assert table.peak_bytes(printed) <= budget
        assert table.total_s(printed) >= exhaustive(table, budget, simple_peak=False) - 1e-9


def test_the_printed_recurrence_can_miss_the_optimum() -> None:
    """It keeps the cheapest first layer, whose transition then costs more than it saved."""
    table = LayerTable(
        cost_s=np.array([[1.0, 2.0], [9.0, 1.0]]),
        kept_bytes=np.ones((2, 2)),
        backward_bytes=np.zeros((2, 2)),
        forward_bytes=np.ones((2, 2)),
        layout=np.array([0, 1]),
        transition_s=np.array([[[0.0, 0.0], [0.0, 0.0]], [[0.0, 5.0], [5.0, 0.0]]]),
    )
    found, printed = search(table, 8.0, 1.0), search_as_printed(table, 8.0, 1.0)
    assert found is not None and table.total_s(found) == 3.0
    assert printed is not None and table.total_s(printed) == 7.0
