"""What operators hold once they are done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from simulator.plan import Plan
from simulator.problem import Problem
from simulator.uniform import uniform_plan
from tests.validation.tiny import problem
from tests.validation.tiny_plans import one_process, two_processes
from validation.execution.groups import GroupPool
from validation.execution.launch import Worker
from validation.execution.operator_call import Slots, storage_key
from validation.execution.plan_executor import PlanExecutor
from validation.fake_devices import fake_processes
from validation.storage_tracer import StorageTracer


@contextmanager
def counted_refills(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Yield the storages alive of what recomputation filled in."""
    alive: set[int] = set()
    fill = Slots.fill

    def counting(slots: Slots, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in alive:
            alive.add(key)
            weakref.finalize(tensor.untyped_storage(), alive.discard, key)
        fill(slots, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Slots, "fill", counting)
        yield alive


@pytest.mark.parametrize("stops_early", [True, False])
def test_recomputation_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, stops_early: bool) -> None:
    of = problem("gpt", recompute_stops_early=stops_early)
    plan = uniform_plan(of, microbatch=2, recompute="full").canonical(of.workload)
    worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), torch.device("cpu"))
    executor = PlanExecutor(plan, of, worker)
    with counted_refills(monkeypatch) as alive:
        executor.run_iteration(0)
        gc.collect()
        assert not alive


def alive_after_forward(of: Problem, plan: Plan) -> int:
    """Return the bytes that a rank of two holds between forward and backward, on fake tensors."""
    held = []
    with fake_processes(0, 2) as backend, FakeTensorMode(), StorageTracer() as tracer:
        worker = Worker(0, 2, GroupPool(rank=0, world_size=2, backend=backend), torch.device("cpu"))
        executor = PlanExecutor(plan.canonical(of.workload), of, worker)
        (runner,) = executor.runners.values()
        before = tracer.live_bytes
        _, state = runner.forward(0, {})
        held.append(tracer.live_bytes - before)
        del state
    return held[0]


LEAVING_NOTHING = (
    "gpt, full recomputation, zb-h1", "gpt dp2, ZeRO-3, split backward", "gpt pp2, zb-h1", "bert pp2, zb-h1",
    "swin tp2, shifted windows", "xlnet tp2",
)
CASES = {case.name: (count, case) for count, made in ((1, one_process), (2, two_processes)) for case in made()}


@pytest.mark.parametrize("name", LEAVING_NOTHING)
def test_an_iteration_leaves_no_tensors_to_the_garbage_collector(name: str) -> None:
    """On a rank of each stage: others do the same."""
    count, case = CASES[name]
    for rank in range(len(case.plan.stages)):
        with fake_processes(rank, count) as backend, FakeTensorMode(), StorageTracer() as tracer:
            worker = Worker(rank, count, GroupPool(rank=rank, world_size=count, backend=backend), torch.device("cpu"))
            executor = PlanExecutor(case.plan.canonical(case.problem.workload), case.problem, worker)
            gc.collect()
            gc.disable()
            try:
                executor.run_iteration(0)
                left = tracer.live_bytes
            finally:
                gc.enable()
            gc.collect()
            assert left == tracer.live_bytes, f"rank {rank}"


def test_gathered_parameters_are_let_go_after_forward() -> None:
    of = problem("gpt")
    sharded = uniform_plan(of, dp=2, microbatch=2, zero=3)
    assert alive_after_forward(of, sharded) == alive_after_forward(of, uniform_plan(of, dp=2, microbatch=2))


def test_scattered_gradients_are_let_go_during_backward() -> None:
    of = problem("gpt", global_batch=4)
    plan = uniform_plan(of, dp=2, microbatch=2, zero=3, overlap_gradient_sync=True)
    assert plan.num_microbatches == 1
    with fake_processes(0, 2) as backend, FakeTensorMode():
        worker = Worker(0, 2, GroupPool(rank=0, world_size=2, backend=backend), torch.device("cpu"))
        executor = PlanExecutor(plan.canonical(of.workload), of, worker)
        (runner,) = executor.runners.values()
        buffers = []

        def count(index: int) -> None:
            done(index)
            buffers.append(sum(bucket.buffer is not None for bucket in runner.gradients.buckets))

        done, runner.gradients.operator_done = runner.gradients.operator_done, count  # type: ignore[method-assign]
        executor.run_iteration(0)
    assert len(runner.gradients.buckets) > 4
    assert max(buffers) <= 3  # one filled, one travelling, one done with when the next is launched
