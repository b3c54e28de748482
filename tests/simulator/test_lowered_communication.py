"""What a lowered plan communicates: in layers, between meshes and stages, of weights and their gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.engines.engine_simpy import run_simpy
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import lower
from simulator.lowering.program import ProgramBuilder
from simulator.lowering.transfers import crossing_tensors
from simulator.plan import Axis, Plan, Stage
from simulator.simulate import simulate, simulate_time_s
from simulator.taskgraph import COMMUNICATION, COMPUTATION, TaskGraph
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import chain_of_opaque, chain_problem, small_problem


@pytest.mark.parametrize(
    ("degrees", "plain", "regathered"), [(dict(tp=4), 4, 4), (dict(tp=4, sequence_parallel=True), 8, 10)]
)
def test_megatron_has_four_all_reduces_a_layer_or_as_many_pairs(degrees: dict, plain: int, regathered: int) -> None:
    problem = small_problem("gpt", global_batch=1)
    graph = lower(validate(uniform_plan(problem, **degrees), problem), CostTables(problem), Fidelity()).graph
    names = [graph.names[i] for i in graph.name[graph.kind == COMMUNICATION]]
    assert sum("layer2." in name for name in names) == regathered
    kept = replace(problem, runtime=replace(problem.runtime, keeps_gathered_inputs=True))
    graph = lower(validate(uniform_plan(kept, **degrees), kept), CostTables(kept), Fidelity()).graph
    names = [graph.names[i] for i in graph.name[graph.kind == COMMUNICATION]]
    assert sum("layer2." in name for name in names) == plain


def test_neighbours_with_other_meshes_are_resharded() -> None:
    problem = small_problem("gpt", global_batch=8)
    count = len(problem.workload)
    half = problem.workload.layers[2][1]
    stage = Stage(
        ((0, count),),
        (0, 1, 2, 3),
        ((half, (Axis("batch", 4),)), (count - half, (Axis("batch", 2), Axis("tensor", 2)))),
    )
    plan = Plan(stages=(stage,), microbatch_size=8, num_microbatches=1)
    graph = lower(validate(plan, problem), CostTables(problem), Fidelity()).graph
    names = [graph.names[i] for i in graph.name[np.array(graph.causes)[graph.cause] == "resharding"]]
    # Norm and residual share one gathered copy; every rank has the whole gradient and cuts its slice for free.
    assert set(names) == {"all_gather layer3.norm_1"}
    quiet = simulate_time_s(plan, problem, fidelity=Fidelity().without("resharding"))
    assert quiet < simulate_time_s(plan, problem)


@pytest.mark.parametrize("keeps", [False, True])
def test_what_was_gathered_for_another_mesh_is_kept_whatever_sequence_parallelism_does(keeps: bool) -> None:
    problem = small_problem("gpt", global_batch=8)
    problem = replace(problem, runtime=replace(problem.runtime, keeps_gathered_inputs=keeps))
    count, half = len(problem.workload), problem.workload.layers[2][1]
    stage = Stage(((0, count),), (0, 1, 2, 3), ((half, (Axis("batch", 4),)), (count - half, (Axis("tensor", 4),))))
    plan = Plan(stages=(stage,), microbatch_size=8, num_microbatches=1)
    result = simulate(plan, problem)
    graph = result.graph
    names = [graph.names[i] for i in graph.name[np.array(graph.causes)[graph.cause] == "resharding"]]
    assert names == ["all_gather layer3.norm_1"]
    length, hidden = problem.workload.tensors[problem.workload.operators[half].inputs[0]]
    assert result.memory[0].consumers["gathered inputs"] >= 2 * 8 * length * hidden


def test_blocking_transfers_hold_up_the_sender() -> None:
    problem = small_problem("gpt", cluster="v100-1gpu-10g:4x1")
    plan = uniform_plan(problem, pp=4)
    free = replace(problem, runtime=replace(problem.runtime, transfer_mode="overlapped"))
    assert simulate_time_s(plan, free) < simulate_time_s(plan, problem)


@pytest.mark.parametrize(
    ("schedule", "chunks", "alike"),
    [("1f1b", 1, "blocking"), ("gpipe", 1, "blocking"), ("zb-h1", 1, "blocking"), ("interleaved", 2, "overlapped")],
)
def test_a_runtime_may_overlap_transfers_of_interleaved_stages_alone(schedule: str, chunks: int, alike: str) -> None:
    """As Megatron's core does; where they are overlapped, no host waits for them either."""
    problem = small_problem("gpt", cluster="v100-1gpu-10g:4x1")
    assert "receive" in problem.runtime.host_waits
    plan = uniform_plan(problem, pp=4 // chunks, schedule=schedule, chunks=chunks)

    def times(mode: str) -> tuple[float, float, float]:
        of = replace(problem, runtime=replace(problem.runtime, transfer_mode=mode))
        estimates = estimate(plan, of), FastEstimator(of).estimate(plan)
        return simulate_time_s(plan, of), *(each.iteration_time_s for each in estimates)

    found = times("interleaved")
    assert found == times(alike)
    assert found != times("overlapped" if alike == "blocking" else "blocking")


def test_a_tensor_read_several_stages_later_is_relayed() -> None:
    """T5's encoder output is read by every decoder layer, so every later boundary carries it."""
    problem = small_problem("t5", global_batch=4)
    workload = problem.workload
    views = lower(validate(uniform_plan(problem, pp=4), problem), CostTables(problem), Fidelity()).views
    crossing = crossing_tensors(views)
    stage_of = {index: view.position for view in views for index in view.operators}
    far = {
        name
        for name, readers in workload.consumers.items()
        if name in workload.producer and stage_of[max(readers)] - stage_of[workload.producer[name]] > 1
    }
    assert len(far) == 1
    carried = [bool(far & set(tensors)) for tensors in crossing]
    assert carried == [False, True, True]


@pytest.mark.parametrize("pp", [1, 2])
def test_every_decoder_layer_reduces_its_gradient_of_the_encoders_output(pp: int) -> None:
    """Backward, a column-parallel layer each: an encoder layer 2, a decoder layer 4 (self, query, memory, MLP), a head.

    Where gradients are summed first, the decoder layers of a stage share the reduction of the memory's.
    """
    alone = small_problem("t5", global_batch=1)
    summed = replace(alone, runtime=replace(alone.runtime, sums_input_gradients=True))
    layers = 2
    for problem, of_the_memory in ((alone, layers), (summed, 1)):
        plan = validate(uniform_plan(problem, tp=2, pp=pp), problem)
        views = lower(plan, CostTables(problem), Fidelity()).views
        items = [
            item
            for view in views
            for item in ProgramBuilder(view, Fidelity()).backward(GRADIENTS, gather=False, sync=False)
            if item.collective is not None
        ]
        assert {item.collective.collective for item in items if item.collective} == {"all_reduce"}
        assert len(items) == 2 * layers + 3 * layers + of_the_memory + 1


def _named(graph, words: str):
    return [task for task in range(graph.num_tasks) if words in graph.names[graph.name[task]]]


def test_two_layouts_of_one_tied_weight_in_a_stage_are_brought_together() -> None:
    problem = small_problem("gpt", global_batch=4)
    count = len(problem.workload)
    stage = Stage(((0, count),), (0, 1, 2, 3), ((9, (Axis("tensor", 4),)), (count - 9, (Axis("batch", 4),))))
    graph = lower(validate(Plan((stage,), 4, 1), problem), CostTables(problem), Fidelity()).graph
    assert (np.array(graph.causes)[graph.cause] == "embedding sync").any()


def test_sharded_parameters_are_reduced_layer_by_layer_while_backward_runs() -> None:
    problem = small_problem("gpt", runtime="windtunnel-executor-fp32", global_batch=4)
    plan = validate(replace(uniform_plan(problem, dp=4, zero=3), gradient_reduction="every"), problem)
    graph = lower(plan, CostTables(problem), Fidelity()).graph
    run = run_simpy(graph)
    causes = np.array(graph.causes)[graph.cause]
    reductions = np.flatnonzero(causes == "gradient sync")
    assert len(reductions) >= len(problem.workload.layers)
    assert run.start_s[reductions].min() < run.end_s[causes == "backward"].max() * 0.7


def test_segments_over_several_layers_gather_each_layer_before_they_compute_it_again() -> None:
    problem = small_problem("gpt", runtime="windtunnel-executor-fp32", global_batch=4)
    plan = uniform_plan(problem, dp=4, zero=3)
    start, stop = problem.workload.layers[1][0], problem.workload.layers[4][1]
    plan = validate(replace(plan, stages=(replace(plan.stages[0], recompute=((start, stop),)),)), problem)
    graph = lower(plan, CostTables(problem), Fidelity().without("merge")).graph
    run = run_simpy(graph)
    causes = np.array(graph.causes)[graph.cause]
    again = np.flatnonzero(causes == "recompute")
    first = again[np.argmin(run.start_s[again])]
    after_forward = run.end_s[causes == "forward"].max()
    gathers = np.flatnonzero((causes == "parameter gather") & (run.end_s > after_forward))
    assert sum(run.end_s[gathers] <= run.start_s[again].max()) >= 4
    assert any(run.end_s[gathers] <= run.start_s[first])


@pytest.mark.parametrize("runtime", ["megatron-lm-2021", "galvatron-v1"])
def test_receives_of_one_pass_are_posted_together(runtime: str) -> None:
    """One sender, two receivers and back: the sender's two gradients come at once, not one after the other."""
    problem = small_problem("gpt", cluster="v100-1gpu-10g:3x1", runtime=runtime, global_batch=8)
    half, count = problem.workload.layers[2][1], len(problem.workload)
    stages = (
        Stage(((0, half),), (0,), ((half, ()),)),
        Stage(((half, count),), (1, 2), ((count - half, (Axis("batch", 2),)),)),
    )
    plan = Plan(stages=stages, microbatch_size=2, num_microbatches=4)
    reference = simulate_time_s(plan, problem)
    everyone = simulate(plan, problem, fidelity=Fidelity().without("symmetry"))
    assert everyone.iteration_time_s == pytest.approx(reference, rel=1e-9)
    graph, run = everyone.graph, everyone.schedule
    backward = [t for t in _named(graph, "transfer after backward of stage 1") if graph.microbatch[t] == 0]
    assert len(backward) == 2
    assert run.start_s[backward[0]] == pytest.approx(run.start_s[backward[1]], abs=1e-4)


def test_a_received_tensors_gradient_goes_back_as_the_tensor_came() -> None:
    """The first reader wants it whole, the residual's a half of the samples: that half's gradient must be gathered."""
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=8)
    workload = problem.workload
    half, count = workload.layers[2][0], len(workload)
    readers = [reader for reader in workload.consumers[workload.operators[half - 1].outputs[0]] if reader >= half]
    assert len(readers) == 2 and readers[0] == half  # the layer's norm, and the residual behind the attention
    whole, cut = (Axis("replicate", 2),), (Axis("batch", 2),)
    found = {}
    for first in (whole, cut):
        second = Stage(((half, count),), (2, 3), ((1, first), (count - half - 1, cut)))
        stages = (Stage(((0, half),), (0, 1), ((half, cut),)), second)
        plan = validate(Plan(stages=stages, microbatch_size=4, num_microbatches=2), problem)
        views = lower(plan, CostTables(problem), Fidelity()).views
        items = ProgramBuilder(views[1], Fidelity()).backward(GRADIENTS, gather=False, sync=False)
        moved = [item.collective for item in items if item.collective is not None]
        found[first] = sorted((each.collective, each.num_bytes) for each in moved)
    size = 4 * np.prod(workload.tensors[workload.operators[half].inputs[0]]) * 2.0
    # The norm's own output is gathered on its way back to it, too: one gather of the samples each.
    assert found[whole] == [("all_gather", size), ("all_gather", size)]
    assert found[cut] == []


