"""From plans to task graphs: closed forms, hosts, symmetry, merging, and effects switched off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware_models.model import HardwareModel
from simulator.costs import CostTables
from simulator.engines.engine_simpy import run_simpy
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower
from simulator.plan import Axis, Plan, Stage
from simulator.simulate import simulate, simulate_time_s
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
    return simulate_time_s(plan, problem, fidelity=Fidelity.ideal())


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
    assert simulate_time_s(plan, problem, fidelity=Fidelity.ideal()) == 12 * 3.0 + 3 * 1.0


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
    found = simulate_time_s(plan, behind, fidelity=Fidelity().without(*off))
    assert found == pytest.approx(3 * (sum(forward) + again + sum(backward) + 2 * 250e-6), rel=1e-9)
    assert any(cost.forward.device_s > cost.forward.host_s for cost in tables)
    assert any(cost.forward.device_s < cost.forward.host_s for cost in tables)
    ahead = replace(problem, runtime=replace(slow, host_runs_ahead=True))
    assert simulate_time_s(plan, ahead, fidelity=Fidelity().without(*off)) < found
    without_host = Fidelity().without("host", *off)
    assert (
        simulate_time_s(plan, ahead, fidelity=without_host)
        == simulate_time_s(plan, behind, fidelity=without_host)
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
    assert simulate_time_s(sliced, problem, fidelity=ideal) == 4 * 3.0
    assert simulate_time_s(turns, problem, fidelity=ideal) == 2 * 6.0
    graph = lower(validate(turns, problem), CostTables(problem), ideal).graph
    assert graph.num_tasks == 8  # a forward and a backward for each microbatch, on one replica each


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
    everything = simulate_time_s(plan, problem)
    assert simulate_time_s(plan, problem, fidelity=Fidelity().without(effect)) < everything


def test_gpt_530b_shape_lowers_to_few_templates() -> None:
    problem = small_problem("gpt", global_batch=256)
    plan = validate(uniform_plan(problem, pp=4), problem)
    graph = lower(plan, CostTables(problem), Fidelity()).graph
    assert len(set(graph.name.tolist())) < 60
    assert graph.num_tasks < 256 * 4 * 6
