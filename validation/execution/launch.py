"""Starts one process per rank and brings back what each returns; none is left behind, whatever happens.

They are forked from a server that has loaded torch and used nothing of it: the first takes seconds, the others a tenth.
Rendezvous is a key-value store of the parent on 127.0.0.1, on a free port unless one is given. Under torchrun
the processes are there already: :func:`worker_from_environment`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from datafiles.words import counted
from validation.execution.groups import GroupPool
from validation.execution.host_memory import keep_freed_memory

_TCPStore: Any = vars(dist)["TCPStore"]  # torch does not export it for type checkers
HOST = "127.0.0.1"
GRACE_S = 2.0
"""After a first failure the others may still say why they stopped; the cause is the one that is no echo."""

ECHOES = ("Connection closed by peer", "Connection reset by peer", "Socket Timeout", "Broken pipe", "Timed out waiting")
"""What the survivors say when another rank died."""


class ToldError(RuntimeError):
    """An error in a process that its parent may know what to do about; its arguments must be picklable."""


class WorkerError(RuntimeError):
    """A process failed; the message names its rank and its last error.

    Attributes:
        told: What it told its parent, if that was the cause.
    """

    def __init__(self, message: str, told: ToldError | None = None) -> None:
        super().__init__(message)
        self.told = told


@dataclass
class Worker:
    """A process among others.

    Attributes:
        rank, world_size: Its number, and how many there are.
        pool: Communicators, kept from plan to plan.
        device: Where its tensors live.
        progress: Shared numbers that say what it is doing (iteration, action kind, stage, microbatch).
        job: Number of the job that it runs, of several.
    """

    rank: int
    world_size: int
    pool: GroupPool
    device: torch.device
    progress: Any = field(default_factory=lambda: [-1, 0, -1, -1])
    job: int = 0

    def doing(self, iteration: int, kind: str, stage: int, microbatch: int) -> None:
        """Note what this process does now, for the message should it die."""
        self.progress[0], self.progress[1], self.progress[2], self.progress[3] = iteration, ord(kind), stage, microbatch


Target = Callable[[Worker, Any], Any]
"""What a process runs; must be importable, and its result picklable."""


@dataclass(frozen=True)
class _Settings:
    """What every process is told besides its rank."""

    world_size: int
    port: int
    device: str
    timeout_s: float
    num_threads: int
    environment: Mapping[str, str]


def backend_of(device: str) -> str:
    """Return the backend for a device type: gloo on the CPU, nccl on CUDA."""
    return "nccl" if device == "cuda" else "gloo"


def check_devices(num_processes: int, device: str) -> None:
    """Refuse more processes on CUDA than this machine has GPUs.

    Raises:
        ValueError: If there are fewer.
    """
    if device == "cuda" and torch.cuda.device_count() < num_processes:
        raise ValueError(
            f"{counted(num_processes, 'process on cuda needs', 'processes on cuda need')} "
            f"{counted(num_processes, 'GPU')}, got {torch.cuda.device_count()}; use a plan for fewer devices, or "
            "device cpu"
        )


def launch(
    target: Target,
    argument: Any,
    *,
    num_processes: int,
    device: str = "cpu",
    timeout_s: float = 600.0,
    port: int | None = None,
    num_threads: int | None = None,
) -> list[Any]:
    """Run ``target(worker, argument)`` in new processes and return what each gave, by rank.

    Args:
        target: Importable function.
        argument: Passed to every process.
        num_processes: Ranks; one alone has no process group.
        device: ``cpu`` or ``cuda`` (rank r uses GPU r).
        timeout_s: Seconds until all are stopped.
        port: Rendezvous port; None for a free one.
        num_threads: Torch's threads per process; None shares the cores out.

    Raises:
        ValueError: If the port is in use, or there are fewer GPUs than ranks.
        WorkerError: If a process fails, dies, or takes too long.
    """
    check_devices(num_processes, device)
    listener = _listen(port)
    chosen = int(listener.getsockname()[1])
    store = (
        _TCPStore(HOST, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        if num_processes > 1
        else None
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["validation.profiling.jobs"])
    settings = _Settings(
        num_processes, chosen, device, timeout_s, num_threads or max(1, (os.cpu_count() or 1) // num_processes),
        dict(os.environ),
    )  # fmt: skip
    # By value: torch would hand tensors over as open files, of which a fork server takes 250.
    work = pickle.dumps((target, argument))
    progress = [context.RawArray("l", [-1, 0, -1, -1]) for _ in range(num_processes)]
    processes, connections = [], []
    try:
        for rank in range(num_processes):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, settings, work, theirs, progress[rank]),
                daemon=True,
                name=f"windtunnel rank {rank}",
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return _collect(processes, connections, progress, timeout_s)
    finally:
        _stop(processes)
        for connection in connections:
            connection.close()
        del store


def _listen(port: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((HOST, port or 0))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"port must be free for the rendezvous on {HOST}, got {port}: {error.strerror}; leave port out to take a "
            "free one"
        ) from None
    listener.listen(128)
    return listener


def _stop(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _collect(
    processes: Sequence[Any], connections: Sequence[Connection], progress: Sequence[Any], timeout_s: float
) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    told: dict[int, ToldError] = {}
    deadline = time.monotonic() + timeout_s
    open_ranks = set(range(len(processes)))
    while open_ranks and time.monotonic() < deadline:
        wait([connections[rank] for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
        for rank in sorted(open_ranks):
            if not connections[rank].poll():
                continue
            open_ranks.discard(rank)
            _read(rank, processes[rank], connections[rank], results, errors, told)
        if errors:
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if errors:
        cause = min(told) if told else _cause(errors)
        raise WorkerError(_failure(cause, errors, progress, len(processes)), told.get(cause))
    if open_ranks:
        late = ", ".join(f"rank {rank} ({_doing(progress[rank])})" for rank in sorted(open_ranks))
        raise WorkerError(f"no answer within {timeout_s:g} s from {late}; {_stopped(len(processes))}")
    return [results[rank] for rank in range(len(processes))]


def _read(
    rank: int,
    process: Any,
    connection: Connection,
    results: dict[int, Any],
    errors: dict[int, str],
    told: dict[int, ToldError],
) -> None:
    try:
        word, value, more = connection.recv()
    except (EOFError, OSError):
        process.join(GRACE_S)
        errors[rank] = _death(process.exitcode)
        return
    if word == "result":
        results[rank] = value
    else:
        errors[rank] = value
        if more is not None:
            told[rank] = more


def _death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} without a word"


def _cause(errors: dict[int, str]) -> int:
    """Return the rank that failed first: a death, else an error that is no echo of another rank's."""

    def rank_first(rank: int) -> tuple[bool, bool, int]:
        text = errors[rank]
        is_death = text.startswith(("killed by", "ended with"))
        return not is_death, any(echo in text for echo in ECHOES), rank

    return min(errors, key=rank_first)


