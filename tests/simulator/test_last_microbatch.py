"""A last microbatch with fewer samples: times, transfers and memory of its own, under every schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_models.model import HardwareModel
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import Lowered, lower, pipeline_shape
from simulator.memory.device_memory import memory_microbatches
from simulator.plan import Axis, Plan, Stage
from simulator.plan_file import load_plan, save_plan
from simulator.problem import Problem, ProblemSpec
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from simulator.schedules.registry import schedule_named
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SMALL, chain_of_opaque, chain_problem, small_problem
from workloads.graph_builder import GraphBuilder

SHAPES = [
    dict(tp=4),
    dict(dp=4),
    dict(pp=2, dp=2, schedule="gpipe"),
    dict(tp=2, pp=2, recompute="full"),
    dict(pp=2, dp=2, zero=2, overlap_gradient_sync=True),
    dict(dp=4, zero=3),
    dict(pp=4, schedule="zb-h1"),
    dict(pp=2, chunks=2, schedule="interleaved", recompute="selective"),
    dict(tp=2, sequence_parallel=True, pp=2, schedule="gpipe"),
]


def with_last(problem: Problem, size: int, last: int, count: int, **shape: object) -> tuple[Plan, Problem]:
    """Return a uniform plan of ``count`` microbatches, sizes per replica, and the problem of its true batch."""
    dp = int(shape.get("dp", 1))  # type: ignore[call-overload]
    equal = uniform_plan(replace(problem, global_batch=dp * size * count), microbatch=size, **shape)  # type: ignore[arg-type]
    plan = replace(equal, last_microbatch_size=dp * last)
    return plan, replace(problem, global_batch=plan.global_batch)


# Time


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 2), (3, 7), (4, 8), (8, 16)])
def test_gpipe_ends_at_m_plus_p_minus_2_full_passes_and_one_small_one(stages: int, count: int) -> None:
    problem = chain_problem(chain_of_opaque(stages, 1.0, 2.0), num_devices=stages, global_batch=1)
    plan, problem = with_last(problem, 2, 1, count, pp=stages, schedule="gpipe")
    assert simulate_time_s(plan, problem, fidelity=Fidelity.ideal()) == (count + stages - 2) * 6.0 + 3.0
    equal = replace(plan, last_microbatch_size=None)
    whole = simulate(equal, replace(problem, global_batch=2 * count), fidelity=Fidelity.ideal())
    assert whole.iteration_time_s == (count + stages - 1) * 6.0


def longest_path_s(plan: Plan, problem: Problem) -> float:
    """Return the end of the last pass, from the orders of the schedule and the seconds of each pass alone."""
    costs, gpu = CostTables(problem), problem.gpu_types[0]
    orders = schedule_named(plan.schedule).actions(pipeline_shape(plan))
    seconds = {}
    for stage, one in enumerate(plan.stages):
        for samples in (plan.microbatch_size, plan.last_microbatch_size or 0):
            found = [costs.operator(index, (), samples, gpu) for index in one.indices()] if samples else []
            forward = sum(cost.forward.device_s for cost in found)
            first = sum(cost.backward_input.device_s for cost in found)
            second = sum(cost.backward_weight.device_s for cost in found)
            seconds[stage, samples] = {
                FORWARD: forward, BACKWARD: first + second, BACKWARD_INPUT: first, BACKWARD_WEIGHT: second
            }  # fmt: skip
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * len(orders)
    waiting = [list(order) for order in orders]
    while any(waiting):
        for rank, order in enumerate(waiting):
            while order:
                kind, stage, number = order[0]
                back = BACKWARD if kind == BACKWARD else BACKWARD_INPUT
                needs = {
                    FORWARD: [(FORWARD, stage - 1, number)] if stage else [],
                    BACKWARD_WEIGHT: [(BACKWARD_INPUT, stage, number)],
                }.get(kind, [(FORWARD, stage, number)])
                if kind in (BACKWARD, BACKWARD_INPUT) and stage + 1 < len(plan.stages):
                    needs = [*needs, (back, stage + 1, number)]
                if any(need not in ends for need in needs):
                    break
                samples = plan.microbatch_size
                if plan.last_microbatch_size is not None and number == plan.num_microbatches - 1:
                    samples = plan.last_microbatch_size
                begin = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = ends[kind, stage, number] = begin + seconds[stage, samples][kind]
                order.pop(0)
    return max(free)


@st.composite
def unequal_pipelines(draw: st.DrawFn) -> tuple[Plan, Problem]:
    """Draw stages of unequal times under every schedule, with a smaller last microbatch."""
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved"]))
    ranks, chunks = draw(st.integers(1, 4)), 2 if schedule == "interleaved" else 1
    builder = GraphBuilder(name="chain", family="opaque", tokens_per_sample=0)
    tensor = builder.input("x", (1,))
    for number in range(ranks * chunks):
        builder.layer(f"layer{number}")
        row = {
            "forward_s": draw(st.sampled_from([0.1, 1.0, 1.7])),
            "backward_s": draw(st.sampled_from([0.2, 2.0, 3.1])),
            "output_bytes": 1,
        }
        tensor = builder.add("row", "opaque", [tensor], row)
    problem = chain_problem(builder.build(), num_devices=ranks, global_batch=1)
    count = draw(st.integers(1, 4)) * ranks if chunks > 1 else draw(st.integers(2, 9))
    size = draw(st.integers(2, 5))
    stages = tuple(
        Stage(((stage, stage + 1),), (stage % ranks,), ((1, ()),)) for stage in range(ranks * chunks)
    )
    plan = Plan(stages, size, max(2, count), schedule=schedule, last_microbatch_size=draw(st.integers(1, size)))
    return plan, replace(problem, global_batch=plan.global_batch)


@settings(max_examples=120, deadline=None)
@given(unequal_pipelines())
def test_any_schedule_ends_with_the_longest_path_through_its_passes(drawn: tuple[Plan, Problem]) -> None:
    plan, problem = drawn
    found = simulate_time_s(plan, problem, fidelity=Fidelity.ideal(), engine="compiled")
    assert found == pytest.approx(longest_path_s(plan, problem), rel=1e-12)


def test_the_closed_form_is_exact_for_equal_stages_under_gpipe() -> None:
    problem = chain_problem(chain_of_opaque(4, 1.0, 2.0), num_devices=4, global_batch=1)
    plan, problem = with_last(problem, 4, 1, 6, pp=4, schedule="gpipe")
    assert estimate(plan, problem).iteration_time_s == pytest.approx((6 + 4 - 2) * 12.0 + 3.0, rel=1e-3)


# Tasks


def columns(lowered: Lowered, rank: int, position: int) -> list[tuple[object, ...]]:
    """Return the tasks of one action: what they are, and how long alone."""
    graph, starts = lowered.graph, lowered.action_start_task[rank]
    stop = starts[position + 1] if position + 1 < len(starts) else None
    if stop is None:
        return []
    return [
        (graph.names[graph.name[t]], graph.work_s[t], graph.latency_s[t], graph.host_s[t], graph.bound_s[t])
        for t in range(int(starts[position]), int(stop))
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(f"{k}={v}" for k, v in shape.items()))
def test_its_tasks_are_those_of_a_plan_with_such_microbatches_only(shape: dict) -> None:
    """Neither its size nor anybody else's: transfers, collectives, kernels and launches, task by task."""
    problem = small_problem("gpt", runtime="megatron-lm-2021")
    plan, problem = with_last(problem, 3, 1, 8, **shape)
    lowered = {}
    plans = {"own": plan, "full": replace(plan, last_microbatch_size=None), "small": plan.all_like_last()}
    for name, each in plans.items():
        of = replace(problem, global_batch=each.global_batch)
        lowered[name] = lower(validate(each, of), CostTables(of), Fidelity())
    seen = set()
    for rank, order in enumerate(lowered["own"].orders):
        for position, action in enumerate(order):
            smaller = action.microbatch == plan.num_microbatches - 1
            like = lowered["small" if smaller else "full"]
            assert columns(lowered["own"], rank, position) == columns(like, rank, position)
            seen.add(smaller)
    assert seen == {True, False}
    durations = [sum(task[1] for task in columns(lowered[name], 0, 0)) for name in ("full", "small")]
    assert durations[0] > durations[1]


