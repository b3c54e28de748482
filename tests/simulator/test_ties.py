"""How gradients of tied weights are reduced: once, or by each layer that uses them; over stages whole, or by shards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.epilogue import tied_groups
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import gradient_buckets, parameter_groups
from simulator.lowering.whole_gradients import whole_gradients_begin
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem

ALONE = Fidelity().without("host", "overlap-slowdown", "contention", "optimizer")
USES = {"gpt": {2}, "bert": {2}, "t5": {2, 3}, "vit": set[int]()}
"""Layers that use each tied weight: embedding, decoder's embedding (positions too), head."""


def problem_with(family: str, **changes: object) -> Problem:
    problem = small_problem(family, runtime="pytorch-ddp", cluster="a100-80g-dgx:1x8")
    return replace(
        problem, runtime=replace(problem.runtime, copies_gradients=False, gradient_bucket_bytes=None, **changes)
    )


def ties(problem: Problem, plan: Plan) -> dict[str, tuple[int, float]]:
    """Return how many layers use each tied weight, and the bytes of its gradient."""
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    sizes = {group.tie: 4.0 * group.num_elements for group in parameter_groups(view) if group.tie is not None}
    layers: dict[str, set[int]] = {tie: set() for tie in sizes}
    for index, op in enumerate(problem.workload.operators):
        for parameter in problem.workload.parameters(index):
            if parameter.tie is not None:
                layers[parameter.tie].add(op.layer)
    return {tie: (len(layers[tie]), size) for tie, size in sizes.items()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("family", sorted(USES))
def test_each_layer_that_uses_a_weight_reduces_it(family: str, overlap: bool) -> None:
    """One bucket holds all gradients and is reduced behind everything else: its time says what it holds."""
    sizes, times = [], []
    for by_use in (False, True):
        problem = problem_with(family, reduces_ties_by_use=by_use)
        plan = uniform_plan(problem, dp=8, microbatch=2, overlap_gradient_sync=overlap)
        (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
        (bucket,) = gradient_buckets(view, merged=not overlap)
        (reduction,) = bucket.collectives
        sizes.append(reduction.num_bytes)
        alone_s = problem.hardware.collective("all_reduce", reduction.num_bytes, tuple(range(8))).alone_s
        times.append(simulate_time_s(plan, problem, fidelity=ALONE) - alone_s)
    found = ties(problem, plan)
    assert {uses for uses, _ in found.values()} == USES[family]
    assert sizes[1] - sizes[0] == sum((uses - 1) * size for uses, size in found.values())
    assert times[1] == pytest.approx(times[0])


def test_sharded_weights_are_reduced_as_they_are_gathered_once() -> None:
    times = [
        simulate_time_s(uniform_plan(problem, dp=8, microbatch=2, zero=3), problem)
        for problem in (problem_with("t5", reduces_ties_by_use=by_use) for by_use in (False, True))
    ]
    assert times[0] == times[1]


def test_a_weight_tied_under_splits_of_two_names_is_held_once() -> None:
    """Sequence parallelism cuts the embedding's rows as the head's, under another name."""
    problem = small_problem("gpt")
    held = {}
    for splits in (False, True):
        plan = uniform_plan(problem, tp=4, microbatch=1, sequence_parallel=splits)
        (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
        held[splits] = sum(group.num_elements for group in parameter_groups(view))
        tied = [group for group in parameter_groups(view) if group.tie]
        assert len(tied) == 1 and len(tied[0].users) == 2
    assert held[True] == held[False]


@pytest.mark.parametrize(("zero", "shards"), [(0, (1, 1)), (1, (4, 1)), (2, (4, 4))])
def test_stages_that_share_a_weight_reduce_it_whole_where_the_runtime_does(zero: int, shards: tuple[int, int]) -> None:
    """Before ZeRO-1 scatters gradients, as Megatron-LM and DeepSpeed: two stages of four, pair by pair."""
    times, expected = [], []
    for whole, parts in zip((False, True), shards, strict=True):
        problem = problem_with("gpt", reduces_ties_whole=whole, scatters_under_zero1=True)
        plan = uniform_plan(problem, pp=2, dp=4, zero=zero)
        views = stage_views(plan.canonical(problem.workload), CostTables(problem))
        tied = next(group for group in parameter_groups(views[0]) if group.tie)
        size = 4.0 * tied.num_elements / parts
        assert {(devices, num_bytes) for _, devices, num_bytes in tied_groups(views)} == {
            ((rank, rank + 4), size) for rank in range(4)
        }
        times.append(simulate_time_s(plan, problem, fidelity=ALONE))
        expected.append(problem.hardware.collective("all_reduce", size, (0, 4)).alone_s)
        by_classes = estimate(plan, problem).iteration_time_s
        assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(by_classes, rel=1e-11)
    assert times[1] - times[0] == pytest.approx(expected[1] - expected[0], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "name", ["megatron-lm-2021", "megatron-lm-2022", "megatron-lm-2023", "megatron-lm-2023-fp16", "megatron-deepspeed"]
)
def test_runtimes_of_megatron_and_deepspeed_reduce_tied_weights_whole(name: str) -> None:
    assert load_runtime(name).reduces_ties_whole


@pytest.mark.parametrize(("keeps_root", "passes"), [(True, ["head"]), (False, ["embedding", "head"])])
def test_each_unit_that_uses_a_tied_weight_begins_a_whole_gradient_but_the_root_sums_its_own(
    keeps_root: bool, passes: list[str]
) -> None:
    """Backward comes to the head first; embedding and head are one unit in the root, else two. ZeRO-1 scatters none."""
    problem = small_problem("gpt", runtime="composer-fsdp", cluster="a100-80g-dgx:1x4")
    problem = replace(problem, runtime=replace(problem.runtime, keeps_root_gathered=keeps_root))
    ends = {0: "embedding", len(problem.workload) - 1: "head"}
    for zero, expected in ((1, []), (3, passes)):
        plan = validate(uniform_plan(problem, dp=4, zero=zero), problem)
        (view,) = stage_views(plan, CostTables(problem))
        (tied,) = [group for group in parameter_groups(view) if group.tie is not None]
        assert [ends[user] for user in tied.users] == ["embedding", "head"]
        assert [ends[index] for index in whole_gradients_begin(view, tied)] == expected
