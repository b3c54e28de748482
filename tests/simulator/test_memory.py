"""Memory from the plan's tensors: closed forms, balance, and what each choice saves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import stage_views
from simulator.memory.device_memory import memory_microbatches
from simulator.memory.events import CATEGORIES
from simulator.memory.program import StageMemory
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import SMALL, small_problem
from workloads.registry import build_workload

GIB = 2**30


def usage(problem: Problem, **degrees: object):
    result = simulate(uniform_plan(problem, **degrees), problem)  # type: ignore[arg-type]
    return result.memory


def histories(problem: Problem, **degrees: object):
    """Return memory and live bytes over time of every device."""
    result = simulate(uniform_plan(problem, **degrees), problem)  # type: ignore[arg-type]
    return [(memory, result.live_bytes(memory.device)) for memory in result.memory]


def live_of(memory, words: str) -> float:
    return memory.consumers.get(words, 0)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("family", list(SMALL))
def test_what_an_iteration_allocates_it_frees(family: str, schedule: str, recompute: str) -> None:
    problem = small_problem(family)
    for memory, history in histories(problem, pp=2, dp=2, schedule=schedule, recompute=recompute):
        live = history.live_bytes
        states = live[history.times_s == 0.0]
        assert live[-1] <= live.max()
        assert live.min() >= 0
        first_growth = np.flatnonzero(np.diff(live) < 0)[0]
        assert live[-1] <= live[first_growth]
        assert len(states)
        parameters = live_of(memory, "parameters") + live_of(memory, "gradients") + live_of(memory, "optimizer states")
        assert live[-1] == parameters


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_forward_pass_leaves_what_korthikanti_says(tp: int, recompute: str) -> None:
    """A layer leaves sbh(10 + 24/t + 5as/(ht)) bytes (fp16, fused kernels, dropout), norm statistics aside.

    The last term is the attention core's, and goes with it where that is recomputed; nothing else does.
    """
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x8")
    plan = validate(uniform_plan(problem, pp=2, tp=tp, recompute=recompute), problem)
    costs = CostTables(problem)
    view = stage_views(plan, costs)[1]
    memory = StageMemory(
        view,
        lambda index: costs.operator(index, view.shardings[index], 1, view.gpu_type),
        reshards=True,
        sharded_gradients=False,
    )
    tensors, is_alloc = memory.forward()
    live = {tensor for tensor, alloc in zip(tensors, is_alloc, strict=True) if alloc}
    live -= {tensor for tensor, alloc in zip(tensors, is_alloc, strict=True) if not alloc}
    names = {number: name for name, number in memory.table.names.items()}
    s, h, a, layers = 2048, 1024, 16, 2
    head = s * h * 2 * 2 + s * 2 * 4 + s * 8  # input of the final norm and of the logits, statistics, labels
    logits = sum(memory.table.sizes[t] for t in live if memory.table.categories[t] == CATEGORIES.index("logits"))
    statistics = layers * 2 * s * 2 * 4
    found = sum(memory.table.sizes[tensor] for tensor in live) - logits - head - statistics
    core = 5 * a * s / (h * tp) if recompute == "none" else 0.0
    assert found == layers * s * h * (10 + 24 / tp + core), sorted(names[t] for t in live)


def test_model_states_divide_by_zero_level() -> None:
    problem = small_problem("gpt", runtime="windtunnel-executor-fp32")
    runtime = problem.runtime
    elements = problem.workload.num_parameters
    for zero in range(4):
        ((_, history),) = histories(problem, dp=4, microbatch=4, zero=zero, overlap_gradient_sync=True)
        share = 1 / 4
        expected = elements * (
            runtime.parameter_bytes * (share if zero == 3 else 1)
            + runtime.gradient_bytes * (share if zero >= 2 else 1)
            + runtime.optimizer_bytes * (share if zero >= 1 else 1)
        )
        assert history.live_bytes[-1] - problem.matmul_workspace_bytes == pytest.approx(expected, rel=1e-3)


def test_gpipe_keeps_every_microbatch_and_1f1b_as_many_as_stages_are_left() -> None:
    problem = small_problem("gpt", global_batch=16)
    one = [live_of(memory, "saved activations") for memory in usage(problem, pp=4)]
    many = [live_of(memory, "saved activations") for memory in usage(problem, pp=4, schedule="gpipe")]
    assert many[1] == pytest.approx(16 / 3 * one[1], rel=0.05)
    assert one[1] == pytest.approx(3 / 2 * one[2], rel=0.05)


def test_recomputation_saves_activations_in_the_order_full_selective_none() -> None:
    problem = small_problem("gpt")
    peaks = [usage(problem, pp=2, recompute=kind)[0].peak_allocated_bytes for kind in ("full", "selective", "none")]
    assert peaks[0] < peaks[1] < peaks[2]


def test_full_recomputation_keeps_the_inputs_of_layers_and_one_layer_at_a_time() -> None:
    problem = small_problem("gpt")
    full = usage(problem, pp=2, recompute="full")[0]
    s, h, layers = 2048, 1024, 2
    assert live_of(full, "segment inputs") == pytest.approx(2 * layers * 2 * s * h, rel=0.26)
    plain = usage(problem, pp=2)[0]
    one_layer = live_of(plain, "saved activations") / (2 * layers)
    assert live_of(full, "recomputed activations") <= 1.05 * one_layer


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_the_first_microbatches_show_the_peak_of_all(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_problem("gpt", global_batch=32)
    plan = uniform_plan(problem, pp=2, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    assert memory_microbatches(plan) < 32
    few = simulate(plan, problem).memory
    monkeypatch.setattr("simulator.memory.device_memory.memory_microbatches", lambda plan: plan.num_microbatches)
    everything = simulate(plan, problem).memory
    assert [m.peak_allocated_bytes for m in few] == [m.peak_allocated_bytes for m in everything]
    assert [m.peak_reserved_bytes for m in few] == [m.peak_reserved_bytes for m in everything]


def test_reserved_is_at_least_allocated_and_at_most_capacity_where_the_plan_fits() -> None:
    problem = small_problem("gpt")
    for memory in usage(problem, pp=2, dp=2):
        assert memory.fits
        assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes <= memory.capacity_bytes


def test_out_of_memory_is_an_answer_that_names_the_largest_consumers() -> None:
    problem = replace(small_problem("gpt", global_batch=16), memory_limit_bytes=3 * GIB)
    result = simulate(uniform_plan(problem, pp=2, microbatch=2), problem)
    assert not result.fits
    assert result.memory[0].failed_request_bytes
    text = result.describe()
    assert "OUT OF MEMORY" in text and "saved activations" in text


def test_without_the_allocator_fitting_compares_live_bytes() -> None:
    problem = small_problem("gpt")
    plan: Plan = uniform_plan(problem, pp=2)
    exact = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory[0]
    assert exact.peak_reserved_bytes == exact.peak_allocated_bytes
    tight = replace(
        problem,
        memory_limit_bytes=exact.peak_allocated_bytes
        + problem.runtime.context_bytes
        + problem.runtime.communication_buffer_bytes,
    )
    assert simulate(plan, tight, fidelity=Fidelity().without("allocator")).memory[0].fits
    assert not simulate(plan, tight).memory[0].fits


def test_interleaved_stages_share_one_device_and_its_memory() -> None:
    problem = small_problem("gpt")
    memory = usage(problem, pp=2, chunks=2, schedule="interleaved")
    plain = usage(problem, pp=2)
    assert len(memory) == 2
    assert live_of(memory[0], "parameters") == pytest.approx(live_of(plain[0], "parameters"), rel=1e-3)
    assert live_of(memory[0], "saved activations") > live_of(plain[0], "saved activations")


@pytest.mark.parametrize("reshards", [True, False])
def test_parameters_that_stay_gathered_lie_beside_their_shards_in_the_type_they_travel_in(reshards: bool) -> None:
    """FSDP2: fp32 shards, bf16 copies."""
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x4", runtime="pytorch-fsdp2", global_batch=4)
    plan = replace(uniform_plan(problem, dp=4, zero=3), reshard_after_forward=reshards)
    result = simulate(plan, problem)
    consumers = result.memory[0].consumers
    assert consumers["parameters"] == pytest.approx(problem.workload.num_parameters * 4 / 4, rel=1e-3)
    if not reshards:
        assert consumers["gathered parameters"] == pytest.approx(problem.workload.num_parameters * 2, rel=1e-3)


def test_sequence_parallelism_keeps_shards_unless_the_runtime_keeps_gathered_inputs() -> None:
    """Korthikanti et al. 2022: sbh/t (34 + 5as/h) a layer; keeping gathered inputs adds 4sbh (1 - 1/t)."""
    problem = small_problem("gpt", global_batch=1)
    kept = replace(problem, runtime=replace(problem.runtime, keeps_gathered_inputs=True))
    t, s, h, a, layers = 4, 2048, 1024, 16, 4
    (shard,) = usage(problem, tp=t, sequence_parallel=True)
    (whole,) = usage(kept, tp=t, sequence_parallel=True)
    saved = live_of(shard, "saved activations")
    assert saved == pytest.approx(layers * s * h / t * (34 + 5 * a * s / h), rel=0.03)
    gathered = live_of(whole, "gathered inputs")
    assert gathered == pytest.approx(layers * 2 * 2 * s * h + 2 * s * h, rel=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("cut", [3, 7, 9, 11])
def test_a_cut_inside_a_recomputed_layer_leaks_nothing(cut: int, schedule: str) -> None:
    problem = small_problem("gpt")
    start, count = problem.workload.layers[2][0] + cut, len(problem.workload)
    layers = problem.workload.layers[1:-1]
    stages = tuple(
        Stage(
            ((first, last),),
            (number,),
            ((last - first, ()),),
            tuple((max(a, first), min(b, last)) for a, b in layers if max(a, first) < min(b, last)),
        )
        for number, (first, last) in enumerate(((0, start), (start, count)))
    )
    plan = Plan(stages, microbatch_size=1, num_microbatches=16, schedule=schedule)
    result = simulate(plan, problem)
    for memory in result.memory:
        states = sum(live_of(memory, words) for words in ("parameters", "gradients", "optimizer states"))
        assert result.live_bytes(memory.device).live_bytes[-1] == states


def test_a_tensor_scattered_on_its_way_is_kept_as_a_shard() -> None:
    """Aceso's alternative split: a column-split dense leaves shards, a row-split qkv wants them of a partial sum."""
    problem = small_problem("gpt", global_batch=1)
    count = len(problem.workload)
    stage = Stage(((0, count),), (0, 1, 2, 3), ((count, (Axis("tensor_sequence", 4),)),))
    (memory,) = simulate(Plan((stage,), 1, 1), problem).memory
    plain = Stage(((0, count),), (0, 1, 2, 3), ((count, (Axis("tensor", 4),)),))
    (whole,) = simulate(Plan((plain,), 1, 1), problem).memory
    assert memory.peak_allocated_bytes < whole.peak_allocated_bytes


