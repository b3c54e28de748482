"""ZeRO-3 by parameter, every rank's part listed, with a host that waits: closed forms, both engines, all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.estimate_memory import whole_for_a_while
from simulator.costs import CostTables
from simulator.engines.engine_compiled import run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower, stage_views
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.synchronisation import gather_collectives, gradient_buckets
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate, simulate_time_s
from simulator.taskgraph import COMPUTATION
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem

RANKS = 8

ALONE = Fidelity().without("host", "overlap-slowdown", "contention", "optimizer")
"""Tasks take as long as their costs say."""


def problem_with(family: str = "gpt", **changes: object) -> Problem:
    problem = small_problem(family, runtime="deepspeed-zero3-2021", cluster="a100-80g-dgx:1x8")
    return replace(problem, runtime=replace(problem.runtime, **changes))


def sharded(problem: Problem, **changes: object) -> Plan:
    plan = uniform_plan(problem, dp=RANKS, zero=3, microbatch=1, **changes)  # type: ignore[arg-type]
    return replace(plan, gradient_reduction="every")


def layers_of_parameters(problem: Problem) -> tuple[dict[object, set[int]], dict[object, int]]:
    """Return the layers that use each parameter, and its elements, from the graph alone."""
    users: dict[object, set[int]] = {}
    elements: dict[object, int] = {}
    for index, op in enumerate(problem.workload.operators):
        for number, parameter in enumerate(problem.workload.parameters(index)):
            key = parameter.tie or (index, number)
            users.setdefault(key, set()).add(op.layer)
            count = 1
            for size in parameter.shape:
                count *= size
            elements[key] = count
    return users, elements


def parts_of_small(elements: Mapping[object, int], most: int) -> int:
    """Return how many ranks' parts small parameters are put together of: one of two elements of two."""
    return sum(-(-count // -(-count // RANKS)) for count in elements.values() if count <= most)


@pytest.mark.parametrize("family", ["gpt", "bert", "vit"])
def test_the_host_lists_every_rank_for_every_parameter(family: str) -> None:
    """Each large parameter twice a microbatch for every layer that uses it, to gather; each once, to scatter.

    And each small one once a microbatch, to put it together.
    """
    problem = problem_with(family)
    users, elements = layers_of_parameters(problem)
    least = problem.runtime.parameter_calls_above
    assert least == 100_000
    calls = sum(2 * len(layers) * (elements[key] > least) + 1 for key, layers in users.items())
    few = parts_of_small(elements, least)
    times = []
    for entry_s in (1e-3, 3e-3):  # Longer than anything on the device: all of it is waited for.
        own = problem_with(family, host_seconds_per_list_entry=entry_s)
        times.append(simulate_time_s(sharded(own), own))
    num_microbatches = sharded(problem).num_microbatches
    assert num_microbatches == 2
    assert times[1] - times[0] == pytest.approx(num_microbatches * (calls * RANKS + few) * 2e-3, rel=2e-3)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_every_call_has_its_latency(family: str) -> None:
    problem = problem_with(family)
    plan = sharded(problem)
    graph = simulate(plan, problem, fidelity=ALONE).graph
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    users, elements = layers_of_parameters(problem)
    found = {
        cause: float(sum(graph.latency_s[np.array(graph.causes)[graph.cause] == cause]))
        for cause in ("parameter gather", "gradient sync")
    }
    gathers = {
        layer: sum(layer in layers and elements[key] > 100_000 for key, layers in users.items())
        for layer in range(len(problem.workload.layers))
    }
    scatters = {
        layer: sum(min(layers) == layer for layers in users.values()) for layer in range(len(problem.workload.layers))
    }

    def latency_s(item: MeshCollective) -> float:
        return problem.hardware.collective(item.collective, item.num_bytes, tuple(range(RANKS))).latency_s

    gather_s = sum(gathers[layer] * latency_s(item) for layer, (item,) in gather_collectives(view).items())
    scatter_s = sum(
        scatters[problem.workload.operators[bucket.last_operator].layer] * latency_s(*bucket.collectives)
        for bucket in gradient_buckets(view, merged=False)
    )
    assert found["parameter gather"] == pytest.approx(2 * plan.num_microbatches * gather_s)
    assert found["gradient sync"] == pytest.approx(plan.num_microbatches * scatter_s)


def test_a_host_that_waits_at_each_layer_hides_no_launches() -> None:
    waits = problem_with(host_seconds_per_list_entry=1e-4)
    runs_on = replace(waits, runtime=replace(waits.runtime, host_waits=("optimizer",)))
    plan = sharded(waits)
    assert simulate_time_s(plan, waits) > simulate_time_s(plan, runs_on)
    alone = Fidelity().without("host")
    assert simulate_time_s(plan, waits, fidelity=alone) == pytest.approx(
        simulate_time_s(plan, runs_on, fidelity=alone), rel=1e-9
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_representatives_unmerged_tasks_and_both_engines_agree(family: str, recompute: str) -> None:
    problem = problem_with(family)
    plan = sharded(problem, recompute=recompute)
    times = []
    base = Fidelity().without("overlap-slowdown")  # Merged runs that launches bind end up to a launch earlier.
    for fidelity in (base, replace(base, merge=False), replace(base, symmetry=False)):
        graph = lower(plan.canonical(problem.workload), CostTables(problem), fidelity).graph
        times += [max(run(graph).end_s) for run in (run_simpy, run_compiled)]
    for one, other in pairwise(times):
        assert one == pytest.approx(other, rel=1e-9)


def test_the_closed_form_has_three_quarters_of_what_calls_take_too() -> None:
    """A few small layers: of what each call takes the host and the wire."""
    problem = problem_with()
    together = problem_with(parameter_calls_above=None, host_seconds_per_list_entry=0.0)
    plan = sharded(problem)
    more_s = simulate_time_s(plan, problem) - simulate_time_s(plan, together)
    found_s = estimate(plan, problem).iteration_time_s - estimate(plan, together).iteration_time_s
    assert 0.7 * more_s < found_s < more_s


def test_interleaved_ranks_whose_hosts_wait_for_gathers_are_refused() -> None:
    """Each would wait for a gather of a stage whose neighbour waits likewise."""
    problem = replace(problem_with(), global_batch=16)
    shape = dict(pp=2, dp=4, chunks=2, schedule="interleaved", microbatch=1)
    with pytest.raises(ValueError, match=r"before they post receives.* one stage a rank, or ZeRO-2"):
        simulate(uniform_plan(problem, zero=3, **shape), problem)  # type: ignore[arg-type]
    simulate(uniform_plan(problem, zero=2, **shape), problem)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["gpt", "bert", "vit"])
def test_what_is_whole_at_once_fills_a_bucket_of_gradients(family: str) -> None:
    """Buckets of one element: every operator with parameters ends a unit, and two neighbours are whole at once."""
    problem = problem_with(family, gradient_bucket_bytes=2)
    workload = problem.workload
    own = [
        sum(prod(parameter.shape) for parameter in workload.parameters(index)) for index in range(len(workload))
    ]
    costs = CostTables(problem)
    with_parameters = [unit for unit, elements in zip(costs.unit_parts, own, strict=True) if elements]
    assert len(set(with_parameters)) == len(with_parameters)
    assert list(costs.unit_parts) == sorted(costs.unit_parts)
    (view,) = stage_views(validate(sharded(problem), problem), costs)
    whole = whole_for_a_while(view)
    units = [(index, elements) for index, elements in enumerate(own) if elements]
    sizes = [0, *(2 * elements for _, elements in units), 0]  # fp16
    expected = {
        index: sizes[place] + 2 * sizes[place + 1] + sizes[place + 2] for place, (index, _) in enumerate(units)
    }
    found = {index: whole.beside[index] for index in expected}
    assert (whole.root, found) == (0, expected), "parameters of a unit and the next one, gradients of it and the last"
    assert FastEstimator(problem).estimate(sharded(problem)).peak_bytes == pytest.approx(
        estimate(sharded(problem), problem).peak_bytes, rel=1e-11
    )
    wide = problem_with(family)  # A layer fills no bucket of 1 GB: it is one unit, and no smaller than its operators.
    assert CostTables(wide).unit_parts == tuple(op.layer for op in workload.operators)
    peaks = [simulate(sharded(each), each).peak_allocated_bytes for each in (problem, wide)]
    assert peaks[0] < peaks[1]


def test_a_layer_of_530b_is_never_whole() -> None:
    """Its products have 1.26, 0.42, 1.68 and 1.68e9 elements, a bucket 5e8: two of the last are the most, 6.3 GiB."""
    spec = ProblemSpec(
        model="megatron-gpt-530b", cluster="a100-80g-dgx:80x8", runtime="deepspeed-zero3-2021", global_batch=2560
    )
    problem = spec.load()
    plan = uniform_plan(problem, dp=640, zero=3, microbatch=4, recompute="full")
    (view,) = stage_views(validate(plan, problem), CostTables(problem))
    h = 20480
    whole, most = whole_for_a_while(view), 2 * ((4 * h * h + 4 * h) + (4 * h * h + h))
    in_bucket = 2 * (4 * h + h)  # The gradients of their biases, for which there is room in one.
    assert (max(whole.gathers.values()), whole.gradients) == (most, most - in_bucket)


def test_merged_tasks_of_a_launch_bound_run_that_waits_end_a_little_earlier() -> None:
    """What the effect ``merge`` says of itself: up to one launch a task, under 1 % (GNMT, ZeRO-3 of DeepSpeed)."""
    problem = ProblemSpec("gnmt-8", "p3.8xlarge:1x2", "deepspeed-zero3-2021", 2).load()
    plan = uniform_plan(problem, dp=2, zero=3)
    merged = simulate_time_s(plan, problem)
    alone = simulate_time_s(plan, problem, fidelity=Fidelity().without("merge"))
    assert 0.99 * alone < merged < 0.995 * alone
    assert "one task (no effect on times but where a" in (Fidelity.__doc__ or "")


@pytest.mark.parametrize("family", ["gpt", "bert", "vit"])
def test_what_stays_whole_is_put_together_behind_the_step_of_every_ranks_part(family: str) -> None:
    """partition_parameters.py, ``_allgather_params`` of 0.3.12 and 0.5.0: a copy for each rank of each of them."""
    problem = problem_with(family)
    plan, runtime = sharded(problem), problem.runtime
    assert runtime.parameter_calls_above is not None
    _, elements = layers_of_parameters(problem)
    parts = parts_of_small(elements, runtime.parameter_calls_above)
    expected_s = plan.num_microbatches * parts * runtime.host_seconds_per_list_entry
    graph = simulate(plan, problem).graph
    rebuilt = [
        float(graph.work_s[task])
        for task in range(graph.num_tasks)
        if graph.kind[task] == COMPUTATION and graph.microbatch[task] < 0
        and graph.causes[graph.cause[task]] == "parameter gather"
    ]
    assert parts > 100 and rebuilt == [pytest.approx(expected_s)]
    found_s = estimate(plan, problem).iteration_time_s
    assert FastEstimator(problem).estimate(plan).iteration_time_s == pytest.approx(found_s, rel=1e-9)
