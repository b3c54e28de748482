"""What is copied beside what is communicated, and the root unit: closed forms, both engines, all ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from simulator.costs import CostTables
from simulator.engines.engine_compiled import run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.fidelity import Fidelity
from simulator.lowering.copies import GRADIENT_COPY, gradient_copy
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import lower, stage_views
from simulator.lowering.program import ProgramBuilder
from simulator.lowering.synchronisation import gather_collectives, gradient_buckets, parameter_groups
from simulator.lowering.view import StageView
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import repeated_layers, uniform_plan
from tests.simulator.problems import small_problem
from workloads.kernels import MemoryBound

ALONE = Fidelity().without("host", "overlap-slowdown", "contention", "optimizer")
"""Tasks take as long as their costs say."""


def with_copies(wanted: bool, family: str = "gpt", **changes: object) -> Problem:
    problem = small_problem(family, runtime="pytorch-ddp", cluster="a100-80g-dgx:1x8")
    return replace(problem, runtime=replace(problem.runtime, copies_gradients=wanted, **changes))


def copies_s(problem: Problem, plan: Plan) -> float:
    """Return the seconds of copying every gradient of the only stage once, from its parameters alone."""
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    sizes = [4.0 * group.num_elements for group in parameter_groups(view)]
    return sum(
        problem.hardware.kernel_time_s(view.gpu_type, MemoryBound(size, size), problem.runtime.implementation.dtype)
        for size in sizes
    )


def difference_s(plan: Plan, family: str = "gpt", **changes: object) -> float:
    """Return what copying adds to the iteration time."""
    with_s, without_s = (
        simulate_time_s(plan, with_copies(wanted, family, **changes), fidelity=ALONE)
        for wanted in (True, False)
    )
    return with_s - without_s


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "vit"])
def test_one_bucket_is_filled_before_and_emptied_after_its_reduction(family: str, overlap: bool) -> None:
    """Every parameter once each way, a tied one too."""
    problem = with_copies(True, family)
    plan = uniform_plan(problem, dp=8, microbatch=2, overlap_gradient_sync=overlap)
    copies = copies_s(problem, plan)
    assert copies > 1e-4
    assert difference_s(plan, family, gradient_bucket_bytes=None) == pytest.approx(2 * copies)


def test_copies_hide_behind_the_reductions_of_other_buckets() -> None:
    """All but those before the first bucket and after the last, where reductions rule."""
    problem = with_copies(True)
    plan = uniform_plan(problem, dp=8, microbatch=2)
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    buckets = gradient_buckets(view, merged=False)
    assert len(buckets) > 3
    first, last = (
        sum(gradient_copy(view, operator, view.gpu_type).device_s for operator in bucket.copied)
        for bucket in (buckets[0], buckets[-1])
    )
    found = difference_s(plan)
    assert 0.99 * (first + last) < found < 0.8 * 2 * copies_s(problem, plan)


def test_every_gradient_is_copied_once_each_way_and_back_when_its_bucket_is_reduced() -> None:
    problem = with_copies(True)
    plan = uniform_plan(problem, dp=8, microbatch=2)
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    items = ProgramBuilder(view, Fidelity()).backward(GRADIENTS, gather=False, sync=True)
    owners = sorted({group.operator for group in parameter_groups(view)})
    copies = [
        (operator, position)
        for position, item in enumerate(items)
        for operator, phase in item.parts
        if phase == GRADIENT_COPY
    ]
    end = max(position for position, item in enumerate(items) if item.chained)
    assert sorted(operator for operator, position in copies if position <= end) == owners
    assert sorted(operator for operator, position in copies if position > end) == owners
    for item in items[end + 1 :]:
        if not item.collective:
            last, *reductions = item.after
            assert last == end and all(items[position].role == "reduce" for position in reductions)
            assert max(operator for operator, _ in item.parts) >= item.operator == min(item.parts)[0]


def test_the_next_forward_pass_waits_for_the_buckets_of_the_last_backward_pass() -> None:
    """Where every pass reduces, as DistributedDataParallel does unless told otherwise, nothing hides behind it."""
    problem = with_copies(True, gradient_bucket_bytes=None)
    one, two = (uniform_plan(problem, dp=8, microbatch=each) for each in (2, 1))
    cost = CostTables(problem)
    (view,) = stage_views(one.canonical(problem.workload), cost)
    (bucket,) = gradient_buckets(view, merged=False)
    (reduction,) = bucket.collectives
    alone_s = problem.hardware.collective(reduction.collective, reduction.num_bytes, tuple(range(8))).alone_s
    for plan, passes in ((one, 1), (two, 2)):
        silent = simulate_time_s(plan, problem, fidelity=ALONE.without("gradient-sync"))
        whole = simulate_time_s(plan, problem, fidelity=ALONE)
        assert whole - silent == pytest.approx(passes * (alone_s + 2 * copies_s(problem, plan)))


@pytest.mark.parametrize("times", [1, 2])
def test_sharded_gradients_are_gone_over_before_they_are_scattered(times: int) -> None:
    """Two microbatches that both reduce; where no gather is waited for and gradients are added, nothing of it hides."""
    with_s, without_s = (
        simulate_time_s(plan, problem, fidelity=ALONE.without("parameter-gather"))
        for copies in (times, 0)
        for problem in [with_copies(False, sharded_gradient_copies=copies, hands_over_gradients=False)]
        for plan in [uniform_plan(problem, dp=8, microbatch=1, zero=3)]
    )
    problem = with_copies(False, sharded_gradient_copies=times, hands_over_gradients=False)
    (view,) = stage_views(
        uniform_plan(problem, dp=8, microbatch=1, zero=3).canonical(problem.workload), CostTables(problem)
    )
    kernels = [MemoryBound(2.0 * group.num_elements, 4.0 * group.num_elements) for group in parameter_groups(view)]
    once = sum(problem.hardware.kernel_time_s(view.gpu_type, kernel, "bf16") for kernel in kernels)
    assert with_s - without_s == pytest.approx(2 * times * once, rel=1e-6)


def test_gradients_that_fill_a_bucket_are_written_into_it_and_divided() -> None:
    """DeepSpeed's ZeRO-2: two passes of two bytes in and two out for each gradient, in both microbatches."""
    problem = small_problem("gpt", runtime="megatron-deepspeed", cluster="a100-80g-dgx:1x8")
    without = replace(problem, runtime=replace(problem.runtime, sharded_gradient_copies=0))
    plan = uniform_plan(problem, dp=8, microbatch=1, zero=2)
    with_s, without_s = (simulate_time_s(plan, each, fidelity=ALONE) for each in (problem, without))
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    kernels = [MemoryBound(2.0 * group.num_elements, 2.0 * group.num_elements) for group in parameter_groups(view)]
    once = sum(problem.hardware.kernel_time_s(view.gpu_type, kernel, "fp16") for kernel in kernels)
    assert plan.num_microbatches == 2
    assert with_s - without_s == pytest.approx(2 * 2 * once, rel=1e-6)


