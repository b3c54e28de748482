"""What Megatron-Core itself holds and sends, against simulations under Megatron's runtimes; no plan is executed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the models need torch (extra: validation)")
pytest.importorskip("megatron", reason="the check needs Megatron-Core (extra: megatron)")

from simulator.uniform import uniform_plan
from validation.megatron.model import Degrees, Shape
from validation.megatron.trace import trace_megatron
from validation.megatron_check import CHECKS, GPT, GROUPED, LLAMA, Sent, check, compare, megatron_problem, totals
from validation.memory_check import Check, table
from validation.simulated_calls import simulated_calls

CLOSE, RESERVED = 0.005, 0.065
QUICK = (
    check(GPT, 2, tp=2, sequence_parallel=True, microbatch=2, recompute="selective", layers=2),
    check(GPT, 2, tp=2, microbatch=2, recompute="full", runtime="megatron-lm-2021", layers=2),
    check(GPT, 4, (0, 1), pp=2, microbatch=1, schedule="interleaved", chunks=2),
    check(LLAMA, 3, (0, 3), tp=2, pp=2, microbatch=1, layers=2),
    check(LLAMA, 2, dp=2, zero=1, microbatch=1, layers=2),
    check(GROUPED, 2, tp=4, sequence_parallel=True, microbatch=1, layers=2),
)


def assert_alike(of: Check) -> None:
    rows, sent = compare(of)
    problem = megatron_problem(of)
    plan = uniform_plan(problem, **of.degrees)  # type: ignore[arg-type]
    for row in rows:
        # Megatron's schedules still name what came from the stage before, and its gradient, when the next pass begins.
        receives = simulated_calls(plan, problem, row.device) if row.device >= of.num_gpus // 2 else {}
        held = max((2 * call.num_bytes for call in receives if call.kind == "transfer"), default=0)
        more = sum(row.traced.values()) - sum(row.predicted.values())
        slack = CLOSE * sum(row.traced.values())
        assert -slack <= more <= slack + held, table([row])
        assert abs(row.reserved_error) <= RESERVED, table([row])
        for name, size in row.predicted.items():
            if name != "activations":
                assert row.traced[name] == pytest.approx(size, rel=0.001, abs=2**20), table([row])
    for each in sent:
        assert not each.other_bytes, each
        # Under ``refreshes_in_forward`` gathers go by layer here; Megatron-Core has buckets, on the first stage alone.
        assert not each.other_numbers or of.degrees.get("overlap_gradient_sync"), each
        assert each.traced or of.num_gpus == 1, each


@pytest.mark.parametrize("of", QUICK, ids=str)
def test_predicted_bytes_and_calls_are_those_of_megatron_core(of: Check) -> None:
    assert_alike(of)


@pytest.mark.slow
@pytest.mark.parametrize("of", CHECKS, ids=str)
def test_so_are_those_of_the_report(of: Check) -> None:
    assert_alike(of)


def test_a_wrong_plan_is_told_apart() -> None:
    """The check can fail: one more microbatch, or sequence parallelism, is another number of calls, and other bytes."""
    of, longer = (check(GPT, number, tp=2, microbatch=1, layers=2) for number in (2, 3))
    problem = megatron_problem(of)
    plan = uniform_plan(problem, **of.degrees)  # type: ignore[arg-type]
    own, cut = Degrees(tp=2, microbatch=1), Degrees(tp=2, microbatch=1, sequence_parallel=True)
    memory, calls = trace_megatron(problem, own, 0)
    other, in_parts = trace_megatron(problem, cut, 0)
    _, more = trace_megatron(megatron_problem(longer), own, 0)
    predicted = totals(simulated_calls(plan, problem, 0))
    alike, unlike, too_many = (Sent(of, 0, predicted, totals(each)) for each in (calls, in_parts, more))
    assert not alike.other_bytes and not alike.other_numbers
    assert too_many.other_bytes == too_many.other_numbers == [("all_reduce", 2)]
    assert {kind for kind, _ in unlike.other_bytes} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert memory.peak_bytes > other.peak_bytes


def test_of_a_workload_its_shape_is_read() -> None:
    shape = Shape.of(megatron_problem(check(GROUPED, 2, tp=4, microbatch=1)).workload)
    assert (shape.num_layers, shape.hidden, shape.heads, shape.kv_heads) == (4, 4096, 32, 8)
    assert (shape.ffn, shape.vocab, shape.seq_len, shape.is_gated, shape.is_tied) == (14336, 128256, 8192, True, False)


@pytest.mark.parametrize(
    ("degrees", "rank", "words"),
    [
        (Degrees(pp=3), 0, "as many layers each, got 4 layers for 3 stages"),
        (Degrees(tp=2), 2, "rank must be from 0 to 1, got 2"),
        (Degrees(dp=2, zero=3), 0, "zero must be 0 or 1"),
        (Degrees(pp=2, schedule="zb-h1"), 0, "got zb-h1"),
    ],
)
def test_plans_that_it_has_not_are_refused(degrees: Degrees, rank: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trace_megatron(megatron_problem(check(GPT, 2, microbatch=1)), degrees, rank)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GPT or LLaMA family with plain attention, got bert-large"):
        Shape.of(megatron_problem(check("bert-large", 2, microbatch=1)).workload)