@pytest.mark.parametrize("family", list(SMALL))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: ",".join(f"{k}={v}" for k, v in shape.items()))
def test_engines_representatives_and_merged_tasks_agree(family: str, shape: dict) -> None:
    if (family == "vit" and shape.get("sequence_parallel")) or (family == "t5" and shape.get("chunks")):
        shape = dict(pp=2)
    problem = small_problem(family, runtime="windtunnel-executor-fp32")
    plan, problem = with_last(problem, 3, 1, 4, **shape)
    costs = CostTables(problem)
    reference = simulate(plan, problem, costs=costs)
    compiled = simulate(plan, problem, costs=costs, engine="compiled", leave_out_periods=True)
    assert compiled.iteration_time_s == reference.iteration_time_s
    assert compiled.peak_reserved_bytes == reference.peak_reserved_bytes
    everyone = simulate(plan, problem, costs=costs, fidelity=Fidelity().without("symmetry"))
    assert everyone.iteration_time_s == pytest.approx(reference.iteration_time_s, rel=1e-9)
    assert everyone.peak_reserved_bytes == reference.peak_reserved_bytes
    unmerged = simulate(plan, problem, costs=costs, fidelity=Fidelity().without("merge", "overlap-slowdown"))
    merged = simulate(plan, problem, costs=costs, fidelity=Fidelity().without("overlap-slowdown"))
    assert unmerged.iteration_time_s == pytest.approx(merged.iteration_time_s, rel=1e-9)
    for memory in reference.memory:
        kept = ("parameters", "gradients", "optimizer states")
        live = reference.live_bytes(memory.device).live_bytes
        assert live.min() >= 0
        lasting = sum(memory.consumers.get(name, 0) for name in kept)
        assert live[-1] == lasting + problem.matmul_workspace_bytes