@pytest.mark.parametrize("shape", [dict(tp=8), dict(dp=8, zero=3), dict(dp=8, zero=2)])
def test_what_is_sharded_or_not_replicated_is_not_copied(shape: dict) -> None:
    assert difference_s(uniform_plan(with_copies(True), microbatch=2, **shape)) == 0


def test_the_optimizer_of_ddp_may_be_sharded_and_gradients_are_reduced_as_without() -> None:
    """ZeroRedundancyOptimizer (torch 2.13.0) steps a part and broadcasts it; the reducer knows nothing of it."""
    problem = with_copies(True)
    reductions, copies = [], []
    for zero in (0, 1):
        plan = uniform_plan(problem, dp=8, microbatch=2, zero=zero).canonical(problem.workload)
        (view,) = stage_views(plan, CostTables(problem))
        buckets = gradient_buckets(view, merged=False)
        reductions.append([[(item.collective, item.num_bytes) for item in each.collectives] for each in buckets])
        copies.append([(each.copied, each.passes, each.copied_back) for each in buckets])
    assert reductions[0] == reductions[1] and {name for each in reductions[1] for name, _ in each} == {"all_reduce"}
    assert copies[0] == copies[1]
    scatters = replace(problem, runtime=replace(problem.runtime, scatters_under_zero1=True))
    assert difference_s(uniform_plan(scatters, dp=8, microbatch=2, zero=1), scatters_under_zero1=True) == 0


