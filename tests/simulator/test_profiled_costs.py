"""Costs of operators that were measured: what a profile's rows are of, and what grows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile, ProfileRow, Split
from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.closed_forms.operator_needs import passes_working_bytes
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.plan import Axis, Plan, Sharding, Stage, resolve
from simulator.problem import Problem
from simulator.profiled_costs import modelled_row, profiled_as
from simulator.segments import Segment
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem
from workloads.registry import build_workload


def test_a_profile_row_that_contains_its_collective_is_not_charged_for_it_again() -> None:
    problem = small_problem("gpt", global_batch=4)
    rows = []
    for op in problem.workload.operators[1:14]:
        rows.append(
            ProfileRow(
                role=op.role, samples=1, tensor_size=2, split="default", forward_s=1.0, backward_s=2.0, saved_bytes=0.0,
                forward_workspace_bytes=0.0, backward_workspace_bytes=0.0, input_bytes=0.0, output_bytes=0.0,
                parameter_bytes=0.0, includes_collectives=True, num_groups=1, source="test",
            )
        )  # fmt: skip
    profile = OperatorProfile("gpt", problem.gpu_types[0], "fp16", tuple(rows), "test")
    measured = replace(problem, hardware=replace(problem.hardware, operator_profile=profile))
    plan = uniform_plan(measured, tp=2)
    result = simulate(plan, measured, fidelity=Fidelity().without("optimizer", "host", "gradient-sync"))
    layers, microbatches = 4, 4
    assert result.iteration_time_s == pytest.approx(layers * 13 * 3.0 * microbatches, rel=0.02)
    assert 0.9 < result.duration_sources["measured"] < 1.0
    names = [result.graph.names[i] for i in np.unique(result.graph.name[result.graph.kind == 1])]
    assert not any(".mlp_linear_2" in name or ".attention_qkv" in name for name in names)
    graph = simulate(uniform_plan(measured, tp=2, pp=2), measured).graph
    split = {graph.names[i] for i in graph.name[np.array(graph.causes)[graph.cause] == "tensor parallel"]}
    assert not any(".mlp_linear_2" in name or ".attention_qkv" in name for name in split)


def test_what_all_ranks_repeat_though_it_could_be_cut_is_the_row_of_one_rank() -> None:
    operators = {op.role: op for op in small_problem("gpt", global_batch=4).workload.operators}
    repeated = (Axis("batch", 2), Axis("replicate", 2))
    assert profiled_as(operators["mlp_linear_1"], repeated) == (1, "default")
    assert profiled_as(operators["mlp_linear_1"], (Axis("column", 2),)) == (2, "default")
    assert profiled_as(operators["mlp_linear_1"], (Axis("column", 2), Axis("row", 2))) is None
    # What can only be repeated was measured beside what is cut, on as many ranks.
    assert profiled_as(operators["norm_1"], repeated) == (2, "default")


@pytest.mark.parametrize("kernels_only", [True, False])
def test_outside_profiled_samples_an_operator_grows_from_the_nearest_as_the_model_has_it(kernels_only: bool) -> None:
    """A machine that takes thrice the model's time is found again from two and four samples."""
    problem = small_problem("gpt", global_batch=16)
    costs, gpu_type = CostTables(problem), problem.gpu_types[0]
    index = next(number for number, op in enumerate(problem.workload.operators) if op.role == "mlp_linear_1")

    def alone_s(segment: Segment) -> float:
        return segment.device_s if kernels_only else max(segment.device_s, segment.host_s)

    rows = []
    for samples in (2, 4):
        cost = costs.operator(index, (), samples, gpu_type)
        rows.append(
            ProfileRow(
                role="mlp_linear_1", samples=samples, tensor_size=1, split="default",
                forward_s=3 * alone_s(cost.forward), backward_s=3 * alone_s(cost.backward), saved_bytes=0.0,
                forward_workspace_bytes=0.0, backward_workspace_bytes=0.0, input_bytes=0.0, output_bytes=0.0,
                parameter_bytes=0.0, includes_collectives=False, num_groups=1, source="test",
            )
        )  # fmt: skip
    profile = OperatorProfile("gpt", gpu_type, "fp16", tuple(rows), "test", kernels_only=kernels_only)
    profiled = CostTables(replace(problem, hardware=replace(problem.hardware, operator_profile=profile)))
    for samples in (1, 8, 16):
        modelled, found = (each.operator(index, (), samples, gpu_type) for each in (costs, profiled))
        assert found.forward.device_s == pytest.approx(3 * alone_s(modelled.forward))
        assert found.backward.device_s == pytest.approx(3 * alone_s(modelled.backward))
        assert found.forward.recorded == (0.0, 0.0, found.forward.device_s)