def host_s(graph: TaskGraph, cause: str, stage: int) -> list[float]:
    """Return what hosts launch of the computation of a stage, by task."""
    own = (np.array(graph.causes)[graph.cause] == cause) & (graph.stage == stage) & (graph.kind == COMPUTATION)
    return graph.host_s[own].tolist()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_host_launches_each_send_and_each_receive_of_a_pass(replicas: int) -> None:
    """Operators without kernels: a pass is launched as often as its device has partners on the other side."""
    launch_s = 1e-4
    problem = chain_problem(chain_of_opaque(2, 1e-3, 2e-3, 1000), num_devices=3, global_batch=4)
    runtime = replace(problem.runtime, host_seconds_per_kernel=launch_s, host_seconds_per_pass=0.0)
    second = tuple(range(1, 1 + replicas))
    stages = (Stage(((0, 1),), (0,), ((1, ()),)), Stage(((1, 2),), second, ((1, (Axis("batch", replicas),)),)))
    plan = Plan(stages=stages, microbatch_size=2, num_microbatches=2)
    graph = simulate(plan, replace(problem, runtime=runtime), fidelity=Fidelity().without("symmetry")).graph
    for cause in ("forward", "backward"):
        assert host_s(graph, cause, 0) == pytest.approx([replicas * launch_s] * 2)
        assert host_s(graph, cause, 1) == pytest.approx([launch_s] * 2 * replicas)


