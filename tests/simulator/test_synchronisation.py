"""When gradients are reduced, and what is done with them before the optimizer step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import gradient_buckets, parameter_groups
from simulator.plan import Axis
from simulator.problem import Problem
from simulator.simulate import simulate, simulate_time_s
from simulator.taskgraph import COMPUTATION
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem
from workloads.kernels import MemoryBound


def test_gradients_reduced_in_every_pass_and_not_overlapped_are_waited_for() -> None:
    """An iteration is longer by all reductions of all microbatches than without any."""
    problem = small_problem("gpt", runtime="pytorch-ddp", cluster="a100-80g-dgx:1x4")
    problem = replace(problem, runtime=replace(problem.runtime, copies_gradients=False))
    alone = Fidelity().without("host", "overlap-slowdown", "contention", "optimizer")
    plan = replace(uniform_plan(problem, dp=4, microbatch=4), gradient_reduction="every", overlap_gradient_sync=False)
    seconds = {
        sync: simulate_time_s(plan, problem, fidelity=alone if sync else alone.without("gradient-sync"))
        for sync in (True, False)
    }
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    reductions_s = sum(
        problem.hardware.collective(item.collective, item.num_bytes, (0, 1, 2, 3)).alone_s
        for bucket in gradient_buckets(view, merged=False)
        for item in bucket.collectives
    )
    assert seconds[True] - seconds[False] == pytest.approx(plan.num_microbatches * reductions_s, rel=1e-6)
    overlapped = simulate_time_s(replace(plan, overlap_gradient_sync=True), problem, fidelity=alone)
    assert overlapped < seconds[True]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_gradient_norm_reads_what_a_rank_has_of_the_gradients(zero: int) -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime="megatron-deepspeed")
    graph = simulate(uniform_plan(problem, dp=4, microbatch=4, zero=zero), problem).graph
    (norm,) = np.flatnonzero(
        (np.array(graph.causes)[graph.cause] == "gradient norm") & (graph.kind == COMPUTATION)
    )
    whole = simulate(uniform_plan(problem, dp=4, microbatch=4), problem).graph
    (other,) = np.flatnonzero(
        (np.array(whole.causes)[whole.cause] == "gradient norm") & (whole.kind == COMPUTATION)
    )
    assert graph.work_s[norm] == pytest.approx(whole.work_s[other] / (4 if zero else 1), rel=0.01)


@pytest.mark.parametrize("zero", [0, 1])
def test_megatron_averages_all_gradients_and_takes_the_norm_of_what_it_steps(zero: int) -> None:
    """Bytes a parameter by hand: a buffer of fp16 zeroed (2) and divided (4); fp32 copies unscaled (8) and read (4)."""
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime="megatron-lm-2021")
    plan = uniform_plan(problem, dp=4, microbatch=4, zero=zero)
    graph = simulate(plan, problem).graph
    (norm,) = np.flatnonzero((np.array(graph.causes)[graph.cause] == "gradient norm") & (graph.kind == COMPUTATION))
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    elements = sum(group.num_elements for group in parameter_groups(view))
    touched = elements * (2 + 4 + (8 + 4) / (4 if zero else 1))
    kernel = MemoryBound(0.75 * touched, 0.25 * touched, "reduction")
    assert graph.work_s[norm] == pytest.approx(problem.hardware.kernel_time_s(view.gpu_type, kernel, "fp16"), rel=1e-9)


def test_passes_over_gradients_take_their_time_without_a_norm_too() -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime="megatron-lm-2021")
    bare = replace(problem.runtime, gradient_clipping=False, loss_scaling=False, gradient_pass_bytes=None)
    times = []
    for runtime in (bare, replace(bare, gradient_pass_bytes=(600.0, 0.0))):
        own = replace(problem, runtime=runtime)
        times.append(simulate_time_s(uniform_plan(own, dp=4, microbatch=4), own))
    assert times[1] > times[0]


def test_shards_of_gradients_are_summed_over_replicas_once_they_are_scattered() -> None:
    """Hybrid sharding: reduce-scatter over four shards, then all-reduce of the shard over two replicas."""
    problem = small_problem("gpt", runtime="pytorch-fsdp2", cluster="a100-80g-dgx:2x4")
    plan = uniform_plan(problem, dp=8, zero=3)
    (stage,) = plan.stages
    hybrid = ((stage.num_operators(), (Axis("batch", 2), Axis("batch", 4, 3))),)
    result = simulate(replace(plan, stages=(replace(stage, shardings=hybrid),)), problem)
    graph, schedule = result.graph, result.schedule
    tasks: dict[tuple[str, str], list[int]] = {}
    for task in np.flatnonzero(np.array(graph.causes)[graph.cause] == "gradient sync"):
        collective, _, unit = graph.names[graph.name[task]].partition(" ")
        tasks.setdefault((collective, unit), []).append(int(task))
    scattered = [unit for collective, unit in tasks if collective == "reduce_scatter"]
    assert len(scattered) > 4
    for unit in scattered:
        for first, then in zip(tasks["reduce_scatter", unit], tasks["all_reduce", unit], strict=True):
            assert schedule.start_s[then] >= schedule.end_s[first]


@pytest.mark.parametrize("cluster", ["a100-80g-dgx-100g:2x4", "v100-1gpu-25g:8x1"])
def test_reduces_to_owners_move_what_a_reduce_scatter_spares(cluster: str) -> None:
    """DeepSpeed sums each rank's part by a reduce of its own: n/(n - 1) of a reduce-scatter's time, double for two."""
    problem = small_problem("gpt", cluster=cluster, runtime="megatron-deepspeed")
    scattering = replace(problem, runtime=replace(problem.runtime, reduces_to_owners=()))
    dp = len(problem.hardware.cluster.nodes)
    plan = uniform_plan(problem, tp=problem.num_devices // dp, dp=dp, zero=2, overlap_gradient_sync=False)

    def work_s(each: Problem) -> float:
        graph = simulate(plan, each).graph
        return float(graph.work_s[np.array(graph.causes)[graph.cause] == "gradient sync"].sum())

    own, other = work_s(problem), work_s(scattering)
    assert own > 0
    assert own == pytest.approx(other * dp / (dp - 1), rel=1e-6)
    simulated, closed, fast = (
        run(problem).iteration_time_s - run(scattering).iteration_time_s
        for run in (
            lambda each: simulate(plan, each),
            lambda each: estimate(plan, each),
            lambda each: FastEstimator(each).estimate(plan),
        )
    )
    assert fast == pytest.approx(closed, rel=1e-9)
    assert closed == pytest.approx(simulated, rel=1e-6)


@pytest.mark.parametrize(("zero", "collective"), [(1, "all_reduce"), (2, "owner_reduce")])
@pytest.mark.parametrize("runtime", ["megatron-deepspeed", "megatron-deepspeed-timed"])
def test_deepspeed_all_reduces_under_zero_1_and_reduces_to_owners_under_2(runtime, zero, collective) -> None:
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime=runtime)
    plan = uniform_plan(problem, dp=4, zero=zero)
    (view,) = stage_views(plan.canonical(problem.workload), CostTables(problem))
    found = {item.collective for bucket in gradient_buckets(view, merged=True) for item in bucket.collectives}
    assert found == {collective}


@pytest.mark.parametrize(
    ("runtime", "in_turn"), [("pytorch-fsdp2", True), ("composer-fsdp", True), ("galvatron-v1", False)]
)
def test_gathers_and_reductions_of_one_communicator_travel_in_turn(runtime: str, in_turn: bool) -> None:
    """Between nodes both have much to wait for; fairscale, which Galvatron has, reduces by a group of its own."""
    problem = small_problem("gpt", runtime=runtime, cluster="rtx3090-pcie:4x1")
    result = simulate(uniform_plan(problem, dp=4, zero=3), problem)
    graph, times = result.graph, result.schedule
    spans = {
        cause: [
            (float(times.start_s[task]), float(times.end_s[task]))
            for task in np.flatnonzero(np.array(graph.causes)[graph.cause] == cause)
        ]
        for cause in ("parameter gather", "gradient sync")
    }
    gathers, reductions = spans.values()
    shared_s = sum(max(0.0, min(b, d) - max(a, c)) for a, b in gathers for c, d in reductions)
    assert gathers and reductions and (shared_s < 1e-9) is in_turn
