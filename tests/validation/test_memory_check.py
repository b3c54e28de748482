"""Predicted live bytes against torch's own accounting, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.validation.tiny import problem
from validation.memory_check import CHECKS, GPT, STATES, Check, compare, random_checks, table
from validation.memory_trace import trace_memory

WITHIN = 0.03
QUICK = (
    Check(GPT, 1, 2, {"microbatch": 2}, attention="flash"),
    Check(GPT, 1, 4, {"microbatch": 2, "recompute": "selective"}),
    Check(GPT, 2, 4, {"dp": 2, "microbatch": 2, "recompute": "full"}),
    Check(GPT, 2, 2, {"pp": 2, "microbatch": 1}, (0, 1)),
    Check(GPT, 2, 3, {"pp": 2, "microbatch": 2, "schedule": "gpipe", "smaller_last": True}, (0,)),
    Check(GPT, 2, 3, {"pp": 2, "microbatch": 1, "schedule": "zb-h1"}, (1,)),
    Check(GPT, 2, 2, {"dp": 2, "zero": 3, "microbatch": 1, "recompute": "full", "overlap_gradient_sync": True}),
)
CLOSE = 0.005
EXACT = (  # Where tensor parallelism cuts vocabularies, sequences, heads or channels.
    Check("gpt3-350m", 2, 8, {"tp": 2, "microbatch": 4, "recompute": "full"}, layers=4),
    Check("gpt3-350m", 2, 8, {"tp": 2, "microbatch": 4, "sequence_parallel": True}, layers=4),
    Check("t5-large-32", 2, 8, {"tp": 2, "microbatch": 4}, layers=4),
    Check("wide-resnet-500m", 2, 16, {"tp": 2, "microbatch": 8}),
    Check("wide-resnet-500m", 4, 16, {"tp": 4, "microbatch": 8}),
    Check("llama2-70b", 8, 2, {"tp": 8, "microbatch": 1}, attention="flash", layers=8),
    Check("vgg-19", 2, 16, {"dp": 2, "zero": 1, "microbatch": 4}),  # Gradients: the optimizer step rules.
)


@pytest.mark.parametrize("check", QUICK, ids=str)
def test_predicted_bytes_are_those_of_torch(check: Check) -> None:
    """Those that live, and over two iterations, the moments made in the first, those that torch's storages reserve."""
    for row in compare(check):
        assert max(abs(row.error), abs(row.reserved_error)) <= WITHIN, table([row])
        for name in STATES[:1]:
            assert row.predicted[name] == pytest.approx(row.traced[name], rel=1e-3)


@pytest.mark.parametrize("check", EXACT, ids=str)
def test_so_are_those_where_something_is_cut(check: Check) -> None:
    for row in compare(check):
        assert abs(row.error) <= CLOSE, table([row])


@pytest.mark.parametrize(
    ("model", "layers", "attention"),
    [
        ("gpt3-350m", 4, "plain"),
        ("bert-large", 4, "plain"),
        ("vit-large", 4, "flash"),
        ("wide-resnet-500m", 0, "plain"),
        ("resnet-50", 0, "plain"),
        ("t5-large-32", 4, "plain"),
    ],
)
def test_a_part_of_what_all_ranks_have_is_copied_and_the_whole_let_go(model: str, layers: int, attention: str) -> None:
    """Megatron's other order: linear layers first by rows, which read a part each of what norms make whole."""
    check = Check(model, 4, 8, {"tp": 4, "microbatch": 4}, attention=attention, layers=layers)
    of = check.problem()
    plan = uniform_plan(of, **check.degrees)  # type: ignore[arg-type]
    (stage,) = plan.stages
    other = tuple(
        (count, tuple(axis._replace(split="tensor_alternative") for axis in axes)) for count, axes in stage.shardings
    )
    plan = validate(replace(plan, stages=(replace(stage, shardings=other),)), of)
    (memory,), (traced,) = simulate(plan, of).memory, trace_memory(plan, of, (0,))
    assert memory.peak_allocated_bytes == pytest.approx(traced.peak_bytes, rel=0.02)  # +3 to +5 % with the whole kept


def test_the_checks_cover_what_the_report_claims() -> None:
    pipelined = [check for check in CHECKS if len(check.devices) > 1]
    assert len(CHECKS) >= 10
    assert len(pipelined) >= 5
    for check in pipelined:
        problem = check.problem()
        plan = uniform_plan(problem, **check.degrees)  # type: ignore[arg-type]
        assert plan.num_microbatches > 1
        for end in (plan.stages[0], plan.stages[-1]):
            assert set(end.devices) & set(check.devices)


def drawn_checks() -> Iterator[Check]:
    """Yield 25 plans, but of models whose layers are unlike or smaller than a bucket: gradients that ZeRO scatters."""
    images = ("vgg", "resnet", "wide-resnet", "swin")
    return islice((check for check in random_checks(Random(3)) if not check.model.startswith(images)), 25)


def is_known_short(check: Check) -> bool:
    """Return whether a drawn plan is the one whose peak is known to be too low: see docs/memory.md."""
    return check.model == "bert-large" and check.degrees.get("schedule") == "zb-h1"


@pytest.mark.slow
def test_so_are_those_of_random_plans() -> None:
    for check in drawn_checks():
        if not is_known_short(check):
            for row in compare(check):
                assert abs(row.error) <= WITHIN, table([row])


@pytest.mark.slow
@pytest.mark.xfail(strict=True, reason="BERT-Large, tp 4 with sequence parallelism: -4.0 %, see docs/memory.md")
def test_so_is_that_of_the_plan_that_is_known_to_be_short() -> None:
    for check in drawn_checks():
        if is_known_short(check):
            for row in compare(check):
                assert abs(row.error) <= WITHIN, table([row])


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_all_checks_agree(check: Check) -> None:
    for row in compare(check):
        assert abs(row.error) <= WITHIN, table([row])


def test_a_device_outside_the_plan_is_refused() -> None:
    of = problem("gpt")
    with pytest.raises(ValueError, match=r"devices must be of the plan \(\[0, 1\]\), got \[7\]"):
        trace_memory(uniform_plan(of, dp=2, microbatch=2), of, [7])
