"""Clocks of the executor: passes, operators and collectives, timed where they run."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from validation.measurement import COLLECTIVE, Samples, TimedSpan


class Clock:
    """Marks moments: ``perf_counter`` on the CPU, events on CUDA, read once the iteration is over."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return now."""
        if not self.on_cuda:
            return time.perf_counter()
        make: Any = torch.cuda.Event  # untyped in torch
        event = make(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks; on CUDA after a synchronisation."""
        return float(start.elapsed_time(end)) * 1e-3 if self.on_cuda else float(end - start)


class OperatorTimes:
    """Times of single operators, measured inside the executor."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.taken_bytes: dict[tuple[str, int], int] = {}
        """By phase and operator, what the allocator held at most meanwhile beyond what it held before; on CUDA."""
        self._marks: list[tuple[str, int, Any, Any]] = []

    @contextmanager
    def measure(self, phase: str, index: int) -> Iterator[None]:
        """Time the body."""
        start = self.clock.mark()
        yield
        self._marks.append((phase, index, start, self.clock.mark()))

    def spans(self, rank: int, start: Any) -> list[TimedSpan]:
        """Return what was timed since the mark ``start``, without forgetting it."""
        since = self.clock.seconds
        return [
            TimedSpan(rank, phase, index, "", since(start, began), since(start, ended))
            for phase, index, began, ended in self._marks
        ]

    def one_pass(self, key: Hashable) -> AbstractContextManager[None]:
        """Say that the body is a pass; equal passes have equal keys."""
        return nullcontext()

    def outside(self) -> AbstractContextManager[None]:
        """Say that the body is a collective."""
        return nullcontext()

    def drain(self) -> tuple[Samples, Samples]:
        """Return the samples since the last call, in seconds, and those of the host where they are apart: nowhere."""
        found: Samples = {}
        for phase, index, start, end in self._marks:
            found.setdefault((phase, index), []).append(self.clock.seconds(start, end))
        self._marks.clear()
        return found, {}


class CollectiveTimes:
    """What a rank waits for its collectives (on CUDA: its compute stream)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._marks: list[tuple[str, str, Any, Any]] = []

    @contextmanager
    def measure(self, name: str, phase: str = COLLECTIVE) -> Iterator[None]:
        """Time the body."""
        start = self.clock.mark()
        yield
        self._marks.append((phase, name, start, self.clock.mark()))

    def drain(self, rank: int, start: Any) -> list[TimedSpan]:
        """Return what was timed since the mark ``start``, and forget it."""
        since = self.clock.seconds
        found = [
            TimedSpan(rank, phase, -1, name, since(start, began), since(start, ended))
            for phase, name, began, ended in self._marks
        ]
        self._marks.clear()
        return found
