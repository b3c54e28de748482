"""Whole gradients of FSDP before they are scattered: in the type of the products, then copied into what is reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator.closed_forms.estimate import estimate
from simulator.fidelity import Fidelity
from simulator.problem import ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from workloads import build_workload

LAYER = 12 * 2048 * 2048 + 13 * 2048
"""Elements of a layer of GPT 1.3B."""


def peak(**changes: object) -> tuple[float, dict[str, int]]:
    """Return the peak of GPT 1.3B with a head of no size to speak of, and what it is made of."""
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x8", "pytorch-fsdp2", 16).load()
    workload = build_workload("gpt3-1.3b", attention="flash", overrides={"vocab": 128})
    problem = replace(problem, workload=workload, runtime=replace(problem.runtime, **changes))
    plan = uniform_plan(problem, dp=8, zero=3, recompute="full")
    found = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory[0]
    return found.peak_allocated_bytes, dict(found.consumers)


def test_a_layer_waits_in_bf16_beside_what_travels_of_the_one_before() -> None:
    """torch 2.13.0, ``_fsdp_collectives.py``: one input of a reduce-scatter in fp32, and the next layer's gradients."""
    _, held = peak()
    assert held["unsharded gradients"] == pytest.approx((4 + 2) * LAYER, rel=0.005)


def test_without_a_copy_two_layers_are_there_as_they_are_reduced() -> None:
    _, held = peak(sharded_gradient_copies=0)
    assert held["unsharded gradients"] == pytest.approx((4 + 4) * LAYER, rel=0.005)


@pytest.mark.parametrize("runtime", ["composer-fsdp", "galvatron-v1-bf16"])
def test_gradients_of_a_flat_parameter_wait_until_autograd_joins_them(runtime: str) -> None:
    """The first FSDP and FairScale: a layer's gradients beside the flat one; nothing is reserved while it works."""
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x8", runtime, 8).load()
    attention = problem.runtime.attention
    workload = build_workload("gpt3-1.3b", attention=attention, overrides={"vocab": 128, "seq_len": 16})
    problem = replace(problem, workload=workload)
    plan = uniform_plan(problem, dp=8, zero=3)
    (memory,) = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory
    assert dict(memory.consumers)["unsharded gradients"] == pytest.approx((2 + 2) * LAYER, rel=0.01)
    assert "workspace" not in memory.consumers


def test_the_heads_gradient_is_not_there_while_its_loss_works() -> None:
    problem = ProblemSpec("gpt3-1.3b", "h100-dgx:1x8", "pytorch-fsdp2", 16).load()
    plan = uniform_plan(problem, dp=8, microbatch=2, zero=3)
    held = dict(simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory[0].consumers)
    assert "unsharded gradients" not in held and held["workspace"] == 2 * 4 * 2 * 2048 * 51200


def test_a_weight_that_embedding_and_head_share_is_reduced_once() -> None:
    """One parameter of the root, whose gradients autograd sums before FSDP copies them (torch 2.13.0)."""
    problem = ProblemSpec("gpt3-1.3b", "h100-dgx:1x8", "pytorch-fsdp2", 8).load()
    small = build_workload("gpt3-1.3b", attention="flash", overrides={"seq_len": 64})
    problem = replace(problem, workload=small)
    plan = uniform_plan(problem, dp=8, zero=3, recompute="full")
    held = dict(simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory[0].consumers)
    root = (51200 + 64 + 2) * 2048  # words, positions, and the last norm
    assert held["unsharded gradients"] == pytest.approx((4 + 2) * root, rel=1e-3)


def test_the_root_is_reduced_as_one_unit() -> None:
    """Embedding and head lie in bf16 beside the copy in fp32 of both (torch 2.13.0, ``foreach_reduce``)."""
    problem = ProblemSpec("llama3-8b", "h100-dgx:1x8", "pytorch-fsdp2", 8).load()
    problem = replace(problem, workload=build_workload("llama3-8b", attention="flash", overrides={"seq_len": 512}))
    plan = uniform_plan(problem, dp=8, zero=3)
    (memory,) = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory
    root = (2 * 128256 + 1) * 4096
    assert dict(memory.consumers)["unsharded gradients"] == pytest.approx((4 + 2) * root, rel=1e-3)
    assert memory.peak_allocated_bytes == pytest.approx(estimate(plan, problem).peak_bytes[0], rel=0.02)


@pytest.mark.parametrize(("layers", "pp"), [(2, 2), (4, 4)])
def test_the_closed_form_has_a_stage_of_one_layer(layers: int, pp: int) -> None:
    """Its gradients in bf16 beside their copy in fp32, and those of the head above."""
    problem = ProblemSpec("llama2-7b", "h100-dgx:1x8", "pytorch-fsdp2", 8).load()
    workload = build_workload("llama2-7b", attention="flash", overrides={"layers": layers, "seq_len": 256})
    problem = replace(problem, workload=workload)
    plan = uniform_plan(problem, pp=pp, dp=8 // pp, zero=3)
    expected = estimate(plan, problem).peak_bytes
    found = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory
    for memory, own in zip(found, expected, strict=True):
        assert -0.01 < own / memory.peak_allocated_bytes - 1 < 0.1