def _slow_profile(rows: Iterable[tuple[str, int, int, Split]], factor: float, *, inside: Iterable[int] = ()) -> Problem:
    """Return a problem whose profile has rows ``(role, samples, degree, split)`` at ``factor`` times the model.

    Args:
        rows: To have.
        factor: On the model's time of both passes.
        inside: Degrees whose rows say that they hold collectives.
    """
    problem = small_problem("gpt", global_batch=16)
    costs, gpu_type, found = CostTables(problem), problem.gpu_types[0], []
    roles = [op.role for op in problem.workload.operators]
    for role, samples, size, split in rows:
        index = roles.index(role)
        axis = Axis("tensor" if split == "default" else "tensor_alternative", size)
        cost = costs.operator(index, resolve((axis,), problem.workload.operators[index]), samples, gpu_type)
        found.append(
            ProfileRow(
                role=role, samples=samples, tensor_size=size, split=split, forward_s=factor * cost.forward.device_s,
                backward_s=factor * cost.backward.device_s, saved_bytes=0.0, forward_workspace_bytes=0.0,
                backward_workspace_bytes=0.0, input_bytes=0.0, output_bytes=0.0, parameter_bytes=0.0,
                includes_collectives=size in inside, num_groups=1, source="test",
            )
        )  # fmt: skip
    profile = OperatorProfile("gpt", gpu_type, "fp16", tuple(found), "test", kernels_only=True)
    return replace(problem, hardware=replace(problem.hardware, operator_profile=profile))


@pytest.mark.parametrize("role", ["norm_1", "mlp_linear_1", "mlp_linear_2", "attention_score"])
@pytest.mark.parametrize("profiled", [1, 4])
@pytest.mark.parametrize("split", ["default", "alternative"])
def test_at_degrees_without_rows_an_operator_grows_from_the_nearest_as_the_model_has_it(
    role: str, profiled: int, split: Split
) -> None:
    """A machine that takes thrice the model's time is found again from another degree, and from the default split."""
    problem = _slow_profile([(role, 2, profiled, "default"), (role, 4, profiled, "default")], 3.0)
    bare = CostTables(replace(problem, hardware=replace(problem.hardware, operator_profile=None)))
    roles = [op.role for op in problem.workload.operators]
    axes = (Axis("batch", 2), Axis("tensor" if split == "default" else "tensor_alternative", 2))
    sharding = resolve(axes, problem.workload.operators[roles.index(role)])
    for samples in (1, 2, 4, 8):
        modelled, found = (
            each.operator(roles.index(role), sharding, samples, problem.gpu_types[0])
            for each in (bare, CostTables(problem))
        )
        assert found.forward.device_s == pytest.approx(3 * modelled.forward.device_s)
        assert found.backward.device_s == pytest.approx(3 * modelled.backward.device_s)
        assert found.forward.recorded == (0.0, 0.0, found.forward.device_s)
        assert not found.includes_collectives