def test_what_a_stage_sends_is_held_only_where_the_runtime_holds_it() -> None:
    """GPipe, recomputation: a microbatch leaves its input and, where that is kept, its output of equal size."""
    peaks = {}
    for keeps in (True, False):
        problem = small_problem("gpt", global_batch=8)
        problem = replace(problem, runtime=replace(problem.runtime, keeps_stage_outputs=keeps))
        memory = usage(problem, pp=4, microbatch=1, schedule="gpipe", recompute="full")[1]
        peaks[keeps] = live_of(memory, "stage outputs")
    tokens, hidden = problem.workload.tensors[problem.workload.operators[0].outputs[0]]
    assert peaks == {True: 8 * 2 * tokens * hidden, False: 0}


def test_the_root_unit_stays_gathered_from_forward_to_backward() -> None:
    """What is gathered at the peak, the end of forward: embedding and head; and a layer in any case."""
    problem = small_problem("gpt", runtime="composer-fsdp", cluster="a100-80g-dgx:1x4")
    gathered = {}
    for keeps in (True, False):
        own = replace(problem, runtime=replace(problem.runtime, keeps_root_gathered=keeps))
        costs = CostTables(own)
        plan = validate(uniform_plan(own, dp=4, zero=3), own)
        view = stage_views(plan, costs)[0]
        memory = StageMemory(
            view,
            lambda index, view=view, costs=costs: costs.operator(  # type: ignore[misc]
                index, view.shardings[index], 1, view.gpu_type
            ),
            reshards=True,
            sharded_gradients=True,
        )
        tensors, allocates = memory.forward()
        alive: set[int] = set()
        for tensor, allocated in zip(tensors, allocates, strict=True):
            (alive.add if allocated else alive.discard)(tensor)
        gathered[keeps] = sum(
            memory.table.sizes[tensor]
            for tensor in alive
            if CATEGORIES[memory.table.categories[tensor]] == "gathered parameters"
        )
    workload = problem.workload
    first, last = workload.layers[0], workload.layers[-1]
    ends = {
        parameter.tie or (index, parameter.name): np.prod(parameter.shape)
        for bounds in (first, last)
        for index in range(*bounds)
        for parameter in workload.parameters(index)
    }
    assert gathered[False] == 0
    # One unit holds a tied weight once; bf16.
    assert gathered[True] == 2 * sum(ends.values())


