"""What DeepSpeed's own ZeRO holds, against simulations under its runtime; no plan is executed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="the models need torch (extra: validation)")

from simulator.problem import Problem  # noqa: E402
from simulator.uniform import uniform_plan  # noqa: E402
from validation.deepspeed_engine import INSTALL, load_deepspeed  # noqa: E402
from validation.memory_check import (  # noqa: E402
    DEEPSPEED,
    GPT,
    OF_DEEPSPEED,
    ZERO_3,
    Check,
    compare,
    table,
    wrapped_check,
)
from validation.wrapped_trace import trace_wrapped  # noqa: E402

CLOSE, RESERVED = 0.005, 0.15
"""Reserved bytes hang on whether a bucket, or a flat tensor of all gradients, finds a place that is free."""
PREFETCHED = 0.03
"""Of ZeRO-3: a layer that is gathered ahead, which 0.5.10 means to do and does not (docs/memory.md)."""
QUICK = (
    wrapped_check(DEEPSPEED, GPT, 2, 2, microbatch=1, layers=6, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 2, 1, microbatch=1, layers=6, zero=1, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 8, 1, microbatch=1, layers=6, zero=1, recompute="full"),
    wrapped_check(DEEPSPEED, GPT, 8, 2, microbatch=2, layers=6, zero=1),
    wrapped_check(DEEPSPEED, "llama2-7b", 2, 1, microbatch=1, layers=8, zero=2, recompute="full"),
    wrapped_check(DEEPSPEED, "llama2-7b", 4, 2, microbatch=1, layers=8, zero=2, recompute="full"),
    wrapped_check(DEEPSPEED, "bert-large", 4, 2, microbatch=8, zero=1, attention="plain"),
    wrapped_check(ZERO_3, "llama2-7b", 4, 1, microbatch=1, layers=8, recompute="full"),
    wrapped_check(ZERO_3, GPT, 8, 2, microbatch=1, layers=6, overlap_gradient_sync=True),
)
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason=f"DeepSpeed is not there: {INSTALL}")


@needs_deepspeed
@pytest.mark.parametrize("check", QUICK, ids=str)
def test_predicted_bytes_are_those_of_deepspeeds_own_zero(check: Check) -> None:
    (row,) = compare(check)
    assert abs(row.error) <= (PREFETCHED if check.runtime == ZERO_3 else CLOSE), table([row])
    assert abs(row.reserved_error) <= RESERVED, table([row])
    for name in ("parameters", "optimizer states"):
        assert row.traced[name] == pytest.approx(row.predicted[name], rel=0.01), table([row])


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("check", OF_DEEPSPEED, ids=str)
def test_so_are_those_of_the_report(check: Check) -> None:
    (row,) = compare(check)
    assert abs(row.error) <= (PREFETCHED if check.runtime == ZERO_3 else 2 * CLOSE), table([row])
    assert abs(row.reserved_error) <= RESERVED, table([row])


def test_without_deepspeed_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.split(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r"deepspeed==0\.5\.10"):
        load_deepspeed()
    assert "torch._six" not in sys.modules


def test_another_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ("zero.stage_1_and_2", "zero.stage3", "zero.partition_parameters", "fp16.fused_optimizer")
    for name in ("", *(f".runtime.{part}" for part in parts)):
        module = ModuleType(f"deepspeed{name}")
        module.__dict__["__version__"] = "0.9.5"
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ImportError, match=r"must be of version 0\.5\.10, got 0\.9\.5"):
        load_deepspeed()


def test_other_plans_are_refused() -> None:
    def small(num_gpus: int) -> Problem:
        return wrapped_check(DEEPSPEED, GPT, num_gpus, 1, microbatch=1, layers=2).problem()

    for words in ({"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}):
        of = small(2)
        with pytest.raises(ValueError, match="one stage of replicas under ZeRO 0, 1, 2"):
            trace_wrapped(uniform_plan(of, **words), of)  # type: ignore[arg-type]
    of = wrapped_check(ZERO_3, GPT, 2, 1, microbatch=1, layers=2).problem()
    with pytest.raises(ValueError, match="that share all by ZeRO-3"):
        trace_wrapped(uniform_plan(of, dp=2, zero=2), of)
    alone = small(1)
    with pytest.raises(ValueError, match="two replicas or more"):
        trace_wrapped(uniform_plan(alone), alone)
