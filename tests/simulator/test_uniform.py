"""Uniform plans: what their arguments mean."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_models.runtime_files import load_runtime, runtime_names
from simulator.simulate import simulate, simulate_time_s
from simulator.uniform import recompute_segments, repeated_layers, uniform_plan
from tests.simulator.problems import small_problem
from workloads import build_workload


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_over_a_single_replica_is_none(zero: int) -> None:
    """Norms of sequence parallelism and tied weights are not reduced more often either."""
    problem = small_problem("gpt", global_batch=16)
    alone, plain = (uniform_plan(problem, tp=2, pp=2, zero=level, sequence_parallel=True) for level in (zero, 0))
    assert alone.gradient_reduction == plain.gradient_reduction == "last"
    assert simulate_time_s(alone, problem) == simulate_time_s(plain, problem)


@pytest.mark.parametrize("zero", [2, 3])
def test_from_zero_2_on_no_device_keeps_whole_gradients(zero: int) -> None:
    """Megatron-LM reduces once an iteration, for which whole gradients would wait."""
    problem = small_problem("gpt", global_batch=16)
    assert problem.runtime.reduce_gradients == "last"
    plan = uniform_plan(problem, dp=4, zero=zero)
    gradients = {
        reduction: simulate(replace(plan, gradient_reduction=reduction), problem).memory[0].consumers["gradients"]
        for reduction in (plan.gradient_reduction, "last")
    }
    assert gradients["every"] == pytest.approx(gradients["last"] / 4, rel=1e-3)


def test_gradients_are_reduced_when_the_runtime_says_unless_told_otherwise() -> None:
    problem = small_problem("gpt")
    every = small_problem("gpt", runtime="pytorch-ddp", cluster="a100-80g-dgx:1x4")
    assert [uniform_plan(problem, dp=4, zero=zero).gradient_reduction for zero in (0, 1)] == ["last", "last"]
    assert uniform_plan(every, dp=4).gradient_reduction == "every"
    assert uniform_plan(problem, dp=4, zero=3, gradient_reduction="last").gradient_reduction == "last"
    assert uniform_plan(every, dp=4, gradient_reduction="last").gradient_reduction == "last"


def test_a_batch_below_one_whole_microbatch_is_refused_with_what_would_fit() -> None:
    problem = small_problem("gpt", global_batch=3)
    with pytest.raises(ValueError, match=r"one whole microbatch.* got batch 3 and 4 \* 1 = 4; try dp 3 or less"):
        uniform_plan(problem, dp=4, smaller_last=True)
    with pytest.raises(ValueError, match=r"got batch 3 and 1 \* 4 = 4; try microbatch 3 or a larger batch"):
        uniform_plan(problem, dp=1, microbatch=4, smaller_last=True)
    assert uniform_plan(problem, dp=1, microbatch=3, smaller_last=True).num_microbatches == 1


def test_pages_name_the_runtimes_under_which_zero_2_is_fsdps() -> None:
    found = {name for name in runtime_names() if load_runtime(name).keeps_root_gathered}
    page = (Path(__file__).parents[2] / "docs" / "simplifications.md").read_text()
    part = next(part for part in page.split("\n- ") if part.startswith("**Axes of ZeRO-2 under FSDP**"))
    for text in (part, uniform_plan.__doc__ or ""):
        assert {name for name in runtime_names() if name in re.findall(r"[a-z0-9-]+", text)} == found


@pytest.mark.parametrize("runtime", ["pytorch-fsdp2", "composer-fsdp"])
def test_zero_2_is_what_fsdp_has_under_that_name(runtime: str) -> None:
    """Parameters gathered once an iteration, gradients scattered layer by layer."""
    problem = small_problem("gpt", runtime=runtime, cluster="a100-80g-dgx:1x4")
    plan = uniform_plan(problem, dp=4, zero=2)
    assert plan == replace(uniform_plan(problem, dp=4, zero=3), reshard_after_forward=False)
    bucketed = small_problem("gpt", runtime="megatron-deepspeed")
    assert uniform_plan(bucketed, dp=4, zero=2).reshard_after_forward


@pytest.mark.parametrize("depths", [(2, 2), (2, 3, 2), (1, 4)])
def test_a_layer_behind_a_patch_merging_repeats_whether_or_not_another_does(depths: tuple[int, ...]) -> None:
    workload = build_workload("swin-huge-32", overrides={"depths": depths, "heads": (10, 20, 40)[: len(depths)]})
    attention = [op.layer for op in workload.operators if op.role == "attention_score"]
    assert [workload.operators[first].layer for first, _ in repeated_layers(workload)] == attention
    assert len(attention) == sum(depths)
    assert len(recompute_segments(workload, 0, len(workload), "full")) == sum(depths)


def test_what_joins_an_encoder_to_a_decoder_does_not_repeat() -> None:
    workload = build_workload("t5-large-32")
    roles = [{op.role for op in workload.operators[slice(*bounds)]} for bounds in repeated_layers(workload)]
    assert len(roles) == 32 and not any("decoder_embedding" in found for found in roles)
