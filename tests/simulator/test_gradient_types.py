"""Gradients that are made, summed and reduced in types of their own: DeepSpeed's BF16_Optimizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_models.runtime_files import load_runtime, runtime_names
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.lowering.epilogue import tied_groups
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import gradient_buckets, parameter_groups
from simulator.plan import resolve
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem
from workloads.kernels import MemoryBound


def bf16_problem(**changes: object) -> Problem:
    problem = small_problem(cluster="a100-80g-dgx:1x4", runtime="megatron-deepspeed-bf16")
    return replace(problem, runtime=replace(problem.runtime, **changes))


def test_each_gradient_is_cast_and_then_added() -> None:
    """Cast: two bytes are read and four written; added: four and four are read, four written."""
    problem = bf16_problem()
    without = bf16_problem(adds_gradients=False)
    gpu_type = problem.hardware.gpu_type(0)
    for index, op in enumerate(problem.workload.operators):
        sharding = resolve((), op)
        mine, other = (CostTables(of).operator(index, sharding, 1, gpu_type) for of in (problem, without))
        work = [
            kernel
            for _, count in mine.parameters
            for kernel in (MemoryBound(2.0 * count, 4.0 * count), MemoryBound(8.0 * count, 4.0 * count))
        ]
        wanted_s = sum(problem.hardware.kernel_time_s(gpu_type, kernel, "bf16") for kernel in work)
        more = mine.backward_weight.device_s - other.backward_weight.device_s
        assert more == pytest.approx(wanted_s, abs=1e-12)


def test_data_parallelism_reduces_two_bytes_of_each_and_stages_four_of_what_they_share() -> None:
    problem = bf16_problem()
    plan = validate(uniform_plan(problem, pp=2, dp=2, zero=1), problem)
    views = stage_views(plan, CostTables(problem))
    for view in views:
        elements = sum(group.num_elements for group in parameter_groups(view))
        reduced = [item.num_bytes for bucket in gradient_buckets(view, merged=True) for item in bucket.collectives]
        assert sum(reduced) == 2 * elements
    (embedding,) = {group.num_elements for group in parameter_groups(views[0]) if group.tie is not None}
    assert {num_bytes for _, _, num_bytes in tied_groups(views)} == {4.0 * embedding}


@pytest.mark.parametrize("shape", [dict(pp=2, dp=2, zero=1), dict(dp=4, zero=1), dict(tp=2, dp=2, zero=1)], ids=str)
def test_closed_forms_have_both_types(shape: dict[str, int]) -> None:
    """The compiled one has what the readable one has, and that is as near to the simulator as with one type."""
    far = []
    for problem in (bf16_problem(), bf16_problem(reduced_gradient_bytes=None)):
        plan = uniform_plan(problem, **shape)  # type: ignore[arg-type]
        found, fast = estimate(plan, problem), FastEstimator(problem).estimate(plan)
        assert fast.iteration_time_s == pytest.approx(found.iteration_time_s, rel=1e-12)
        assert fast.peak_bytes == found.peak_bytes
        far.append(found.iteration_time_s / simulate(plan, problem).iteration_time_s - 1)
    assert far[0] == pytest.approx(far[1], abs=2e-3) and abs(far[0]) < 0.02


def test_sums_and_the_last_gradients_stay() -> None:
    """Whole on each rank: two bytes of weights, four of sums, two made last; of twelve of the optimizer its part."""
    problem = bf16_problem()
    plan = uniform_plan(problem, dp=4, zero=1)
    (memory,) = simulate(plan, problem).memory
    elements = problem.workload.num_parameters
    assert memory.consumers["parameters"] == pytest.approx(2 * elements, rel=1e-3)
    assert memory.consumers["gradients"] == pytest.approx(6 * elements, rel=1e-3)
    assert memory.consumers["optimizer states"] == pytest.approx(3 * elements, rel=1e-3)


@pytest.mark.parametrize("name", runtime_names())
def test_other_runtimes_reduce_what_they_sum(name: str) -> None:
    runtime = load_runtime(name)
    is_alike = runtime.travelling_gradient_bytes == runtime.gradient_accumulation_bytes
    assert is_alike == (name != "megatron-deepspeed-bf16")
