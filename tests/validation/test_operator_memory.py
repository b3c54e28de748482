"""What operators hold once they are done."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from simulator.uniform import uniform_plan
from tests.validation.tiny import problem
from validation.groups import GroupPool
from validation.launch import Worker
from validation.operator_call import Slots, storage_key
from validation.plan_executor import PlanExecutor


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
