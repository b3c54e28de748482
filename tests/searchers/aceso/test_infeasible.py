"""Configurations that cannot run: their price is infinite, whatever else is wrong with them, and always a number."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import cache
from itertools import pairwise
from math import inf, isfinite, isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from searchers.aceso.configuration import Configuration, Run, StageChoice, runs_of
from searchers.aceso.model import PerformanceModel
from simulator.costs import cost_tables
from tests.searchers.tiny import tiny_problem
from workloads.models.gpt import GPTSpec
from workloads.registry import build_from_spec

HEADS = (5, 6, 8)
"""No tensor degree divides five heads; two divides six."""

ORDERS = ("largest", "worth", "cheapest")


@cache
def model_of(heads: int, batch: int, is_tied: bool, order: str = "cheapest") -> PerformanceModel:
    shape = GPTSpec(
        name="tiny", layers=2, hidden=64 * heads, heads=heads, seq_len=128, vocab=8000, tied_embeddings=is_tied
    )
    problem = replace(tiny_problem(4, batch), workload=build_from_spec(shape))
    return PerformanceModel.of(problem, cost_tables(problem), recompute=order)


def is_possible(model: PerformanceModel, heads: int, configuration: Configuration) -> bool:
    """Return whether each run's degree divides the heads, and its replicas the microbatch, which divides the batch."""
    return all(
        heads % run.tp == 0 and model.allows(stage.gpus, run.tp, configuration.microbatch)
        for stage in configuration.stages
        for run in stage.runs
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[PerformanceModel, int, Configuration]:
    heads, batch = draw(st.sampled_from(HEADS)), draw(st.sampled_from([1, 2, 8]))
    model = model_of(heads, batch, draw(st.booleans()), draw(st.sampled_from(ORDERS)))
    count = model.num_operators
    borders = sorted(draw(st.sets(st.integers(1, count - 1), max_size=3)))
    stages = []
    for start, stop in pairwise([0, *borders, count]):
        gpus = draw(st.sampled_from([1, 2, 4] if not borders else [1, 2] if len(borders) == 1 else [1]))
        degrees = st.sampled_from([degree for degree in (1, 2, 4) if degree <= gpus])
        other = draw(st.integers(start, stop))
        first, last = draw(degrees), draw(degrees)
        stages.append(StageChoice(gpus, runs_of((first if i < other else last, 0) for i in range(start, stop))))
    flags = draw(st.none() | st.binary(min_size=count, max_size=count))
    if flags is not None:
        flags = bytes(byte & 1 for byte in flags)
    return model, heads, Configuration(draw(st.sampled_from([1, 2, 4, 16])), tuple(stages), flags)


@given(cases())
@settings(deadline=None)
def test_no_figure_of_a_price_is_nan_and_what_cannot_run_is_infinite(
    case: tuple[PerformanceModel, int, Configuration]
) -> None:
    model, heads, configuration = case
    found = model.price(configuration)
    figures = [found.iteration_s, found.memory_bytes]
    figures += [figure for stage in found.stages for figure in astuple(stage) if isinstance(figure, float)]
    assert not any(isnan(figure) for figure in figures)
    possible = is_possible(model, heads, configuration)
    assert isfinite(found.iteration_s) == isfinite(found.memory_bytes) == possible


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("is_tied", [True, False])
def test_heads_that_a_degree_does_not_divide_cost_everything(batch: int, is_tied: bool) -> None:
    """One microbatch leaves no steady state: 0 microbatches of a stage that never ends are nothing, not NaN."""
    model = model_of(5, batch, is_tied)
    for given_flags in (None, bytes(model.num_operators), b"\1" * model.num_operators):
        found = model.price(Configuration(batch, (StageChoice(2, (Run(model.num_operators, 2),)),), given_flags))
        assert (found.iteration_s, found.memory_bytes, found.fits) == (inf, inf, False)


@pytest.mark.parametrize("microbatch", [3, 8, 16])
def test_a_microbatch_that_the_batch_has_no_room_for_costs_everything(microbatch: int) -> None:
    """Of two stages too: minus one microbatch of one is no gain on filling both."""
    model = model_of(8, 4, True)
    half = model.num_operators // 2
    stages = (StageChoice(2, (Run(half, 1),)), StageChoice(2, (Run(model.num_operators - half, 1),)))
    found = model.price(Configuration(microbatch, stages))
    assert (found.iteration_s, found.memory_bytes) == (inf, inf)