def _failure(cause: int, errors: dict[int, str], progress: Sequence[Any], num_processes: int) -> str:
    lines = errors[cause].strip().splitlines()
    others = [f"rank {rank}: {errors[rank].strip().splitlines()[-1]}" for rank in sorted(errors) if rank != cause]
    text = f"rank {cause} of {num_processes} failed at {_doing(progress[cause])}: {lines[-1]}"
    if len(lines) > 1:
        text += "\n" + "\n".join(lines)
    if others:
        text += "\nthen " + "; ".join(others)
    return f"{text}\n{_stopped(num_processes)}"


def _stopped(num_processes: int) -> str:
    return "the process was stopped" if num_processes == 1 else f"all {num_processes} processes were stopped"


def _doing(progress: Any) -> str:
    iteration, kind, stage, microbatch = progress
    if iteration < 0:
        return "start-up"
    return f"iteration {iteration}, {chr(kind)}(stage {stage}, microbatch {microbatch})"


def _child(rank: int, settings: _Settings, work: bytes, connection: Connection, progress: Any) -> None:
    _die_with_parent()
    os.environ.clear()  # the server's, of when it was started
    os.environ.update(settings.environment)
    world_size, device, timeout_s = settings.world_size, settings.device, settings.timeout_s
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(settings.num_threads)
    try:
        chosen = torch.device("cpu")
        if device == "cuda":
            chosen = torch.device("cuda", rank)
            torch.cuda.set_device(chosen)
        else:
            keep_freed_memory()
        backend = None
        if world_size > 1:
            backend = backend_of(device)
            limit = timedelta(seconds=timeout_s)
            store = _TCPStore(HOST, settings.port, is_master=False, timeout=limit)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        pool = GroupPool(rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)
        target, argument = pickle.loads(work)
        result = target(Worker(rank, world_size, pool, chosen, progress), argument)
        connection.send(("result", result, None))
    except BaseException as error:
        connection.send(("error", traceback.format_exc(), error if isinstance(error, ToldError) else None))
        connection.close()
        # Leave at once: a process group whose peers are gone may hang when it is taken down.
        os._exit(1)
    connection.close()
    leave_group()


def leave_group() -> None:
    """Take the process group down when every process has come so far; nothing where there is none.

    A process that ends with its group up may be aborted, since the group's threads still run.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _die_with_parent() -> None:
    """End this process when its parent is gone, however that went."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def worker_from_environment(device: str, *, timeout_s: float = 600.0) -> Worker:
    """Return this process as torchrun started it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    Raises:
        ValueError: If torchrun did not start it.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError("RANK and WORLD_SIZE must be set, as torchrun does; or let execute() start the processes")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = torch.device("cpu")
    if device == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(chosen)
    else:
        keep_freed_memory()
    backend = None
    if world_size > 1:
        backend = backend_of(device)
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    pool = GroupPool(rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)
    return Worker(rank, world_size, pool, chosen)
