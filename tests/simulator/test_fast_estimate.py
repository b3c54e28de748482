"""The fast estimate against ``estimate``, plan by plan; against the engine; and its array forms."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_models.collective_table import CollectiveTable, Row
from hardware_models.group_shapes import GroupShape
from hardware_models.runtime_files import runtime_names
from simulator.closed_forms.estimate import estimate
from simulator.engines.engine_compiled import run_compiled
from simulator.fast.estimate import FastEstimator, PlanArrays, StageColumns
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower
from simulator.plan import Axis, Plan, Sharding, Stage
from simulator.problem import Problem, ProblemSpec
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SMALL, chain_of_opaque, chain_problem, small_problem
from workloads.registry import build_workload

SETTINGS = [
    ("v100-32g-dgx1:2x4", "megatron-lm-2021"),  # a mesh of unequal links; transfers in parts
    ("a100-80g-dgx:2x4", "composer-fsdp"),  # a switch; bf16; gathers
    ("a100-80g-dgx:1x8", "pytorch-fsdp2"),  # parameters are cast before they are gathered
    ("a100-80g-dgx:1x8", "pytorch-ddp"),  # buckets; passes wait for what is copied back
    ("a100-40g-dgx:2x4", "deepspeed-zero3-2021"),  # a host that waits for gathers; calls by parameter
    ("v100-1gpu-25g:6x1", "galvatron-v1"),  # only the network; whole transfers; recomputation does not stop early
    ("v100-32g-dgx1:1x2+v100-32g-dgx1:1x4", "megatron-deepspeed"),  # unequal nodes
    ("a100-80g-dgx:1x8", "megatron-lm-2023-flash"),  # what flash attention makes of several samples is copied
    ("a100-80g-dgx:2x4", "megatron-deepspeed-timed"),  # a host that never runs ahead
    ("p3.8xlarge:1x3+p3.8xlarge:1x2+v100-32g-dgx1:1x4", "megatron-lm-2021"),  # groups that share cards, unlike ones too
]
WORDS = ("tensor", "tensor_alternative", "tensor_sequence", "replicate")


@lru_cache
def estimator(family: str, cluster: str, runtime: str) -> FastEstimator:
    """Return one estimator per problem: what it keeps must not leak from plan to plan."""
    return FastEstimator(small_problem(family, cluster=cluster, runtime=runtime, global_batch=24))


@st.composite
def shardings(draw: st.DrawFn, num_devices: int) -> Sharding:
    """Draw any mesh of one or two axes over the devices, in either order."""
    replicas = draw(st.sampled_from([n for n in range(1, num_devices + 1) if num_devices % n == 0]))
    axes = [
        Axis("batch", replicas, draw(st.integers(0, 3)) if replicas > 1 else 0),
        Axis(draw(st.sampled_from(WORDS)), num_devices // replicas),
    ]
    return tuple(draw(st.permutations(axes)))


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> Plan:
    """Draw a plan with any cuts, any strategy per run of operators, any segments, under any schedule."""
    count = len(problem.workload)
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1"]))
    num_ranks = draw(st.integers(1, min(3, problem.num_devices)))
    num_stages = 2 * num_ranks if schedule == "interleaved" else num_ranks
    devices, first_device = [], 0
    for rank in range(num_ranks):
        left = problem.num_devices - first_device - (num_ranks - rank - 1)
        number = draw(st.sampled_from([n for n in (1, 2, 4) if n <= left]))
        own = range(first_device, first_device + number)
        devices.append(tuple(own) if draw(st.booleans()) else tuple(draw(st.permutations(own))))
        first_device += number
    cuts = sorted(draw(st.sets(st.integers(1, count - 1), min_size=num_stages - 1, max_size=num_stages - 1)))
    stages = []
    for position, (first, stop) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
        own = devices[position % num_ranks]
        inner = sorted(draw(st.sets(st.integers(first + 1, stop - 1), max_size=3))) if stop - first > 1 else []
        runs = [(b - a, draw(shardings(len(own)))) for a, b in zip([first, *inner], [*inner, stop], strict=True)]
        bounds = sorted(draw(st.sets(st.integers(first, stop), max_size=8)))
        segments = tuple(zip(bounds[::2], bounds[1::2], strict=False))
        stages.append(Stage(((first, stop),), own, tuple(runs), segments))
    size = draw(st.sampled_from([4, 6, 12, 24]))
    m = 24 // size
    warmup = None
    if schedule == "1f1b" and draw(st.booleans()):
        warmup = tuple(min(m, 2 * (num_stages - stage) - 1) for stage in range(num_stages))
    return Plan(
        stages=tuple(stages),
        microbatch_size=size,
        num_microbatches=m,
        schedule=schedule,
        warmup=warmup,
        gradient_reduction=draw(st.sampled_from(["last", "every"])),
        reshard_after_forward=draw(st.booleans()),
        overlap_gradient_sync=draw(st.booleans()),
    )


def assert_equal(plan: Plan, found: FastEstimator) -> None:
    expected, fast = estimate(plan, found.problem, found.costs), found.estimate(plan)
    assert fast.iteration_time_s == pytest.approx(expected.iteration_time_s, rel=1e-11)
    assert fast.stage_time_s == pytest.approx(expected.stage_time_s, rel=1e-11)
    assert fast.peak_bytes == expected.peak_bytes
    assert fast.capacity_bytes == expected.capacity_bytes
    assert fast.fits == expected.fits


def is_legal(plan: Plan, problem: Problem) -> bool:
    try:
        validate(plan, problem)
    except ValueError:
        return False
    return True


@settings(max_examples=100, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(SMALL)), setting=st.sampled_from(SETTINGS))
def test_time_and_memory_equal_the_estimate_on_any_plan(data, family, setting) -> None:
    found = estimator(family, *setting)
    plan = data.draw(plans(found.problem))
    if is_legal(plan, found.problem):
        assert_equal(plan, found)


@settings(max_examples=100, deadline=None)
@given(
    setting=st.sampled_from(SETTINGS[:2]), family=st.sampled_from(sorted(SMALL)), tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]), microbatch=st.sampled_from([1, 3]), zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "full"]), sequence=st.booleans(), schedule=st.sampled_from(["1f1b", "zb-h1"]),
    reduction=st.sampled_from(["last", "every"]), reshards=st.booleans(), overlaps=st.booleans(),
)  # fmt: skip
def test_and_on_uniform_ones_whose_operators_are_split_in_many_ways(
    setting, family, tp, pp, microbatch, zero, recompute, sequence, schedule, reduction, reshards, overlaps
) -> None:
    """A strategy that suits only operators without parameters gathers nothing, and does not unshard its stage."""
    found = estimator(family, *setting)
    plan = uniform_plan(
        found.problem, tp=tp, pp=pp, dp=8 // (tp * pp), microbatch=microbatch, zero=zero, recompute=recompute,
        sequence_parallel=sequence and tp > 1, schedule=schedule, gradient_reduction=reduction,
        overlap_gradient_sync=overlaps,
    )  # fmt: skip
    plan = replace(plan, reshard_after_forward=reshards)
    if is_legal(plan, found.problem):
        assert_equal(plan, found)


@pytest.mark.parametrize("reduction", ["last", "every"])
@pytest.mark.parametrize(
    "strategies",
    [*(((Axis("batch", 8, a),), (Axis("batch", 8, b),)) for a, b in ((1, 3), (3, 1), (2, 3), (0, 3))),
     ((Axis("batch", 2),), (Axis("tensor_sequence", 2),)), ((Axis("tensor_sequence", 2),), (Axis("batch", 2),))],
)  # fmt: skip
@pytest.mark.parametrize("runtime", ["composer-fsdp", "pytorch-fsdp2", "deepspeed-zero3-2021", "pytorch-ddp"])
def test_only_what_is_copied_counts_as_copied_of_all_that_is_reduced_alike(runtime, strategies, reduction) -> None:
    """ZeRO 1 to 3 share a reduction, and the third alone copies gradients; so do replicas and shards of a sequence."""
    found = estimator("gpt", "a100-80g-dgx:1x8", runtime)
    count, devices = len(found.problem.workload), tuple(range(strategies[0][0].size))
    runs = ((count // 2, strategies[0]), (count - count // 2, strategies[1]))
    plan = Plan(
        (Stage(((0, count),), devices, runs),), 8, 3, gradient_reduction=reduction, overlap_gradient_sync=True
    )
    validate(plan, found.problem)
    assert_equal(plan, found)


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_too_few_heads_for_the_fused_softmax_keep_something_else(tp, microbatch) -> None:
    problem = ProblemSpec("gpt-scale-8", "v100-32g-dgx1:1x8", "megatron-lm-2021", 8 * microbatch).load()
    for recompute in ("none", "selective"):
        assert_equal(
            uniform_plan(problem, tp=tp, pp=8 // tp, microbatch=microbatch, recompute=recompute),
            FastEstimator(problem),
        )


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize("runtime", runtime_names())
def test_every_runtime_has_plans_of_one_sample_a_replica_and_of_several(runtime, microbatch) -> None:
    """Megatron-LM's flash attention keeps its output of one sample, and a copy of several."""
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime=runtime, global_batch=16)
    for recompute in ("none", "selective"):
        assert_equal(uniform_plan(problem, dp=4, microbatch=microbatch, recompute=recompute), FastEstimator(problem))


