"""From plans to task graphs: closed forms, symmetry, merging, and what is communicated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware_models.model import HardwareModel
from simulator.costs import CostTables
from simulator.engine_simpy import run_simpy
from simulator.fidelity import Fidelity
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import lower
from simulator.lowering.program import ProgramBuilder
from simulator.lowering.transfers import crossing_tensors
from simulator.plan import Axis, Plan, Stage
from simulator.simulate import simulate
from simulator.taskgraph import COMMUNICATION
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SMALL, chain_of_opaque, chain_problem, small_problem
from workloads.graph_builder import GraphBuilder
from workloads.kernels import Kernel, Matmul
from workloads.operators import Workload

PIPELINES = [(1, 1), (1, 4), (2, 2), (3, 7), (4, 8), (8, 16)]


def ideal_s(
    num_stages: int, num_microbatches: int, schedule: str, *, chunks: int = 1, tf: float = 1.0, tb: float = 2.0
):
    workload = chain_of_opaque(num_stages * chunks, tf, tb)
    problem = chain_problem(workload, num_devices=num_stages, global_batch=num_microbatches)
    plan = uniform_plan(problem, pp=num_stages, schedule=schedule, chunks=chunks)
    return simulate(plan, problem, fidelity=Fidelity.ideal()).iteration_time_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), PIPELINES)
def test_equal_stages_end_at_m_plus_p_minus_1_times_both_passes(schedule: str, stages: int, microbatches: int) -> None:
    assert ideal_s(stages, microbatches, schedule) == (microbatches + stages - 1) * 3.0


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(stages: int, microbatches: int, chunks: int) -> None:
    busy = microbatches * chunks * 3.0
    assert ideal_s(stages, microbatches, "interleaved", chunks=chunks) == busy + (stages - 1) * 3.0


class _EqualKernels(HardwareModel):
    """Every matmul takes as long as its FLOPs say."""

    def kernel_time_s(self, gpu_type: str, kernel: Kernel, dtype: str) -> float:
        return kernel.flop / 2**34 if isinstance(kernel, Matmul) else 0.0


def test_zb_h1_leaves_the_bubble_of_forward_and_input_gradient_less_the_weight_gradient() -> None:
    """Equal passes T_F = T_I = T_W = 1 s: 12 microbatches and a bubble of (p - 1)(T_F + T_I - T_W)."""
    problem = replace(
        small_problem("gpt"),
        workload=_square_linears(4),
        hardware=_EqualKernels(cluster=small_problem("gpt").hardware.cluster),
        global_batch=12,
    )
    plan = uniform_plan(problem, pp=4, schedule="zb-h1")
    assert simulate(plan, problem, fidelity=Fidelity.ideal()).iteration_time_s == 12 * 3.0 + 3 * 1.0


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("merge", [True, False])
def test_a_host_that_never_runs_ahead_makes_every_operator_the_longer_of_kernels_and_launches(
    recompute: str, merge: bool
) -> None:
    problem = small_problem("gpt", global_batch=3)
    slow = replace(
        problem.runtime,
        host_runs_ahead=False,
        host_seconds_per_operator=(60e-6, 110e-6),
        host_seconds_per_pass=250e-6,
    )
    behind = replace(problem, runtime=slow)
    plan = uniform_plan(behind, microbatch=1, recompute=recompute)
    costs, device = CostTables(behind), problem.hardware.gpu_type(0)
    tables = [costs.operator(index, (), 1, device) for index in range(len(problem.workload))]
    forward = [max(cost.forward.device_s, cost.forward.host_s) for cost in tables]
    backward = [max(cost.backward.device_s, cost.backward.host_s) for cost in tables]
    again = sum(forward[first] for start, stop in plan.stages[0].recompute for first in range(start, stop))
    off = ["optimizer", "allocator", *([] if merge else ["merge"])]
    found = simulate(plan, behind, fidelity=Fidelity().without(*off)).iteration_time_s
    assert found == pytest.approx(3 * (sum(forward) + again + sum(backward) + 2 * 250e-6), rel=1e-9)
    assert any(cost.forward.device_s > cost.forward.host_s for cost in tables)
    assert any(cost.forward.device_s < cost.forward.host_s for cost in tables)
    ahead = replace(problem, runtime=replace(slow, host_runs_ahead=True))
    assert simulate(plan, ahead, fidelity=Fidelity().without(*off)).iteration_time_s < found
    without_host = Fidelity().without("host", *off)
    assert (
        simulate(plan, ahead, fidelity=without_host).iteration_time_s
        == simulate(plan, behind, fidelity=without_host).iteration_time_s
    )


def test_a_host_that_never_runs_ahead_delays_every_collective_by_its_launch() -> None:
    problem = small_problem("gpt", global_batch=1)
    plan = uniform_plan(problem, tp=2, microbatch=1)
    quick, slow = (
        simulate(plan, replace(problem, runtime=replace(behind, host_seconds_per_collective=(seconds, 0.0))))
        for behind in [replace(problem.runtime, host_runs_ahead=False)]
        for seconds in (0.0, 100e-6)
    )
    is_collective = (quick.graph.kind == COMMUNICATION) & (quick.graph.work_s > 0)
    delay = slow.graph.latency_s - quick.graph.latency_s
    assert is_collective.sum() == 21  # embedding, two a layer forward and backward, three in the loss, one behind it
    np.testing.assert_allclose(delay[is_collective], 100e-6, rtol=1e-9)
    assert slow.iteration_time_s - quick.iteration_time_s == pytest.approx(21 * 100e-6, rel=1e-6)


def _square_linears(count: int) -> Workload:
    builder = GraphBuilder(name="linears", family="test", tokens_per_sample=2048)
    x = builder.input("x", (2048, 2048))
    attributes = {"in": 2048, "out": 2048, "bias": False}
    for number in range(count):
        builder.layer(f"layer{number}")
        x = builder.add("linear", "linear", [x], attributes, tensor="column")
    return builder.build()


SHAPES = [
    dict(tp=4),
    dict(dp=4, microbatch=2),
    dict(tp=2, dp=2),
    dict(tp=2, pp=2, recompute="full"),
    dict(pp=2, dp=2, recompute="selective"),
    dict(dp=4, zero=3),
    dict(dp=2, tp=2, zero=2),
    dict(pp=2, schedule="zb-h1"),
    dict(pp=2, chunks=2, schedule="interleaved"),
    dict(tp=2, sequence_parallel=True, pp=2, schedule="gpipe"),
]


@pytest.mark.parametrize("family", list(SMALL))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(f"{k}={v}" for k, v in shape.items()))
def test_representatives_equal_all_ranks_and_merged_equals_unmerged(family: str, shape: dict) -> None:
    problem = small_problem(family, runtime="windtunnel-executor-fp32", cluster="v100-32g-dgx1:1x4")
    if family == "vit" and shape.get("sequence_parallel"):
        pytest.skip("197 tokens cannot be split over two ranks")
    if family == "t5" and shape.get("schedule") == "interleaved":
        pytest.skip("two layers a side are too few for four virtual stages of equal make")
    plan = uniform_plan(problem, **shape)
    costs = CostTables(problem)
    reference = simulate(plan, problem, costs=costs)
    everyone = simulate(plan, problem, costs=costs, fidelity=Fidelity().without("symmetry"))
    unmerged = simulate(plan, problem, costs=costs, fidelity=Fidelity().without("merge", "overlap-slowdown"))
    merged = simulate(plan, problem, costs=costs, fidelity=Fidelity().without("overlap-slowdown"))
    assert everyone.iteration_time_s == pytest.approx(reference.iteration_time_s, rel=1e-9)
    assert unmerged.iteration_time_s == pytest.approx(merged.iteration_time_s, rel=1e-9)
    assert everyone.peak_reserved_bytes == reference.peak_reserved_bytes
    assert everyone.graph.num_devices == len(plan.devices)


def test_every_member_of_a_class_runs_exactly_when_its_representative_does() -> None:
    """On four nodes whose NICs are shared by strided groups, with contention and slowdown on."""
    problem = small_problem("gpt", cluster="v100-32g-dgx1:2x8", global_batch=32)
    plan = validate(uniform_plan(problem, tp=2, dp=4, pp=2, overlap_gradient_sync=True), problem)
    costs = CostTables(problem)
    few = lower(plan, costs, Fidelity()).graph
    all_ = lower(plan, costs, Fidelity().without("symmetry")).graph
    assert few.num_devices < all_.num_devices == 16
    few_run, all_run = run_simpy(few), run_simpy(all_)
    for representative, members in enumerate(few.device_members):
        stream = _compute_stream(few, representative)
        for member in members:
            other = _compute_stream(all_, [devices[0] for devices in all_.device_members].index(member))
            np.testing.assert_allclose(all_run.start_s[other], few_run.start_s[stream], rtol=1e-9)
            np.testing.assert_allclose(all_run.end_s[other], few_run.end_s[stream], rtol=1e-9)


def _compute_stream(graph, device: int):
    number = next(
        i
        for i, (name, owner) in enumerate(zip(graph.stream_names, graph.stream_device, strict=True))
        if owner == device and name == "compute"
    )
    return graph.streams.row(number)


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


def test_unequal_slices_cost_as_much_as_the_largest() -> None:
    workload = chain_of_opaque(2, 1.0, 2.0)
    problem = chain_problem(workload, num_devices=4, global_batch=16)
    stages = (
        Stage(((0, 1),), (0, 1, 2), ((1, (Axis("batch", 3),)),)),
        Stage(((1, 2),), (3,), ((1, ()),)),
    )
    plan = Plan(stages=stages, microbatch_size=4, num_microbatches=4)
    result = simulate(plan, problem, fidelity=Fidelity.ideal())
    # Slices of 2, 1 and 1 samples; the second stage has all 4: 12 s a microbatch, after 2 s of fill.
    assert result.iteration_time_s == 2.0 + 4 * 12.0 + 4.0
    assert len(result.memory) == 3  # two replicas of one sample are alike


def test_replicas_that_take_turns_run_whole_microbatches_at_once() -> None:
    workload = chain_of_opaque(1, 1.0, 2.0)
    problem = chain_problem(workload, num_devices=2, global_batch=8)
    stage = Stage(((0, 1),), (0, 1), ((1, (Axis("batch", 2),)),))
    sliced = Plan(stages=(stage,), microbatch_size=2, num_microbatches=4)
    turns = Plan(stages=(stage,), microbatch_size=2, num_microbatches=4, replica_assignment="round_robin")
    ideal = Fidelity.ideal()
    assert simulate(sliced, problem, fidelity=ideal).iteration_time_s == 4 * 3.0
    assert simulate(turns, problem, fidelity=ideal).iteration_time_s == 2 * 6.0
    graph = lower(validate(turns, problem), CostTables(problem), ideal).graph
    assert graph.num_tasks == 8  # a forward and a backward for each microbatch, on one replica each


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
    quiet = simulate(plan, problem, fidelity=Fidelity().without("resharding")).iteration_time_s
    assert quiet < simulate(plan, problem).iteration_time_s


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


EFFECTS = [
    "host",
    "tensor-parallel",
    "gradient-sync",
    "transfers",
    "recompute",
    "optimizer",
    "contention",
    "overlap-slowdown",
]


@pytest.mark.parametrize("effect", EFFECTS)
def test_switching_an_effect_off_makes_the_iteration_faster_where_it_matters(effect: str) -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:2x8", runtime="windtunnel-executor-fp32")
    degrees = {
        "contention": dict(dp=2, tp=8),
        "overlap-slowdown": dict(dp=8, overlap_gradient_sync=True),
    }.get(effect, dict(dp=2, tp=2, pp=2, recompute="full"))
    plan = uniform_plan(problem, **degrees)
    if effect == "contention":  # tensor ranks on one node, data parallel pairs strided over the NICs
        assert problem.hardware.cluster.node_of(0) != problem.hardware.cluster.node_of(8)
    everything = simulate(plan, problem).iteration_time_s
    assert simulate(plan, problem, fidelity=Fidelity().without(effect)).iteration_time_s < everything


def test_blocking_transfers_hold_up_the_sender() -> None:
    problem = small_problem("gpt", cluster="v100-1gpu-10g:4x1")
    plan = uniform_plan(problem, pp=4)
    free = replace(problem, runtime=replace(problem.runtime, transfer_mode="overlapped"))
    assert simulate(plan, free).iteration_time_s < simulate(plan, problem).iteration_time_s


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


def test_gpt_530b_shape_lowers_to_few_templates() -> None:
    problem = small_problem("gpt", global_batch=256)
    plan = validate(uniform_plan(problem, pp=4), problem)
    graph = lower(plan, CostTables(problem), Fidelity()).graph
    assert len(set(graph.name.tolist())) < 60
    assert graph.num_tasks < 256 * 4 * 6


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
    reference = simulate(plan, problem).iteration_time_s
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
