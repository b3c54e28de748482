"""A few tasks as columns, and a template: a block of them to be tiled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

StreamKey = tuple[int, Hashable]
"""A representative device and the stream on it."""


@dataclass
class TaskRows:
    """Columns of a few tasks; ids are positions."""

    work_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    lead_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    bound_s: list[float] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    host_waits: list[bool] = field(default_factory=list)
    cause: list[str] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    stage: list[int] = field(default_factory=list)
    shares: list[dict[int, float]] = field(default_factory=list)
    predecessors: list[list[int]] = field(default_factory=list)
    streams: dict[StreamKey, list[int]] = field(default_factory=dict)
    hosts: dict[int, list[int]] = field(default_factory=dict)
    members: list[tuple[int, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.work_s)

    def add(
        self,
        *,
        cause: str,
        name: str,
        stage: int,
        kind: int,
        work_s: float,
        latency_s: float = 0.0,
        lead_s: float = 0.0,
        host_s: float = 0.0,
        bound_s: float = 0.0,
        host_waits: bool = False,
        shares: Mapping[int, float] | None = None,
        predecessors: Iterable[int] = (),
        streams: Iterable[StreamKey] = (),
        hosts: Iterable[int] = (),
    ) -> int:
        """Append a task and return its position."""
        task = len(self.work_s)
        self.work_s.append(work_s)
        self.latency_s.append(latency_s)
        self.lead_s.append(lead_s)
        self.host_s.append(host_s)
        self.bound_s.append(bound_s)
        self.kind.append(kind)
        self.host_waits.append(host_waits)
        self.cause.append(cause)
        self.name.append(name)
        self.stage.append(stage)
        self.shares.append(dict(shares or {}))
        self.predecessors.append(sorted(set(predecessors)))
        for key in streams:
            self.streams.setdefault(key, []).append(task)
        launched_by = tuple(hosts)
        self.members.append(launched_by)
        for device in launched_by:
            self.hosts.setdefault(device, []).append(task)
        return task


@dataclass(frozen=True)
class Send:
    """A transfer task at the end of a template.

    Attributes:
        task: Position in the template.
        source, target: Representative devices.
    """

    task: int
    source: int
    target: int


@dataclass
class Template:
    """A block of tasks for one (stage, phase, variant).

    Attributes:
        rows: The tasks.
        heads: Per representative, tasks that wait for what the stage receives.
        tails: Per representative, the tasks after which the action's chain is done.
        starters: Per representative, the first chained tasks; heads too, unless the host waits before them.
        openers: Of those, the ones that run beside the compute stream.
        free_heads: Per representative, unchained tasks that wait for the previous action; heads too if they move
            activations, not if they gather parameters.
        sends: Transfers to the neighbouring stage.
        unchained: Per representative, unchained tasks that nothing in the block waits for.
    """

    rows: TaskRows = field(default_factory=TaskRows)
    heads: dict[int, list[int]] = field(default_factory=dict)
    tails: dict[int, list[int]] = field(default_factory=dict)
    starters: dict[int, list[int]] = field(default_factory=dict)
    openers: dict[int, list[int]] = field(default_factory=dict)
    free_heads: dict[int, list[int]] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    unchained: dict[int, list[int]] = field(default_factory=dict)

    @cached_property
    def inner_edges(self) -> NDArray[np.int64]:
        """Tasks and their predecessors inside the finished template: int64[E, 2]."""
        pairs = [(task, before) for task, found in enumerate(self.rows.predecessors) for before in found]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)