@st.composite
def any_plans(draw: st.DrawFn) -> tuple[Plan, Problem]:
    """Draw replicas of unequal slices or in turn, meshes that differ between stages, and any sizes."""
    degrees = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    builder = GraphBuilder(name="chain", family="opaque", tokens_per_sample=0)
    tensor = builder.input("x", (1,))
    for number in range(len(degrees)):
        builder.layer(f"layer{number}")
        row = {
            "forward_s": draw(st.sampled_from([1e-5, 1e-3, 1.7e-3])),
            "backward_s": draw(st.sampled_from([1e-5, 2e-3, 3.1e-3])),
            "output_bytes": draw(st.sampled_from([1, 10**6, 10**8])),
        }
        tensor = builder.add("row", "opaque", [tensor], row)
    turns = draw(st.booleans())
    size = draw(st.integers(max(degrees), 7))
    stages, device = [], 0
    for number, degree in enumerate(degrees):
        stages.append(
            Stage(((number, number + 1),), tuple(range(device, device + degree)), ((1, (Axis("batch", degree),)),))
        )
        device += degree
    plan = Plan(
        tuple(stages),
        size,
        draw(st.integers(max(2, *degrees), 9)),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        replica_assignment="round_robin" if turns else "slice",
        last_microbatch_size=draw(st.integers(1 if turns else max(degrees), size)),
    )
    cluster = HardwareModel.from_name(draw(st.sampled_from(["v100-1gpu-25g:9x1", "a100-80g-dgx:2x5"])))
    chain = chain_problem(builder.build(), num_devices=device, global_batch=plan.global_batch)
    return plan, replace(chain, hardware=cluster)


