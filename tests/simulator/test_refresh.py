"""Parameters that ZeRO-1 and 2 gather: behind the optimizer step, or beside the next forward pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.closed_forms.estimate import estimate, stage_views
from simulator.closed_forms.stage_prices import collective_s
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.synchronisation import gather_collectives, parameter_refresh
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem

QUIET = Fidelity().without("host", "overlap-slowdown", "contention")


def problems(cluster: str = "a100-80g-dgx:1x4", global_batch: int = 64) -> tuple[Problem, Problem]:
    """Return a problem whose runtime gathers beside the forward pass, and the same behind the step."""
    beside = small_problem("gpt", cluster=cluster, runtime="megatron-core-2024", global_batch=global_batch)
    assert beside.runtime.refreshes_in_forward
    return beside, replace(beside, runtime=replace(beside.runtime, refreshes_in_forward=False))


@pytest.mark.parametrize("zero", [1, 2])
def test_only_the_gather_of_the_first_unit_is_waited_for(zero: int) -> None:
    beside, behind = problems()
    plan = uniform_plan(beside, dp=4, zero=zero, microbatch=16)
    (view,) = stage_views(plan.canonical(beside.workload), CostTables(beside))
    (later,) = stage_views(plan.canonical(behind.workload), CostTables(behind))
    assert not parameter_refresh(view) and not gather_collectives(later)
    gathers = gather_collectives(view)
    by_unit = [item.num_bytes for unit in gathers for item in gathers[unit]]
    assert sum(by_unit) == sum(item.num_bytes for item in parameter_refresh(later))
    first_s = sum(collective_s(view, item) for item in gathers[min(gathers)])
    refresh_s = sum(collective_s(later, item) for item in parameter_refresh(later))
    saved_s = simulate_time_s(plan, behind, fidelity=QUIET) - simulate_time_s(plan, beside, fidelity=QUIET)
    assert saved_s == pytest.approx(refresh_s - first_s, rel=1e-9)


def test_nothing_else_of_it_is_held_or_sent() -> None:
    """Parameters travel as wide as they are kept, wherever; those that ZeRO-3 gathers may travel narrower."""
    beside, behind = problems()
    wide = replace(beside.runtime, parameter_bytes=4)
    assert wide.gathered_parameter_bytes == 2
    plan = uniform_plan(beside, dp=4, zero=1, microbatch=4)
    wide_behind = replace(behind, runtime=replace(wide, refreshes_in_forward=False))
    for one, other in ((beside, behind), (replace(beside, runtime=wide), wide_behind)):
        found, late = simulate(plan, one), simulate(plan, other)
        assert found.memory[0].peak_allocated_bytes == late.memory[0].peak_allocated_bytes
        assert sum(found.graph.causes[cause] == "parameter gather" for cause in found.graph.cause) == 6  # a unit each
        (view,), (later,) = (stage_views(plan.canonical(each.workload), CostTables(each)) for each in (one, other))
        sent = sum(item.num_bytes for items in gather_collectives(view).values() for item in items)
        assert sent == sum(item.num_bytes for item in parameter_refresh(later))
        estimates = estimate(plan, one), FastEstimator(one).estimate(plan)
        assert estimates[1].iteration_time_s == pytest.approx(estimates[0].iteration_time_s, rel=1e-11)


def test_later_stages_gather_their_first_units_while_they_wait_for_activations() -> None:
    problem, _ = problems("a100-40g-dgx-100g:8x1")
    assert "receive" in problem.runtime.host_waits  # whose hosts launch a pass when what it receives is there
    result = simulate(uniform_plan(problem, dp=4, pp=2, zero=1, microbatch=1), problem)
    graph, schedule = result.graph, result.schedule
    causes, own = np.array(graph.causes)[graph.cause], graph.stage == 1
    gathered_s = np.sort(schedule.start_s[own & (causes == "parameter gather")])
    begins_s = schedule.start_s[own & (causes == "forward")].min()
    assert len(gathered_s) == 3  # two layers, and what is behind them
    assert gathered_s[0] < begins_s / 2 and gathered_s[1] < begins_s <= gathered_s[2]  # two before it, then one ahead


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 8, "zero": 1},
        {"dp": 4, "tp": 2, "zero": 1, "sequence_parallel": True},
        {"dp": 4, "pp": 2, "zero": 1},
        {"dp": 2, "pp": 4, "zero": 1},
        {"dp": 2, "pp": 4, "zero": 1, "schedule": "gpipe"},
        {"dp": 2, "pp": 4, "zero": 1, "schedule": "zb-h1"},
        {"dp": 4, "pp": 2, "zero": 1, "schedule": "interleaved", "chunks": 2},
        {"dp": 8, "zero": 2},
    ],
    ids=str,
)
def test_closed_forms_have_what_the_engine_has(degrees: dict) -> None:
    beside, behind = problems("a100-40g-dgx-100g:8x1")
    plan = uniform_plan(beside, microbatch=1, **degrees)
    found, other = (simulate_time_s(plan, problem) for problem in (beside, behind))
    closed = estimate(plan, beside).iteration_time_s
    assert found != other  # and longer where a unit takes longer to gather than the stage before to compute
    assert closed == pytest.approx(found, rel=0.03)
    assert FastEstimator(beside).estimate(plan).iteration_time_s == pytest.approx(closed, rel=1e-11)


@pytest.mark.parametrize(
    ("changes", "recompute"),
    [({"prefetches_gathers": False}, "none"), ({"regathers_recomputed": True}, "full"), ({}, "full")],
    ids=str,
)
@pytest.mark.parametrize("degrees", [{"dp": 8}, {"dp": 4, "pp": 2}, {"dp": 4, "pp": 2, "schedule": "gpipe"}], ids=str)
def test_so_they_do_of_other_ways_to_gather(changes: dict, recompute: str, degrees: dict) -> None:
    problem, _ = problems("a100-40g-dgx-100g:8x1")
    problem = replace(problem, runtime=replace(problem.runtime, **changes))
    plan = uniform_plan(problem, microbatch=1, zero=1, recompute=recompute, **degrees)
    closed = estimate(plan, problem).iteration_time_s
    assert closed == pytest.approx(simulate_time_s(plan, problem), rel=0.03)
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(closed, rel=1e-11)


def test_a_stage_with_zero_3_as_well_gathers_behind_the_step() -> None:
    beside, behind = problems()
    count, half = len(beside.workload), beside.workload.layers[2][1]
    shardings = ((half, (Axis("batch", 4, zero=1),)), (count - half, (Axis("batch", 4, zero=3),)))
    plan = Plan((Stage(((0, count),), (0, 1, 2, 3), shardings),), microbatch_size=16, num_microbatches=4)
    (view,) = stage_views(validate(plan, beside), CostTables(beside))
    assert parameter_refresh(view)
    assert simulate_time_s(plan, beside) == simulate_time_s(plan, behind)
    assert estimate(plan, beside) == estimate(plan, behind)
    with pytest.raises(ValueError, match=r"beside its first forward pass must have no parameters of ZeRO-3"):
        FastEstimator(beside).estimate(plan)