@pytest.mark.parametrize("prefetches", [True, False])
def test_the_next_layer_is_held_only_where_it_is_gathered_ahead(prefetches: bool) -> None:
    """A runtime that gathers when a layer begins has freed the one before: one layer at a time, not two."""
    problem = small_problem("gpt", runtime="galvatron-v1", cluster="titan-rtx-pcie:1x4")
    problem = replace(problem, runtime=replace(problem.runtime, prefetches_gathers=prefetches))
    costs = CostTables(problem)
    plan = validate(uniform_plan(problem, dp=4, zero=3), problem)
    view = stage_views(plan, costs)[0]
    memory = StageMemory(
        view,
        lambda index: costs.operator(index, view.shardings[index], 1, view.gpu_type),
        reshards=True,
        sharded_gradients=True,
    )
    layers = [
        4 * sum(prod(parameter.shape) for index in range(*bounds) for parameter in problem.workload.parameters(index))
        for bounds in problem.workload.layers
    ]
    for tensors, allocates in (memory.forward(), memory.backward()):
        alive: set[int] = set()
        most = 0
        for tensor, allocated in zip(tensors, allocates, strict=True):
            (alive.add if allocated else alive.discard)(tensor)
            gathered = [each for each in alive if CATEGORIES[memory.table.categories[each]] == "gathered parameters"]
            most = max(most, sum(memory.table.sizes[each] for each in gathered))
        pairs = pairwise(layers)
        assert most == (max(map(sum, pairs)) if prefetches else max(layers))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_in_flight_share_the_gathered_root_unit(schedule: str) -> None:
    """A unit of FSDP has one whole tensor, however many microbatches have used it and have yet to."""
    gathered = []
    for batch in (4, 8, 14, 16):  # of four samples each, of which the last may be two
        problem = small_problem("gpt", runtime="composer-fsdp", cluster="a100-80g-dgx:1x4", global_batch=batch)
        stages = usage(problem, pp=2, dp=2, zero=3, schedule=schedule, microbatch=2, smaller_last=True)
        gathered.append([live_of(memory, "gathered parameters") for memory in stages])
    assert gathered[0][0] > 0
    assert gathered == gathered[:1] * 4


