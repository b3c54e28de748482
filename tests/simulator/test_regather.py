"""Layers computed again under ZeRO-3: who gathers their parameters how often, and what stays gathered."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import stage_views
from simulator.lowering.program import ProgramBuilder
from simulator.lowering.recompute import whole_units
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem


def sharded(problem: Problem, **shape: object) -> Plan:
    return uniform_plan(problem, zero=3, microbatch=1, **{"dp": 4, "recompute": "full", **shape})  # type: ignore[arg-type]


def with_and_without(family: str = "gpt", **changes: object) -> list[Problem]:
    problem = small_problem(family, runtime="galvatron-v1", cluster="titan-rtx-pcie:1x8")
    assert problem.runtime.regathers_recomputed
    runtimes = (replace(problem.runtime, regathers_recomputed=again, **changes) for again in (True, False))
    return [replace(problem, runtime=runtime) for runtime in runtimes]


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_layer_that_is_computed_again_whole_is_gathered_three_times(prefetches: bool) -> None:
    again, once = with_and_without(prefetches_gathers=prefetches)
    units = CostTables(again).units
    plan = sharded(again)
    (stage,) = plan.stages
    recomputed = {unit for start, stop in stage.recompute for unit in whole_units(units, start, stop)}
    assert len(recomputed) == len(stage.recompute) > 1
    for problem, expected in ((again, 3), (once, 2)):
        (view,) = stage_views(validate(plan, problem), CostTables(problem))
        builder = ProgramBuilder(view, Fidelity())
        items = [*builder.forward(gather=True), *builder.backward(GRADIENTS, gather=True, sync=False)]
        count = Counter(units[item.operator] for item in items if item.role == "gather" and item.collective)
        assert {count[unit] for unit in recomputed} == {expected}
        assert {number for unit, number in count.items() if unit not in recomputed} <= {1, 2}


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("shape", [{}, {"tp": 2, "dp": 4}, {"pp": 2, "dp": 4}, {"recompute": "selective"}])
def test_closed_forms_and_engine_pay_for_the_third_gather(family: str, shape: dict[str, object]) -> None:
    again, once = with_and_without(family)
    plan = sharded(again, **shape)
    estimates = [estimate(plan, problem) for problem in (again, once)]
    fast = [FastEstimator(problem).estimate(plan) for problem in (again, once)]
    simulated = [simulate_time_s(plan, problem) for problem in (again, once)]
    for slow, quick in zip(estimates, fast, strict=True):
        assert quick.iteration_time_s == pytest.approx(slow.iteration_time_s, rel=1e-9)
        assert quick.peak_bytes == slow.peak_bytes
    more_s = estimates[0].iteration_time_s - estimates[1].iteration_time_s
    if shape.get("recompute") == "selective":
        assert more_s == 0 and simulated[0] == simulated[1]
    else:
        assert more_s > 0
        # On one stage exactly; over two the estimate is up to a quarter of the difference off.
        assert simulated[0] - simulated[1] == pytest.approx(more_s, rel=0.25 if "pp" in shape else 1e-9)


@pytest.mark.parametrize("runtime", ["pytorch-fsdp2", "composer-fsdp", "hetu-galvatron"])
@pytest.mark.parametrize("pp", [1, 2])
def test_what_stays_gathered_is_given_back_by_the_last_backward_pass(runtime: str, pp: int) -> None:
    """Nothing of it is there in the optimizer step, and each unit was gathered once."""
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime=runtime, global_batch=12 // pp)
    plan = uniform_plan(problem, dp=4 // pp, pp=pp, zero=3, microbatch=1, recompute="full")
    stays = replace(plan, reshard_after_forward=False)
    histories = [simulate(each, problem).live_bytes(0).live_bytes for each in (plan, stays)]
    assert histories[0][-1] == histories[1][-1], "the step finds the same"
    ends = [np.abs(np.diff(history)).sum() for history in histories]
    assert ends[0] > ends[1], "each unit is gathered once"
    assert simulate(stays, problem).memory[0].peak_where.startswith("stage 0, backward of microbatch")
