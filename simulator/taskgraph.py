"""The task graph: the only thing engines read. Arrays in compressed sparse rows (CSR).

A task occupies streams on devices, waits for predecessors, is launched by the hosts of its devices, and
uses shares of links while it works. ``docs/model.md`` states the semantics; in short:

- *Start*: all predecessors have ended, the task is next on each of its streams, and the host of each of
  its devices has come to it. It then holds its streams to its end.
- *Progress*: first ``latency_s`` passes, whatever else happens; then ``work_s`` is done at speed
  ``1 / (max(1, load of its fullest resource) * slowdown)``. A task is *running* only in that second part.
- *End*: when the work is done, but not before (latest host arrival + ``bound_s``).
- *Host*: walks each device's list in order. It arrives at task i ``lead_s[i]`` after it came to it (the launch
  of the first kernel), and goes on ``host_s[i]`` after it came to it, or, where ``host_waits[i]``, not before
  that task's end. A task in no host's list has no host constraint: arrival 0, no bound.
- *Load* of a resource: sum of the shares of the running tasks that use it.
- *Slowdown*: a device slows its running tasks while at least one computation and one communication are
  running on it; a task takes the largest factor among its devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

COMPUTATION, COMMUNICATION, OTHER = 0, 1, 2

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Csr:
    """Ragged rows: row i is ``items[offsets[i]:offsets[i + 1]]``."""

    offsets: Ints
    items: Ints

    def row(self, index: int) -> Ints:
        """Return one row (a view)."""
        return self.items[self.offsets[index] : self.offsets[index + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def from_rows(rows: list[list[int]]) -> Csr:
        """Build from Python lists (tests, small graphs)."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return Csr(offsets=offsets, items=np.array([item for row in rows for item in row], dtype=np.int32))


@dataclass(frozen=True)
class TaskGraph:
    """Tasks, streams, hosts and resources of one iteration. T tasks, S streams, D devices, R resources.

    "Device" means a representative: one of several devices that behave alike (``device_members``).

    Attributes:
        work_s: float64[T]. Seconds of work alone at full speed, >= 0.
        latency_s: float64[T]. Seconds before the work, unaffected by sharing, >= 0.
        lead_s: float64[T]. Seconds of launching before the task can start, <= host_s.
        host_s: float64[T]. Seconds a host needs to launch the whole task.
        bound_s: float64[T]. The task ends no earlier than its latest host arrival plus this.
        kind: int8[T]. COMPUTATION, COMMUNICATION or OTHER.
        host_waits: bool[T]. Hosts that launched the task go on only after its end.
        predecessors: Csr, T rows of task ids.
        streams: Csr, S rows: the tasks of each stream in program order.
        stream_device: int32[S]. Device of each stream.
        hosts: Csr, D rows: the tasks each device's host launches, in program order.
        shares: Csr, T rows of resource ids, each at most once; ``share_fractions`` runs parallel to its items.
        share_fractions: float64[len(shares.items)]. Fraction of the resource's capacity used when alone.
        slowdown_computation, slowdown_communication: float64[D]. Factors >= 1 under overlap.
        cause: int16[T]. Index into ``causes``: what the time is spent on.
        stage, microbatch: int32[T]. -1 where it does not apply.
        name: int32[T]. Index into ``names``.
        causes, names, stream_names, resource_names: Tables of words.
        device_stage: int32[D]. Pipeline position of the device's first stage.
        device_members: One tuple of physical device ids per device.
    """

    work_s: Floats
    latency_s: Floats
    lead_s: Floats
    host_s: Floats
    bound_s: Floats
    kind: NDArray[np.int8]
    host_waits: Bools
    predecessors: Csr
    streams: Csr
    stream_device: Ints
    hosts: Csr
    shares: Csr
    share_fractions: Floats
    slowdown_computation: Floats
    slowdown_communication: Floats
    cause: NDArray[np.int16]
    stage: Ints
    microbatch: Ints
    name: Ints
    causes: tuple[str, ...]
    names: tuple[str, ...]
    stream_names: tuple[str, ...]
    resource_names: tuple[str, ...]
    device_stage: Ints
    device_members: tuple[tuple[int, ...], ...]

    @property
    def num_tasks(self) -> int:
        """Number of tasks T."""
        return len(self.work_s)

    @property
    def num_devices(self) -> int:
        """Number of representatives D."""
        return len(self.device_members)


@dataclass(frozen=True)
class Schedule:
    """When every task ran.

    Attributes:
        start_s, end_s: float64[T]. Seconds from the start of the iteration.
        host_arrival_s: float64[T]. When the last of its hosts came to the task (its earliest launch).
        statistics: What the engine counted: ``events`` and ``speed_changes``.
    """

    start_s: Floats
    end_s: Floats
    host_arrival_s: Floats
    statistics: dict[str, float] = field(default_factory=dict)
