"""Weights that embedding and head share: held once in a stage where both lay them out alike, else by each."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from searchers.galvatron.dynamic_programming import search
from searchers.galvatron.layer_profiles import Layer
from searchers.galvatron.layer_tables import LayerTables
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from searchers.galvatron.stage_table import StageTable
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Level, Strategy
from searchers.galvatron.tied_weights import TiedTable, search_tied
from simulator.problem import ProblemSpec
from simulator.simulate import simulate

UNIT = 4.0


@st.composite
def tied_tables(draw: st.DrawFn) -> tuple[list[TiedTable], tuple[int, ...]]:
    """Small tables of whole units in which two or three layers share a weight, and these layers."""
    layers, options, layouts = draw(st.integers(2, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    holders = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), min_size=2, max_size=3))))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (layers, options)
    forward = UNIT * random.integers(0, 4, shape).astype(np.float64)
    states = UNIT * random.integers(0, 4, shape)
    backward = UNIT * random.integers(0, 4, shape).astype(np.float64)
    sync_s = random.uniform(0, 4, shape)
    cost = random.uniform(1, 9, shape)
    cost[random.random(shape) < 0.1] = np.inf
    transition = random.uniform(0, 4, (layers, layouts, layouts))
    transition[0] = 0.0
    weights = random.integers(0, 3, options)

    def table(alone: NDArray[np.bool_]) -> StageTable:
        return StageTable(
            cost_s=cost + alone[:, None] * sync_s,
            kept_bytes=forward + UNIT + alone[:, None] * states,
            backward_bytes=backward + alone[:, None] * UNIT,
            forward_bytes=forward,
            layout=layout,
            transition_s=transition,
        )

    layout = random.integers(0, layouts, options)
    holds = np.isin(np.arange(layers), holders)
    alone = table(holds)
    tables = [
        TiedTable(table(holds & (np.arange(layers) <= keeper)), alone, keeper, weights)
        for keeper in holders[:-1]
    ]
    return tables, holders


def exhaustive(tables: list[TiedTable], holders: tuple[int, ...], budget: float) -> float:
    """Return the least seconds over all strategies of all layers, each layout of the weight counted once."""
    alone, best = tables[0].alone, np.inf
    rows = np.arange(len(alone.cost_s))
    shared = tables[0].shared  # of the first holder: all the others'
    for choice in itertools.product(range(alone.cost_s.shape[1]), repeat=len(rows)):
        chosen = np.array(choice)
        kinds = [tables[0].weights[chosen[holder]] for holder in holders]
        again = {holder for number, holder in enumerate(holders) if kinds[number] in kinds[:number]}
        own = np.isin(rows, tuple(again))
        held = replace(
            alone,
            **{
                name: np.where(own[:, None], getattr(shared, name), getattr(alone, name))
                for name in ("cost_s", "kept_bytes", "backward_bytes")
            },
        )
        if held.peak_bytes(chosen) <= budget:
            best = min(best, held.total_s(chosen))
    return best


@settings(max_examples=200, deadline=None)
@given(tied=tied_tables(), units=st.integers(0, 40))
def test_the_search_is_exact_where_layers_share_a_weight(
    tied: tuple[list[TiedTable], tuple[int, ...]], units: int
) -> None:
    tables, holders = tied
    found = search_tied(tables, units * UNIT, UNIT, most=64)
    wanted = exhaustive(tables, holders, units * UNIT)
    if found is None:
        assert wanted == np.inf
        return
    found_s = min(
        table.under(layout).total_s(found) for table in tables for layout in np.unique(table.weights)
    )
    assert found_s == pytest.approx(wanted)


@settings(max_examples=100, deadline=None)
@given(tied=tied_tables(), units=st.integers(0, 40), step=st.sampled_from([1.0, 3.0]))
def test_no_layout_that_would_be_better_is_left_out(
    tied: tuple[list[TiedTable], tuple[int, ...]], units: int, step: float
) -> None:
    """Also in coarse steps, where what is found is not the optimum."""
    tables, _ = tied
    under = [table.under(layout) for table in tables for layout in np.unique(table.weights)]
    each = [(own, search(own, units * UNIT, step * UNIT)) for own in under]
    wanted = min((own.total_s(one) for own, one in each if one is not None), default=np.inf)
    found = search_tied(tables, units * UNIT, step * UNIT)
    found_s = min(
        (own.total_s(found) for own in under if found is not None and own.peak_bytes(found) <= units * UNIT),
        default=np.inf,
    )
    assert found_s <= wanted * (1 + 1e-9)


@pytest.mark.parametrize("head", [(DATA, 8), (SHARDED, 8), (TENSOR, 8)])
@pytest.mark.parametrize("embedding", [(DATA, 8), (SHARDED, 8), (TENSOR, 8)])
def test_a_stage_holds_embedding_and_head_once_for_each_of_their_layouts(
    embedding: tuple[str, int], head: tuple[str, int]
) -> None:
    """A head under plain data parallelism was free beside an embedding that was cut eightfold."""
    problem = ProblemSpec("bert-huge-32", "titan-rtx-pcie:1x8", "galvatron-v1", 8).load()
    search = Planner(problem, Options()).searches[1]
    rest = Strategy((Level(SHARDED, 8),))
    chosen = [Strategy((Level(*embedding),)), *[rest] * (len(search.layers) - 2), Strategy((Level(*head),))]
    found = search.assess([search.layers], [chosen], 8, Cut(1, 8))
    assert found is not None
    simulated = simulate(to_plan(found, problem), problem, engine="compiled")
    assert found.peak_bytes == pytest.approx(simulated.peak_allocated_bytes, rel=0.03)
    assert found.iteration_time_s == pytest.approx(simulated.iteration_time_s, rel=0.05)


def test_layers_without_tied_weights_are_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stays linear in layers: a word embedding is looked for in each layer behind it, nothing else is."""
    problem = ProblemSpec("bert-huge-32", "titan-rtx-pcie:1x8", "galvatron-v1", 8).load()
    search = Planner(problem, Options()).searches[1]
    compared = []
    agreeing = LayerTables._agreeing

    def counted(self: LayerTables, first: Layer, second: Layer, ties: frozenset[str]) -> frozenset[str]:
        compared.append(first)
        return agreeing(self, first, second, ties)

    monkeypatch.setattr(LayerTables, "_agreeing", counted)
    found = list(search.tables.keepers(search.layers, 1e6))
    assert [number for number, _ in found] == [0]
    assert len(compared) == len(search.layers) - 1
