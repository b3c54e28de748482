"""Runs a plan for real and returns what was measured.

``execute`` starts one process per device; ``execute_here`` runs in processes that are there (torchrun's).
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from simulator.plan import Plan
from simulator.problem import Problem
from validation.execution.collector import collector_off
from validation.execution.executable import check_executable
from validation.execution.launch import ToldError, Worker, WorkerError, backend_of, launch
from validation.execution.memory_history import recorded_history, release_cuda_memory
from validation.execution.plan_executor import PlanExecutor
from validation.measurement import Measurement, RankRecord, combine


@dataclass(frozen=True)
class Job:
    """What every process of an execution is given."""

    plan: Plan
    problem: Problem
    iterations: int
    warmup: int
    measure_operators: bool = False
    traced_iterations: int = 0
    """Iterations after those that count, in which every operator is timed."""
    records_memory: bool = False
    """On CUDA, return the allocator's history as well."""


class OutOfMemoryError(ToldError):
    """A device among several had no memory; the others wait for it, so that all have to be stopped."""

    def __init__(self, job: int, message: str) -> None:
        super().__init__(job, message)
        self.job = job

    def __str__(self) -> str:
        return str(self.args[1])


def run_rank(worker: Worker, job: Job) -> RankRecord:
    """Run a job on this process and return what it measured.

    A process alone that runs out of GPU memory says so in its record.

    Raises:
        OutOfMemoryError: If one among others does, whoever asked for the memory: the allocator, NCCL, or a library.
    """
    try:
        if worker.device.type != "cuda":
            return _run_rank(worker, job)
        release_cuda_memory()
        if not job.records_memory:
            return _run_rank(worker, job)
        with recorded_history(worker.device) as history:
            record = _run_rank(worker, job)
            record.memory_history = history()
        return record
    except RuntimeError as error:
        if worker.world_size > 1 and "out of memory" in str(error):
            raise OutOfMemoryError(worker.job, str(error)) from error
        if not isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        return RankRecord(worker.rank, sorted(job.plan.devices)[worker.rank], out_of_memory=True)


def _run_rank(worker: Worker, job: Job) -> RankRecord:
    executor = PlanExecutor(job.plan, job.problem, worker, measure_operators=job.measure_operators)
    with collector_off():
        return _run_iterations(worker, job, executor)


def _run_iterations(worker: Worker, job: Job, executor: PlanExecutor) -> RankRecord:
    record = RankRecord(worker.rank, executor.device_id)
    on_cuda = worker.device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()
    for iteration in range(job.warmup + job.iterations):
        if iteration == job.warmup:
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(worker.device)
            if executor.times is not None:
                executor.times.drain()
        _start_together(worker)
        done = executor.run_iteration(iteration)
        record.iterations_s.append(done.iteration_s)
        record.losses.append(executor.loss())
        if iteration >= job.warmup:
            record.actions.append(done.actions)
            record.tails_s.append(done.tail_s)
            record.times.append(done.device_time(executor.device_id))
    if on_cuda:
        record.memory = (
            torch.cuda.max_memory_allocated(worker.device),
            torch.cuda.max_memory_reserved(worker.device),
        )
    if executor.times is not None:
        record.operator_s, record.operator_host_s = executor.times.drain()
        record.operator_taken_bytes = executor.times.taken_bytes
    for extra in range(job.traced_iterations):
        if extra == 0:
            executor.time_operators()
        _start_together(worker)
        record.traced = executor.run_iteration(job.warmup + job.iterations + extra)
    if executor.times is not None and not record.operator_s:
        record.operator_s, _ = executor.times.drain()
    record.notes = executor.notes()
    return record


def _start_together(worker: Worker) -> None:
    """Collect what the iteration before left, and wait for the other ranks."""
    gc.collect()
    if worker.world_size > 1:
        dist.barrier()


