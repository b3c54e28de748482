"""What a profile says of the host that launches operators: time, recomputation, and every estimate of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from hardware_models.profile import OperatorProfile, ProfileRow
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.plan import Plan, resolve
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem

FORWARD_S, BACKWARD_S, AGAIN_S = 1e-3, 3e-3, 5e-3
"""Of every operator's host."""
KERNELS_S = 1e-5
"""Of either pass of every operator."""
BARE = Fidelity().without("optimizer")


def row(role: str, samples: int = 1, host: tuple[float | None, ...] = (FORWARD_S, BACKWARD_S, AGAIN_S)) -> ProfileRow:
    return ProfileRow(role, samples, 1, "default", KERNELS_S, KERNELS_S, 0, 0, 0, 0, 0, 0, False, 1, "test", *host)


def profiled(problem: Problem, *rows: ProfileRow, kernels_only: bool = True) -> Problem:
    dtype = problem.runtime.implementation.dtype
    profile = OperatorProfile("gpt", problem.gpu_types[0], dtype, rows, "test", kernels_only=kernels_only)
    return replace(problem, hardware=replace(problem.hardware, operator_profile=profile))


def hosted(**options: object) -> Problem:
    """Return a problem whose operators all have rows."""
    problem = small_problem("gpt", **options)  # type: ignore[arg-type]
    return profiled(problem, *(row(role) for role in dict.fromkeys(op.role for op in problem.workload.operators)))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_host_that_takes_longer_than_the_kernels_is_what_an_iteration_takes(recompute: str) -> None:
    problem = hosted(cluster="a100-80g-dgx:1x1", runtime="windtunnel-executor", global_batch=1)
    plan = uniform_plan(problem, recompute=recompute)
    again = {"none": 0, "full": 4 * 13}[recompute]  # Four layers, whose last operators keep masks of dropout.
    expected_s = len(problem.workload) * (FORWARD_S + BACKWARD_S) + again * AGAIN_S
    found_s = simulate_time_s(plan, problem, fidelity=BARE)
    assert found_s == pytest.approx(expected_s, rel=1e-3)


def test_a_host_is_interpolated_where_both_ends_have_one_and_modelled_where_neither_does() -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x1", runtime="windtunnel-executor", global_batch=4)
    index = next(number for number, op in enumerate(problem.workload.operators) if op.role == "mlp_linear_1")
    op, gpu_type = problem.workload.operators[index], problem.gpu_types[0]

    def host_s(*rows: ProfileRow) -> tuple[float, float, float]:
        cost = CostTables(profiled(problem, *rows)).operator(index, resolve((), op), 2, gpu_type)
        return cost.forward.host_s, cost.recomputed.host_s, cost.backward_alone.host_s

    ends = row("mlp_linear_1", 1, (1e-3, 3e-3, 5e-3)), row("mlp_linear_1", 3, (3e-3, 5e-3, 9e-3))
    assert host_s(*ends) == pytest.approx((2e-3, 7e-3, 4e-3))
    modelled = host_s()
    assert host_s(ends[0], row("mlp_linear_1", 3, (None, None, None))) == pytest.approx(modelled)
    assert host_s(row("mlp_linear_1", 2, (2e-3, None, None))) == pytest.approx((2e-3, 2e-3, modelled[2]))


def test_an_operator_timed_by_itself_takes_no_less_than_its_host() -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x1", runtime="windtunnel-executor", global_batch=1)
    own = profiled(problem, row("mlp_linear_1"), kernels_only=False)
    index = next(number for number, op in enumerate(problem.workload.operators) if op.role == "mlp_linear_1")
    cost = CostTables(own).operator(index, (), 1, problem.gpu_types[0])
    assert (cost.forward.host_s, cost.recomputed.host_s, cost.backward_alone.host_s) == pytest.approx((KERNELS_S,) * 3)


@pytest.mark.parametrize("runtime", ["windtunnel-executor", "pytorch-ddp", "megatron-deepspeed-timed"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(("pp", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "zb-h1"), (4, "gpipe")])
def test_estimates_have_the_host_of_recomputation(runtime: str, recompute: str, pp: int, schedule: str) -> None:
    problem = hosted(cluster="a100-80g-dgx:1x4", runtime=runtime, global_batch=8)
    plan = uniform_plan(problem, pp=pp, dp=4 // pp, microbatch=1, recompute=recompute, schedule=schedule)
    fast = FastEstimator(problem)
    expected, found = estimate(plan, problem, fast.costs), fast.estimate(plan)
    assert found.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-11)
    simulated_s = simulate_time_s(plan, problem, engine="compiled")
    if pp == 1:
        assert expected.iteration_time_s == pytest.approx(simulated_s, rel=0.01)


def test_the_more_of_a_segment_runs_again_the_longer_it_takes() -> None:
    """A run of operators that a segment cuts: sums over operators are of those in it alone."""
    problem = hosted(cluster="a100-80g-dgx:1x1", runtime="windtunnel-executor", global_batch=1)
    fast, first = FastEstimator(problem), uniform_plan(problem)

    def recomputing(stop: int) -> Plan:
        return replace(first, stages=(replace(first.stages[0], recompute=((3, stop),)),))

    found_s = [fast.estimate(recomputing(stop)).iteration_time_s for stop in (6, 8, 10)]
    assert all(later_s > earlier_s + 0.9 * AGAIN_S for earlier_s, later_s in pairwise(found_s))
    for stop in (6, 8, 10):
        plan = recomputing(stop)
        assert fast.estimate(plan).iteration_time_s == pytest.approx(
            estimate(plan, problem, fast.costs).iteration_time_s, rel=1e-11
        )