def test_measured_collectives_are_interpolated_as_in_the_hardware_model() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=24)
    rows = [
        (kind, size, num_bytes, 1e-5 + num_bytes / rate)
        for kind, rate in (("all_reduce", 3e10), ("all_gather", 5e10), ("reduce_scatter", 4e10))
        for size in (2, 4)
        for num_bytes in (1e5, 1e6, 7e6, 2e8)
    ]
    table = CollectiveTable.from_rows(rows, "made up")
    found = FastEstimator(replace(problem, hardware=replace(problem.hardware, collective_table=table)))
    for tp, dp, zero in ((1, 4, 0), (1, 4, 1), (1, 4, 3), (2, 2, 2), (2, 2, 0)):
        assert_equal(uniform_plan(found.problem, tp=tp, dp=dp, zero=zero), found)


@pytest.mark.parametrize("measured", [False, True])
def test_channels_that_are_gathered_are_joined_in_both(measured: bool) -> None:
    problem = ProblemSpec("resnet-50", "v100-32g-dgx1:1x4", "megatron-lm-2021-fp32", 32).load()
    apart = replace(problem, runtime=replace(problem.runtime, joins_gathers=False))
    if measured:
        rows = [("all_gather", size, 1e3 * 4**step, 1e-5 + 4**step * 2e-8) for size in (2, 4) for step in range(12)]
        table = CollectiveTable.from_rows(rows, "made up")
        problem, apart = (
            replace(each, hardware=replace(each.hardware, collective_table=table)) for each in (problem, apart)
        )
    found = FastEstimator(problem)
    for tp, dp, pp in ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1)):
        plan = uniform_plan(problem, tp=tp, dp=dp, pp=pp, microbatch=8)
        assert_equal(plan, found)
        longer_s = estimate(plan, problem).iteration_time_s - estimate(plan, apart).iteration_time_s
        if tp == 1:
            assert longer_s == 0
        elif pp == 1:
            # Forward, the output of every convolution: three copies at 0.895 of 900 GB/s.
            outputs = [op.outputs[0] for op in problem.workload.operators if op.kind == "conv2d"]
            size = sum(prod(problem.workload.tensors[name]) for name in outputs) * 4 * 32 / dp
            assert longer_s == pytest.approx(6 * size / (0.895 * 900e9), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_weights_that_each_use_reduces_are_in_both(family: str) -> None:
    found = estimator(family, "a100-80g-dgx:1x8", "galvatron-v1")
    once = replace(found.problem, runtime=replace(found.problem.runtime, reduces_ties_by_use=False))
    for shape in (dict(dp=8), dict(tp=2, dp=4), dict(pp=2, dp=4), dict(dp=8, zero=1), dict(dp=8, zero=3)):
        plan = uniform_plan(found.problem, **shape)  # type: ignore[arg-type]
        assert_equal(plan, found)
        more_s = estimate(plan, found.problem).iteration_time_s - estimate(plan, once).iteration_time_s
        assert more_s == 0 if "zero" in shape else more_s >= 0
    assert estimate(uniform_plan(found.problem, dp=8), found.problem).iteration_time_s > estimate(
        uniform_plan(once, dp=8), once
    ).iteration_time_s


@pytest.mark.parametrize("runtime", ["pytorch-fsdp2", "composer-fsdp"])
def test_whole_layers_are_gathered_in_the_type_that_travels(runtime) -> None:
    found = estimator("gpt", "a100-80g-dgx:1x8", runtime)
    for dp, pp in ((8, 1), (4, 2)):
        assert_equal(uniform_plan(found.problem, dp=dp, pp=pp, zero=3), found)


def test_series_are_chosen_by_the_shape_of_a_group() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:2x4", global_batch=24)
    shapes = (GroupShape(2, 1, 1), GroupShape(2, 1, 2), GroupShape(2, 2), GroupShape(4, 2, 2), GroupShape(8, 2, 1))
    rows: list[Row] = [
        ("all_reduce", shape, num_bytes, 1e-5 * (number + 1) + num_bytes / (1e10 + 3e9 * number))
        for number, shape in enumerate(shapes)
        for num_bytes in (1e4, 3e6, 5e7)
    ]
    table = CollectiveTable.from_rows(rows, "made up")
    found = FastEstimator(replace(problem, hardware=replace(problem.hardware, collective_table=table)))
    modelled = FastEstimator(problem)
    for tp, dp in ((2, 4), (4, 2), (1, 8)):
        plan = uniform_plan(found.problem, tp=tp, dp=dp)
        assert_equal(plan, found)
        assert found.estimate(plan).iteration_time_s != modelled.estimate(plan).iteration_time_s


def test_series_of_several_groups_at_once_are_refused() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=24)
    rows: list[Row] = [("all_reduce", GroupShape(2, 1, 2, groups_per_node=2), size, size / 1e10) for size in (1e4, 1e7)]
    table = CollectiveTable.from_rows(rows, "made up")
    found = FastEstimator(replace(problem, hardware=replace(problem.hardware, collective_table=table)))
    plan = uniform_plan(found.problem, tp=2, dp=2)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"measured one group at a time.*use estimate"):
            found.estimate(plan)
    assert_equal(uniform_plan(found.problem, tp=1, dp=4), found)


