"""What devices send, by hand: Megatron's all-reduces of a layer, boundaries of a pipeline, gradients of replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from simulator.uniform import uniform_plan
from tests.validation.tiny import problem
from validation.simulated_calls import Call, simulated_calls

HIDDEN, LAYERS, BATCH = 32, 4, 8
"""Of the tiny GPT, which has as many samples and 8 tokens each, of 4 bytes a number."""


def test_a_tensor_parallel_layer_reduces_twice_forward_and_twice_backward() -> None:
    of = problem("gpt")
    calls = simulated_calls(uniform_plan(of, tp=2, microbatch=of.global_batch), of, 1)
    tokens = of.global_batch * of.workload.tokens_per_sample
    whole = Call("all_reduce", 2, tokens * HIDDEN * 4)
    # Once more for the embedding's sum and for the gradient of the head's input; and what the loss sums of each token.
    assert calls[whole] == 4 * LAYERS + 2
    assert {call for call in calls if call != whole} == {Call("all_reduce", 2, tokens * 4)}


def test_stages_exchange_a_boundary_a_microbatch_each_way() -> None:
    of = problem("gpt")
    microbatches = 4
    plan = uniform_plan(of, pp=2, microbatch=of.global_batch // microbatches)
    size = of.global_batch // microbatches * of.workload.tokens_per_sample * HIDDEN * 4
    for device in (0, 1):
        calls = simulated_calls(plan, of, device)
        transfers = {call: number for call, number in calls.items() if call.kind == "transfer"}
        assert transfers == {Call("transfer", 2, size): 2 * microbatches}


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_replicas_reduce_all_gradients_once(zero: int) -> None:
    of = problem("llama")  # No weight is used twice.
    calls = simulated_calls(uniform_plan(of, dp=2, zero=zero, microbatch=of.global_batch // 2), of, 0)
    total = Counter[str]()
    for call, number in calls.items():
        total[call.kind] += number * call.num_bytes
    parameters = 4 * of.workload.num_parameters
    if zero == 0:
        assert total == {"all_reduce": parameters}
    else:
        # ZeRO-1 gathers once, behind the step; ZeRO-3 before each of the two passes.
        assert total["reduce_scatter"] == parameters and total["all_gather"] == parameters * (2 if zero == 3 else 1)


def test_collectives_that_are_several_calls_keep_their_kind_and_group() -> None:
    """DeepSpeed's ZeRO-3 of 2021 gathers and scatters parameter by parameter, each with a latency of its own."""
    of = problem("gpt")
    runtime = replace(of.runtime, parameter_calls_above=100)
    assert runtime.parameter_calls_above is not None
    calls = simulated_calls(uniform_plan(of, dp=4, zero=3), replace(of, runtime=runtime), 0)
    assert {call.kind for call in calls} == {"all_gather", "reduce_scatter"}
    assert {call.num_ranks for call in calls} == {4}
