"""A plan that is not legal is refused with the place, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from simulator.plan import Axis, Plan, Stage
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.simulator.problems import small_problem

Change = Callable[[Plan], Plan]


def _stage(plan: Plan, number: int, **changes: object) -> Plan:
    stages = list(plan.stages)
    stages[number] = replace(stages[number], **changes)  # type: ignore[arg-type]
    return replace(plan, stages=tuple(stages))


CASES: dict[str, tuple[Change, str]] = {
    "no stages": (lambda p: replace(p, stages=()), "at least one stage"),
    "batch": (lambda p: replace(p, num_microbatches=3), r"global batch 16, got 2 \* 3 = 6; try num_microbatches: 8"),
    "batch not divisible": (lambda p: replace(p, microbatch_size=3), "try microbatch_size: 2, num_microbatches: 8"),
    "overlap": (lambda p: _stage(p, 1, operators=((26, 55),)), r"stages\.1.*operator 26 .* is in stage 0 already"),
    "turns": (
        lambda p: replace(p, replica_assignment="round_robin", schedule="zb-h1"),
        "round_robin goes with the schedules gpipe, 1f1b, got zb-h1",
    ),
    "hole": (lambda p: _stage(p, 1, operators=((28, 55),)), "every operator must be in a stage, 1 are in none"),
    "range": (lambda p: _stage(p, 1, operators=((27, 99),)), r"0 <= start < stop <= 55"),
    "no device": (lambda p: _stage(p, 0, devices=()), r"stages\.0\.devices.*at least one"),
    "repeated device": (lambda p: _stage(p, 0, devices=(0, 0)), "must not be named twice"),
    "unknown device": (lambda p: _stage(p, 1, devices=(2, 9)), r"devices must be in 0\.\.3 .*got 9"),
    "half shared devices": (lambda p: _stage(p, 1, devices=(1, 2)), "same device tuple or none in common"),
    "mesh": (
        lambda p: _stage(p, 0, shardings=((27, (Axis("batch", 3),)),)),
        "multiply to the stage's 2 devices, got 3 = 3",
    ),
    "counts": (lambda p: _stage(p, 0, shardings=((5, (Axis("batch", 2),)),)), "add up to the stage's 27 operators, got 5"),  # noqa: E501
    "split": (lambda p: _stage(p, 0, shardings=((27, (Axis("diagonal", 2),)),)), "no split 'diagonal'; known: tensor"),
    "zero": (lambda p: _stage(p, 0, shardings=((27, (Axis("tensor", 2, 3),)),)), "zero goes with batch only"),
    "segment": (lambda p: _stage(p, 0, recompute=((26, 31),)), r"stages\.0\.recompute: a segment must lie inside"),
    "segments": (lambda p: _stage(p, 0, recompute=((1, 9), (5, 12))), "segments must not overlap"),
    "schedule": (lambda p: replace(p, schedule="1f1c"), "did you mean '1f1b'"),
    "reduction": (lambda p: replace(p, gradient_reduction="never"), "one of last, every"),
    "warm-up": (lambda p: replace(p, warmup=(1,)), r"one depth per stage \(2\), got 1"),
    "warm-up of gpipe": (lambda p: replace(p, warmup=(1, 1), schedule="gpipe"), "sets its own warm-up"),
    "order": (
        lambda p: replace(p, stages=(replace(p.stages[0], operators=((27, 55),), shardings=((28, p.stages[0].shardings[0][1]),)),  # noqa: E501
                                     replace(p.stages[1], operators=((0, 27),), shardings=((27, p.stages[0].shardings[0][1]),)))),  # noqa: E501
        "order the stages along the data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_an_illegal_plan_is_refused_with_a_reason(name: str) -> None:
    problem = small_problem("gpt")
    plan = uniform_plan(problem, pp=2, dp=2)
    assert validate(plan, problem)
    change, words = CASES[name]
    with pytest.raises(ValueError, match=words):
        validate(change(plan), problem)


def test_heads_that_do_not_divide_are_refused() -> None:
    problem = small_problem("gpt", cluster="v100-32g-dgx1:1x3", global_batch=15)
    with pytest.raises(ValueError, match="must divide 16, got 3"):
        validate(uniform_plan(problem, tp=3), problem)


def test_a_replica_without_a_sample_is_refused() -> None:
    problem = small_problem("gpt")
    plan = replace(uniform_plan(problem, dp=4), microbatch_size=2, num_microbatches=8)
    with pytest.raises(ValueError, match=r"\) and others like it: each of 4 replicas needs a sample") as found:
        validate(plan, problem)
    assert str(found.value).count("needs a sample") == 1


def test_everything_wrong_is_named_at_once() -> None:
    problem = small_problem("gpt")
    plan = _stage(replace(uniform_plan(problem, pp=2), gradient_reduction="x", num_microbatches=1), 0, devices=(7,))
    with pytest.raises(ValueError) as found:
        validate(plan, problem)
    assert all(words in str(found.value) for words in ("gradient_reduction", "global batch", "stages.0.devices"))


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (dict(tp=8), "at most the cluster's 4 devices"),
        (dict(microbatch=5), r"must divide the global batch 16, got 1 \* 5 = 5; try microbatch 4"),
        (dict(dp=3), "a dp that divides 16"),
        (dict(pp=4, chunks=2, schedule="interleaved"), "at most the 4 repeated layers"),
        (dict(pp=2, chunks=2), "need schedule interleaved"),
        (dict(pp=2, schedule="interleaved"), "needs chunks .* above 1, got 1; give 2 or more, or schedule 1f1b"),
        (dict(recompute="some"), "none, selective, full"),
        (dict(zero=4), "zero must be"),
        (dict(tp=0), "tp must be at least 1"),
    ],
)
def test_uniform_degrees_that_do_not_fit_say_what_would(degrees: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        uniform_plan(small_problem("gpt"), **degrees)


def test_a_remainder_of_layers_goes_to_the_middle_stages() -> None:
    problem = small_problem("bert")
    from simulator.uniform import even_layer_cuts, repeated_layers

    layers = repeated_layers(problem.workload)
    cuts = even_layer_cuts(problem.workload, 3)
    counts = [sum(start <= layer[0] < stop for layer in layers) for start, stop in cuts]
    assert counts == [1, 2, 1]
    assert cuts[0][0] == 0 and cuts[-1][1] == len(problem.workload)


def test_stages_may_share_their_devices() -> None:
    problem = small_problem("gpt", global_batch=8)
    count = len(problem.workload)
    stages = tuple(Stage(((start, stop),), (0,), ((stop - start, ()),)) for start, stop in ((0, 29), (29, count)))
    assert validate(Plan(stages=stages, microbatch_size=1, num_microbatches=8, schedule="gpipe"), problem)


def test_a_degree_that_heads_do_not_allow_names_them() -> None:
    """And one that the width of an MLP does not allow does not."""
    problem = small_problem("gpt", cluster="a100-80g-dgx:1x3", global_batch=16)
    with pytest.raises(ValueError, match=r"attention_qkv.*got 3; 16 are its groups of heads") as refused:
        validate(uniform_plan(problem, tp=3), problem)
    assert all("heads (kv_heads" not in line for line in str(refused.value).splitlines() if "mlp" in line)
