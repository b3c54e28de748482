"""The optimizer's step in the closed forms: by hand, and against the simulator."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from hardware_models.machine_factors import with_factors
from hardware_models.runtime_files import load_runtime, runtime_names
from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.stage_prices import items_s, stage_step_s
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import stage_views
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.lowering.step import adam_launches, norm_s, num_launches, step_work
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem
from workloads.kernels import MemoryBound

NODE = "a100-80g-dgx:1x8"
ALONE = Fidelity().without("overlap-slowdown", "contention", "allocator")


def vit_large(runtime: str, **changes: Any) -> Problem:
    problem = ProblemSpec("vit-large", NODE, runtime, 64).load()
    return replace(problem, runtime=replace(problem.runtime, **changes))


def without_hosts(problem: Problem) -> Problem:
    """Return a problem whose hosts take no time: what they do to pipelines is tested elsewhere."""
    quick = replace(
        problem.runtime,
        host_seconds_per_kernel=0.0,
        host_seconds_per_operator=(0.0, 0.0),
        host_seconds_per_pass=0.0,
        host_seconds_per_collective=(0.0, 0.0),
    )
    return replace(problem, runtime=quick)


def views_of(plan: Plan, problem: Problem) -> list[StageView]:
    return list(stage_views(validate(plan, problem), CostTables(problem)))


def check(plan: Plan, problem: Problem, error: float) -> None:
    """The step is what is looked at: both closed forms have it, within an error that is a tenth of it at most."""
    expected_s, without_s = (
        simulate_time_s(plan, problem, engine="compiled", fidelity=replace(ALONE, optimizer=steps))
        for steps in (True, False)
    )
    found_s = estimate(plan, problem).iteration_time_s
    assert found_s == pytest.approx(expected_s, rel=error)
    assert expected_s - without_s > 10 * error * expected_s
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(found_s, rel=1e-11)


# By hand


def test_a_fused_step_is_its_bytes_over_the_rate_of_the_memory() -> None:
    """ViT-Large, 304,326,632 parameters of 28 bytes: gradients once, two moments and itself twice, each of four."""
    problem = vit_large("windtunnel-executor-fp32")
    gpu = problem.hardware.gpu("a100-sxm4-80gb")
    (view,) = views_of(uniform_plan(problem), problem)
    seconds = 304_326_632 * 28 / (gpu.memory_bytes_per_s * gpu.optimizer_bandwidth_fraction)
    assert stage_step_s(view, 1.0, 0.0) == pytest.approx((0.0, seconds), rel=1e-12)
    # A host that has only come to it launches one kernel first.
    assert stage_step_s(view, 0.0, 0.0)[1] == pytest.approx(seconds + gpu.launch_s, rel=1e-12)


def test_kernels_per_tensor_are_launched_one_by_one() -> None:
    """Eight for each parameter tensor, by a host of 1 ms for each, the last of which the device then does."""
    problem = vit_large("galvatron-v1", host_seconds_per_kernel=1e-3)
    gpu = problem.hardware.gpu("a100-sxm4-80gb")
    (view,) = views_of(uniform_plan(problem), problem)
    count = 8 * sum(len(problem.workload.parameters(index)) for index in range(len(problem.workload)))
    seconds = 304_326_632 * 80 / (gpu.memory_bytes_per_s * gpu.optimizer_bandwidth_fraction)
    assert stage_step_s(view, 0.0, 0.0)[1] == pytest.approx(count * 1e-3 + seconds / count, rel=1e-12)
    assert stage_step_s(view, 0.5, 0.0)[1] == pytest.approx(count * 1e-3 + seconds / count - 0.5, rel=1e-12)
    assert stage_step_s(view, 10.0, 0.0)[1] == pytest.approx(seconds, rel=1e-12)
    behind = replace(problem, runtime=replace(problem.runtime, host_runs_ahead=False))
    (view,) = views_of(uniform_plan(behind), behind)
    assert stage_step_s(view, 10.0, 0.0)[1] == pytest.approx(count * 1e-3, rel=1e-12)


def test_kernels_over_lists_take_in_48_tensors_and_21_million_elements() -> None:
    """ViT-Large: 304,326,632 parameters are 15 launches of each of eight operations, its 296 tensors 7.

    Of twenty elements of four bytes a parameter, those of the temporary among them.
    """
    problem = vit_large("pytorch-ddp", host_seconds_per_kernel=1e-3)
    gpu = problem.hardware.gpu("a100-sxm4-80gb")
    (view,) = views_of(uniform_plan(problem), problem)
    count = 8 * 15
    seconds = 304_326_632 * 80 / (gpu.memory_bytes_per_s * gpu.optimizer_bandwidth_fraction)
    assert stage_step_s(view, 0.0, 0.0)[1] == pytest.approx(count * 1e-3 + seconds / count, rel=1e-12)


def test_all_runtimes_have_one_compiled_step() -> None:
    """A number of another type would be compiled anew, up to a minute."""
    kinds = {tuple(map(type, adam_launches(load_runtime(name)))) for name in runtime_names()}
    assert kinds == {(int, float, float)}


@pytest.mark.parametrize(("zero", "tensors"), [(0, 296), (3, 26)])
def test_layers_that_fsdp_shards_are_stepped_as_one_tensor_each(zero: int, tensors: int) -> None:
    """ViT-Large: twelve tensors in each of 24 layers and eight around them; or 24 layers, embedding and head."""
    problem = vit_large("composer-fsdp", host_seconds_per_kernel=1e-3)
    (view,) = views_of(uniform_plan(problem, dp=8, zero=zero), problem)
    work = step_work(view)
    assert (work.num_tensors, work.num_stepped) == (296, tensors)
    assert num_launches(adam_launches(problem.runtime), work.num_stepped, work.touched_bytes) == 8 * tensors


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_shard_is_stepped_and_all_is_zeroed_and_averaged(zero: int) -> None:
    """Megatron-LM's passes are 6 bytes for each parameter and 12 for each of those that ZeRO leaves a rank."""
    problem = vit_large("megatron-lm-2021")
    shards = 8 if zero else 1
    (view,) = views_of(uniform_plan(problem, dp=8, zero=zero), problem)
    gpu = problem.hardware.gpu("a100-sxm4-80gb")
    passed_s, updated_s = stage_step_s(view, 1.0, norm_s(view.costs, range(8)))
    rate = gpu.memory_bytes_per_s * gpu.optimizer_bandwidth_fraction
    # Gradients of 2 bytes, states of 12 and parameters of 2 twice, an fp32 copy of gradients twice; waited for.
    assert updated_s == pytest.approx(304_326_632 / shards * (2 + 24 + 4 + 8) / rate + gpu.launch_s, rel=1e-12)
    num_bytes = 304_326_632 * (6 + 12 / shards)
    kernel = MemoryBound(0.75 * num_bytes, 0.25 * num_bytes, "reduction")
    assert passed_s == pytest.approx(problem.hardware.kernel_time_s(view.gpu_type, kernel, "fp16"), rel=1e-12)