def test_degrees_without_rows_take_the_largest_below_that_holds_no_collectives() -> None:
    places: tuple[tuple[int, Split], ...] = ((1, "default"), (4, "default"), (2, "alternative"))
    rows = [("mlp_linear_2", 2, size, split) for size, split in places]
    profile = _slow_profile(rows, 1.0, inside=(4,)).hardware.operator_profile
    assert profile is not None
    assert profile.nearest_degree("mlp_linear_2", 8) == (1, "default")
    assert profile.nearest_degree("mlp_linear_2", 4, "alternative") == (2, "alternative")
    assert profile.nearest_degree("mlp_linear_2", 1, "alternative") == (2, "alternative")
    assert profile.nearest_degree("mlp_linear_1", 2) is None
    default = _slow_profile([("mlp_linear_2", 2, 2, "default")], 1.0).hardware.operator_profile
    assert default is not None
    assert default.nearest_degree("mlp_linear_2", 2, "alternative") == (2, "default")
    problem = _slow_profile(rows[1:2], 3.0, inside=(4,))
    index = [op.role for op in problem.workload.operators].index("mlp_linear_2")
    bare = CostTables(replace(problem, hardware=replace(problem.hardware, operator_profile=None)))
    modelled, found = (each.operator(index, (), 2, problem.gpu_types[0]) for each in (bare, CostTables(problem)))
    assert found.forward == modelled.forward


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_measured_share_of_a_stage_on_unlike_gpus_is_that_of_all_of_them(order: tuple[int, int]) -> None:
    """Two V100s with a profile of every operator and two T4s without, as replicas of one stage."""
    parts = ("v100-32g-dgx1:1x2", "g4dn.12xlarge:1x2")
    problem = small_problem("gpt", cluster="+".join(parts[number] for number in order), global_batch=4)
    plan = uniform_plan(problem, dp=4)
    costs, axes = CostTables(problem), (Axis("batch", 4),)
    seconds = {
        gpu_type: [
            sum(sum(part.recorded) for part in (cost.forward, cost.backward))
            for cost in (costs.operator(index, axes, 1, gpu_type) for index in range(len(problem.workload)))
        ]
        for gpu_type in set(problem.gpu_types)
    }
    rows, seen = [], set()
    for index, op in enumerate(problem.workload.operators):
        if op.role not in seen:
            seen.add(op.role)
            cost = costs.operator(index, axes, 1, "v100-sxm2-32gb")
            rows.append(
                ProfileRow(
                    role=op.role, samples=1, tensor_size=1, split="default", forward_s=cost.forward.device_s,
                    backward_s=cost.backward.device_s, saved_bytes=0.0, forward_workspace_bytes=0.0,
                    backward_workspace_bytes=0.0, input_bytes=0.0, output_bytes=0.0, parameter_bytes=0.0,
                    includes_collectives=False, num_groups=1, source="test",
                )
            )  # fmt: skip
    profile = OperatorProfile("gpt", "v100-sxm2-32gb", "fp16", tuple(rows), "test", kernels_only=True)
    profiled = replace(problem, hardware=replace(problem.hardware, operator_profile=profile))
    found = simulate(plan, profiled).duration_sources
    measured, modelled = sum(seconds["v100-sxm2-32gb"]), sum(seconds["t4-16gb"])
    assert found["measured"] == pytest.approx(measured / (measured + modelled), rel=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((Axis("batch", 2), Axis("tensor", 2)), (Axis("tensor", 4),)),
        ((Axis("tensor", 4),), (Axis("batch", 2), Axis("tensor", 2))),
        ((Axis("batch", 4),), (Axis("tensor", 4),)),
    ],
)
def test_what_lays_samples_out_for_another_mesh_is_in_no_profile_row(first: Sharding, second: Sharding) -> None:
    """A row with its collectives has those of its own tensor-parallel ranks; neighbours of it know nothing of it."""
    problem = small_problem("gpt", global_batch=4)
    axes = {word for sharding in (first, second) for word in sharding if word.split == "tensor"}
    rows = [
        ProfileRow(
            role=op.role, samples=samples, tensor_size=axis.size, split="default", forward_s=1.0, backward_s=2.0,
            saved_bytes=0.0, forward_workspace_bytes=0.0, backward_workspace_bytes=0.0, input_bytes=0.0,
            output_bytes=0.0, parameter_bytes=0.0, includes_collectives=True, num_groups=1, source="test",
        )
        for op in problem.workload.operators[1:14]
        for axis in axes
        for samples in (1, 2, 4)
    ]  # fmt: skip
    profile = OperatorProfile("gpt", problem.gpu_types[0], "fp16", tuple(rows), "test")
    measured = replace(problem, hardware=replace(problem.hardware, operator_profile=profile))
    count, half = len(problem.workload), problem.workload.layers[2][1]
    plan = Plan((Stage(((0, count),), (0, 1, 2, 3), ((half, first), (count - half, second))),), 4, 1)
    found = []
    for own in (problem, measured):
        graph = simulate(plan, own).graph
        causes = np.array(graph.causes)[graph.cause]
        moved = np.flatnonzero(causes == "resharding")
        found.append(sorted((graph.names[graph.name[task]], float(graph.work_s[task])) for task in moved))
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_collectives_in_the_rows_of_one_gpu_type_are_charged_on_the_other(order: tuple[int, int]) -> None:
    """Replicas of two V100s, whose profile holds their all-reduces, and of two T4s, which have none and are slower."""
    parts = ("v100-32g-dgx1:1x2", "g4dn.12xlarge:1x2")
    problem = small_problem("gpt", cluster="+".join(parts[number] for number in order), global_batch=4)
    plan = uniform_plan(problem, tp=2, dp=2)
    rows = [
        ProfileRow(
            role=op.role, samples=1, tensor_size=2, split="default", forward_s=1e-4, backward_s=2e-4, saved_bytes=0.0,
            forward_workspace_bytes=0.0, backward_workspace_bytes=0.0, input_bytes=0.0, output_bytes=0.0,
            parameter_bytes=0.0, includes_collectives=True, num_groups=1, source="test",
        )
        for op in problem.workload.operators[1:14]
    ]  # fmt: skip
    profile = OperatorProfile("gpt", "v100-sxm2-32gb", "fp16", tuple(rows), "test", kernels_only=True)
    profiled = replace(problem, hardware=replace(problem.hardware, operator_profile=profile))
    found = simulate(plan, profiled)
    slowest = simulate(plan, small_problem("gpt", cluster="g4dn.12xlarge:2x2", global_batch=4))
    assert found.iteration_time_s == pytest.approx(slowest.iteration_time_s, rel=1e-3)
    graph = found.graph
    reduced = dict.fromkeys(problem.gpu_types, 0)
    for number, device in enumerate(graph.stream_device):
        if graph.stream_names[number].startswith("tensor"):
            gpu_type = problem.gpu_types[graph.device_members[device][0]]
            tasks = graph.streams.items[graph.streams.offsets[number] : graph.streams.offsets[number + 1]]
            reduced[gpu_type] += len(tasks)
    # Both reduce for the embedding and the loss, which no row is of. T4s alone do for layers: two microbatches, four
    # layers, two all-reduces in either pass.
    assert reduced["t4-16gb"] - reduced["v100-sxm2-32gb"] == 2 * 4 * 4


