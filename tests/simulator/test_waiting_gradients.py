"""Whole gradients of FSDP before they are scattered: in the type of the products, then copied into what is reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.fast.estimate import FastEstimator
from simulator.fidelity import Fidelity
from simulator.lowering.lower import stage_views
from simulator.lowering.synchronisation import parameter_groups
from simulator.memory.events import CATEGORIES
from simulator.memory.model_states import static_bytes
from simulator.memory.program import StageMemory
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from workloads import build_workload

LAYER = 12 * 2048 * 2048 + 13 * 2048
"""Elements of a layer of GPT 1.3B."""


def moments(problem: Problem, **shape: object) -> list[Counter[str]]:
    """Return what is live after every allocation of a backward pass under ZeRO-3 over eight ranks, by what it is."""
    plan = validate(uniform_plan(problem, dp=8, zero=3, **shape), problem)
    (view,) = stage_views(plan, costs := CostTables(problem))
    anew = static_bytes(list(parameter_groups(view)), costs, sharded_gradients=True).gradients_anew
    program = StageMemory(view, view.cost, reshards=True, sharded_gradients=True, gradients_anew=anew)
    program.forward()
    live, found = Counter[str](), []
    for tensor, is_alloc in zip(*program.backward(), strict=True):
        size = program.table.sizes[tensor]
        live[CATEGORIES[program.table.categories[tensor]]] += size if is_alloc else -size
        found.append(Counter(live))
    return found


def most_unsharded(problem: Problem, **shape: object) -> Counter[str]:
    """Return what is live when most gradients are whole."""
    return max(moments(problem, **shape), key=lambda live: live["unsharded gradients"])


def gpt(runtime: str = "pytorch-fsdp2", overrides: Mapping[str, object] | None = None, **changes: object) -> Problem:
    """Return GPT 1.3B, with a head of no size to speak of unless said otherwise."""
    problem = ProblemSpec("gpt3-1.3b", "a100-80g-dgx:1x8", runtime, 16).load()
    chosen = {"vocab": 128} if overrides is None else overrides
    workload = build_workload("gpt3-1.3b", attention=problem.runtime.attention, overrides=chosen)
    return replace(problem, workload=workload, runtime=replace(problem.runtime, **changes))


def test_a_layer_waits_in_bf16_beside_its_copy_in_fp32() -> None:
    """torch 2.13.0, ``_fsdp_collectives.py``: one input of a reduce-scatter in fp32, of gradients in bf16.

    A layer's parameters are given back before (``FSDPParamGroup.post_backward``): the next one's alone are there, and
    no shard of its gradient.
    """
    held = most_unsharded(gpt(), recompute="full")
    assert held["unsharded gradients"] == pytest.approx((4 + 2) * LAYER, rel=0.005)
    root = (128 + 2048 + 2) * 2048
    assert held["gathered parameters"] == 2 * (LAYER + root)
    assert held["gradients"] == pytest.approx(0, abs=0.01 * LAYER)  # The last layer is the first to be copied.


def test_a_flat_parameters_gradients_are_joined_before_it_is_given_back() -> None:
    """Autograd joins them (torch 2.0.1, ``SplitBackward``); the post-backward hook comes behind. Composer asks late."""
    early, late = (
        most_unsharded(gpt("composer-fsdp", holds_next_unit=held), recompute="full") for held in (("backward",), ())
    )
    for held, num_units in ((early, 2), (late, 1)):
        assert held["unsharded gradients"] == pytest.approx((2 + 2) * LAYER, rel=0.005)
        assert held["gathered parameters"] == 2 * (num_units * LAYER + (128 + 2048 + 2) * 2048)


def test_without_a_copy_two_layers_are_there_as_they_are_reduced() -> None:
    held = most_unsharded(gpt(sharded_gradient_copies=0), recompute="full")
    assert held["unsharded gradients"] == pytest.approx((4 + 4) * LAYER, rel=0.005)


def test_a_segment_holds_its_ends_until_its_gradients_are_joined() -> None:
    """Reentrant checkpointing (torch 1.13.1, ``CheckpointFunction.backward``): input, output and their gradients."""
    held, let_go = (
        most_unsharded(gpt("composer-fsdp", recompute_holds_ends=holds), recompute="full") for holds in (True, False)
    )
    end = 2 * 2048 * 2048  # One sample in bf16.
    kept = {name: held[name] - let_go[name] for name in {*held, *let_go} if held[name] != let_go[name]}
    assert kept == {"recomputed activations": end, "activation gradients": end, "segment inputs": end}


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
    matmuls = 2 * 32 * 2**20  # One for forward, one for autograd's thread, on Hopper.
    assert "unsharded gradients" not in held and held["workspace"] == 2 * 4 * 2 * 2048 * 51200 + matmuls


def test_a_weight_that_embedding_and_head_share_is_reduced_once() -> None:
    """One parameter of the root, whose gradients autograd sums before FSDP copies them (torch 2.13.0)."""
    problem = ProblemSpec("gpt3-1.3b", "h100-dgx:1x8", "pytorch-fsdp2", 8).load()
    small = build_workload("gpt3-1.3b", attention="flash", overrides={"seq_len": 64})
    held = most_unsharded(replace(problem, workload=small), recompute="full")
    root = (51200 + 64 + 2) * 2048  # words, positions, and the last norm
    assert held["unsharded gradients"] == pytest.approx((4 + 2) * root, rel=1e-3)


def test_the_root_is_reduced_as_one_unit() -> None:
    """Embedding and head lie in bf16 beside the copy in fp32 of both (torch 2.13.0, ``foreach_reduce``).

    Shards of their gradients come behind; the closed form has them there already.
    """
    problem = ProblemSpec("llama3-8b", "h100-dgx:1x8", "pytorch-fsdp2", 8).load()
    problem = replace(problem, workload=build_workload("llama3-8b", attention="flash", overrides={"seq_len": 512}))
    plan = uniform_plan(problem, dp=8, zero=3)
    (memory,) = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory
    root = (2 * 128256 + 1) * 4096
    assert dict(memory.consumers)["unsharded gradients"] == pytest.approx((4 + 2) * root, rel=1e-3)
    expected = estimate(plan, problem).peak_bytes[0] - 4 * root / 8
    assert memory.peak_allocated_bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("layers", "pp"), [(2, 2), (4, 4)])
def test_the_closed_form_has_a_stage_of_one_layer(layers: int, pp: int) -> None:
    """Its gradients in bf16 beside their copy in fp32, and those of the head above.

    The closed form has all shards of gradients by then, which come when theirs are copied.
    """
    problem = ProblemSpec("llama2-7b", "h100-dgx:1x8", "pytorch-fsdp2", 8).load()
    workload = build_workload("llama2-7b", attention="flash", overrides={"layers": layers, "seq_len": 256})
    problem = replace(problem, workload=workload)
    plan = uniform_plan(problem, pp=pp, dp=8 // pp, zero=3)
    expected = estimate(plan, problem).peak_bytes
    views = stage_views(validate(plan, problem), CostTables(problem))
    assert FastEstimator(problem).estimate(plan).peak_bytes == expected
    found = simulate(plan, problem, fidelity=Fidelity().without("allocator")).memory
    for memory, own, view in zip(found, expected, views, strict=True):
        shards = sum(4 * group.num_elements * pp / 8 for group in parameter_groups(view))
        assert own / memory.peak_allocated_bytes - 1 > -0.01
        assert (own - shards) / memory.peak_allocated_bytes - 1 < 0.1
