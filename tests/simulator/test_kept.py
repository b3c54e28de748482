"""What is kept between simulations changes no result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.costs import CostTables, cost_tables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.kept import Kept
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem


def test_the_oldest_entries_are_forgotten() -> None:
    kept, made = Kept(4), []
    for key in (1, 2, 3, 4, 1, 5, 1):
        kept.get(key, lambda key=key: made.append(key) or -key)
        assert len(kept) <= 4
    assert made == [1, 2, 3, 4, 5, 1]
    assert kept.get(5, lambda: 0) == -5
    kept.clear()
    assert len(kept) == 0


def test_calls_on_one_problem_share_its_tables() -> None:
    problem = small_problem("gpt", global_batch=8)
    costs, plan = cost_tables(problem), uniform_plan(problem, pp=2, dp=2)
    num_stages = len(costs.stages)
    assert cost_tables(replace(problem, global_batch=16)) is not costs
    found = simulate(plan, problem)
    assert len(costs.stages) > num_stages
    assert simulate(plan, problem, costs=CostTables(problem)).iteration_time_s == found.iteration_time_s
    assert FastEstimator(problem).costs is costs


@pytest.mark.parametrize("engine", ["simpy", "compiled"])
def test_shared_tables_give_what_fresh_ones_give(engine) -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:2x4", global_batch=16)
    shared = CostTables(problem)
    first = uniform_plan(problem, tp=2, pp=2, dp=2, recompute="full")
    cases = [(first, Fidelity()), (first, Fidelity().without("transfers")), (first, Fidelity())]
    cases += [
        (replace(first, **changes), Fidelity())
        for changes in (
            {"gradient_reduction": "every"},
            {"schedule": "gpipe"},
            {"microbatch_size": 4, "num_microbatches": 4},
            {"stages": (first.stages[0], replace(first.stages[1], recompute=()))},
            {"stages": tuple(replace(stage, devices=tuple(7 - d for d in stage.devices)) for stage in first.stages)},
        )
    ]
    for plan, fidelity in cases:
        once = simulate(plan, problem, fidelity=fidelity, engine=engine, costs=shared)
        again = simulate(plan, problem, fidelity=fidelity, engine=engine, costs=CostTables(problem))
        np.testing.assert_array_equal(once.schedule.end_s, again.schedule.end_s)
        assert once.graph.names == again.graph.names
        for one, other in zip(once.memory, again.memory, strict=True):
            assert one.peak_reserved_bytes == other.peak_reserved_bytes
            assert one.peak_where == other.peak_where
            histories = once.live_bytes(one.device), again.live_bytes(other.device)
            np.testing.assert_array_equal(*(history.live_bytes for history in histories))