def test_operators_of_one_role_have_rows_of_their_own_or_else_their_roles() -> None:
    """Swin's norms are of four widths: with a row for two of them, the others have that of all."""
    workload = build_workload("swin-huge-32")
    hardware, runtime = HardwareModel(parse_cluster("titan-rtx-pcie:1x2")), load_runtime("galvatron-v1")
    problem = Problem(workload, hardware, runtime, 8)
    seconds = {"norm_1": 1.0, "norm_1.1": 5.0, "norm_1.4": 0.25}
    rows = [
        ProfileRow(
            role=role, samples=4, tensor_size=1, split="default", forward_s=each, backward_s=2 * each, saved_bytes=0.0,
            forward_workspace_bytes=0.0, backward_workspace_bytes=0.0, input_bytes=0.0, output_bytes=0.0,
            parameter_bytes=0.0, includes_collectives=False, num_groups=1, source="test",
        )
        for role, each in seconds.items()
    ]  # fmt: skip
    profile = OperatorProfile("swin", problem.gpu_types[0], "fp32", tuple(rows), "test")
    costs = CostTables(replace(problem, hardware=replace(hardware, operator_profile=profile)))
    found = [
        costs.operator(index, (), 4, problem.gpu_types[0]).forward.device_s
        for index, op in enumerate(workload.operators)
        if op.role == "norm_1"
    ]
    assert found == pytest.approx([5.0] * 2 + [1.0] * 2 + [1.0] * 26 + [0.25] * 2)


def with_taken(
    problem: Problem, index: int, samples: int, more: tuple[float, float]
) -> tuple[Problem, tuple[float, float]]:
    """Return the problem with a profile of an operator whose passes took so much more than the model has, and that."""
    gpu_type, workload = problem.gpu_types[0], problem.workload
    cost = CostTables(problem).operator(index, (), samples, gpu_type)
    forward, backward = passes_working_bytes(index, cost, problem)
    kept = sum(size for name, size in cost.saved if ":" not in name)
    taken = sum(cost.output_bytes) + kept + forward + more[0], backward - sum(cost.output_bytes) + more[1]
    row = replace(
        modelled_row(problem, index, cost, samples, (1, "default"), "test"),
        forward_taken_bytes=taken[0], backward_taken_bytes=taken[1],
    )  # fmt: skip
    dtype = problem.runtime.implementation.dtype
    profile = OperatorProfile(workload.name, gpu_type, dtype, (row,), "test", kernels_only=True)
    return replace(problem, hardware=replace(problem.hardware, operator_profile=profile)), taken