@pytest.mark.parametrize(
    "shape",
    [
        dict(dp=8),
        dict(tp=2, dp=2, pp=2),
        dict(tp=2, dp=4, sequence_parallel=True, recompute="full"),
        dict(dp=4, pp=2, schedule="interleaved", chunks=2),
        dict(dp=4, pp=2, schedule="zb-h1"),
        dict(dp=8, overlap_gradient_sync=False),
        dict(dp=8, zero=3),
        dict(tp=2, dp=4, zero=3, recompute="full"),
        dict(dp=4, pp=2, zero=3, schedule="interleaved", chunks=2),
        dict(dp=4, pp=2, zero=3, schedule="zb-h1"),
    ],
)
@pytest.mark.parametrize("host_behind", [False, True])
def test_representatives_unmerged_tasks_and_both_engines_agree(shape: dict, host_behind: bool) -> None:
    problem = with_copies(True, sharded_gradient_copies=2, copies_gathered=True, keeps_root_gathered=True)
    plan = uniform_plan(problem, microbatch=1, **shape)
    times = []
    if host_behind:
        problem = replace(problem, runtime=replace(problem.runtime, host_runs_ahead=False))
    for fidelity in (Fidelity(), replace(Fidelity(), merge=False), replace(Fidelity(), symmetry=False)):
        graph = lower(plan.canonical(problem.workload), CostTables(problem), fidelity).graph
        times += [max(run(graph).end_s) for run in (run_simpy, run_compiled)]
    for one, other in pairwise(times):
        assert one == pytest.approx(other, rel=1e-6)


def sharded(family: str, **changes: object) -> tuple[Problem, Plan, StageView]:
    """Return a problem whose gathers are all waited for, a plan of one sharded stage, and its view."""
    problem = with_copies(False, family, prefetches_gathers=False, **changes)
    plan = uniform_plan(problem, dp=8, microbatch=1, zero=3)
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    return problem, plan, view


def gathers_s(view: StageView) -> dict[int, float]:
    """Return the seconds of gathering each layer alone."""
    hardware = view.costs.problem.hardware
    return {
        layer: sum(hardware.collective(each.collective, each.num_bytes, tuple(range(8))).alone_s for each in found)
        for layer, found in gather_collectives(view).items()
    }


def users_of(problem: Problem, operator: int, tie: str | None) -> list[int]:
    """Return the layers that hold a parameter, by the graph alone."""
    if tie is None:
        return [problem.workload.operators[operator].layer]
    return [
        op.layer
        for index, op in enumerate(problem.workload.operators)
        if any(parameter.tie == tie for parameter in problem.workload.parameters(index))
    ]


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_tied_weight_is_gathered_for_every_layer_that_uses_it(family: str, kept: bool) -> None:
    """Between embedding and head it is not there, unless it is of the root unit."""
    problem, _, view = sharded(family, keeps_root_gathered=kept)
    ends = {problem.workload.operators[0].layer, problem.workload.operators[-1].layer}
    expected: dict[int, float] = {}
    for group in parameter_groups(view):
        layers = users_of(problem, group.operator, group.tie)
        stays = kept and ends.intersection(layers)
        for layer in layers[:1] if stays else dict.fromkeys(layers):
            size = group.num_elements * problem.runtime.gathered_parameter_bytes
            expected[layer] = expected.get(layer, 0.0) + size
    assert any(len(set(users_of(problem, group.operator, group.tie))) > 1 for group in parameter_groups(view))
    found = {layer: sum(one.num_bytes for one in each) for layer, each in gather_collectives(view).items()}
    assert found == expected


