"""Seconds of one collective or transfer, as the executor meets it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

IN_A_ROW = 10
"""Collectives between two events on a GPU, so that ranks that begin apart wait once for ten."""

ALONE_BYTES = 1 << 28
"""From here on one takes milliseconds, beside which that wait is nothing; ten would take seconds over PCIe."""

AHEAD_CYCLES = 4_000_000
"""Some 2 ms in which the GPU does nothing: the host has launched ten collectives by then (20 to 50 us each)."""


def seconds_of(work: Callable[[], object], device: torch.device, num_bytes: int) -> float:
    """Return what ``work`` on a message takes: on the CPU once; on a GPU the mean of several in a row, by events.

    In an iteration the host is ahead of the GPU, so what it takes to launch does not count there: timed by the host's
    clock, launch and synchronisation would be most of a small collective.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    make: Any = torch.cuda.Event  # untyped in torch
    start, end = make(enable_timing=True), make(enable_timing=True)
    wait: Any = torch.cuda._sleep
    wait(AHEAD_CYCLES)
    start.record()
    count = 1 if num_bytes >= ALONE_BYTES else IN_A_ROW
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) * 1e-3 / count
