"""The walk keeps its books: steps change the cost by what a full evaluation says."""

from __future__ import annotations

import numpy as np
import pytest

from searchers.alpa.elimination import solve
from searchers.alpa.intra_op import ATTRIBUTES
from searchers.budget import Budget
from searchers.mcmc import FlexFlowMcmc, Walk
from tests.searchers.alpa.test_intra_op import random_graph
from tests.searchers.tiny import tiny_problem


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_keeps_its_books_and_ends_near_the_optimum(seed: int) -> None:
    graph = random_graph(seed, 8, "skip")
    finite = [np.where(np.isfinite(cost), cost, 5.0) for cost in graph.costs]
    graph = type(graph)(finite, graph.edges, [np.zeros((len(ATTRIBUTES), len(cost))) for cost in finite])
    random = np.random.default_rng(seed)
    walk = Walk.start(graph, [0] * 8, 1, 1.0, temperature=0.02, state_bytes=16.0)
    best = walk.cost
    for _ in range(4000):
        walk.step(random)
        best = min(best, walk.cost)
    assert walk.seconds == pytest.approx(graph.objective(walk.chosen))
    optimum, _ = solve(graph)
    assert optimum * (1 - 1e-9) <= best <= optimum * 1.05


def test_same_seed_gives_the_same_plans() -> None:
    found = FlexFlowMcmc(steps=300).search(tiny_problem(2, 4), Budget(evaluations=30), seed=1)
    again = FlexFlowMcmc(steps=300).search(tiny_problem(2, 4), Budget(evaluations=30), seed=1)
    assert [ranked.plan for ranked in found.plans] == [ranked.plan for ranked in again.plans]
    other = FlexFlowMcmc(steps=300).search(tiny_problem(2, 4), Budget(evaluations=30), seed=2)
    assert other.counters["proposals"] == found.counters["proposals"] > 0


def test_what_the_last_steps_find_is_scored() -> None:
    """Whatever their number: the best of a walk was scored at every five-thousandth only."""
    found = FlexFlowMcmc(steps=300).search(tiny_problem(2, 4), seed=1)
    walks = found.counters["proposals"] / 300
    assert found.counters["evaluations"] > walks, "each begins with one"


def test_where_the_best_of_a_walk_does_not_fit_it_walks_again_within_less_memory() -> None:
    """Its own account of memory leaves out work space."""
    found = FlexFlowMcmc(steps=5_000).search(tiny_problem(2, 4, 1_337_000_000), seed=1)
    assert found.counters["out_of_memory"] > 0, "what it found first"
