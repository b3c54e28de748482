"""Galvatron's dynamic programming against exhaustive search."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from searchers.galvatron import dynamic_programming
from searchers.galvatron.dynamic_programming import search
from searchers.galvatron.printed_recurrence import search_as_printed
from searchers.galvatron.stage_table import StageTable

UNIT = 4.0


@st.composite
def tables(draw: st.DrawFn) -> StageTable:
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
    return StageTable(
        cost_s=cost,
        kept_bytes=forward + UNIT * random.integers(0, 4, shape),
        backward_bytes=(UNIT * draw(st.integers(0, 1))) * random.integers(0, 5, shape).astype(np.float64),
        forward_bytes=forward,
        layout=random.integers(0, layouts, options),
        transition_s=transition,
    )


def exhaustive(table: StageTable, budget: float) -> float:
    """Return the least seconds over all strategies of all layers whose peak obeys Eq. 2; infinity if none fits."""
    layers, options = table.cost_s.shape
    best = np.inf
    for choice in itertools.product(range(options), repeat=layers):
        chosen = np.array(choice)
        if table.peak_bytes(chosen) <= budget:
            best = min(best, table.total_s(chosen))
    return float(best)


@settings(max_examples=300, deadline=None)
@given(table=tables(), units=st.integers(0, 30))
def test_the_search_is_exact_and_within_the_budget(table: StageTable, units: int) -> None:
    budget = units * UNIT
    found = search(table, budget, UNIT)
    wanted = exhaustive(table, budget)
    if found is None:
        assert wanted == np.inf
        return
    assert table.total_s(found) == pytest.approx(wanted)
    assert table.peak_bytes(found) <= budget


@settings(max_examples=150, deadline=None)
@given(table=tables(), units=st.integers(0, 30), share=st.floats(0.5, 1.5))
def test_only_what_costs_less_is_found(table: StageTable, units: int, share: float) -> None:
    """A bound that cut off too much would lose the optimum where it is just below what is asked for."""
    wanted = exhaustive(table, units * UNIT)
    below_s = share * wanted if np.isfinite(wanted) else 10.0
    found = search(table, units * UNIT, UNIT, most=64, below_s=below_s)
    if found is None:
        assert wanted >= below_s * (1 - 1e-9)
    else:
        assert table.total_s(found) == pytest.approx(wanted)
        assert wanted <= below_s


def test_the_hungriest_layer_decides_what_others_may_need() -> None:
    """The second layer needs nine during its backward pass, so the first may as well."""
    rungs = np.arange(1.0, 41.0)
    backward = np.stack([rungs, np.where(rungs < 9, np.inf, rungs)])
    cost = np.where(np.isfinite(backward), 50.0 - rungs, np.inf)
    kept, forward = np.ones_like(cost), np.zeros_like(cost)
    table = StageTable(cost, kept, backward, forward, np.zeros(40, dtype=np.int64), np.zeros((2, 1, 1)))
    found = search(table, 11.0, 1.0)
    assert found is not None and found.tolist() == [8, 8]


def test_what_later_layers_really_hold_is_room_for_earlier_ones() -> None:
    """The last layer's dearer strategy frees more of what it keeps, which the first needs then: 12 s, not 20."""
    table = StageTable(
        cost_s=np.array([[10.0, 1.0], [10.0, 11.0]]),
        kept_bytes=np.array([[1.0, 1.0], [4.0, 4.0]]),
        backward_bytes=np.array([[0.0, 5.0], [0.0, 0.0]]),
        forward_bytes=np.array([[1.0, 1.0], [1.0, 4.0]]),
        layout=np.zeros(2, dtype=np.int64),
        transition_s=np.zeros((2, 1, 1)),
    )
    found = search(table, 6.0, 1.0)
    assert found is not None and found.tolist() == [1, 1]
    found = search(table, 5.0, 1.0)
    assert found is not None and found.tolist() == [0, 0]


def test_what_later_layers_hold_is_not_set_aside_for_an_earlier_one() -> None:
    """One layer keeps nothing and needs 4 while the other's 4 are still to come: 4 are enough for both, not 8."""
    table = StageTable(
        cost_s=np.ones((2, 1)),
        kept_bytes=np.array([[0.0], [4.0]]),
        backward_bytes=np.array([[4.0], [0.0]]),
        forward_bytes=np.array([[0.0], [4.0]]),
        layout=np.zeros(1, dtype=np.int64),
        transition_s=np.zeros((2, 1, 1)),
    )
    assert table.peak_bytes(np.array([0, 0])) == 4.0
    assert search(table, 4.0, 1.0) is not None


def test_a_layer_that_never_fits_is_seen_before_anything_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer needs twice the budget during its backward pass: found out last, after all others."""
    shape = (3, 2)
    table = StageTable(
        cost_s=np.ones(shape),
        kept_bytes=np.ones(shape),
        backward_bytes=np.array([[20.0, 20.0], [0.0, 0.0], [0.0, 0.0]]),
        forward_bytes=np.ones(shape),
        layout=np.zeros(2, dtype=np.int64),
        transition_s=np.zeros((3, 1, 1)),
    )
    monkeypatch.setattr(dynamic_programming, "priced", None)
    assert search(table, 10.0, 1.0) is None


@settings(max_examples=100, deadline=None)
@given(table=tables(), units=st.integers(0, 30), step=st.sampled_from([1.0, 3.0, 10.0]))
def test_a_coarse_step_costs_time_but_never_memory(table: StageTable, units: int, step: float) -> None:
    budget = units * UNIT
    found = search(table, budget, step * UNIT, most=1)
    if found is not None:
        assert table.peak_bytes(found) <= budget
        assert table.total_s(found) >= exhaustive(table, budget) - 1e-9


@settings(max_examples=100, deadline=None)
@given(table=tables(), units=st.floats(0, 30), seed=st.integers(0, 2**32 - 1))
def test_parts_of_bytes_never_break_the_budget(table: StageTable, units: float, seed: int) -> None:
    """Shards of states are seldom whole bytes; what is lost to rounding is a byte a layer at most."""
    random = np.random.default_rng(seed)
    shape = table.cost_s.shape
    forward = table.forward_bytes + random.random(shape)
    table = replace(
        table,
        forward_bytes=forward,
        kept_bytes=table.kept_bytes + forward + random.random(shape),
        backward_bytes=table.backward_bytes + random.random(shape),
    )
    found = search(table, units * UNIT, 1.0, most=64)
    found_s = np.inf if found is None else table.total_s(found)
    assert found is None or table.peak_bytes(found) <= units * UNIT
    assert exhaustive(table, units * UNIT) - 1e-9 <= found_s
    assert found_s <= exhaustive(table, units * UNIT - 4 * len(table.cost_s) - 1) + 1e-9


@settings(max_examples=100, deadline=None)
@given(table=tables(), units=st.integers(0, 30))
def test_the_printed_recurrence_is_never_better(table: StageTable, units: int) -> None:
    budget = units * UNIT
    printed = search_as_printed(table, budget, UNIT) if np.isfinite(table.cost_s).any(axis=1).all() else None
    if printed is not None and np.isfinite(table.total_s(printed)):
        assert table.peak_bytes(printed) <= budget
        assert table.total_s(printed) >= exhaustive(table, budget) - 1e-9


def test_the_printed_recurrence_can_miss_the_optimum() -> None:
    """It keeps the cheapest first layer, whose transition then costs more than it saved."""
    table = StageTable(
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
