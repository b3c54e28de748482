"""A tied head's gradient waits for the embedding's: from one end of a stage's backward pass to the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.fast.estimate import FastEstimator
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from workloads.registry import build_workload


def problem(model: str = "gpt3-1.3b", runtime: str = "megatron-lm-2021", *, waits: bool = True) -> Problem:
    """Return a model of four layers, of which one that is computed again takes more than the loss."""
    chosen = replace(load_runtime(runtime), tied_gradients_wait=waits)
    return Problem(
        workload=build_workload(model, attention="plain", overrides={"layers": 4}),
        hardware=HardwareModel.from_name("a100-80g-dgx:1x4"),
        runtime=replace(chosen, attention="plain"),
        global_batch=16,
    )


def embedding_bytes(of: Problem, each: int) -> int:
    embedding = of.workload.operators[0].attributes
    return int(embedding["vocab"]) * int(embedding["hidden"]) * each


def more_bytes(model: str = "gpt3-1.3b", runtime: str = "megatron-lm-2021", **words: object) -> list[float]:
    """Return by how much the wait raises the peak of each stage, which three models of memory agree on."""
    found = []
    for waits in (False, True):
        of = problem(model, runtime, waits=waits)
        plan = uniform_plan(of, recompute="full", **words)  # type: ignore[arg-type]
        peaks = estimate(plan, of).peak_bytes
        assert FastEstimator(of).estimate(plan).peak_bytes == peaks
        simulated = [device.peak_allocated_bytes for device in simulate(plan, of).memory]
        assert list(peaks) == pytest.approx(simulated, rel=1e-3)
        found.append(simulated)
    without, waiting = found
    return [after - before for before, after in zip(without, waiting, strict=True)]


def test_it_is_there_while_layers_go_backward() -> None:
    """A layer computed again with four samples is the peak; the gradient beside it is one of the embedding, in fp16."""
    of = problem()
    assert more_bytes(microbatch=4) == [embedding_bytes(of, 2)]
    assert more_bytes(microbatch=4, tp=2) == [embedding_bytes(of, 2) // 2]


def test_stages_of_their_own_and_weights_of_their_own_wait_for_none() -> None:
    assert more_bytes(microbatch=4, pp=2) == [0, 0]
    assert more_bytes("llama2-7b", microbatch=4) == [0]


def test_what_zero_scatters_is_whole_for_as_long_anyway() -> None:
    assert more_bytes(microbatch=4, dp=2, zero=3) == [0]
    assert more_bytes(microbatch=4, dp=2, zero=1) == [embedding_bytes(problem(), 2)]
    # Reduced with the last microbatch alone nothing is scattered in a pass.
    assert more_bytes(microbatch=2, dp=2, zero=3, gradient_reduction="last") == [embedding_bytes(problem(), 2)]


def test_under_autocast_it_has_been_cast_back() -> None:
    runtime = "pytorch-ddp"
    (more,) = more_bytes(runtime=runtime, microbatch=4)
    assert more == embedding_bytes(problem(runtime=runtime), 4)


def test_the_executor_adds_at_once() -> None:
    assert not load_runtime("windtunnel-executor").tied_gradients_wait
    assert load_runtime("pytorch-fsdp2").tied_gradients_wait
