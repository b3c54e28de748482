"""What a simulation returns: times, memory, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.words import counted
from simulator.fidelity import Fidelity
from simulator.memory.usage import DeviceMemory, LiveBytes
from simulator.reports.breakdown import breakdown_rows, bubble_share, members_text
from simulator.reports.critical_path import CriticalPath, critical_path
from simulator.run import LaterRun, Run
from simulator.taskgraph import Schedule, TaskGraph

if TYPE_CHECKING:
    import pandas as pd

    from simulator.reports.trace import TraceReport

BYTES_PER_GIB = 2**30

MAX_CONSUMERS_NAMED = 4


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """One simulated training iteration.

    Attributes:
        iteration_time_s: Start of the first to end of the last task, optimizer included.
        global_batch: Samples per iteration.
        tokens_per_sample: Tokens (or patches) of one sample.
        num_devices: Devices in use.
        model_flop: Matmul FLOP of forward and backward of one iteration, nothing recomputed; 0 where they are not
            known, as those of a layer profile.
        hardware_flop: The same with what is recomputed.
        peak_flop_per_s: Sum over the devices in use.
        memory: One entry per representative device.
        run: What was simulated, and when each task ran. Where what repeats was left out, the whole is run when
            it is first looked at (``graph``, ``schedule``, ``breakdown``, ``summary``, plots).
        fidelity: Which effects were on.
        duration_sources: Share of the device time of operators that was ``measured``, ``interpolated``,
            ``modelled``.
        plan_hash: Canonical hash of the plan.
        engine: Name of the engine.
        wall_s: Seconds the simulation took.
        notes: What to know before the figures are read (``simulator.remarks``).
    """

    iteration_time_s: float
    global_batch: int
    tokens_per_sample: int
    num_devices: int
    model_flop: float
    hardware_flop: float
    peak_flop_per_s: float
    memory: tuple[DeviceMemory, ...] = field(repr=False)
    run: Run | LaterRun = field(repr=False)
    fidelity: Fidelity
    duration_sources: Mapping[str, float]
    plan_hash: str
    engine: str
    wall_s: float
    notes: tuple[str, ...] = ()

    @property
    def graph(self) -> TaskGraph:
        """What was simulated."""
        return self.run.graph

    @property
    def schedule(self) -> Schedule:
        """When each task ran."""
        return self.run.schedule

    def live_bytes(self, device: int) -> LiveBytes:
        """Return what is live on a representative device over the iteration.

        Args:
            device: ``DeviceMemory.device`` of an entry of ``memory``, not a device id of the plan.

        Raises:
            ValueError: If there is no such device.
        """
        known = range(len(self.memory))
        if device not in known:
            raise ValueError(
                f"device must be one that `memory` has an entry of, 0 to {len(known) - 1}, got {device}; devices that "
                "do the same share one (graph.device_members)"
            )
        return self.run.live_bytes(device)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices together."""
        return self.global_batch / self.iteration_time_s

    @property
    def tokens_per_s_per_device(self) -> float | None:
        """Tokens per second and device; None where samples are of no known tokens."""
        return self.samples_per_s * self.tokens_per_sample / self.num_devices if self.tokens_per_sample else None

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: model FLOP per second as a share of the peak; None where they are not known.

        Above 1 where Winograd's algorithm does fewer operations than the products that are counted (fp32, 3x3).
        """
        return self._utilisation(self.model_flop)

    @property
    def hfu(self) -> float | None:
        """Hardware FLOP utilisation: as ``mfu``, recomputation counted."""
        return self._utilisation(self.hardware_flop)

    def _utilisation(self, flop: float) -> float | None:
        return flop / self.iteration_time_s / self.peak_flop_per_s if self.model_flop > 0 else None

    @property
    def fits(self) -> bool:
        """Whether every device's allocator replay ended within its capacity."""
        return all(memory.fits for memory in self.memory)

    @property
    def peak_allocated_bytes(self) -> int:
        """Live bytes at the peak of the device that holds most."""
        return max((memory.peak_allocated_bytes for memory in self.memory), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Bytes that the caching allocator took, where that is most."""
        return max((memory.peak_reserved_bytes for memory in self.memory), default=0)

    @property
    def peak_device(self) -> DeviceMemory | None:
        """The device with the highest live peak relative to its capacity; the first that fails if any."""
        failed = [memory for memory in self.memory if not memory.fits]
        chosen = failed or list(self.memory)
        return max(chosen, key=_fullness, default=None)

    @property
    def largest_device(self) -> DeviceMemory | None:
        """The device with the highest live peak, however much it has; the first of equal ones."""
        return max(self.memory, key=lambda memory: memory.peak_allocated_bytes, default=None)

    def breakdown(self) -> pd.DataFrame:
        """Return seconds per device and category; see ``simulator.reports.breakdown``."""
        import pandas as pd

        return pd.DataFrame(self._breakdown)

    def critical_path(self) -> CriticalPath:
        """Return the chain of causes that the iteration time consists of."""
        return self._critical_path

    @cached_property
    def bubble_share(self) -> float:
        """Share of all devices' time in which nothing runs, is in transfer or being launched."""
        return bubble_share(self._breakdown)

    @cached_property
    def _breakdown(self) -> list[dict[str, Any]]:
        return breakdown_rows(self.graph, self.schedule, self.iteration_time_s)

    @cached_property
    def _critical_path(self) -> CriticalPath:
        return critical_path(self.graph, self.schedule, self.iteration_time_s)

    def summary(self) -> dict[str, Any]:
        """Return what ``--json`` prints: plain values with units in their keys."""
        return {
            "plan_hash": self.plan_hash,
            "iteration_time_s": self.iteration_time_s,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "fits": self.fits,
            "peak_allocated_bytes": int(self.peak_allocated_bytes),
            "peak_reserved_bytes": int(self.peak_reserved_bytes),
            "bubble_share": self.bubble_share,
            "global_batch": self.global_batch,
            "num_devices": self.num_devices,
            "critical_path": [
                {"cause": words, "time_s": seconds, "share": share}
                for words, seconds, share in self.critical_path().by_cause()
            ],
            "breakdown": self._breakdown,
            "memory": [_memory_mapping(memory, self.graph) for memory in self.memory],
            "duration_sources": {name: float(share) for name, share in self.duration_sources.items()},
            "switched_off": _switched_off(self.fidelity),
            "notes": list(self.notes),
            "engine": self.engine,
            "num_tasks": self.graph.num_tasks,
            "wall_s": self.wall_s,
        }

    def describe(self) -> str:
        """Return the first screen as plain text."""
        lines = [] if self.fits else ["DOES NOT FIT: times are those it would take with memory enough"]
        tokens = self.tokens_per_s_per_device
        lines += [
            f"iteration time  {format_s(self.iteration_time_s)}",
            f"throughput      {format_rate(self.samples_per_s)} samples/s"
            f"{'' if tokens is None else f', {tokens:,.0f} tokens/s per GPU'} "
            f"({counted(self.num_devices, 'GPU')})",
            f"MFU             {self._mfu_words()}",
            *(f"{label:<16}{text}" for label, text in self._memory_lines()),
            f"bubble          {100 * self.bubble_share:.1f} % of device time",
        ]
        path = self.critical_path().describe().splitlines()
        lines += [f"{'critical path' if number == 0 else '':<16}{line}" for number, line in enumerate(path)]
        sources = ", ".join(f"{100 * share:.0f} % {name}" for name, share in self.duration_sources.items() if share > 0)
        if sources:
            lines.append(f"operator times  {sources}")
        if off := _switched_off(self.fidelity):
            lines.append(f"without         {', '.join(off)}")
        lines += [f"note            {words}" for words in self.notes]
        return "\n".join(lines)

    def _mfu_words(self) -> str:
        if self.mfu is None or self.hfu is None:
            return "unknown: the model has times, no FLOPs"
        return f"{100 * self.mfu:.1f} % ({100 * self.hfu:.1f} % with recomputation)"

    def _memory_lines(self) -> list[tuple[str, str]]:
        device = self.peak_device
        if device is None:
            return []
        where = f" ({device.peak_where})" if device.peak_where else ""
        consumers = consumers_text(device)
        if device.fits:
            used = (
                f"{format_bytes(device.peak_allocated_bytes)} live, "
                f"{format_bytes(device.peak_reserved_bytes)} reserved "
                f"of {format_bytes(device.capacity_bytes)}{where}"
            )
            return [("memory", used), *self._larger_line(device), ("", consumers)]
        members = self.graph.device_members[device.device]
        stage = int(self.graph.device_stage[device.device])
        failed = sum(len(self.graph.device_members[memory.device]) for memory in self.memory if not memory.fits)
        request = (
            f"; {format_bytes(device.failed_request_bytes)} could not be allocated"
            if device.failed_request_bytes is not None
            else ""
        )
        return [
            (
                "memory",
                f"OUT OF MEMORY on {failed} of {counted(self.num_devices, 'GPU')}, first of all stage {stage} "
                f"(GPU {members_text(members)})",
            ),
            (
                "",
                f"{format_bytes(device.peak_allocated_bytes)} live of {format_bytes(device.capacity_bytes)}"
                f"{where}{request}",
            ),
            ("", consumers),
        ]

    def _larger_line(self, fullest: DeviceMemory) -> list[tuple[str, str]]:
        """Return a line about the device that holds most, where GPUs differ and another is nearer to its capacity."""
        largest = self.largest_device
        if largest is None or largest.peak_allocated_bytes <= fullest.peak_allocated_bytes:
            return []
        words = f"{format_bytes(largest.peak_allocated_bytes)} live of {format_bytes(largest.capacity_bytes)}"
        return [("", f"(nearest to its capacity; most is {words}, stage {self.graph.device_stage[largest.device]})")]

    def write_trace(self, path: str | Path, **options: Any) -> TraceReport:
        """Write a Chrome trace (``.json.gz``) that opens in Perfetto; see ``simulator.reports.trace``."""
        from simulator.reports.trace import write_trace

        return write_trace(self, path, **options)

    def plot_timeline(self, path: str | Path, **options: Any) -> None:
        """Write a PNG of the timeline; see ``simulator.reports.timeline``."""
        from simulator.reports.timeline import plot_timeline

        plot_timeline(self, path, **options)

    def plot_memory(self, path: str | Path, **options: Any) -> None:
        """Write a PNG of live bytes over time; see ``simulator.reports.memory_plot``."""
        from simulator.reports.memory_plot import plot_memory

        plot_memory(self, path, **options)


def consumers_text(memory: DeviceMemory, limit: int = MAX_CONSUMERS_NAMED) -> str:
    """Return the largest consumers at the peak in words."""
    largest = sorted(memory.consumers.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{name} {format_bytes(size)}" for name, size in largest[:limit] if size > 0]
    rest = sum(size for _, size in largest[limit:])
    return ", ".join([*named, f"other {format_bytes(rest)}"] if rest > 0 else named)


def format_bytes(size: float) -> str:
    """Return bytes in binary units.

    >>> format_bytes(3 * 2**29), format_bytes(5 * 2**20), format_bytes(12)
    ('1.50 GiB', '5.0 MiB', '12 B')
    """
    if abs(size) >= 0.1 * BYTES_PER_GIB:
        return f"{size / BYTES_PER_GIB:.{2 if abs(size) < 10 * BYTES_PER_GIB else 1}f} GiB"
    if abs(size) >= 2**20:
        return f"{size / 2**20:.1f} MiB"
    if abs(size) >= 2**10:
        return f"{size / 2**10:.1f} KiB"
    return f"{size:.0f} B"


def format_s(seconds: float) -> str:
    """Return seconds with four digits in the unit that suits.

    >>> format_s(12.3456), format_s(0.0123456), format_s(4.2e-5)
    ('12.35 s', '12.35 ms', '42.00 us')
    """
    size = abs(seconds)
    factor, unit = (1.0, "s") if size >= 1 or size == 0 else (1e3, "ms") if size >= 1e-3 else (1e6, "us")
    value = seconds * factor
    decimals = 3 if abs(value) < 10 and unit == "s" else 2 if abs(value) < 100 else 1
    return f"{value:,.{decimals}f} {unit}"


def format_rate(per_s: float) -> str:
    """Return a rate with four digits, or all before the point where there are more.

    >>> format_rate(8.02917), format_rate(11409.37)
    ('8.029', '11,409')
    """
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def _fullness(memory: DeviceMemory) -> float:
    return memory.peak_allocated_bytes / max(1, memory.capacity_bytes)


def _switched_off(fidelity: Fidelity) -> list[str]:
    return [each.name.replace("_", "-") for each in fields(fidelity) if not getattr(fidelity, each.name)]


def _memory_mapping(memory: DeviceMemory, graph: TaskGraph) -> dict[str, Any]:
    return {
        "devices": [int(member) for member in graph.device_members[memory.device]],
        "stage": int(graph.device_stage[memory.device]),
        "fits": bool(memory.fits),
        "peak_allocated_bytes": int(memory.peak_allocated_bytes),
        "peak_reserved_bytes": int(memory.peak_reserved_bytes),
        "capacity_bytes": int(memory.capacity_bytes),
        "peak_time_s": float(memory.peak_time_s),
        "peak_where": memory.peak_where,
        "consumers_bytes": {name: int(size) for name, size in memory.consumers.items()},
        "failed_request_bytes": (None if memory.failed_request_bytes is None else int(memory.failed_request_bytes)),
    }
