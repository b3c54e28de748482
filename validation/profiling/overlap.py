"""How much computation and communication slow each other: both alone, then together.

On CUDA matrix products run on one stream, and copies or reductions, the kernels that transfers and collectives
consist of, on a second one. On the CPU a matrix product runs beside an all-reduce of two processes over gloo.
A part that ends early runs the rest of its partner alone, so the factors are those of the time both run:
``(t - rest) / alone``, where ``rest`` is what the longer part still does once the shorter has ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from validation.execution.launch import Worker, launch

MATMUL = 4096
COPIED_BYTES = 256 << 20
CPU_MATMUL = 768
CPU_BYTES = 16 << 20
KINDS = ("copy", "reduction")


@dataclass(frozen=True)
class OverlapRow:
    """One pair.

    Attributes:
        kind: ``copy`` or ``reduction`` on CUDA, ``all_reduce`` on the CPU.
        computation_alone_s, communication_alone_s: Seconds of each alone.
        computation_s, communication_s: Seconds of each while the other runs or has run.
        computation_factor, communication_factor: Slowdown while both run, at least 1.
    """

    kind: str
    computation_alone_s: float
    communication_alone_s: float
    computation_s: float
    communication_s: float
    computation_factor: float
    communication_factor: float

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def overlap_row(
    kind: str, computation_alone_s: float, communication_alone_s: float, computation_s: float, communication_s: float
) -> OverlapRow:
    """Return the factors that four times imply.

    The part that ends first ran beside the other all the time: its factor is time over time alone. Of the other,
    only as much was done meanwhile as it did not do afterwards at full speed.

    >>> row = overlap_row("copy", 1.0, 1.0, 1.5, 1.25)  # the copy ends first; 0.25 of the product is left then
    >>> row.communication_factor, round(row.computation_factor, 3)
    (1.25, 1.667)
    """
    shared_s = min(computation_s, communication_s)

    def factor(alone_s: float, taken_s: float) -> float:
        done_s = alone_s - (taken_s - shared_s)
        return max(1.0, shared_s / done_s) if done_s > 0 else 1.0

    return OverlapRow(
        kind,
        computation_alone_s,
        communication_alone_s,
        computation_s,
        communication_s,
        factor(computation_alone_s, computation_s),
        factor(communication_alone_s, communication_s),
    )


def measure_overlap(*, device: str = "cpu", repeats: int = 9, timeout_s: float = 300.0) -> list[OverlapRow]:
    """Measure the slowdown on this machine.

    Args:
        device: ``cpu`` (two processes over gloo) or ``cuda`` (one GPU, two streams).
        repeats: Samples; the medians count.
        timeout_s: Seconds until the processes are stopped.
    """
    if device == "cuda":
        rows: list[OverlapRow] = launch(_on_cuda, repeats, num_processes=1, device=device, timeout_s=timeout_s)[0]
        return rows
    by_rank: list[list[OverlapRow]] = launch(_on_cpu, repeats, num_processes=2, timeout_s=timeout_s, num_threads=1)
    return by_rank[0]


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples[2:]) if len(samples) > 3 else statistics.median(samples)


def _on_cpu(worker: Worker, repeats: int) -> list[OverlapRow]:
    left = torch.rand(CPU_MATMUL, CPU_MATMUL)
    buffer = torch.zeros(CPU_BYTES // 4)

    def compute(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.matmul(left, left)
        return time.perf_counter() - start

    def communicate() -> float:
        start = time.perf_counter()
        dist.all_reduce(buffer)
        return time.perf_counter() - start

    def sampled(work: Callable[[], float]) -> list[float]:
        samples = []
        for _ in range(repeats + 2):
            dist.barrier()
            samples.append(work())
        return samples

    communication_alone_s = _median(sampled(communicate))
    one_s = _median(sampled(lambda: compute(1)))
    agreed = torch.tensor([float(max(2, round(2 * communication_alone_s / one_s)))])
    dist.broadcast(agreed, 0)
    count = int(agreed)
    computation_alone_s = _median(sampled(lambda: compute(count)))
    together: list[tuple[float, float]] = []
    for _ in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        handle: Any = dist.all_reduce(buffer, async_op=True)
        ended = None
        for _ in range(count):
            torch.matmul(left, left)
            if ended is None and handle.is_completed():
                ended = time.perf_counter() - start
        computation_s = time.perf_counter() - start
        handle.wait()
        together.append((computation_s, ended if ended is not None else time.perf_counter() - start))
    computation_s, communication_s = (_median(samples) for samples in zip(*together, strict=True))
    return [overlap_row("all_reduce", computation_alone_s, communication_alone_s, computation_s, communication_s)]


def _on_cuda(worker: Worker, repeats: int) -> list[OverlapRow]:
    device = worker.device
    left = torch.rand(MATMUL, MATMUL, device=device, dtype=torch.bfloat16)
    source = torch.zeros(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    work: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "reduction": lambda: target.add_(source),
    }
    return [_pair_on_cuda(kind, lambda: torch.matmul(left, left), work[kind], device, repeats) for kind in KINDS]


def _pair_on_cuda(
    kind: str, compute: Callable[[], Any], communicate: Callable[[], Any], device: torch.device, repeats: int
) -> OverlapRow:
    make: Any = torch.cuda.Stream  # untyped in torch
    streams: list[Any] = [make(device), make(device)]
    counts = [8, 8]

    def run(parts: Sequence[int]) -> list[float]:
        """Return seconds of each part from a common start, by events on its own stream."""
        torch.cuda.synchronize(device)
        event: Any = torch.cuda.Event
        start = event(enable_timing=True)
        start.record()
        ends = {}
        for part in parts:
            with torch.cuda.stream(streams[part]):
                streams[part].wait_event(start)
                for _ in range(counts[part]):
                    (compute, communicate)[part]()
                ends[part] = event(enable_timing=True)
                ends[part].record()
        torch.cuda.synchronize(device)
        return [float(start.elapsed_time(ends[part])) * 1e-3 for part in parts]

    def medians(parts: Sequence[int]) -> list[float]:
        samples = [run(parts) for _ in range(repeats + 2)]
        return [_median(values) for values in zip(*samples, strict=True)]

    # Equal lengths, so that both run nearly all the time.
    first, second = medians([0])[0], medians([1])[0]
    if first < second:
        counts[0] = max(1, round(counts[0] * second / first))
    else:
        counts[1] = max(1, round(counts[1] * first / second))
    computation_alone_s, communication_alone_s = medians([0])[0], medians([1])[0]
    computation_s, communication_s = medians([0, 1])
    return overlap_row(kind, computation_alone_s, communication_alone_s, computation_s, communication_s)