@settings(max_examples=100, deadline=None)
@given(any_plans())
def test_any_plan_is_the_same_on_representatives_and_in_both_engines_and_leaks_nothing(
    drawn: tuple[Plan, Problem],
) -> None:
    plan, problem = drawn
    found = simulate(plan, problem, engine="compiled", leave_out_periods=True)
    assert simulate_time_s(plan, problem) == found.iteration_time_s
    everyone = simulate(plan, problem, engine="compiled", fidelity=Fidelity().without("symmetry"))
    assert everyone.iteration_time_s == pytest.approx(found.iteration_time_s, rel=1e-9)
    assert everyone.peak_reserved_bytes == found.peak_reserved_bytes
    for memory in found.memory:
        live = found.live_bytes(memory.device).live_bytes
        assert live[-1] == 0  # opaque rows have no states
        assert live.min() >= 0


# Memory, and what counts samples


def test_gpipe_holds_what_the_true_samples_keep() -> None:
    problem = small_problem("gpt")

    def saved(size: int, last: int, count: int) -> float:
        plan, of = with_last(problem, size, last, count, pp=2, schedule="gpipe")
        return simulate(plan, of).memory[0].consumers["saved activations"]

    full = saved(4, 4, 5) - saved(4, 4, 4)  # what one microbatch keeps
    assert saved(4, 1, 5) == pytest.approx(saved(4, 4, 4) + full / 4, rel=1e-4)
    assert saved(4, 3, 5) == pytest.approx(saved(4, 4, 4) + full * 3 / 4, rel=1e-4)


def test_memory_is_followed_to_the_last_microbatch() -> None:
    """A full pipeline repeats itself, but the smaller tensors at its end meet an allocator that has not seen them."""
    problem = small_problem("gpt")
    plan, of = with_last(problem, 4, 3, 40, pp=2)
    found = simulate(plan, of, engine="compiled")
    equal = simulate(replace(plan, last_microbatch_size=None), replace(of, global_batch=160), engine="compiled")
    assert memory_microbatches(plan) == plan.num_microbatches == 40
    for mine, theirs in zip(found.memory, equal.memory, strict=True):
        assert mine.peak_allocated_bytes == theirs.peak_allocated_bytes
        assert mine.peak_reserved_bytes >= mine.peak_allocated_bytes
        labels = np.unique(np.floor(found.live_bytes(mine.device).times_s / found.iteration_time_s * 10))
        assert len(labels) >= 10  # events in every tenth of the iteration


@pytest.mark.parametrize("reduction", ["last", "every"])
def test_gradients_made_by_the_first_backward_pass_are_made_once(reduction: str) -> None:
    problem = small_problem("gpt", runtime="windtunnel-executor-fp32")
    problem = replace(problem, runtime=replace(problem.runtime, frees_gradients="all"))
    for zero in (0, 2):
        plan, of = with_last(problem, 2, 1, 3, pp=2, dp=2, zero=zero)
        plan = replace(plan, gradient_reduction=reduction)
        equal = replace(plan, last_microbatch_size=None)
        found, whole = simulate(plan, of), simulate(equal, replace(of, global_batch=equal.global_batch))
        left, left_whole = ([r.live_bytes(m.device).live_bytes[-1] for m in r.memory] for r in (found, whole))
        assert left == left_whole
        assert all(size > m.consumers["parameters"] for size, m in zip(left, found.memory, strict=True))


def test_throughput_and_flop_count_true_samples() -> None:
    problem = small_problem("gpt")
    plan, of = with_last(problem, 4, 1, 3, pp=2)
    found = simulate(plan, of)
    one = simulate(uniform_plan(replace(of, global_batch=1)), replace(of, global_batch=1))
    assert (found.global_batch, plan.global_batch) == (9, 9)
    assert found.model_flop == pytest.approx(9 * one.model_flop)
    assert found.samples_per_s == pytest.approx(9 / found.iteration_time_s)


# Plans


def test_a_last_microbatch_like_the_others_is_not_named() -> None:
    problem = small_problem("gpt")
    plan = uniform_plan(problem, pp=2, microbatch=4)
    same = replace(plan, last_microbatch_size=4)
    assert same.canonical_hash(problem.workload) == plan.canonical_hash(problem.workload)
    assert simulate_time_s(same, problem) == simulate_time_s(plan, problem)
    other = replace(plan, last_microbatch_size=3)
    assert other.canonical_hash(problem.workload) != plan.canonical_hash(problem.workload)
    assert other.global_batch == plan.global_batch - 1