def test_a_tied_weight_that_stays_after_the_forward_pass_is_gathered_once() -> None:
    _, plan, view = sharded("gpt")
    stays = replace(view, plan=replace(plan, reshard_after_forward=False))
    first, last = view.operators[0], view.operators[-1]
    layers = [view.costs.problem.workload.operators[index].layer for index in (first, last)]
    again, once = (
        [sum(item.num_bytes for item in gather_collectives(each)[layer]) for layer in layers] for each in (view, stays)
    )
    assert again[0] == once[0] and again[1] > 100 * once[1]


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["gpt", "t5", "vit"])
def test_what_was_gathered_is_copied_once_for_each_gather(family: str, recompute: str, kept: bool) -> None:
    """The root's once a microbatch, where it is kept; nothing of it is recomputation."""
    with_s, without_s = (
        simulate(
            uniform_plan(problem, dp=8, microbatch=1, zero=3, recompute=recompute),
            problem,
            fidelity=ALONE.without("gradient-sync"),
        ).iteration_time_s
        for wanted in (True, False)
        for problem, _, _ in [sharded(family, copies_gathered=wanted, keeps_root_gathered=kept)]
    )
    problem, plan, view = sharded(family, keeps_root_gathered=kept)
    sizes: dict[int, float] = {}
    for group in parameter_groups(view):
        for layer in users_of(problem, group.operator, group.tie)[: 1 if kept else None]:
            sizes[layer] = sizes.get(layer, 0.0) + group.num_elements * problem.runtime.gathered_parameter_bytes
    copies = sum(
        (1 if layer in view.costs.root_units else 2)
        * problem.hardware.kernel_time_s(view.gpu_type, MemoryBound(size, size), "bf16")
        for layer, size in sizes.items()
    )
    assert with_s - without_s == pytest.approx(plan.num_microbatches * copies, rel=1e-6)


@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "vit"])
def test_the_root_unit_is_gathered_for_the_forward_pass_and_stays(family: str) -> None:
    """Embedding, head and what else does not repeat; gathers of the layers come twice."""
    own_s, root_s = dict[bool, float](), dict[bool, float]()
    for kept in (True, False):
        problem, plan, view = sharded(family, keeps_root_gathered=kept, overlap_gradient_sync=False)
        plan = replace(plan, overlap_gradient_sync=False)
        own_s[kept] = simulate_time_s(plan, problem, fidelity=ALONE.without("gradient-sync"))
        found = gathers_s(view)
        root = set(found) - {problem.workload.operators[first].layer for first, _ in repeated_layers(problem.workload)}
        root_s[kept] = sum(seconds for layer, seconds in found.items() if layer in root)
        assert view.costs.root_units >= root if kept else not view.costs.root_units
        with_prefetch = replace(problem, runtime=replace(problem.runtime, prefetches_gathers=True))
        items = ProgramBuilder(replace(view, costs=CostTables(with_prefetch)), Fidelity()).forward(gather=True)
        first = next(position for position, item in enumerate(items) if item.collective is None)
        gathered = [
            problem.workload.operators[item.operator].layer for item in items[:first] if item.role == "gather"
        ]
        assert gathered == [*(sorted(root) if kept else [0]), 1], "the root, or its first layer, and the next one ahead"
    gained_s = (own_s[False] - own_s[True]) / plan.num_microbatches
    assert root_s[True] > 0
    assert gained_s == pytest.approx(2 * root_s[False] - root_s[True], rel=1e-6)


def test_gradients_of_the_root_unit_are_reduced_as_one_when_the_last_is_there() -> None:
    for kept in (True, False):
        problem, _, view = sharded("bert", keeps_root_gathered=kept)
        buckets = gradient_buckets(view, merged=False)
        inside = {problem.workload.operators[first].layer for first, _ in repeated_layers(problem.workload)}
        outside = [b for b in buckets if problem.workload.operators[b.last_operator].layer not in inside]
        assert len(outside) == 1 if kept else len(outside) > 1
        assert [bucket.last_operator for bucket in buckets] == sorted(
            (bucket.last_operator for bucket in buckets), reverse=True
        )
        (whole,) = {item.collective for bucket in buckets for item in bucket.collectives}
        assert whole == "reduce_scatter"
        groups = list(parameter_groups(view))
        for bucket in buckets:
            (collective,) = bucket.collectives
            assert collective.num_bytes == 4 * sum(groups[member].num_elements for member in bucket.members)
            assert bucket.last_operator == min(groups[member].operator for member in bucket.members)
        assert sorted(member for bucket in buckets for member in bucket.members) == list(range(len(groups)))
