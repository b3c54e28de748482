"""Cost tables: composition of segments, tables against rows, profiles without double counting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.plan import Axis, resolve
from simulator.segments import EMPTY, Segment
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import repeated_layers, uniform_plan
from tests.simulator.problems import small_problem
from workloads.kernels import MemoryBound

KERNELS = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 3)), min_size=1, max_size=6)


def joined(kernels: list[tuple[float, float]]) -> Segment:
    total = EMPTY
    for launch, seconds in kernels:
        total = total.then(Segment(seconds, launch, launch + seconds, launch))
    return total


@given(KERNELS)
def test_a_segment_has_the_bound_of_its_kernels(kernels: list[tuple[float, float]]) -> None:
    """L = max over j of the launches up to j plus the kernels from j on."""
    found = joined(kernels)
    bounds = [
        sum(launch for launch, _ in kernels[: j + 1]) + sum(seconds for _, seconds in kernels[j:])
        for j in range(len(kernels))
    ]
    assert found.bound_s == pytest.approx(max(bounds))
    assert found.device_s == pytest.approx(sum(seconds for _, seconds in kernels))
    assert found.lead_s == kernels[0][0]


@given(KERNELS, KERNELS, KERNELS)
def test_joining_segments_is_associative(a: list, b: list, c: list) -> None:
    one, two, three = joined(a), joined(b), joined(c)
    left, right = one.then(two).then(three), one.then(two.then(three))
    for name in ("device_s", "host_s", "bound_s", "lead_s"):
        assert getattr(left, name) == pytest.approx(getattr(right, name))


def test_a_run_of_kernels_has_the_seconds_of_each_origin_that_they_have() -> None:
    first, second = Segment(6.0, recorded=(1.0, 2.0, 3.0)), Segment(60.0, recorded=(10.0, 20.0, 30.0))
    run = first.then(Segment.launch(9.0)).then(second)
    assert run.recorded == (11.0, 22.0, 33.0)
    assert sum(run.recorded) == run.device_s


@pytest.mark.parametrize("axes", [(), (Axis("batch", 2),), (Axis("batch", 2), Axis("tensor", 2)), (Axis("tensor", 4),)])
def test_a_table_holds_the_rows_of_its_operators(axes: tuple[Axis, ...]) -> None:
    problem = small_problem("gpt")
    costs = CostTables(problem)
    gpu_type = problem.gpu_types[0]
    table = costs.table(axes, 1, gpu_type)
    for index, op in enumerate(problem.workload.operators):
        cost = costs.operator(index, resolve(axes, op), 1, gpu_type)
        assert table.forward_s[index] >= cost.forward.device_s
        assert table.parameter_elements[index] == cost.num_parameter_elements
    assert table.prefix["forward_s"][-1] == pytest.approx(table.forward_s.sum())
    assert table.boundary_bytes[-1] == 0.0


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_table_adds_up_to_an_iteration_of_one_stage(keeps: bool, sequence_parallel: bool) -> None:
    """What backward gathers again under sequence parallelism is in it."""
    problem = small_problem("gpt", global_batch=1)
    problem = replace(problem, runtime=replace(problem.runtime, keeps_gathered_inputs=keeps))
    plan = uniform_plan(problem, tp=4, sequence_parallel=sequence_parallel)
    table = CostTables(problem).table(plan.stages[0].shardings[0][1], 1, problem.gpu_types[0])
    result = simulate(plan, problem, fidelity=Fidelity().without("optimizer", "host", "gradient-sync"))
    assert table.forward_s.sum() + table.backward_s.sum() == pytest.approx(result.iteration_time_s, rel=1e-9)


def test_a_cut_between_layers_sends_one_hidden_state_and_inside_attention_the_scores_too() -> None:
    """Aceso's profile: layer boundary B*s*h*2 bytes; behind attention score also b*a*s*s*2."""
    problem = small_problem("gpt")
    table = CostTables(problem).table((), 1, problem.gpu_types[0])
    start, _ = problem.workload.layers[2]
    state = 2048 * 1024 * 2
    assert table.boundary_bytes[start - 1] == state
    roles = [op.role for op in problem.workload.operators]
    score = roles.index("attention_score", start)
    assert table.boundary_bytes[score] == pytest.approx(state + 16 * 2048 * 2048 * 2 + 2048 * 1024 * 2, rel=0.3)


