"""What the host spends on a kernel launch."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from validation.execution.launch import Worker, launch
from validation.profiling.sampling import is_enough, spread

LAUNCHES = 2000
"""Kernels in a row, so that the queue's end does not count."""


@dataclass(frozen=True)
class HostTimes:
    """Launch cost.

    Attributes:
        launch_s: Host seconds per kernel: of an addition of one element, without waiting for it.
        repeats, spread: Samples behind it.
    """

    launch_s: float
    repeats: int
    spread: float


def measure_host(*, device: str = "cpu", cap: int = 25, timeout_s: float = 300.0) -> HostTimes:
    """Measure what a launch costs the host; on the CPU, where there is no queue, what calling an operator costs."""
    found: HostTimes = launch(_host, cap, num_processes=1, device=device, timeout_s=timeout_s, num_threads=1)[0]
    return found


def _host(worker: Worker, cap: int) -> HostTimes:
    one = torch.zeros(1, device=worker.device)
    samples: list[float] = []
    with torch.no_grad():
        while not is_enough(samples[1:], cap=cap):
            if worker.device.type == "cuda":
                torch.cuda.synchronize(worker.device)
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                one.add_(1.0)
            samples.append((time.perf_counter() - began) / LAUNCHES)
    kept = samples[1:]
    return HostTimes(statistics.median(kept), len(kept), spread(kept))
