"""Seconds of an operator's kernels and of the host that launches them, apart, measured inside the executor on a GPU.

Before every operator the GPU is made to wait until the host has launched all of it. So events around its kernels have
no gaps in which the GPU waits for the host, and the host's clock has none in which it waits for the GPU. What an
operator takes of the allocator is looked at before times count, since asking costs the host.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from validation.measurement import Samples
from validation.timers import Clock, OperatorTimes

FIRST_WAIT_S = 3e-3
"""Of the GPU where nothing is known yet of what follows."""
MARGIN = 1.5
"""The GPU waits so many times what the host took the last time; where that was too short, a sample says so."""
LEAST_WAIT_S = 1e-4
"""More than a launch and an event take."""
CYCLES_PER_S = 2e9
"""Of a GPU's clock, about: the slower it is the longer it waits, which does no harm."""

_Place = tuple[Hashable, int]
"""A pass, and which piece of it."""


@dataclass(frozen=True)
class _Piece:
    start: Any
    end: Any
    host_s: float
    was_held: bool


@dataclass
class _Sample:
    phase: str
    index: int
    pieces: list[_Piece] = field(default_factory=list)

    def device_s(self, clock: Clock) -> float:
        return sum(clock.seconds(piece.start, piece.end) for piece in self.pieces)

    @property
    def host_s(self) -> float:
        return sum(piece.host_s for piece in self.pieces)

    @property
    def was_held(self) -> bool:
        return all(piece.was_held for piece in self.pieces)


class HeldBackTimes(OperatorTimes):
    """Times of operators with the GPU held back: what a pass takes between two operators counts with the second.

    Collectives count with none, nor do transfers between passes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(Clock(device))
        self.device = device
        self._expected_s: dict[_Place, float] = {}
        self._samples: list[_Sample] = []
        self._pieces: list[_Piece] = []
        self._open: tuple[Any, float] | None = None
        self._pass: Hashable = None
        self._number = 0
        self._counts_bytes = True

    @contextmanager
    def one_pass(self, key: Hashable) -> Iterator[None]:
        """Time the operators of a pass; equal passes have equal keys."""
        self._pass, self._number = key, 0
        first = len(self._samples)
        self._begin()
        yield
        self._end()
        if len(self._samples) > first:
            self._samples[-1].pieces += self._pieces
        self._pieces = []

    @contextmanager
    def measure(self, phase: str, index: int) -> Iterator[None]:
        """Time the body, and what came before it since the last."""
        with self._counted(phase, index):
            yield
        self._end()
        self._samples.append(_Sample(phase, index, self._pieces))
        self._pieces = []
        self._begin()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the body out, inside a pass or not."""
        is_inside = self._open is not None
        if is_inside:
            self._end()
        yield
        if is_inside:
            self._begin()

    def drain(self) -> tuple[Samples, Samples]:
        """Return the samples since the last call, in seconds: of the kernels, and of the host.

        Kernels that the GPU was not held back for long enough count only where an operator has no others. Bytes are
        counted no more from the first call on.
        """
        self._counts_bytes = False
        host: Samples = {}
        held: Samples = {}
        others: Samples = {}
        for each in self._samples:
            key = each.phase, each.index
            host.setdefault(key, []).append(each.host_s)
            (held if each.was_held else others).setdefault(key, []).append(each.device_s(self.clock))
        self._samples.clear()
        return others | held, host

    @contextmanager
    def _counted(self, phase: str, index: int) -> Iterator[None]:
        """Note what the body takes of the allocator, which the host alone knows: nothing is waited for."""
        if not self._counts_bytes:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        taken = torch.cuda.max_memory_allocated(self.device) - before
        self.taken_bytes[phase, index] = max(taken, self.taken_bytes.get((phase, index), 0))

    def _begin(self) -> None:
        make: Any = torch.cuda.Event  # untyped in torch
        wait: Any = torch.cuda._sleep
        known_s = self._expected_s.get((self._pass, self._number))
        wait_s = FIRST_WAIT_S if known_s is None else max(LEAST_WAIT_S, MARGIN * known_s)
        torch.cuda.synchronize(self.device)
        wait(int(wait_s * CYCLES_PER_S))
        start = make(enable_timing=True)
        start.record()
        self._open = start, time.perf_counter()

    def _end(self) -> None:
        host_end_s = time.perf_counter()
        assert self._open is not None
        start, host_start_s = self._open
        was_held = not start.query()
        self._pieces.append(_Piece(start, self.clock.mark(), host_end_s - host_start_s, was_held))
        place, self._open = (self._pass, self._number), None
        self._expected_s[place] = max(host_end_s - host_start_s, 0.0 if was_held else 2 * FIRST_WAIT_S)
        self._number += 1