@pytest.mark.parametrize(
    "degrees",
    [
        dict(tp=4),
        dict(pp=4),
        dict(tp=2, dp=2, recompute="full"),
        dict(pp=2, dp=2, schedule="gpipe"),
        dict(dp=4, zero=2),
    ],
)
def test_the_closed_form_estimate_is_near_the_simulation(degrees: dict) -> None:
    problem = small_problem("gpt", global_batch=64)
    plan = uniform_plan(problem, **degrees)
    result = simulate(plan, problem)
    found = estimate(plan, problem)
    assert found.iteration_time_s == pytest.approx(result.iteration_time_s, rel=0.12)
    for peak, memory in zip(found.peak_bytes, result.memory, strict=False):
        assert peak == pytest.approx(memory.peak_allocated_bytes, rel=0.15)


@pytest.mark.parametrize("kept_bytes", [2, 4])
def test_a_buffer_of_gradients_costs_one_addition_per_parameter_and_microbatch(kept_bytes: int) -> None:
    """Each addition reads the new gradient and the kept one, and writes the kept one."""
    problem = small_problem()
    with_buffer, without = (
        replace(problem, runtime=replace(problem.runtime, adds_gradients=adds, gradient_accumulation_bytes=kept_bytes))
        for adds in (True, False)
    )
    gpu_type = problem.hardware.gpu_type(0)
    for index, op in enumerate(problem.workload.operators):
        sharding = resolve((), op)
        mine = CostTables(with_buffer).operator(index, sharding, 1, gpu_type)
        other = CostTables(without).operator(index, sharding, 1, gpu_type)
        additions = [MemoryBound(count * (kept_bytes + 2), count * kept_bytes) for _, count in other.parameters]
        wanted = sum(problem.hardware.kernel_time_s(gpu_type, addition, "fp16") for addition in additions)
        assert mine.backward_weight.device_s - other.backward_weight.device_s == pytest.approx(wanted)
        assert (mine.forward, mine.backward_input) == (other.forward, other.backward_input)


def test_a_process_that_drives_several_ranks_launches_a_collective_on_each() -> None:
    problem = small_problem()
    runtime = replace(problem.runtime, host_seconds_per_collective=(5e-6, 20e-6))
    costs = CostTables(replace(problem, runtime=runtime))
    assert costs.collective_host_s((0, 1)) == pytest.approx(45e-6)
    slow = replace(problem, runtime=replace(runtime, host_seconds_per_collective=(50e-3, 0.0)))
    plan = uniform_plan(problem, tp=2, microbatch=1)
    assert simulate_time_s(plan, slow) > simulate_time_s(plan, problem) + 50e-3
    ideal = Fidelity().without("host")
    same = [simulate_time_s(plan, each, fidelity=ideal) for each in (slow, problem)]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    ("kind", "fused_softmax", "forward", "backward"),
    [
        ("linear", True, 1, 1),  # both gradients are one node
        ("dropout_add", True, 1, 1),  # one scripted function
        ("softmax", True, 1, 1),
        ("softmax", False, 5, 5),  # to fp32, scale, mask, softmax, to fp16
        ("embedding", True, 4, 3),  # two look-ups, their sum, dropout; dropout and two tables
        ("lm_loss", True, 8, 4),  # product, cast and six of Megatron's cross entropy; two, cast and product
    ],
)
def test_the_framework_dispatches_each_of_its_operations(
    kind: str, fused_softmax: bool, forward: int, backward: int
) -> None:
    problem = small_problem("gpt")
    runtime = replace(
        problem.runtime,
        implementation=replace(problem.runtime.implementation, fused_softmax=fused_softmax),
        host_seconds_per_kernel=0.0,
        host_seconds_per_operator=(3.0, 100.0),
    )
    costs = CostTables(replace(problem, runtime=runtime))
    index = next(number for number, op in enumerate(problem.workload.operators) if op.kind == kind)
    cost = costs.operator(index, (), 1, problem.hardware.gpu_type(0))
    assert (cost.forward.host_s, cost.backward.host_s) == (3.0 * forward, 100.0 * backward)
    assert cost.forward.lead_s == 3.0  # the first kernel waits for its own dispatch only