def execute(
    plan: Plan,
    problem: Problem,
    *,
    iterations: int = 5,
    warmup: int = 2,
    device: str = "cpu",
    measure_operators: bool = False,
    timeout_s: float = 600.0,
    port: int | None = None,
    num_threads: int | None = None,
) -> Measurement:
    """Run a plan for real and return what was measured, or that a device had no memory for it.

    Args:
        plan: The plan.
        problem: What it is for; its runtime should be windtunnel-executor or windtunnel-executor-fp32.
        iterations, warmup: Iterations that count, and those before.
        device: ``cpu`` (gloo) or ``cuda`` (nccl).
        measure_operators: Time every operator as well.
        timeout_s: Seconds until the processes are stopped.
        port: Rendezvous port on 127.0.0.1; None for a free one.
        num_threads: Torch's threads per process on the CPU; None shares the cores out.

    Raises:
        ValueError: If the plan is not legal or not executable (says what, and in which stage), there are too few
            devices, or the port is in use.
        launch.WorkerError: If a process fails; names its rank and last error.
    """
    job = make_job(plan, problem, iterations, warmup, device, measure_operators=measure_operators)
    try:
        records = launch(
            run_rank,
            job,
            num_processes=len(job.plan.devices),
            device=device,
            timeout_s=timeout_s,
            port=port,
            num_threads=num_threads,
        )
    except WorkerError as error:
        if isinstance(error.told, OutOfMemoryError):
            return ran_out_of_memory(job, device)
        raise
    return measurement_of(records, job, device)


def make_job(
    plan: Plan,
    problem: Problem,
    iterations: int,
    warmup: int,
    device: str,
    *,
    measure_operators: bool = False,
    traced_iterations: int = 0,
    records_memory: bool = False,
    num_processes: int | None = None,
) -> Job:
    """Return what processes are given, once it is checked; arguments and errors as for :func:`execute`."""
    if iterations < 1 or warmup < 0:
        raise ValueError(f"iterations must be at least 1 and warmup at least 0, got {iterations} and {warmup}")
    canonical = check_executable(plan, problem, device=device, num_processes=num_processes)
    return Job(canonical, problem, iterations, warmup, measure_operators, traced_iterations, records_memory)


def execute_here(
    plan: Plan,
    problem: Problem,
    worker: Worker,
    *,
    iterations: int = 5,
    warmup: int = 2,
    measure_operators: bool = False,
) -> Measurement:
    """Run a plan in processes that are there already (torchrun's); every one of them must call this.

    Args:
        plan, problem, iterations, warmup, measure_operators: As for :func:`execute`.
        worker: This process, from ``launch.worker_from_environment``.

    Returns:
        The measurement, on every rank.

    Raises:
        ValueError: As for :func:`execute`; also if the plan needs more processes than there are.
    """
    device = worker.device.type
    job = make_job(
        plan, problem, iterations, warmup, device,
        measure_operators=measure_operators, num_processes=worker.world_size,
    )  # fmt: skip
    own = run_rank(worker, job)
    records: list[RankRecord] = [own]
    if worker.world_size > 1:
        gathered: list[Any] = [None] * worker.world_size
        dist.all_gather_object(gathered, own)
        records = gathered
    return measurement_of(records, job, device)


def measurement_of(records: list[RankRecord], job: Job, device: str) -> Measurement:
    """Return the measurement that the records of all ranks make up."""
    working = [record for record in records if record.device >= 0]
    if any(record.out_of_memory for record in working):
        return ran_out_of_memory(job, device)
    versions = {"torch": str(torch.__version__)}
    if device == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(0)}
    return combine(
        working,
        warmup=job.warmup,
        num_stages=len(job.plan.stages),
        global_batch=job.problem.global_batch,
        tokens_per_sample=job.problem.workload.tokens_per_sample,
        num_devices=len(job.plan.devices),
        plan_hash=job.plan.canonical_hash(job.problem.workload),
        device_type=device,
        backend=backend_of(device) if len(working) > 1 else "none",
        versions=versions,
    )


def ran_out_of_memory(job: Job, device: str) -> Measurement:
    """Return the measurement of a run that a device had no memory for."""
    stages = len(job.plan.stages)
    return Measurement(
        iteration_time_s=0.0,
        iteration_samples_s=(),
        global_batch=job.problem.global_batch,
        tokens_per_sample=job.problem.workload.tokens_per_sample,
        num_devices=len(job.plan.devices),
        stage_forward_s=(0.0,) * stages,
        stage_backward_s=(0.0,) * stages,
        optimizer_s=0.0,
        losses=(),
        memory=(),
        actions=(),
        operator_s={},
        plan_hash=job.plan.canonical_hash(job.problem.workload),
        device_type=device,
        backend="none",
        versions={"torch": str(torch.__version__)},
        out_of_memory=True,
    )