def of_images(model: str, runtime: str, samples: int) -> Problem:
    hardware = HardwareModel(parse_cluster("h100-dgx:1x1"))
    return Problem(build_workload(model), hardware, load_runtime(runtime), samples)


@pytest.mark.parametrize("runtime", ["windtunnel-executor", "windtunnel-executor-fp32"])
@pytest.mark.parametrize(
    ("model", "kind", "number"),
    [
        ("vgg-16", "conv2d", 0), ("vgg-16", "conv2d", 1), ("wide-resnet-500m", "conv2d", 2),
        ("wide-resnet-500m", "shortcut", 0), ("wide-resnet-500m", "shortcut", 1), ("gnmt-8", "lstm", 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [(3e8, 7e8), (0.0, 7e8), (3e8, 0.0), (0.0, 0.0)])
def test_an_operator_takes_what_was_seen_whatever_the_model_has_of_it(
    model: str, kind: str, number: int, runtime: str, more: tuple[float, float]
) -> None:
    """What libraries' kernels work in, in 16 bits and 32: at its peak each pass takes just what the profile says."""
    problem = of_images(model, runtime, 8)
    index = [place for place, op in enumerate(problem.workload.operators) if op.kind == kind][number]
    seen, (forward, backward) = with_taken(problem, index, 8, more)
    cost = CostTables(seen).operator(index, (), 8, seen.gpu_types[0])
    made, kept = sum(cost.output_bytes), sum(size for name, size in cost.saved if ":" not in name)
    works = passes_working_bytes(index, cost, seen)
    assert (made + kept + works[0], works[1] - made) == pytest.approx((forward, backward), abs=2)
    taken = [size for name, size in cost.steps_forward if size > 0]
    assert sum(taken) == cost.workspace_forward_bytes
    bare = CostTables(problem).operator(index, (), 8, seen.gpu_types[0])
    assert len(cost.workspace_weight) == max(len(bare.workspace_weight), bool(more[1]))
    if more == (0.0, 0.0):
        assert (cost.workspace_weight, cost.steps_forward) == (bare.workspace_weight, bare.steps_forward)


def test_what_other_kinds_took_is_left_to_the_model() -> None:
    problem = of_images("vgg-16", "windtunnel-executor-fp32", 8)
    index = next(place for place, op in enumerate(problem.workload.operators) if op.kind == "linear")
    seen, _ = with_taken(problem, index, 8, (1e9, 1e9))
    own, bare = (CostTables(of).operator(index, (), 8, of.gpu_types[0]) for of in (seen, problem))
    assert own.workspace_weight == bare.workspace_weight and own.steps_forward == bare.steps_forward


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("runtime", ["windtunnel-executor", "windtunnel-executor-fp32"])
@pytest.mark.parametrize("samples", [8, 16])
def test_what_a_library_works_in_is_there_while_its_kernels_run(phase: int, runtime: str, samples: int) -> None:
    """Of VGG's second convolution as much as rules the peak: that grows by as much as is taken, and with the samples
    from those that were measured. The closed form is without outputs that nothing keeps while a pass goes forward."""
    problem = of_images("vgg-16", runtime, samples)
    plan = uniform_plan(problem, microbatch=samples)
    index = [place for place, op in enumerate(problem.workload.operators) if op.kind == "conv2d"][1]
    taken = 3e9

    def peak(num_bytes: float) -> int:
        of, _ = with_taken(problem, index, 8, (num_bytes, 0.0) if phase == 0 else (0.0, num_bytes))
        (memory,) = simulate(plan, of).memory
        within = 0.04 if phase == 0 else 1e-4
        assert estimate(plan, of).peak_bytes[0] == pytest.approx(memory.peak_allocated_bytes, rel=within)
        return memory.peak_allocated_bytes

    one, two = peak(taken), peak(2 * taken)
    assert two - one == pytest.approx(taken * samples / 8, rel=1e-5)
    assert one > peak(0.0) == simulate(plan, problem).memory[0].peak_allocated_bytes