def test_a_reduction_over_unlike_gpus_starts_when_the_slower_host_has_launched_it() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x1+a100-80g-dgx:1x1", global_batch=2)
    runtime = replace(problem.runtime, host_seconds_per_kernel=None, host_seconds_per_collective=(0.0, 0.0))
    problem = replace(problem, runtime=runtime)
    plan = replace(uniform_plan(problem, dp=2), overlap_gradient_sync=False)
    costs = CostTables(problem)
    launches = [costs.launch_s(gpu_type) for gpu_type in problem.gpu_types]
    assert min(launches) < max(launches)
    graph = lower(validate(plan, problem), costs, Fidelity()).graph
    reductions = np.array(graph.causes)[graph.cause] == "gradient sync"
    assert set(graph.host_s[reductions].tolist()) == {max(launches)}


@pytest.mark.parametrize("waits", [(), ("receive",)])
def test_a_host_waits_for_what_it_receives_only_where_the_runtime_says_so(waits: tuple[str, ...]) -> None:
    """Two stages, four microbatches: the second receives each forward pass, the first each backward pass."""
    problem = small_problem("gpt", global_batch=4)
    problem = replace(problem, runtime=replace(problem.runtime, host_waits=waits))
    graph = simulate(uniform_plan(problem, pp=2), problem).graph
    waiting = graph.host_waits & (np.array(graph.causes)[graph.cause] == "transfer")
    assert sorted(graph.stage[waiting].tolist()) == ([0] * 4 + [1] * 4 if waits else [])
