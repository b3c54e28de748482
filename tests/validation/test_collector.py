"""The garbage collector does not pause what is timed, and garbage does not stay."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from simulator.uniform import uniform_plan  # noqa: E402
from simulator.validate import validate  # noqa: E402
from tests.validation.tiny import problem  # noqa: E402
from validation.execution.collector import collector_off  # noqa: E402
from validation.execution.executor import Job, run_rank  # noqa: E402
from validation.execution.groups import GroupPool  # noqa: E402
from validation.execution.launch import Worker  # noqa: E402
from validation.execution.plan_executor import PlanExecutor  # noqa: E402


class Node:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.other = self


def test_nothing_is_collected_unless_asked_for() -> None:
    before = gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()
    with collector_off():
        garbage = weakref.ref(Node())
        kept = [Node() for _ in range(10 * before[0][0])]
        assert garbage() is not None
        gc.collect()
        assert garbage() is None and len(kept) > 0
    assert (gc.get_threshold(), gc.isenabled(), gc.get_freeze_count()) == before


def test_a_process_that_had_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="failed"), collector_off():
            raise RuntimeError("failed")
        assert not gc.isenabled() and gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_iterations_are_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem("gpt")
    plan = validate(uniform_plan(of, microbatch=1), of)
    running, paused, collected = [False], [0], [0]
    own = PlanExecutor.run_iteration

    def marked(self: PlanExecutor, iteration: int) -> object:
        running[0] = True
        kept = [Node() for _ in range(10 * gc.get_threshold()[0])]
        found = own(self, iteration)
        running[0] = not kept
        return found

    def count(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            paused[0] += running[0]
            collected[0] += not running[0]

    monkeypatch.setattr(PlanExecutor, "run_iteration", marked)
    gc.callbacks.append(count)
    try:
        worker = Worker(0, 1, GroupPool(rank=0, world_size=1, backend=None), torch.device("cpu"))
        run_rank(worker, Job(plan, of, 3, 1, traced_iterations=1))
    finally:
        gc.callbacks.remove(count)
    assert paused[0] == 0 and collected[0] >= 5