def test_a_uniform_plan_leaves_what_is_left_to_the_last_microbatch_where_asked() -> None:
    problem = small_problem("gpt", global_batch=22)
    with pytest.raises(ValueError, match=r"try microbatch 1, or a smaller last microbatch \(smaller_last\)"):
        uniform_plan(problem, pp=2, dp=2, microbatch=4)
    plan = validate(uniform_plan(problem, pp=2, dp=2, microbatch=4, smaller_last=True), problem)
    assert (plan.microbatch_size, plan.num_microbatches, plan.last_microbatch_size) == (8, 3, 6)
    even = uniform_plan(replace(problem, global_batch=24), pp=2, dp=2, microbatch=4, smaller_last=True)
    assert even == uniform_plan(replace(problem, global_batch=24), pp=2, dp=2, microbatch=4)
    with pytest.raises(ValueError, match="must hold at least one whole microbatch"):
        uniform_plan(replace(problem, global_batch=3), microbatch=4, smaller_last=True)


def test_a_plan_file_holds_it_only_where_it_differs(tmp_path: Path) -> None:
    spec = ProblemSpec(model="gpt3-1.3b", cluster="v100-32g-dgx1:1x4", runtime="megatron-lm-2021", global_batch=15)
    plan = Plan((Stage(((0, 3),), (0,), ((3, ()),)),), 4, 4, last_microbatch_size=3)
    save_plan(tmp_path / "plan.yaml", spec, plan)
    assert load_plan(tmp_path / "plan.yaml") == (spec, plan)
    save_plan(tmp_path / "equal.yaml", spec, replace(plan, last_microbatch_size=None))
    assert "last_microbatch_size" not in (tmp_path / "equal.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(last_microbatch_size=9), "must be from 1 to the microbatch_size 8, got 9; leave it out"),
        (dict(last_microbatch_size=0), "must be from 1 to the microbatch_size 8, got 0"),
        (dict(last_microbatch_size=4), r"8 \* 2 \+ 4 = 20; try num_microbatches: 4, last_microbatch_size: 1"),
        (dict(num_microbatches=1, last_microbatch_size=1), "got num_microbatches 1; use microbatch_size: 1"),
        (dict(last_microbatch_size=1, num_microbatches=4), "each of 2 replicas needs a sample of the last microbatch"),
        (dict(microbatch_size=5, num_microbatches=6, last_microbatch_size=5), "without last_microbatch_size"),
    ],
)
def test_what_is_wrong_with_a_last_microbatch_is_said(change: dict, words: str) -> None:
    problem = small_problem("gpt", global_batch=25)
    plan = replace(uniform_plan(replace(problem, global_batch=24), dp=2, microbatch=4), **change)
    with pytest.raises(ValueError, match=words):
        validate(plan, problem)


def test_unequal_slices_of_it_need_one_batch_degree_in_a_stage() -> None:
    problem = small_problem("gpt", global_batch=7)
    count = len(problem.workload)
    runs = ((2, (Axis("batch", 2), Axis("replicate", 2))), (count - 2, (Axis("batch", 2), Axis("tensor", 2))))
    same = Plan((Stage(((0, count),), (0, 1, 2, 3), runs),), 4, 2, last_microbatch_size=3)
    assert simulate_time_s(same, problem) > 0
    mixed = ((2, (Axis("batch", 4),)), runs[1])
    with pytest.raises(ValueError, match="last_microbatch_size 7 does not divide over"):
        validate(Plan((Stage(((0, count),), (0, 1, 2, 3), mixed),), 8, 2, last_microbatch_size=7),
                 replace(problem, global_batch=15))  # fmt: skip


def test_estimators_for_equal_microbatches_refuse_it_by_name() -> None:
    problem = small_problem("gpt")
    plan, problem = with_last(problem, 4, 1, 3, pp=2)
    with pytest.raises(ValueError, match="microbatches must be alike"):
        FastEstimator(problem).estimate(plan)
