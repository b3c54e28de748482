"""What the processes of the correctness suite run: every plan of a world size, one after the other."""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass

from tests.validation.tiny import CASES
from validation.executable import check_executable
from validation.executor import PlanExecutor
from validation.launch import Worker
from validation.reference import Reference


@dataclass(frozen=True)
class Outcome:
    """One plan on one rank.

    Attributes:
        losses: This rank's share of the loss of each iteration.
        differences: Largest absolute difference of each gradient this rank holds.
        notes: Of the executor.
        seconds: Wall time.
        error: Traceback, if it failed.
    """

    losses: tuple[float, ...] = ()
    differences: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""


def run_cases(worker: Worker, references: dict[str, Reference]) -> list[Outcome]:
    """Run all plans of the world size; two iterations each, so that the optimizer step counts."""
    return [_run(worker, number, references) for number in range(len(CASES[worker.world_size]))]


def _run(worker: Worker, number: int, references: dict[str, Reference]) -> Outcome:
    case = CASES[worker.world_size][number]
    reference = references[case.name]
    start = time.perf_counter()
    differences: list[tuple[str, float]] = []

    def compare(executor: PlanExecutor) -> None:
        for runner in executor.runners.values():
            for held in runner.parameters.held:
                assert held.gradient is not None
                wanted = held.part_of(reference.gradients[held.placed.key])
                difference = float((held.gradient - wanted).abs().max()) if wanted.numel() else 0.0
                differences.append((held.placed.key, difference))

    try:
        plan = check_executable(case.plan, case.problem, device="cpu", num_processes=worker.world_size)
        executor = PlanExecutor(plan, case.problem, worker)
        executor.on_gradients = compare
        losses = []
        for iteration in range(2):
            executor.run_iteration(iteration)
            losses.append(executor.loss())
            executor.on_gradients = None
    except Exception:
        if worker.world_size > 1 and os.environ.get("WINDTUNNEL_TEST_DEBUG") is None:
            raise
        return Outcome(error=traceback.format_exc())
    return Outcome(tuple(losses), tuple(differences), tuple(executor.notes()), time.perf_counter() - start)
