"""What an execution returns: the fields of a simulation, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class TimedAction:
    """One action of a schedule on one rank.

    Attributes:
        rank: Process.
        kind: F, B, I or W.
        stage, microbatch: Of the action.
        start_s, end_s: Seconds since the iteration's start; what it waited for had arrived at the start.
        wait_s: Seconds it (on CUDA the GPU) had waited for a transfer before.
    """

    rank: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    wait_s: float


@dataclass(frozen=True)
class RankMemory:
    """Memory of one device; zeros on the CPU, where torch does not count.

    Attributes:
        device: Device id of the plan.
        peak_allocated_bytes, peak_reserved_bytes: Over the measured iterations.
    """

    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One executed plan; fields are named as in ``simulator.result.SimulationResult``.

    Attributes:
        iteration_time_s: Median over the measured iterations.
        iteration_samples_s: All of them: the slowest rank's time from a barrier to its last action.
        global_batch, tokens_per_sample, num_devices: Of the problem and the plan.
        stage_forward_s, stage_backward_s: Median seconds of one microbatch per stage (slowest rank); a split
            backward is the sum of its halves.
        optimizer_s: Median seconds from the last action's end to the end of the iteration, slowest rank.
        losses: Mean loss of every iteration, warm-up included.
        memory: Per device.
        actions: Of the last iteration.
        operator_s: ``(phase, operator)`` to median seconds, where operator times were asked for.
        plan_hash: Canonical hash of the plan.
        device_type, backend, versions: What it ran on.
        notes: Where execution does more than the plan's derivation says, and other things to know.
    """

    iteration_time_s: float
    iteration_samples_s: tuple[float, ...]
    global_batch: int
    tokens_per_sample: int
    num_devices: int
    stage_forward_s: tuple[float, ...]
    stage_backward_s: tuple[float, ...]
    optimizer_s: float
    losses: tuple[float, ...]
    memory: tuple[RankMemory, ...]
    actions: tuple[TimedAction, ...] = field(repr=False)
    operator_s: Mapping[tuple[str, int], float] = field(repr=False)
    plan_hash: str
    device_type: str
    backend: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices together."""
        return self.global_batch / self.iteration_time_s

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens per second and device."""
        return self.samples_per_s * self.tokens_per_sample / self.num_devices

    @property
    def peak_allocated_bytes(self) -> int:
        """Live bytes at the peak of the fullest device; 0 on the CPU."""
        return max((memory.peak_allocated_bytes for memory in self.memory), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Bytes the caching allocator of the fullest device took; 0 on the CPU."""
        return max((memory.peak_reserved_bytes for memory in self.memory), default=0)

    @property
    def spread(self) -> float:
        """Largest less smallest iteration time, as a share of the median."""
        return (max(self.iteration_samples_s) - min(self.iteration_samples_s)) / self.iteration_time_s

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data with units in the keys."""
        mapping = asdict(self)
        mapping["operator_s"] = [
            {"phase": phase, "operator": index, "seconds": seconds}
            for (phase, index), seconds in sorted(self.operator_s.items())
        ]
        mapping["peak_allocated_bytes"] = self.peak_allocated_bytes
        mapping["peak_reserved_bytes"] = self.peak_reserved_bytes
        return mapping


@dataclass
class RankRecord:
    """What one rank measured.

    Attributes:
        rank, device: Process and device id of the plan.
        iterations_s: Seconds of every iteration, warm-up included.
        actions: Of every measured iteration.
        tails_s: From the last action's end to the end of the iteration.
        losses: This rank's share of the loss, per iteration.
        memory: Peaks.
        operator_s: Samples by phase and operator.
        notes: Things to know.
    """

    rank: int
    device: int
    iterations_s: list[float] = field(default_factory=list)
    actions: list[list[TimedAction]] = field(default_factory=list)
    tails_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    operator_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
        self._marks: list[tuple[str, int, Any, Any]] = []

    @contextmanager
    def measure(self, phase: str, index: int) -> Iterator[None]:
        """Time the body."""
        start = self.clock.mark()
        yield
        self._marks.append((phase, index, start, self.clock.mark()))

    def drain(self) -> dict[tuple[str, int], list[float]]:
        """Return the samples since the last call, in seconds."""
        found: dict[tuple[str, int], list[float]] = {}
        for phase, index, start, end in self._marks:
            found.setdefault((phase, index), []).append(self.clock.seconds(start, end))
        self._marks.clear()
        return found


def combine(records: list[RankRecord], *, warmup: int, num_stages: int, **known: Any) -> Measurement:
    """Return the measurement that all ranks' records make up.

    Args:
        records: One per rank that had work.
        warmup: Iterations that do not count.
        num_stages: Of the plan.
        known: Fields that no rank measures.
    """
    samples = tuple(max(values) for values in zip(*(record.iterations_s for record in records), strict=True))
    forward: list[list[float]] = [[] for _ in range(num_stages)]
    backward: list[list[float]] = [[] for _ in range(num_stages)]
    for record in records:
        for stage in range(num_stages):
            own = [
                (action.kind, action.end_s - action.start_s)
                for actions in record.actions
                for action in actions
                if action.stage == stage
            ]
            by_kind = {kind: [seconds for word, seconds in own if word == kind] for kind in "FBIW"}
            if by_kind["F"]:
                forward[stage].append(statistics.median(by_kind["F"]))
                backward[stage].append(sum(statistics.median(by_kind[kind]) for kind in "BIW" if by_kind[kind]))
    operators: dict[tuple[str, int], list[float]] = {}
    for record in records:
        for key, seconds in record.operator_s.items():
            operators.setdefault(key, []).append(statistics.median(seconds))
    return Measurement(
        iteration_time_s=statistics.median(samples[warmup:]),
        iteration_samples_s=samples[warmup:],
        stage_forward_s=tuple(max(values, default=0.0) for values in forward),
        stage_backward_s=tuple(max(values, default=0.0) for values in backward),
        optimizer_s=max(statistics.median(record.tails_s) for record in records),
        losses=tuple(sum(values) for values in zip(*(record.losses for record in records), strict=True)),
        memory=tuple(RankMemory(record.device, *record.memory) for record in records),
        actions=tuple(action for record in records for action in (record.actions or [[]])[-1]),
        operator_s={key: max(values) for key, values in operators.items()},
        notes=tuple(dict.fromkeys(note for record in records for note in record.notes)),
        **known,
    )