def test_many_plans_at_once_give_what_each_gives_alone() -> None:
    found = FastEstimator(small_problem("t5", cluster="v100-32g-dgx1:2x4", global_batch=24))
    several = [
        uniform_plan(found.problem, tp=tp, pp=pp, dp=8 // (tp * pp), recompute=recompute, schedule=schedule)
        for tp in (1, 2)
        for pp in (1, 2, 4)
        for recompute in ("none", "selective", "full")
        for schedule in ("1f1b", "gpipe")
    ]
    together = found.evaluate(found.arrays(several))
    first = 0
    for index, plan in enumerate(several):
        alone = FastEstimator(found.problem, found.costs).estimate(plan)
        rows = slice(first, first + len(plan.stages))
        assert alone.iteration_time_s == together.iteration_time_s[index]
        assert alone.peak_bytes == tuple(together.peak_bytes[rows])
        assert alone.fits == together.fits[index]
        first = rows.stop


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_plans_survive_the_way_to_arrays_and_back(data) -> None:
    found = estimator("gpt", *SETTINGS[0])
    plan = data.draw(plans(found.problem))
    again = found.plan(found.arrays([plan]), 0)
    assert again.canonical(found.problem.workload) == replace(plan, warmup=again.warmup).canonical(
        found.problem.workload
    )
    assert again.warmup_in_force() == plan.warmup_in_force()


def test_plans_operator_by_operator_become_runs_and_segments() -> None:
    found = estimator("gpt", *SETTINGS[0])
    count = len(found.problem.workload)
    plan = uniform_plan(found.problem, pp=2, tp=2, dp=2, recompute="full", microbatch=2)
    both = found.strategy(plan.stages[0].shardings[0][1])
    other = found.strategy((Axis("batch", 4),))
    stage = np.zeros((2, count), dtype=np.int64)
    segment = np.zeros((2, count), dtype=np.int64)
    strategy = np.full((2, count), both)
    for position, one in enumerate(plan.stages):
        for first, stop in one.operators:
            stage[:, first:stop] = position
        for number, (first, stop) in enumerate(one.recompute):
            segment[:, first:stop] = number + 1
    strategy[1, 7:20] = other
    placements = np.array([found.placement(one.devices) for one in plan.stages] * 2)
    sizes, numbers = np.full(2, plan.microbatch_size), np.full(2, plan.num_microbatches)
    arrays = PlanArrays.from_operators(stage, strategy, segment, placements, sizes, numbers)
    assert found.plan(arrays, 0).canonical(found.problem.workload) == replace(
        plan, gradient_reduction="last", overlap_gradient_sync=True
    ).canonical(found.problem.workload)
    mixed = found.plan(arrays, 1)
    assert [count for count, _ in mixed.stages[0].shardings] == [7, 13, mixed.stages[0].num_operators() - 20]
    times = found.evaluate(arrays).iteration_time_s
    assert times[1] == pytest.approx(estimate(mixed, found.problem, found.costs).iteration_time_s, rel=1e-11)


def test_equal_stages_take_what_the_closed_form_of_1f1b_says() -> None:
    problem = chain_problem(chain_of_opaque(4, 1.0, 2.0), num_devices=4, global_batch=8, has_norm=False)
    time_s = FastEstimator(problem).estimate(uniform_plan(problem, pp=4)).iteration_time_s
    transfer_s = problem.hardware.transfer(1.0, 0, 1).alone_s
    # Stages 1 and 2 send both ways each turn, but stage 1 does not wait while the last microbatch is on its way back.
    assert time_s == pytest.approx(7 * (3.0 + 2 * transfer_s) + 12.0 + 5 * transfer_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_equal_stages_take_what_the_engine_says_without_what_only_an_engine_knows(schedule) -> None:
    problem = chain_problem(chain_of_opaque(8, 1.0, 2.0), num_devices=4, global_batch=16, has_norm=False)
    plan = uniform_plan(problem, pp=4, schedule=schedule)
    fidelity = replace(Fidelity.ideal(), transfers=True)
    graph = lower(validate(plan, problem), FastEstimator(problem).costs, fidelity).graph
    found = FastEstimator(problem).estimate(plan)
    assert found.iteration_time_s == pytest.approx(run_compiled(graph).end_s.max(), rel=1e-9)


@pytest.mark.parametrize(
    ("stops", "segments", "message"),
    [
        ([5, 5], [], "one after the other"),
        ([5, 7], [], "one after the other"),
        ([5, None], [(3, 3)], "segments must lie inside"),
        ([5, None], [(3, 9), (8, 12)], "segments must lie inside"),
    ],
)
def test_arrays_that_break_a_rule_are_refused(stops, segments, message) -> None:
    found = estimator("gpt", *SETTINGS[0])
    stops = [len(found.problem.workload) if stop is None else stop for stop in stops]
    one = found.strategy((Axis("batch", 2),))
    stage = StageColumns(found.placement((0, 1)), stops, [one, one], segments)
    with pytest.raises(ValueError, match=message):
        found.evaluate(PlanArrays.of([stage], 4, 6))


def test_strategies_that_do_not_fit_are_refused_and_forgotten() -> None:
    found = FastEstimator(small_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=24))
    count = len(found.problem.workload)
    place = found.placement(range(4))
    two, three = found.strategy((Axis("batch", 2),)), found.strategy((Axis("tensor", 3), Axis("batch", 1)))
    good = PlanArrays.of([StageColumns(place, [count], [found.strategy((Axis("batch", 4),))])], 4, 6)
    for _ in range(2):
        with pytest.raises(ValueError, match="must multiply to the 4 devices"):
            found.evaluate(PlanArrays.joined([good, PlanArrays.of([StageColumns(place, [count], [two])], 4, 6)]))
    with pytest.raises(ValueError, match="its strategy can split"):
        found.evaluate(PlanArrays.of([StageColumns(found.placement(range(3)), [count], [three])], 4, 6))
    assert found.evaluate(good).iteration_time_s[0] > 0


def test_what_has_no_array_form_is_refused_with_a_reason() -> None:
    found = estimator("gpt", *SETTINGS[0])
    plan = uniform_plan(found.problem, pp=2)
    with pytest.raises(ValueError, match="plan 1: replica_assignment must be slice"):
        found.arrays([plan, replace(plan, replica_assignment="round_robin")])
    swapped = replace(plan, stages=plan.stages[::-1])
    with pytest.raises(ValueError, match="plan 0: stage 0 must hold consecutive operators from 0 on"):
        found.arrays([swapped])
    with pytest.raises(ValueError, match="a placement must name different devices"):
        found.placement((0, 99))


@pytest.mark.parametrize("holds", [None, ()])
def test_what_is_copied_of_a_large_unit_is_in_both(holds: tuple[()] | None) -> None:
    """A head of 128,000 words that is no part of the root: beside its copy in fp32 alone the unit below is gathered."""
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x8", "pytorch-fsdp2", 8).load()
    shape = {"layers": 4, "seq_len": 64, "vocab": 128_000, "tied_embeddings": False}
    workload = build_workload("gpt3-1.3b", attention="flash", overrides=shape)
    runtime = replace(problem.runtime, keeps_root_gathered=False, holds_next_unit=holds)
    found = FastEstimator(replace(problem, workload=workload, runtime=runtime))
    plan = uniform_plan(found.problem, dp=8, zero=3, gradient_reduction="every")
    assert_equal(validate(plan, found.problem), found)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_interleaved_microbatches_that_do_not_fill_rounds_are_refused(num_microbatches: int) -> None:
    """They never ended, compiled."""
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x2", global_batch=16)
    fast = FastEstimator(problem)
    plans = fast.arrays([uniform_plan(problem, pp=2, schedule="interleaved", chunks=2, microbatch=2)])
    assert fast.evaluate(plans).fits.all()
    columns = plans.columns()._replace(num_microbatches=np.array([num_microbatches]))
    with pytest.raises(ValueError, match="interleaved stages and microbatches must be multiples of the ranks"):
        fast.evaluate_columns(columns)
