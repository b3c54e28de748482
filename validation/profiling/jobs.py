"""Several plans one after another in the same processes: starts once, and interleaves what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.executor import Job, OutOfMemoryError, make_job, measurement_of, ran_out_of_memory, run_rank
from validation.execution.launch import Worker, WorkerError, launch
from validation.measurement import Measurement, RankRecord

Rounds = list[list[Measurement]]
"""By round and job."""


@dataclass(frozen=True)
class _Batch:
    jobs: Mapping[int, Job]
    rounds: int


def _run_batch(worker: Worker, batch: _Batch) -> list[dict[int, RankRecord]]:
    return [{number: _run_job(worker, number, job) for number, job in batch.jobs.items()} for _ in range(batch.rounds)]


def _run_job(worker: Worker, number: int, job: Job) -> RankRecord:
    worker.job = number
    return run_rank(worker, job)


def execute_rounds(
    jobs: Sequence[Job], *, rounds: int = 1, device: str = "cpu", num_threads: int = 1, timeout_s: float = 600.0
) -> Rounds:
    """Run jobs in turn, several rounds of all of them, in one set of processes.

    A job that one device among several has no memory for leaves the others waiting: all processes are started anew,
    without it, and it counts as out of memory in every round.

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
    left = dict(enumerate(jobs))
    by_rank: list[list[dict[int, RankRecord]]] = []
    while left:
        try:
            by_rank = launch(
                _run_batch,
                _Batch(left, rounds),
                num_processes=max(len(job.plan.devices) for job in left.values()),
                device=device,
                timeout_s=timeout_s,
                num_threads=num_threads,
            )
            break
        except WorkerError as error:
            if not isinstance(error.told, OutOfMemoryError):
                raise
            del left[error.told.job]
    return [
        [
            measurement_of([records[turn][number] for records in by_rank], job, device)
            if number in left
            else ran_out_of_memory(job, device)
            for number, job in enumerate(jobs)
        ]
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
