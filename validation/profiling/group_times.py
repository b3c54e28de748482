"""Times of collectives over groups of several sizes, all groups of a size at once, and of sends between neighbours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hardware_models.collective_table import Row
from hardware_models.group_shapes import GroupShape
from validation.execution.groups import all_gather_flat, reduce_scatter_flat
from validation.execution.launch import Worker, launch
from validation.profiling.sampling import is_enough
from validation.profiling.stopwatch import seconds_of

SIZES = (1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)
"""Bytes, as the collective counts them."""

LARGE_SIZES = (1 << 26, 1 << 28, 1 << 30)
"""On GPUs besides: the gradients of a stage are reduced at once, and a link reaches its rate with 100 MB and more."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "transfer_intra_node")
WARMUP = 2


@dataclass(frozen=True)
class GroupRequest:
    """What the processes measure.

    Attributes:
        group_size: Ranks of a group; the processes are cut into as many as fit.
        sizes: Message sizes in bytes.
        cap: Samples per size at most.
        spread: Wanted (``validation.profiling.sampling``).
    """

    group_size: int
    sizes: tuple[int, ...]
    cap: int
    spread: float


def measure_groups(
    num_processes: int,
    group_size: int,
    *,
    sizes: Sequence[int] = SIZES,
    cap: int = 25,
    spread: float = 0.05,
    device: str = "cpu",
    timeout_s: float = 600.0,
) -> tuple[list[Row], list[str]]:
    """Measure all collectives over groups of one size.

    Args:
        num_processes: Processes on this machine.
        group_size: At least 2, at most ``num_processes``; groups are neighbours and run at once.
        sizes: Message sizes in bytes.
        cap, spread: Samples per size at most, and when fewer do.
        device: ``cpu`` (gloo) or ``cuda`` (nccl).
        timeout_s: Seconds until the processes are stopped.

    Returns:
        Rows with the number of groups that ran at once, and what the backend cannot do.

    Raises:
        ValueError: If no group fits.
        launch.WorkerError: If a process fails.
    """
    if not 2 <= group_size <= num_processes:
        raise ValueError(f"a group must have 2 to {num_processes} processes, got {group_size}")
    request = GroupRequest(group_size, tuple(sizes), cap, spread)
    used = num_processes // group_size * group_size
    found: list[tuple[list[Row], list[str]]] = launch(
        _measure, request, num_processes=used, device=device, timeout_s=timeout_s, num_threads=1
    )
    rows, notes = found[0]
    return _no_smaller_is_slower(rows), notes


def _no_smaller_is_slower(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, a time lowered where a larger message took less: what came in between was noise."""
    return [
        (kind, shape, size, min(row[3] for row in rows if row[:2] == (kind, shape) and row[2] >= size))
        for kind, shape, size, _ in rows
    ]


def _measure(worker: Worker, request: GroupRequest) -> tuple[list[Row], list[str]]:
    n = request.group_size
    starts = range(0, worker.world_size, n)
    every: list[Any] = [dist.new_group(list(range(start, start + n))) for start in starts]
    own, first = every[worker.rank // n], worker.rank // n * n
    shape = GroupShape(n, groups_per_node=len(every))
    pairs = GroupShape(2, groups_per_node=len(every))
    rows: list[Row] = []
    notes: list[str] = []
    for kind in KINDS:
        for size in request.sizes:
            try:
                work = _work(kind, size, worker, own, first, n)
                seconds, _ = _seconds(work, size, worker, request)
            except RuntimeError as error:
                if "support" not in str(error).lower():
                    raise
                notes.append(f"{kind} over {n} ranks is not supported by the backend")
                break
            is_send = kind == "transfer_intra_node"
            rows.append((kind, pairs if is_send else shape, float(size), seconds / 2 if is_send else seconds))
    return rows, notes


def _work(kind: str, size: int, worker: Worker, group: Any, first: int, n: int) -> Callable[[], None]:
    count = max(1, size // 4 // n) * n
    whole = torch.zeros(count, device=worker.device)
    part = torch.zeros(count // n, device=worker.device)
    other = torch.empty_like(whole)
    place = worker.rank - first

    def send_and_back() -> None:
        if place == 0:
            dist.send(whole, first + 1, group=group)
            dist.recv(whole, first + 1, group=group)
        elif place == 1:
            dist.recv(whole, first, group=group)
            dist.send(whole, first, group=group)

    table: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_flat(whole, part, group=group),
        "reduce_scatter": lambda: reduce_scatter_flat(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, first, group=group),
        "transfer_intra_node": send_and_back,
    }
    return table[kind]


def _seconds(work: Callable[[], None], size: int, worker: Worker, request: GroupRequest) -> tuple[float, int]:
    """Return the median over samples of the slowest rank's time, and the number of samples.

    The slowest rank's time is agreed on, so all ranks stop together.
    """
    samples: list[float] = []
    while len(samples) < WARMUP or not is_enough(samples[WARMUP:], cap=request.cap, wanted=request.spread):
        dist.barrier()
        taken = torch.tensor([seconds_of(work, worker.device, size)], dtype=torch.float64, device=worker.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        samples.append(float(taken))
    return statistics.median(samples[WARMUP:]), len(samples) - WARMUP
