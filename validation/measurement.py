"""What an execution returns: the fields of a simulation, measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

COLLECTIVE, OPTIMIZER = "collective", "optimizer"
"""Phases of spans that are no operator's."""

BACKWARD, RECOMPUTE = "backward", "recompute"
"""Phases of operators beside those of ``workloads.kinds.base``; halves of a backward pass begin with the first."""

Samples = dict[tuple[str, int], list[float]]
"""Seconds, by phase and operator."""

OF_OPERATORS = {"operator_s": "seconds", "operator_host_s": "seconds", "operator_taken_bytes": "bytes"}
"""Fields of ``Measurement`` that are by phase and operator, and what they hold."""


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
class TimedSpan:
    """One operator or collective on one rank, inside an action or after the last.

    Attributes:
        rank: Process.
        phase: ``forward``, ``backward``, ``backward_input``, ``backward_weight``, ``recompute``, ``collective`` or
            ``optimizer``.
        operator: Index of the operator; -1 for collectives and the optimizer step.
        name: Of the collective; empty for operators.
        start_s, end_s: Seconds since the iteration's start. A collective's span is what the rank (on CUDA its
            compute stream) waited for it.
    """

    rank: int
    phase: str
    operator: int
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class DeviceTime:
    """Where one device's time went; medians over the measured iterations.

    Attributes:
        device: Device id of the plan.
        passes_s: Forward and backward passes, collectives in them included.
        waiting_s: Waits for transfers between stages.
        collectives_s: Exposed collectives in passes: the rank waited for them.
        collectives_after_s: The same after the last pass.
        optimizer_s: Optimizer step.
        tail_s: From the last pass to the end of the iteration, the two before included.
        processor_s: Processor time of the thread that runs all this. On the CPU passes and tail take no more, unless
            they wait for collectives or other load takes the processor away.
    """

    device: int
    passes_s: float
    waiting_s: float
    collectives_s: float
    collectives_after_s: float
    optimizer_s: float
    tail_s: float
    processor_s: float


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
        operator_host_s: The same of the host that launches them, where the two were measured apart: ``operator_s`` is
            then of kernels alone.
        operator_taken_bytes: The same of what the allocator held at most meanwhile, beyond what it held before, on a
            GPU: outputs or gradients, and what the operator works in.
        devices: Where each device's time went.
        traced: Actions of an iteration whose operators were timed, and spans of those and of its collectives.
        out_of_memory: A device ran out of memory; times are then zero.
        memory_history: Of the allocator, per device, where it was asked for (``validation.execution.memory_history``).
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
    operator_host_s: Mapping[tuple[str, int], float] = field(default_factory=dict, repr=False)
    operator_taken_bytes: Mapping[tuple[str, int], float] = field(default_factory=dict, repr=False)
    devices: tuple[DeviceTime, ...] = ()
    traced: tuple[tuple[TimedAction, ...], tuple[TimedSpan, ...]] = field(default=((), ()), repr=False)
    out_of_memory: bool = False
    memory_history: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, repr=False)

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

    @property
    def disturbance(self) -> float:
        """Time that passes took over what the processor worked on them: 1 where nothing else kept it busy.

        Mean over devices; says nothing of collectives in passes, and nothing on GPUs.
        """
        ratios = []
        for each in self.devices:
            worked_s = each.processor_s - (each.tail_s - each.collectives_after_s)
            ratios.append((each.passes_s - each.collectives_s) / max(1e-9, worked_s))
        return statistics.fmean(ratios) if ratios else 1.0

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data with units in the keys."""
        mapping = {key: value for key, value in asdict(self).items() if key not in ("traced", "memory_history")}
        for name, word in OF_OPERATORS.items():
            mapping[name] = [
                {"phase": phase, "operator": index, word: value}
                for (phase, index), value in sorted(getattr(self, name).items())
            ]
        mapping["peak_allocated_bytes"] = self.peak_allocated_bytes
        mapping["peak_reserved_bytes"] = self.peak_reserved_bytes
        return mapping


@dataclass(frozen=True)
class IterationRecord:
    """One iteration on one rank.

    Attributes:
        actions: Timed.
        spans: Collectives, the optimizer step, and operators where they are timed.
        tail_s: From the last action's end to the end of the iteration.
        processor_s: Of the thread.
        iteration_s: All of it, by the host's clock; on CUDA until the device was done.
    """

    actions: list[TimedAction]
    spans: list[TimedSpan]
    tail_s: float
    processor_s: float
    iteration_s: float

    def device_time(self, device: int) -> DeviceTime:
        """Return where the time went."""
        passes_end = max((action.end_s for action in self.actions), default=0.0)
        collectives = [span for span in self.spans if span.phase == COLLECTIVE]
        inside = sum(span.end_s - span.start_s for span in collectives if span.start_s < passes_end)
        return DeviceTime(
            device=device,
            passes_s=sum(action.end_s - action.start_s for action in self.actions),
            waiting_s=sum(action.wait_s for action in self.actions),
            collectives_s=inside,
            collectives_after_s=sum(span.end_s - span.start_s for span in collectives) - inside,
            optimizer_s=sum(span.end_s - span.start_s for span in self.spans if span.phase == OPTIMIZER),
            tail_s=self.tail_s,
            processor_s=self.processor_s,
        )


@dataclass
class RankRecord:
    """What one rank measured.

    Attributes:
        rank, device: Process and device id of the plan.
        iterations_s: Seconds of every iteration, warm-up included.
        actions: Of every measured iteration.
        tails_s: From the last action's end to the end of the iteration.
        times: Where the time went, per measured iteration.
        traced: An iteration whose operators were timed.
        losses: This rank's share of the loss, per iteration.
        memory: Peaks.
        operator_s: Samples by phase and operator.
        notes: Things to know.
        out_of_memory: The device ran out of memory.
        memory_history: Of the allocator.
        operator_host_s: Samples of the host, where they are apart.
        operator_taken_bytes: What operators took of the allocator.
    """

    rank: int
    device: int
    iterations_s: list[float] = field(default_factory=list)
    actions: list[list[TimedAction]] = field(default_factory=list)
    tails_s: list[float] = field(default_factory=list)
    times: list[DeviceTime] = field(default_factory=list)
    traced: IterationRecord | None = None
    losses: list[float] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    operator_s: Samples = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    out_of_memory: bool = False
    memory_history: Mapping[str, Any] | None = None
    operator_host_s: Samples = field(default_factory=dict)
    operator_taken_bytes: dict[tuple[str, int], int] = field(default_factory=dict)


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
    return Measurement(
        iteration_time_s=statistics.median(samples[warmup:]),
        iteration_samples_s=samples[warmup:],
        stage_forward_s=tuple(max(values, default=0.0) for values in forward),
        stage_backward_s=tuple(max(values, default=0.0) for values in backward),
        optimizer_s=max(statistics.median(record.tails_s) for record in records),
        losses=tuple(sum(values) for values in zip(*(record.losses for record in records), strict=True)),
        memory=tuple(RankMemory(record.device, *record.memory) for record in records),
        actions=tuple(action for record in records for action in (record.actions or [[]])[-1]),
        operator_s=_slowest([record.operator_s for record in records]),
        operator_host_s=_slowest([record.operator_host_s for record in records]),
        operator_taken_bytes=_most([record.operator_taken_bytes for record in records]),
        notes=tuple(dict.fromkeys(note for record in records for note in record.notes)),
        devices=tuple(_median_time(record.times) for record in records),
        traced=(
            tuple(action for record in records if record.traced for action in record.traced.actions),
            tuple(span for record in records if record.traced for span in record.traced.spans),
        ),
        memory_history={
            record.device: record.memory_history for record in records if record.memory_history is not None
        },
        **known,
    )


def _median_time(times: list[DeviceTime]) -> DeviceTime:
    names = [each.name for each in fields(DeviceTime) if each.name != "device"]
    return DeviceTime(
        device=times[0].device, **{name: statistics.median(getattr(each, name) for each in times) for name in names}
    )


def _most(ranks: Iterable[Mapping[tuple[str, int], int]]) -> dict[tuple[str, int], float]:
    """Return the largest figure of any rank."""
    found: dict[tuple[str, int], float] = {}
    for rank in ranks:
        for key, value in rank.items():
            found[key] = max(value, found.get(key, 0.0))
    return found


def _slowest(ranks: list[Samples]) -> dict[tuple[str, int], float]:
    """Return the medians of the slowest rank."""
    found: Samples = {}
    for samples in ranks:
        for key, seconds in samples.items():
            found.setdefault(key, []).append(statistics.median(seconds))
    return {key: max(values) for key, values in found.items()}
