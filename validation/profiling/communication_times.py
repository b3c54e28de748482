"""Times of transfers and collectives between processes of this machine, as a small table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from validation.execution.groups import all_gather_flat, reduce_scatter_flat
from validation.execution.launch import Worker, launch
from validation.profiling.group_times import LARGE_SIZES
from validation.profiling.stopwatch import seconds_of

SIZES = (256, 4096, 65536, 524288, 4194304, 16777216)
"""Bytes."""

LARGE = 1_000_000
"""Smaller messages are repeated more often."""

Row = tuple[str, int, float, float]
"""``(collective, group size, bytes, seconds)``, as ``hardware_models.collective_table`` takes them."""


@dataclass(frozen=True)
class _Request:
    sizes: tuple[int, ...]
    repeats: int


def measure_communication(
    num_processes: int = 2,
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = 9,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> list[Row]:
    """Measure transfers between two processes and collectives over all of them.

    Args:
        num_processes: At least 2.
        sizes: Message sizes in bytes, multiples of 4; None for ``SIZES``, on CUDA with ``LARGE_SIZES``.
        repeats: Samples per size; the median counts.
        device: ``cpu`` (gloo) or ``cuda`` (nccl).
        timeout_s: Seconds until the processes are stopped.
    """
    if num_processes < 2:
        raise ValueError(f"communication needs at least 2 processes, got {num_processes}")
    if sizes is None:
        sizes = (*SIZES, *LARGE_SIZES) if device == "cuda" else SIZES
    request = _Request(tuple(sizes), repeats)
    rows: list[list[Row]] = launch(
        _measure, request, num_processes=num_processes, device=device, timeout_s=timeout_s, num_threads=1
    )
    return _no_smaller_is_slower(rows[0])


def _no_smaller_is_slower(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, a time lowered where a larger message took less: what came in between was noise."""
    return [
        (kind, group, size, min(row[3] for row in rows if row[:2] == (kind, group) and row[2] >= size))
        for kind, group, size, _ in rows
    ]


def _measure(worker: Worker, request: _Request) -> list[Row]:
    rows: list[Row] = []
    for size in request.sizes:
        buffer = torch.zeros(max(1, size // 4), device=worker.device)

        def reduce(data: torch.Tensor = buffer) -> None:
            dist.all_reduce(data)

        def round_trip(data: torch.Tensor = buffer) -> None:
            if worker.rank == 0:
                dist.send(data, 1)
                dist.recv(data, 1)
            elif worker.rank == 1:
                dist.recv(data, 0)
                dist.send(data, 0)

        part = torch.zeros(max(1, size // 4 // worker.world_size), device=worker.device)
        whole = part.new_zeros(part.numel() * worker.world_size)

        def gather(part: torch.Tensor = part, whole: torch.Tensor = whole) -> None:
            all_gather_flat(whole, part)

        def scatter(part: torch.Tensor = part, whole: torch.Tensor = whole) -> None:
            reduce_scatter_flat(part, whole)

        repeats = request.repeats * (1 if size >= LARGE else 4)
        for kind, work in (("all_reduce", reduce), ("all_gather", gather), ("reduce_scatter", scatter)):
            rows.append((kind, worker.world_size, float(size), _median_s(work, size, repeats, worker)))
        rows.append(("transfer_intra_node", 2, float(size), _median_s(round_trip, size, repeats, worker) / 2))
    return rows


def _median_s(work: Callable[[], None], size: int, repeats: int, worker: Worker) -> float:
    samples = []
    for attempt in range(repeats + 2):
        dist.barrier()
        seconds = seconds_of(work, worker.device, size)
        if attempt >= 2:
            samples.append(seconds)
    return statistics.median(samples)
