"""Gradients of DeepSpeed's ZeRO between the last backward pass and the step: flattened, dropped, cast.

Figures are of ``validation.memory_check --deepspeed`` (DeepSpeed 0.5.10 itself), or worked out by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hardware_models.runtime import Runtime
from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import parameter_groups
from simulator.lowering.whole_gradients import whole_gradients_begin
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from workloads import build_workload

PARAMETERS = 24 * (12 * 2048 * 2048 + 13 * 2048) + (51200 + 512 + 2) * 2048
"""Of GPT 1.3B with sequences of 512, its vocabulary padded."""
BUCKET_BYTES = 1e9
CLOSE = 0.005


def gpt(**changes: object) -> Problem:
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x8", "megatron-deepspeed", 16).load()
    short = build_workload("gpt3-1.3b", attention="plain", overrides={"seq_len": 512})
    return replace(problem, workload=short, runtime=replace(problem.runtime, **changes))  # type: ignore[arg-type]


def peak(problem: Problem, **words: object) -> tuple[float, str]:
    """Return bytes at the peak of the fullest device, and what ran."""
    plan = validate(uniform_plan(problem, **words), problem)  # type: ignore[arg-type]
    memory = max(simulate(plan, problem).memory, key=lambda one: one.peak_allocated_bytes)
    return memory.peak_allocated_bytes, memory.peak_where


def states(dp: int) -> float:
    """Bytes per parameter of fp16 weights and a rank's part of master copy and moments."""
    return 2 + 12 / dp


@pytest.mark.parametrize("zero", [1, 2])
def test_a_rank_steps_its_part_of_the_gradients_and_has_no_others(zero: int) -> None:
    """Two ranks: half the gradients in fp16, flattened once more, and cast to fp32."""
    found, where = peak(gpt(), dp=2, zero=zero, microbatch=1, recompute="full")
    assert where == "the optimizer step"
    assert found == pytest.approx(PARAMETERS * (states(2) + (2 + 2 + 4) / 2), rel=CLOSE)


@pytest.mark.parametrize("dp", [4, 8])
def test_whole_gradients_lie_beside_the_bucket_that_is_reduced(dp: int) -> None:
    problem = gpt()
    found, where = peak(problem, dp=dp, zero=1, microbatch=1, recompute="full")
    assert where == "the optimizer step"
    assert found == pytest.approx(PARAMETERS * (states(dp) + 2) + BUCKET_BYTES, rel=CLOSE)
    whole = replace(problem, runtime=replace(problem.runtime, gradient_bucket_bytes=None))
    found, _ = peak(whole, dp=dp, zero=1, microbatch=1, recompute="full")
    assert found == pytest.approx(PARAMETERS * (states(dp) + 2 + 2), rel=CLOSE)


def test_without_zero_a_step_casts_each_gradient_and_flattens_all() -> None:
    found, where = peak(gpt(), dp=2, microbatch=1, recompute="full")
    assert where == "the optimizer step" and found == pytest.approx(PARAMETERS * (2 + 12 + 2 + 8), rel=CLOSE)


def test_one_flat_tensor_is_no_more_live_bytes_but_a_block_of_its_own() -> None:
    words = {"dp": 2, "microbatch": 1, "recompute": "full"}
    flat, apart = (
        max(simulate(uniform_plan(problem, **words), problem).memory, key=lambda one: one.peak_allocated_bytes)  # type: ignore[arg-type]
        for problem in (gpt(), gpt(flat_workspace_bytes=0))
    )
    assert flat.peak_allocated_bytes == pytest.approx(apart.peak_allocated_bytes, rel=1e-4)
    assert flat.peak_reserved_bytes > apart.peak_reserved_bytes + 3 * PARAMETERS


PLANS: tuple[Mapping[str, object], ...] = (
    {"dp": 2, "zero": 1, "recompute": "full"},
    {"dp": 4, "zero": 1, "recompute": "full"},
    {"dp": 8, "zero": 1, "recompute": "full"},
    {"dp": 8, "zero": 1, "microbatch": 2},
    {"dp": 2, "zero": 2, "recompute": "full"},
    {"dp": 2, "pp": 2, "zero": 1, "recompute": "full"},
    {"dp": 2, "pp": 4, "zero": 1},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "recompute": "full"},
    {"dp": 2, "pp": 2, "zero": 1, "recompute": "full", "schedule": "interleaved", "chunks": 2},
    {"dp": 4, "tp": 2, "zero": 2, "recompute": "full"},
    {"dp": 2, "recompute": "full"},
)


@pytest.mark.parametrize("words", PLANS, ids=str)
def test_the_closed_forms_know_all_that(words: Mapping[str, object]) -> None:
    problem = gpt()
    plan = validate(uniform_plan(problem, **words), problem)  # type: ignore[arg-type]
    peaks = {one.device: one.peak_allocated_bytes for one in simulate(plan, problem).memory}
    found = estimate(plan, problem)
    assert max(found.peak_bytes) == pytest.approx(max(peaks.values()), rel=0.01)
    assert FastEstimator(problem).estimate(plan).peak_bytes == pytest.approx(found.peak_bytes, rel=1e-9)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("runtime", "zero"), [("megatron-deepspeed", 2), ("deepspeed-zero3-2021", 3)])
def test_a_bucket_is_filled_while_another_is_reduced(runtime: str, zero: int, overlaps: bool) -> None:
    """Two buffers of 1e9 bytes where reductions overlap, and no gradient whole besides; all closed forms know."""
    problem = gpt()
    problem = replace(problem, runtime=load_runtime(runtime))
    plan = uniform_plan(problem, dp=8, zero=zero, microbatch=1, recompute="full", overlap_gradient_sync=overlaps)
    (memory,) = simulate(plan, problem).memory
    assert memory.consumers["unsharded gradients"] == pytest.approx(BUCKET_BYTES * (1 + overlaps), abs=1024)
    found = estimate(plan, problem).peak_bytes
    assert found[0] == pytest.approx(memory.peak_allocated_bytes, rel=0.01)
    assert FastEstimator(problem).estimate(plan).peak_bytes == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_gradient_that_no_bucket_holds_is_whole_besides(zero: int) -> None:
    """``extra_large_param_to_reduce``: with buckets of two megabytes all products of a layer, none of its norms."""
    problem = gpt(gradient_bucket_bytes=2_000_000, fills_bucket=(2, 3))
    plan = validate(uniform_plan(problem, dp=8, zero=zero, microbatch=1, recompute="full"), problem)
    (view,) = stage_views(plan, CostTables(problem))
    begun = {group.num_elements for group in parameter_groups(view) if whole_gradients_begin(view, group)}
    assert begun == {
        group.num_elements for group in parameter_groups(view) if 2 * group.num_elements > 2_000_000
    } and min(begun) == 512 * 2048
    assert FastEstimator(problem).estimate(plan).peak_bytes == pytest.approx(
        estimate(plan, problem).peak_bytes, rel=1e-9
    )


def test_what_a_step_works_in_is_said_without_contradiction() -> None:
    runtime: Runtime = load_runtime("megatron-deepspeed")
    assert runtime.workspace_bytes(sharded=False) == (4, (4,))
    assert runtime.workspace_bytes(sharded=True) == (0, (2, 4))
    assert load_runtime("megatron-lm-2021").workspace_bytes(sharded=True) == load_runtime(
        "megatron-lm-2021"
    ).workspace_bytes(sharded=False)
