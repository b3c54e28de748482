"""What a stage holds between the halves of a split backward pass (zb-h1)."""

from __future__ import annotations

import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.lowering.lower import stage_views
from simulator.memory.program import StageMemory
from simulator.problem import ProblemSpec
from simulator.saved import needed_for_weights
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem

TOKENS, HIDDEN, WORDS = 2 * 2048, 2048, 51200


def held_between_halves(runtime: str) -> tuple[dict[str, int], float]:
    """Return what the last of two stages of GPT 1.3B holds of its head, by name, and what the closed form has."""
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x2", runtime, 8).load()
    costs = CostTables(problem)
    plan = uniform_plan(problem, pp=2, microbatch=2, schedule="zb-h1").canonical(problem.workload)
    view = stage_views(plan, costs)[1]
    memory = StageMemory(view, view.cost, reshards=False, sharded_gradients=False)
    live: dict[int, bool] = {}
    for tensors, is_alloc in (memory.forward(), memory.backward(with_weights=False)):
        live |= dict(zip(tensors, is_alloc, strict=True))
    head = view.operators[-1]
    name = problem.workload.operators[head].name
    found = {
        key.removeprefix(f"{name}/"): memory.table.sizes[number]
        for key, number in memory.table.names.items()
        if live[number] and key.startswith(f"{name}/")
    }
    live |= dict(zip(*memory.backward(with_inputs=False), strict=True))
    left = [key for key, number in memory.table.names.items() if live[number] and key.startswith(f"{name}/")]
    assert not left, "the second half lets go of it all"
    saved, _ = needed_for_weights(problem.workload, head, view.cost(head))
    return found, saved - 2 * TOKENS * HIDDEN - 8 * TOKENS  # less its input and labels


@pytest.mark.parametrize("runtime", ["megatron-lm-2021", "megatron-lm-2023", "pytorch-ddp", "windtunnel-executor"])
def test_of_the_heads_own_tensors_only_the_gradient_of_the_logits_waits(runtime: str) -> None:
    """Neither softmax nor logits; under autocast its weights in bf16 too, which the product saved (torch 2.13.0)."""
    found, saved = held_between_halves(runtime)
    casts = {"cast weights": 2 * WORDS * HIDDEN} if runtime == "pytorch-ddp" else {}
    assert found == {"gradient at its product": 2 * TOKENS * WORDS, **casts}
    assert saved == pytest.approx(sum(casts.values()), abs=1e-3 * TOKENS * HIDDEN)


@pytest.mark.parametrize("family", ["gpt", "bert", "vit"])
def test_every_kind_that_parts_late_has_a_gradient_at_its_product(family: str) -> None:
    problem = small_problem(family)
    costs = CostTables(problem)
    (view,) = stage_views(uniform_plan(problem).canonical(problem.workload), costs)
    late = [index for index in view.operators if problem.workload.operators[index].definition.parts_late]
    assert late and all(view.cost(index).workspace_weight_bytes > 0 for index in late)


@pytest.mark.parametrize(("runtime", "zero"), [("deepspeed-zero3-2021", 3), ("megatron-deepspeed", 2)])
@pytest.mark.parametrize(("num_microbatches", "above"), [(1, 0.001), (2, 0.001), (4, 0.035)])
def test_buckets_of_gradients_are_there_while_weight_gradients_are_made_alone(
    runtime: str, zero: int, num_microbatches: int, above: float
) -> None:
    """Two buckets of 1 GB: where input gradients are made, the peak of one and two microbatches here, there is none.

    Of four the peak is in a pass of weight gradients; that of the embedding is the last, when others' needs are gone.
    """
    problem = small_problem(runtime=runtime, cluster="a100-80g-dgx:1x8", global_batch=64)
    plan = uniform_plan(
        problem, dp=4, pp=2, microbatch=16 // num_microbatches, zero=zero, recompute="full",
        schedule="zb-h1", gradient_reduction="every", overlap_gradient_sync=True,
    )  # fmt: skip
    peaks = estimate(plan, problem).peak_bytes
    for peak, memory in zip(peaks, simulate(plan, problem).memory, strict=True):
        assert -0.001 < peak / memory.peak_allocated_bytes - 1 < above
    assert FastEstimator(problem).estimate(plan).peak_bytes == peaks