def test_the_norm_reads_gradients_in_the_type_in_which_they_are_kept() -> None:
    """Under Composer's FSDP they are reduced in bf16, and kept and clipped as fp32 shards."""
    problem = vit_large("composer-fsdp")
    (view,) = views_of(uniform_plan(problem, dp=8, zero=3), problem)
    assert step_work(view).passed_bytes == pytest.approx(304_326_632 / 8 * problem.runtime.gradient_bytes, rel=1e-12)


def test_all_ranks_wait_for_the_slowest_before_the_norm_and_behind_it() -> None:
    """The first stage is alone; the last reduces over a slow network, for longer than the first's last pass takes."""
    problem = without_hosts(small_problem("vit", cluster="v100-1gpu-10g:3x1", global_batch=8))
    count, cut = len(problem.workload), problem.workload.layers[2][0]
    stages = (
        Stage(((0, cut),), (0,), ((cut, ()),)),
        Stage(((cut, count),), (1, 2), ((count - cut, (Axis("batch", 2),)),)),
    )
    plan = Plan(stages, 2, 4, overlap_gradient_sync=False)
    free = replace(problem.runtime, gradient_clipping=False, loss_scaling=False, gradient_pass_bytes=None)
    apart = replace(problem, runtime=free)
    views, between_s = views_of(plan, problem), norm_s(CostTables(problem), range(3))
    elements = sum(
        prod(each.shape) for index in range(cut, count) for each in problem.workload.parameters(index)
    )
    reduced_s = problem.hardware.collective("all_reduce", 2.0 * elements, (1, 2)).alone_s
    (first_s, then_s), (last_first_s, last_then_s) = (stage_step_s(view, 1.0, between_s) for view in views)
    # The last stage begins when the first has its last backward pass before it.
    reduced_s -= items_s(views[0], ProgramBuilder(views[0], Fidelity()).backward(GRADIENTS, gather=True, sync=False))
    assert reduced_s + last_first_s > first_s, "else one stage alone rules"
    with_norm_s = reduced_s + last_first_s + between_s + max(then_s, last_then_s)
    views = views_of(plan, apart)
    own_s, last_own_s = (stage_step_s(view, 1.0, 0.0)[1] for view in views)
    more_s = estimate(plan, problem).iteration_time_s - estimate(plan, apart).iteration_time_s
    assert more_s == pytest.approx(with_norm_s - max(own_s, reduced_s + last_own_s), rel=1e-6)
    for each in (problem, apart):
        found_s = estimate(plan, each).iteration_time_s
        assert FastEstimator(each).estimate(plan).iteration_time_s == pytest.approx(found_s, rel=1e-11)


# Against the simulator


