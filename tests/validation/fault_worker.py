"""Targets of the fault tests: what their processes run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from simulator.uniform import uniform_plan
from tests.validation.tiny import problem
from validation.execution.executable import check_executable
from validation.execution.launch import Worker
from validation.execution.plan_executor import PlanExecutor


def die_in_backward(worker: Worker, rank: int) -> None:
    """Run a pipeline; ``rank`` kills itself in the second iteration's first backward."""
    of = problem("gpt")
    plan = check_executable(uniform_plan(of, pp=2, microbatch=2), of, device="cpu")
    executor = PlanExecutor(plan, of, worker)
    note = worker.doing

    def doing(iteration: int, kind: str, stage: int, microbatch: int) -> None:
        note(iteration, kind, stage, microbatch)
        if worker.rank == rank and iteration == 1 and kind == "B":
            os.kill(os.getpid(), signal.SIGKILL)

    worker.doing = doing  # type: ignore[method-assign]
    for iteration in range(3):
        executor.run_iteration(iteration)


def rest(worker: Worker, seconds: float) -> None:
    """Do nothing for a while."""
    time.sleep(seconds)


def environment(worker: Worker, name: str) -> str | None:
    """Return a variable of the environment."""
    return os.environ.get(name)


def fail(worker: Worker, rank: int) -> str:
    """Raise an error on ``rank`` while the others wait for it."""
    import torch
    import torch.distributed as dist

    if worker.rank == rank:
        raise ArithmeticError("the sky is falling")
    dist.all_reduce(torch.ones(1))
    return "never"


def sleep(worker: Worker, rank: int) -> int:
    """Sleep for long on ``rank``."""
    if worker.rank == rank:
        time.sleep(3600)
    return worker.rank


def write_pid_and_sleep(worker: Worker, folder: str) -> None:
    """Say who one is, then sleep for long."""
    (Path(folder) / f"rank{worker.rank}").write_text(str(os.getpid()))
    time.sleep(3600)


class Failing:
    """A number of iterations at which one rank fails."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __index__(self) -> int:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise RuntimeError(self.message)
        return 0
