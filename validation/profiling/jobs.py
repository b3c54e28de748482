"""Several plans one after another in the same processes: starts once, and interleaves what is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.executor import Job, make_job, measurement_of, run_rank
from validation.execution.launch import Worker, launch
from validation.measurement import Measurement, RankRecord

Rounds = list[list[Measurement]]
"""By round and job."""


@dataclass(frozen=True)
class _Batch:
    jobs: tuple[Job, ...]
    rounds: int


def _run_batch(worker: Worker, batch: _Batch) -> list[list[RankRecord]]:
    return [[run_rank(worker, job) for job in batch.jobs] for _ in range(batch.rounds)]


def execute_rounds(
    jobs: Sequence[Job], *, rounds: int = 1, device: str = "cpu", num_threads: int = 1, timeout_s: float = 600.0
) -> Rounds:
    """Run jobs in turn, several rounds of all of them, in one set of processes.

    Args:
        jobs: From ``executor.make_job``; those on fewer devices than the largest leave the others idle.
        rounds: How often the whole list is run.
        device: ``cpu`` or ``cuda``.
        num_threads: Torch's threads per process on the CPU; the same for all jobs, so that times compare.
        timeout_s: Seconds until the processes are stopped.

    Raises:
        ValueError: If there is nothing to do.
        launch.WorkerError: If a process fails.
    """
    if not jobs or rounds < 1:
        raise ValueError(f"there must be at least 1 job and 1 round, got {len(jobs)} and {rounds}")
    size = max(len(job.plan.devices) for job in jobs)
    by_rank: list[list[list[RankRecord]]] = launch(
        _run_batch,
        _Batch(tuple(jobs), rounds),
        num_processes=size,
        device=device,
        timeout_s=timeout_s,
        num_threads=num_threads,
    )
    return [
        [measurement_of([records[turn][number] for records in by_rank], job, device) for number, job in enumerate(jobs)]
        for turn in range(rounds)
    ]


def plan_job(
    plan: Plan,
    problem: Problem,
    *,
    iterations: int = 4,
    warmup: int = 1,
    device: str = "cpu",
    measure_operators: bool = False,
    traced_iterations: int = 0,
    records_memory: bool = False,
) -> Job:
    """Return a checked job; arguments and errors as for ``executor.execute``."""
    return make_job(
        plan,
        problem,
        iterations,
        warmup,
        device,
        measure_operators=measure_operators,
        traced_iterations=traced_iterations,
        records_memory=records_memory,
    )

