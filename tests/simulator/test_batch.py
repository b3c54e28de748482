"""The batch evaluation against the engine and the memory program, plan by plan."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.batch.errors import MODELLED_ELSEWHERE, error_by_cause
from simulator.batch.evaluator import BatchEvaluator, PlanBatch
from simulator.costs import CostTables
from simulator.engines.engine_compiled import run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower
from simulator.memory.device_memory import device_memory
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SHORT, chain_of_opaque, chain_problem, small_problem

WITHOUT = Fidelity().without(*MODELLED_ELSEWHERE)
SETTINGS = [
    ("v100-32g-dgx1:2x4", "megatron-lm-2021"),  # a mesh of unequal links; sends block
    ("v100-32g-dgx1:1x8", "windtunnel-executor-fp32"),  # sends overlap
    ("v100-1gpu-25g:6x1", "galvatron-v1"),  # only the network; recomputation does not stop early
    ("a100-80g-dgx:1x8", "composer-fsdp"),  # gradients do not outlive an iteration
    ("a100-80g-dgx:1x8", "pytorch-ddp"),  # what replicas reduce is in buckets besides
    ("v100-32g-dgx1:1x2+v100-32g-dgx1:1x4", "megatron-lm-2021"),  # unequal nodes
]


def whole(problem: Problem) -> Problem:
    """Return the problem with transfers that cross whole."""
    return replace(problem, runtime=replace(problem.runtime, scatters_transfers=False))


@lru_cache
def whole_problem(family: str = "gpt", **settings: object) -> Problem:
    return whole(small_problem(family, **settings))  # type: ignore[arg-type]


def whole_chain(*arguments: object, **settings: object) -> Problem:
    return whole(chain_problem(*arguments, **settings))  # type: ignore[arg-type]


def test_transfers_in_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="scatters_transfers"):
        BatchEvaluator(small_problem("gpt"))


def test_collectives_beside_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps_input_reductions"):
        BatchEvaluator(small_problem("gpt", runtime="megatron-lm-2023"))


@lru_cache
def evaluator(family: str, cluster: str, runtime: str) -> BatchEvaluator:
    """Return one evaluator per problem: what it keeps must not leak from plan to plan."""
    return BatchEvaluator(whole_problem(family, cluster=cluster, runtime=runtime, global_batch=24))


def engine_s(batch: PlanBatch, index: int, found: BatchEvaluator, fidelity: Fidelity = WITHOUT) -> float:
    plan = validate(batch.plan(index, found.problem), found.problem)
    return float(run_compiled(lower(plan, found.costs, fidelity).graph).end_s.max())


@st.composite
def batches(draw: st.DrawFn, problem: Problem) -> PlanBatch:
    """Draw one to three plans on all devices: any cuts, any degrees of each stage, GPipe or 1F1B."""
    count = len(problem.workload)
    places = list(range(1, count))
    rows, offsets, sizes, numbers, gpipe = [], [0], [], [], []
    for _ in range(draw(st.integers(1, 3))):
        num_stages = draw(st.integers(1, min(6, problem.num_devices, len(places) + 1)))
        left, meshes = problem.num_devices, []
        for stage in range(num_stages):
            devices = draw(st.integers(1, left - (num_stages - 1 - stage)))
            left -= devices
            tp = draw(st.sampled_from([tp for tp in (1, 2, 4) if devices % tp == 0]))
            dp = max(dp for dp in range(1, devices // tp + 1) if problem.global_batch % dp == 0)
            meshes.append((tp, dp))
        common = int(np.lcm.reduce([dp for _, dp in meshes]))
        size = common * draw(st.sampled_from([k for k in (1, 2, 4) if problem.global_batch % (common * k) == 0]))
        cuts = sorted(
            draw(st.sets(st.sampled_from(places), min_size=num_stages - 1, max_size=num_stages - 1))
            if num_stages > 1
            else []
        )
        for (tp, dp), stop in zip(meshes, [*cuts, count], strict=True):
            rows.append((stop, tp, dp, draw(st.booleans())))
        offsets.append(len(rows))
        sizes.append(size)
        numbers.append(problem.global_batch // size)
        gpipe.append(draw(st.booleans()))
    stops, tp_of, dp_of, recompute = (np.array(column) for column in zip(*rows, strict=True))
    return PlanBatch(
        stage_offsets=np.array(offsets),
        stops=stops,
        tp=tp_of,
        dp=dp_of,
        recompute=recompute.astype(np.bool_),
        microbatch_size=np.array(sizes),
        num_microbatches=np.array(numbers),
        gpipe=np.array(gpipe),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(SHORT)), setting=st.sampled_from(SETTINGS))
def test_times_equal_the_engine_on_any_plan_of_the_space(data, family, setting) -> None:
    found = evaluator(family, *setting)
    batch = data.draw(batches(found.problem))
    times = found.evaluate(batch).iteration_time_s
    for index in range(len(batch)):
        assert times[index] == pytest.approx(engine_s(batch, index, found), rel=1e-9)


@pytest.mark.parametrize("off", ["tensor-parallel", "transfers", "recompute"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_times_equal_the_engine_with_a_further_effect_off(off, data) -> None:
    problem = whole_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=24)
    fidelity = WITHOUT.without(off)
    found = BatchEvaluator(problem, fidelity=fidelity)
    batch = data.draw(batches(problem))
    times = found.evaluate(batch).iteration_time_s
    for index in range(len(batch)):
        assert times[index] == pytest.approx(engine_s(batch, index, found, fidelity), rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(SHORT)), setting=st.sampled_from(SETTINGS[:4]))
def test_peaks_equal_the_memory_program_to_the_byte(data, family, setting) -> None:
    found = evaluator(family, *setting)
    problem = found.problem
    batch = data.draw(batches(problem))
    result = found.evaluate(batch)
    fidelity = Fidelity().without("allocator")
    for index in range(len(batch)):
        plan = validate(batch.plan(index, problem), problem)
        lowered = lower(plan, found.costs, fidelity)
        members = lowered.graph.device_members
        memory = device_memory(plan, lowered, run_compiled(lowered.graph), found.costs, fidelity)
        first = batch.stage_offsets[index]
        for one in memory:
            stage = next(number for number, stage in enumerate(plan.stages) if members[one.device][0] in stage.devices)
            assert result.peak_bytes[first + stage] == one.peak_allocated_bytes
        assert result.fits[index] == all(one.fits for one in memory)


@pytest.mark.parametrize("global_batch", [4, 8, 16])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("family", "runtime"), [("resnet", "galvatron-v1"), ("llama", "composer-fsdp")])
def test_peaks_know_gathered_inputs_and_gradients_made_anew(family, runtime, recompute, global_batch) -> None:
    """A pipeline of two stages whose first backward pass is its only one, its last in flight, or one of many."""
    problem = whole_problem(family, cluster="a100-80g-dgx:1x4", runtime=runtime, global_batch=global_batch)
    stops = np.array([len(problem.workload) // 3, len(problem.workload)])
    batch = PlanBatch(
        stage_offsets=np.array([0, 2]),
        stops=stops,
        tp=np.array([2, 1]),
        dp=np.array([1, 2]),
        recompute=np.array([recompute, recompute]),
        microbatch_size=np.array([4]),
        num_microbatches=np.array([global_batch // 4]),
        gpipe=np.array([False]),
    )
    memory = simulate(batch.plan(0, problem), problem).memory
    peaks = {one.peak_allocated_bytes for one in memory}
    assert set(BatchEvaluator(problem).evaluate(batch).peak_bytes) == peaks


def test_peaks_know_a_buffer_that_is_never_given_back() -> None:
    """The runtime that has one is refused for its collectives, so another one is given it."""
    problem = whole_problem("gpt", cluster="a100-80g-dgx:1x4", runtime="galvatron-v1-bf16", global_batch=8)
    choice = replace(problem.runtime.implementation, keeps_score_buffer=True)
    problem = replace(problem, runtime=replace(problem.runtime, implementation=choice))
    plan = uniform_plan(problem, tp=2, pp=2, microbatch=2)
    peaks = [one.peak_allocated_bytes for one in simulate(plan, problem).memory]
    assert list(BatchEvaluator(problem).evaluate(PlanBatch.from_plans([plan], problem)).peak_bytes) == peaks


def test_equal_stages_take_what_the_closed_form_of_1f1b_says() -> None:
    problem = whole_chain(chain_of_opaque(4, 1.0, 2.0), num_devices=4, global_batch=8)
    found = BatchEvaluator(problem, fidelity=Fidelity.ideal())
    batch = PlanBatch.from_plans([uniform_plan(problem, pp=4)], problem)
    assert found.evaluate(batch).iteration_time_s[0] == pytest.approx((8 + 4 - 1) * 3.0, rel=1e-12)


def test_the_same_holds_for_the_simpy_engine_on_a_long_pipeline() -> None:
    problem = whole_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=64)
    plan = uniform_plan(problem, pp=4)
    found = BatchEvaluator(problem)
    expected = run_simpy(lower(validate(plan, problem), found.costs, WITHOUT).graph).end_s.max()
    times = found.evaluate(PlanBatch.from_plans([plan], problem)).iteration_time_s
    assert times[0] == pytest.approx(expected, rel=1e-9)


def test_one_large_batch_gives_what_its_plans_give_alone() -> None:
    problem = whole_problem("t5", cluster="v100-32g-dgx1:2x4", global_batch=24)
    plans = [
        uniform_plan(problem, pp=pp, tp=tp, dp=8 // (pp * tp), schedule=schedule, recompute=recompute)
        for pp in (1, 2, 4)
        for tp in (1, 2)
        for schedule in ("1f1b", "gpipe")
        for recompute in ("none", "full")
    ]
    together = BatchEvaluator(problem).evaluate(PlanBatch.from_plans(plans, problem))
    first = 0
    for index, plan in enumerate(plans):
        alone = BatchEvaluator(problem).evaluate(PlanBatch.from_plans([plan], problem))
        assert alone.iteration_time_s[0] == together.iteration_time_s[index]
        rows = slice(first, first + len(plan.stages))
        assert alone.peak_bytes.tolist() == together.peak_bytes[rows].tolist()
        first += len(plan.stages)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_plans_survive_the_way_to_arrays_and_back(data) -> None:
    problem = whole_problem("gpt", cluster="v100-32g-dgx1:1x4", global_batch=24)
    batch = data.draw(batches(problem))
    plans = [validate(batch.plan(index, problem), problem) for index in range(len(batch))]
    again = PlanBatch.from_plans(plans, problem)
    for index, plan in enumerate(plans):
        assert again.plan(index, problem).canonical(problem.workload) == plan


def test_a_plan_outside_the_space_is_refused() -> None:
    problem = whole_problem("gpt")
    for plan in (
        uniform_plan(problem, pp=2, schedule="zb-h1"),
        uniform_plan(problem, pp=2, recompute="selective"),
        uniform_plan(problem, dp=4, zero=1),
    ):
        with pytest.raises(ValueError, match="plan 0 must have consecutive operator ranges"):
            PlanBatch.from_plans([plan], problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stops": np.array([5, 5])}, "one after the other"),
        ({"stops": np.array([5, 7])}, "the last stage must stop at operator"),
        ({"dp": np.array([3, 1])}, "dp must divide the microbatch"),
        ({"tp": np.array([4, 4])}, "must fit on 4 devices"),
        ({"tp": np.array([0, 1])}, "tp and dp must be at least 1"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused(change, message) -> None:
    problem = whole_problem("gpt")
    batch = PlanBatch.from_plans([uniform_plan(problem, pp=2)], problem)
    with pytest.raises(ValueError, match=message):
        BatchEvaluator(problem).evaluate(replace(batch, **change))


def test_a_degree_that_does_not_divide_is_refused() -> None:
    problem = whole_problem("gpt", cluster="v100-32g-dgx1:1x8")
    batch = PlanBatch.from_plans([uniform_plan(problem, tp=4)], problem)
    with pytest.raises(ValueError, match=r"must be divisible|must divide"):
        BatchEvaluator(problem).evaluate(replace(batch, tp=np.array([7])))


def test_errors_are_reported_by_cause() -> None:
    problem = whole_problem("gpt", cluster="v100-32g-dgx1:2x4", global_batch=16)
    plans = [uniform_plan(problem, pp=2, tp=tp, dp=4 // tp) for tp in (1, 2, 4)]
    found = {row.cause: row for row in error_by_cause(plans, problem)}
    assert found["nothing"].mean_absolute < 1e-9
    assert found["host"].worst <= 1e-12
    assert found["everything"].bias <= min(found["optimizer"].bias, found["gradient-sync"].bias) < 0.0


def test_costs_may_be_shared() -> None:
    problem = whole_problem("gpt")
    costs = CostTables(problem)
    assert BatchEvaluator(problem, costs).costs is costs