def test_recomputation_that_stops_early_is_not_counted_as_work() -> None:
    """Without dropout nothing saves what the second linear makes: of 12 h^2 + attention, 4 h^2 are not done again."""
    workload = build_workload("gpt3-350m", overrides={"layers": 4, "dropout": 0.0, "attention_dropout": 0.0})
    problem = replace(small_problem("gpt", runtime="windtunnel-executor-fp32"), workload=workload)
    late = replace(problem, runtime=replace(problem.runtime, recompute_stops_early=False))
    early, whole = (
        simulate(uniform_plan(own, microbatch=2, recompute="full"), own, engine="compiled") for own in (problem, late)
    )
    tokens, hidden = problem.workload.tensors[problem.workload.operators[0].outputs[0]]
    layers = len(problem.workload.layers) - 2
    skipped = 2.0 * tokens * hidden * 4 * hidden * layers * problem.global_batch
    assert early.model_flop == whole.model_flop
    assert whole.hardware_flop - early.hardware_flop == pytest.approx(skipped)


def test_gradients_that_are_made_anew_are_not_there_before_the_first_backward_pass() -> None:
    problem = small_problem("gpt", runtime="windtunnel-executor-fp32", global_batch=4)
    own = replace(problem, runtime=replace(problem.runtime, frees_gradients="all"))
    ((before, before_live),) = histories(problem, microbatch=4)
    ((after, after_live),) = histories(own, microbatch=4)
    gradients = live_of(before, "gradients")
    assert gradients == pytest.approx(4 * problem.workload.num_parameters, rel=1e-3)
    assert before_live.live_bytes[before_live.times_s == 0.0][0] > 0
    assert after.peak_allocated_bytes < before.peak_allocated_bytes
    assert after_live.live_bytes[-1] == pytest.approx(before_live.live_bytes[-1], rel=1e-3)


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "pp": 2, "microbatch": 2},
        {"tp": 4, "microbatch": 4, "recompute": "full", "sequence_parallel": True},
        {"pp": 2, "dp": 2, "zero": 1, "microbatch": 2, "schedule": "interleaved", "chunks": 2},
    ],
    ids=str,
)
def test_a_kept_score_buffer_is_there_once_on_each_device(degrees: dict[str, object]) -> None:
    """Two bytes a head and pair of tokens, 2 b a s^2 / t, beside all else: in the simulator and its estimates."""
    problem = small_problem(runtime="megatron-lm-2023", cluster="a100-80g-dgx:1x4")
    choice = replace(problem.runtime.implementation, keeps_score_buffer=False)
    without = replace(problem, runtime=replace(problem.runtime, implementation=choice))
    plan = uniform_plan(problem, **degrees)  # type: ignore[arg-type]
    samples = plan.microbatch_size // int(degrees.get("dp", 1))  # type: ignore[call-overload]
    heads, tokens = 16 // int(degrees.get("tp", 1)), 2048  # type: ignore[call-overload]
    buffer = 2 * samples * heads * tokens**2
    pairs = zip(simulate(plan, problem).memory, simulate(plan, without).memory, strict=True)
    assert {own.peak_allocated_bytes - other.peak_allocated_bytes for own, other in pairs} == {buffer}
    estimates = [FastEstimator(each).estimate(plan).peak_bytes for each in (problem, without)]
    assert estimates[0] == estimate(plan, problem).peak_bytes
    assert {own - other for own, other in zip(*estimates, strict=True)} == {buffer}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_deepspeeds_bucket_of_gradients_is_there_in_every_backward_pass(recompute: str) -> None:
    """1 GB in place of the whole gradients of two layers, or of the layer and the head that the peak has."""
    problem = small_problem(runtime="megatron-deepspeed", global_batch=32)
    without = replace(problem, runtime=replace(problem.runtime, fills_bucket=()))
    smaller = replace(problem, runtime=replace(problem.runtime, gradient_bucket_bytes=600_000_000))
    plan = uniform_plan(problem, dp=4, zero=2, microbatch=4, recompute=recompute)
    peaks = [simulate(plan, each).memory[0] for each in (problem, smaller, without)]
    assert all("backward" in each.peak_where for each in peaks)
    whole, less, other = (each.peak_allocated_bytes for each in peaks)
    assert whole - less == 400_000_000 // 512 * 512
    assert whole > other
    bucket, unsharded = (live_of(each, "unsharded gradients") for each in (peaks[0], peaks[2]))
    assert bucket == -(-1_000_000_000 // 512) * 512 > unsharded
    estimates = [FastEstimator(each).estimate(plan).peak_bytes for each in (problem, smaller)]
    assert estimates[0] == estimate(plan, problem).peak_bytes
    assert estimates[0][0] - estimates[1][0] == 400_000_000
