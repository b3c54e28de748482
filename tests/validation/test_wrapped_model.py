"""What PyTorch's own data parallelism holds, against simulations under its runtimes; no plan is executed."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the models need torch (extra: validation)")

from simulator.problem import Problem  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from tests.validation.tiny import problem  # noqa: E402
from validation.execution.parameters import input_specs, make_samples  # noqa: E402
from validation.execution.reference import run_reference  # noqa: E402
from validation.memory_check import GPT, LLAMA, NARROW, VALUED, WRAPPED, Check, compare, table, wrapped_check  # noqa: E402
from validation.wrapped_model import WRAPPERS, WholeModel  # noqa: E402
from validation.wrapped_trace import trace_wrapped  # noqa: E402

CLOSE, RESERVED = 0.005, 0.03
SEGMENT_BYTES = 20 * 2**20
"""What the allocator takes at once for small blocks: of small models a segment more or less is more than a share."""
SMALL = {**LLAMA, "seq_len": 128}
QUICK = (
    wrapped_check("pytorch-fsdp2", GPT, 4, 1, microbatch=2, layers=6),
    wrapped_check("pytorch-fsdp2", "llama2-7b", 8, 2, microbatch=1, layers=4, recompute="full"),
    wrapped_check("pytorch-fsdp2", "llama2-7b", 8, 2, microbatch=1, layers=4, zero=2),
    wrapped_check("pytorch-fsdp2", GPT, 8, 1, microbatch=1, layers=24, shape=NARROW, recompute="full", zero=2),
    wrapped_check("pytorch-fsdp2", "vit-large", 4, 1, microbatch=32, layers=6),
    wrapped_check("composer-fsdp", GPT, 8, 2, microbatch=2, layers=6, recompute="full"),
    wrapped_check("hetu-galvatron", "llama2-7b", 8, 1, microbatch=1, layers=4),
    wrapped_check("hetu-galvatron", "llama2-7b", 8, 2, microbatch=1, layers=4, gradient_reduction="last"),
    wrapped_check(VALUED, "llama2-7b", 2, 1, microbatch=8, layers=4, shape=SMALL, attention="plain"),
    wrapped_check(VALUED, "llama2-7b", 2, 2, microbatch=8, layers=4, shape=SMALL, attention="plain"),
    wrapped_check(VALUED, "llama2-7b", 1, 1, microbatch=8, layers=4, shape=SMALL, attention="plain"),
)


@pytest.mark.parametrize("check", QUICK, ids=str)
def test_predicted_bytes_are_those_of_pytorchs_own_data_parallelism(check: Check) -> None:
    (row,) = compare(check)
    assert abs(row.error) <= CLOSE, table([row])
    assert row.predicted_reserved == pytest.approx(row.traced_reserved, rel=RESERVED, abs=SEGMENT_BYTES), table([row])
    # What stays whole between microbatches is a state in the simulator, and not one of the wrapper's.
    whole = {"gradients"} if "gradient_reduction" in check.degrees and check.degrees.get("zero") else set()
    for name, size in row.predicted.items():
        if name not in {"activations", *whole}:
            assert row.traced[name] == pytest.approx(size, rel=0.01, abs=2**20), table([row])


@pytest.mark.slow
@pytest.mark.parametrize("check", WRAPPED, ids=str)
def test_so_are_those_of_the_report(check: Check) -> None:
    (row,) = compare(check)
    assert abs(row.error) <= 4 * CLOSE and abs(row.reserved_error) <= 2 * RESERVED, table([row])


def test_the_checks_cover_all_wrappers() -> None:
    assert {check.runtime for check in WRAPPED} == {check.runtime for check in QUICK} == set(WRAPPERS)


@pytest.mark.parametrize("family", ["gpt", "t5", "resnet-wide"])
def test_the_model_is_that_of_the_reference(family: str) -> None:
    """Its loss is that of the same operators in one graph, with segments computed again too."""
    of = problem(family)
    specs = input_specs(of.workload)
    samples = {name: make_samples(spec, range(of.global_batch), torch.float32) for name, spec in specs.items()}
    segments = uniform_plan(of, recompute="full").stages[0].recompute
    (loss,) = run_reference(of).losses
    for recomputed in ((), segments):
        model = WholeModel(of, of.global_batch, recomputed)
        assert float(model(samples).detach()) == pytest.approx(loss, rel=1e-6)


def small_problem(runtime: str, num_gpus: int) -> Problem:
    check = wrapped_check(runtime, "llama2-7b", num_gpus, 1, microbatch=2, layers=2, shape=SMALL)
    return check.problem()


def test_other_plans_and_runtimes_are_refused() -> None:
    of = small_problem("pytorch-fsdp2", 2)
    for words in ({"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 1}, {"dp": 2}):
        with pytest.raises(ValueError, match="one stage of replicas that share all by ZeRO-3"):
            trace_wrapped(uniform_plan(of, **words), of)  # type: ignore[arg-type]
    flat = small_problem("composer-fsdp", 2)
    with pytest.raises(ValueError, match="only pytorch-fsdp2 can keep parameters gathered here, got composer-fsdp"):
        trace_wrapped(replace(uniform_plan(flat, dp=2, zero=3), reshard_after_forward=False), flat)
    of_three = replace(of, global_batch=3)
    with pytest.raises(ValueError, match="microbatches must be equal"):
        trace_wrapped(uniform_plan(of_three, dp=1, zero=0, microbatch=2, smaller_last=True), of_three)
    selective = uniform_plan(of, dp=2, zero=3, recompute="selective")
    with pytest.raises(ValueError, match="segments must be units"):
        trace_wrapped(selective, of)
    other = replace(of, runtime=replace(of.runtime, name="mine"))
    with pytest.raises(ValueError, match="got mine"):
        trace_wrapped(uniform_plan(other, dp=2, zero=3), other)
    ddp = small_problem(VALUED, 2)
    with pytest.raises(ValueError, match="without ZeRO"):
        trace_wrapped(uniform_plan(ddp, dp=2, zero=1), ddp)