def test_each_metric_of_training_is_a_cross_entropy_forward_in_fp32() -> None:
    """Composer's two for MPT: each casts the logits, takes their log-softmax (long rows twice) and picks one a row."""
    with_metrics = small_problem("gpt", runtime="composer-fsdp", cluster="a100-80g-dgx:1x8")
    implementation = replace(with_metrics.runtime.implementation, loss_metrics=0)
    without = replace(with_metrics, runtime=replace(with_metrics.runtime, implementation=implementation))
    index, gpu = len(with_metrics.workload) - 1, with_metrics.gpu_types[0]
    assert with_metrics.workload.operators[index].kind == "lm_loss"
    more, less = (CostTables(problem).operator(index, (), 4, gpu) for problem in (with_metrics, without))
    rows, vocab = 4 * 2048, with_metrics.workload.parameters(index)[0].shape[0]
    kernels = (
        MemoryBound(2.0 * rows * vocab, 4.0 * rows * vocab),
        MemoryBound(2 * 4.0 * rows * vocab, 4.0 * rows * vocab, "reduction"),
        MemoryBound(4.0 * rows, 4.0 * rows, "gather"),
    )
    assert vocab > 12_288
    expected = 2 * sum(with_metrics.hardware.kernel_time_s(gpu, kernel, "bf16") for kernel in kernels)
    assert more.backward_input.device_s - less.backward_input.device_s == pytest.approx(expected)
    assert (more.forward, more.backward_weight, more.saved) == (less.forward, less.backward_weight, less.saved)


def test_a_dtype_that_the_gpu_lacks_is_answered_with_runtimes_that_fit() -> None:
    problem = small_problem("gpt", runtime="pytorch-fsdp2")
    words = r"\(fp16, fp32\), got 'bf16' of runtime pytorch-fsdp2; runtimes that fit: [a-z0-9-]*"
    with pytest.raises(ValueError, match=words) as refused:
        simulate(uniform_plan(problem, dp=4), problem)
    dtypes = [load_runtime(name).implementation.dtype for name in str(refused.value).split("fit: ")[1].split(", ")]
    assert dtypes == ["fp16"] * 4  # 16 bits before 32


@pytest.mark.parametrize(("family", "alone"), [("gpt", 1), ("llama", 1), ("vit", 1), ("t5", 2), ("bert", 0)])
def test_a_norm_that_ends_repeated_layers_can_be_a_unit_of_its_own(family: str, alone: int) -> None:
    """T5 has one behind its encoder too; BERT's comes inside its head, which is wrapped whole."""
    problem = small_problem(family)
    workload, layers = problem.workload, [op.layer for op in problem.workload.operators]
    assert CostTables(problem).units == tuple(layers)
    runtime = replace(problem.runtime, wraps_final_norms=True, keeps_root_gathered=True)
    costs = CostTables(replace(problem, runtime=runtime))
    assert list(costs.units) == sorted(costs.units) and costs.units[-1] == layers[-1] + alone
    norms = [index for index, op in enumerate(workload.operators) if op.role.endswith("final_norm")]
    assert sum(costs.units.count(costs.units[index]) == 1 for index in norms) == alone
    assert all(costs.units[index] in costs.root_units for index in norms)
    assert len(costs.root_units) == len(set(costs.units)) - len(repeated_layers(workload))
