"""One run of an engine: the task graph and when its tasks ran; at once, or when somebody first looks at it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from simulator.memory.usage import LiveBytes
from simulator.taskgraph import Schedule, TaskGraph


@dataclass(frozen=True)
class Run:
    """What was simulated.

    Attributes:
        graph: The tasks.
        schedule: When each ran.
        live_bytes: Returns what is live on a representative device over the iteration.
    """

    graph: TaskGraph
    schedule: Schedule
    live_bytes: Callable[[int], LiveBytes]


class LaterRun:
    """A run that is made when somebody first looks at it.

    Args:
        make: Makes it.
    """

    def __init__(self, make: Callable[[], Run]) -> None:
        self._make = make

    @cached_property
    def _run(self) -> Run:
        return self._make()

    @property
    def graph(self) -> TaskGraph:
        """The tasks."""
        return self._run.graph

    @property
    def schedule(self) -> Schedule:
        """When each runs."""
        return self._run.schedule

    def live_bytes(self, device: int) -> LiveBytes:
        """Return what is live on a representative device over the iteration."""
        return self._run.live_bytes(device)
