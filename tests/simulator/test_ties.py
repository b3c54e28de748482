"""How often gradients of tied weights are reduced: once, or by each layer that uses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import gradient_buckets, parameter_groups
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
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
        times.append(simulate(plan, problem, fidelity=ALONE).iteration_time_s - alone_s)
    found = ties(problem, plan)
    assert {uses for uses, _ in found.values()} == USES[family]
    assert sizes[1] - sizes[0] == sum((uses - 1) * size for uses, size in found.values())
    assert times[1] == pytest.approx(times[0])


def test_sharded_weights_are_reduced_as_they_are_gathered_once() -> None:
    times = [
        simulate(uniform_plan(problem, dp=8, microbatch=2, zero=3), problem).iteration_time_s
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