@pytest.mark.parametrize(
    ("runtime", "shape", "error"),
    [
        ("windtunnel-executor", {}, 5e-5),
        ("pytorch-ddp", {}, 1e-4),
        ("pytorch-ddp", dict(dp=8), 5e-4),
        ("megatron-lm-2021", dict(dp=8), 5e-4),
        ("megatron-lm-2021", dict(dp=8, zero=1), 5e-4),
        ("megatron-lm-2021", dict(dp=8, zero=2), 5e-4),
        ("megatron-lm-2021", dict(tp=2, dp=4), 5e-4),
        ("megatron-deepspeed", dict(dp=8), 5e-4),
        ("megatron-deepspeed-timed", dict(dp=8), 5e-4),
        ("alpa", dict(dp=8), 5e-4),
        ("galvatron-v1", dict(tp=8), 1e-4),
        ("composer-fsdp", dict(tp=8), 5e-4),
    ],
)
def test_vit_large_on_eight_gpus_steps_as_in_the_simulator(runtime: str, shape: dict[str, int], error: float) -> None:
    problem = vit_large(runtime, copies_gradients=False)
    plan = uniform_plan(problem, overlap_gradient_sync=False, gradient_reduction="last", **shape)  # type: ignore[arg-type]
    check(plan, problem, error)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("copies", [False, True])
def test_plain_data_parallelism_waits_for_hosts_of_copies(copies: bool, overlaps: bool) -> None:
    """ViT-Large, reduced once, stepped tensor by tensor: launches of copies are 6 or 7 of 142 ms."""
    problem = vit_large("pytorch-ddp", copies_gradients=copies, optimizer_kernels="per_tensor")
    plan = uniform_plan(problem, dp=8, overlap_gradient_sync=overlaps, gradient_reduction="last")
    check(plan, problem, 4e-4)


@pytest.mark.parametrize("runtime", ["pytorch-fsdp2", "composer-fsdp", "megatron-lm-2023"])
def test_sharded_parameters_are_stepped_in_shards(runtime: str) -> None:
    """Reductions and gathers that hide are left out; what the step adds is not."""
    problem = vit_large(runtime)
    plan = uniform_plan(problem, dp=8, zero=3)
    (view,) = views_of(plan, problem)
    between_s = norm_s(view.costs, range(8))
    with_s, without_s = (
        simulate_time_s(plan, problem, engine="compiled", fidelity=replace(ALONE, optimizer=steps))
        for steps in (True, False)
    )
    assert sum(stage_step_s(view, 1.0, between_s)) + between_s == pytest.approx(with_s - without_s, rel=1e-3)


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("shape", [dict(), dict(pp=2), dict(pp=4), dict(pp=2, dp=2, zero=1), dict(tp=2, pp=2)])
def test_tied_weights_are_stepped_once_by_each_stage_that_has_them(family: str, shape: dict[str, int]) -> None:
    problem = without_hosts(small_problem(family, cluster="a100-80g-dgx:1x4", global_batch=16))
    plan = uniform_plan(problem, overlap_gradient_sync=False, **shape)  # type: ignore[arg-type]
    check(plan, problem, 1e-3)


@pytest.mark.parametrize("runtime", ["megatron-lm-2021", "alpa", "galvatron-v1"])
@pytest.mark.parametrize("schedule", ["interleaved", "gpipe"])
def test_stages_of_a_rank_step_one_after_the_other(runtime: str, schedule: str) -> None:
    problem = without_hosts(small_problem("bert", cluster="a100-80g-dgx:1x2", runtime=runtime, global_batch=8))
    plan = uniform_plan(problem, pp=2, chunks=2, schedule="interleaved", gradient_reduction="last")
    check(replace(plan, schedule=schedule), problem, 1e-9)


def test_a_mixed_stage_steps_at_the_pace_of_its_slowest_type() -> None:
    problem = small_problem("vit", cluster="a100-80g-dgx:1x2+v100-32g-dgx1:1x2", global_batch=16)
    for devices in ((0, 1, 2, 3), (2, 0, 3, 1)):
        count = len(problem.workload)
        stage = Stage(((0, count),), devices, ((count, (Axis("batch", 4),)),))
        check(Plan((stage,), 16, 1, overlap_gradient_sync=False), problem, 0.005)


def test_a_slower_host_is_behind_for_longer() -> None:
    problem = small_problem("vit", cluster="a100-80g-dgx:1x1", runtime="galvatron-v1", global_batch=4)
    cluster = problem.hardware.cluster
    for factor in (0.1, 2.0, 8.0):
        slower = replace(problem, hardware=with_factors(cluster, {"host": factor}, "test").hardware(cluster))
        check(uniform_plan(slower, microbatch=4), slower, 2.5e-3)


def test_a_final_norm_that_is_wrapped_by_itself_is_stepped_by_itself() -> None:
    """Under Galvatron 1.0: 24 layers, embedding, norm and head."""
    problem = vit_large("hetu-galvatron")
    (view,) = views_of(uniform_plan(problem, dp=8, zero=3), problem)
    assert step_work(view).num_stepped == 27
