"""What the devices of a simulated iteration send: kinds, groups and bytes of collectives and transfers.

Task graphs know how long communication takes, not how much it carries. So a plan is lowered for a cluster whose links
take a second for a byte, and whose latency is a number for the kind and the size of the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hardware_models.communication import Communication
from hardware_models.model import HardwareModel
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.taskgraph import COMMUNICATION

TRANSFER = "transfer"
_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", TRANSFER)
_MOST_RANKS = 10_000


class Call(NamedTuple):
    """One call of a collective, or one message.

    Attributes:
        kind: As in ``HardwareModel.collective``, or ``transfer``.
        num_ranks: Of its group.
        num_bytes: As in ``HardwareModel.collective``.
    """

    kind: str
    num_ranks: int
    num_bytes: int


_CODES = 2**16
"""The kind and the group are the fraction of work, in this many parts: whole bytes below 2^37 are exact beside it."""


class _Counting(HardwareModel):
    """Seconds are bytes, and their fraction names the kind and the group; latencies are of several calls at times."""

    def collective(self, kind: str, num_bytes: float, devices: Sequence[int]) -> Communication:
        """Return bytes as work; nothing of one rank."""
        if len(devices) == 1:
            return Communication(latency_s=0.0, work_s=0.0)
        return _named(kind, len(devices), num_bytes)

    def transfer(self, num_bytes: float, source: int, destination: int) -> Communication:
        """Return bytes as work."""
        return _named(TRANSFER, 2, num_bytes)


def _named(kind: str, num_ranks: int, num_bytes: float) -> Communication:
    code = _KINDS.index(kind) * _MOST_RANKS + num_ranks
    return Communication(latency_s=0.0, work_s=round(num_bytes) + code / _CODES)


def simulated_calls(plan: Plan, problem: Problem, device: int) -> Counter[Call]:
    """Return how often a device takes part in each collective of an iteration, and sends or receives each message.

    Args:
        plan: The plan.
        problem: What it is for; of its hardware the cluster counts.
        device: Device id.
    """
    counted = replace(problem, hardware=_Counting(cluster=problem.hardware.cluster))
    graph = simulate(plan, counted).graph
    found: Counter[Call] = Counter()
    (of,) = [number for number, members in enumerate(graph.device_members) if device in members]
    streams = [number for number in range(len(graph.streams)) if graph.stream_device[number] == of]
    for task in sorted({int(task) for stream in streams for task in graph.streams.row(stream)}):
        if graph.kind[task] == COMMUNICATION and graph.work_s[task] > 0:
            num_bytes, code = divmod(float(graph.work_s[task]), 1.0)
            kind, num_ranks = divmod(round(code * _CODES), _MOST_RANKS)
            found[Call(_KINDS[kind], num_ranks, int(num_bytes))] += 1
    return found
