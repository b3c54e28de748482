"""What the planner takes all-reduces and transfers between stages to cost, in closed form.

Two models, chosen by name. ``hardware`` is the cluster's own: all-reduces as ``hardware_models`` prices them,
and transfers in which every replica sends and receives its part, limited by the cards of each machine and by
the rate of one flow. ``released`` is that of DAPPLE's public planner, whose constants are in its code:
NVLink 25 GB/s, Ethernet 3 GB/s for collectives and 1 GB/s for single transfers at 25 Gb/s (scaled here with the
network's nominal rate, since the code knows no other), no latency, an all-reduce inside a machine whose rate
grows with half the number of GPUs, a flat ring across machines, and transfers that ignore how many cards there are.

Source:
    DAPPLE's public repository (AlibabaPAI/DAPPLE, February 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hardware_models.model import HardwareModel
from searchers.dapple.compiled_planner import HARDWARE, RELEASED, Floats, Ints, transfer_line

COMMUNICATION = ("hardware", "released")
NVLINK_BYTES_PER_S = 25e9
ETHERNET_BYTES_PER_S = 3.0e9
ETHERNET_PAIR_BYTES_PER_S = 1.0e9
ETHERNET_NOMINAL_BYTES_PER_S = 3.125e9
LINE_BYTES = (2**24, 2**28)
"""Sizes between which the time of an all-reduce is taken as a straight line."""

Line = tuple[float, float]
"""Seconds, and seconds per byte."""


@dataclass(frozen=True, eq=False)
class CommunicationCosts:
    """Costs of one cluster.

    Attributes:
        hardware: The cluster.
        model: ``hardware`` or ``released``.
    """

    hardware: HardwareModel
    model: str = "hardware"
    _lines: dict[tuple[object, ...], Line] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.model not in COMMUNICATION:
            raise ValueError(f"communication must be one of {', '.join(COMMUNICATION)}, got {self.model!r}")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """GPUs per machine."""
        return tuple(node.num_devices for node in self.hardware.cluster.nodes)

    @cached_property
    def rates(self) -> Floats:
        """What the compiled transfer model needs: float64[6].

        Model, bytes per second inside a machine (one flow), of one flow between machines, of all cards of a
        machine; seconds of latency inside and between machines. Of unlike machines those of the slowest.
        """
        if self.model == "released":
            pair = ETHERNET_PAIR_BYTES_PER_S * self._scale
            return np.array([RELEASED, NVLINK_BYTES_PER_S, pair, ETHERNET_BYTES_PER_S * self._scale, 0.0, 0.0])
        nodes = dict(zip(self.hardware.cluster.kind_of_node, self.hardware.cluster.nodes, strict=True)).values()
        networks = [node.network for node in nodes]
        return np.array(
            [
                HARDWARE,
                min(node.links.point_to_point_bytes_per_s for node in nodes),
                min(
                    len(node.nics_of(slot)) * node.network.nominal_bytes_per_s * node.network.point_to_point_fraction
                    for node in nodes
                    for slot in range(node.num_devices)
                ),
                min(max(1, node.num_nics) * node.network.nic_bytes_per_s for node in nodes),
                max(node.links.point_to_point_latency_s for node in nodes),
                max(each.point_to_point_latency_s for each in networks),
            ]
        )

    @property
    def _scale(self) -> float:
        nominal = min(node.network.nominal_bytes_per_s for node in self.hardware.cluster.nodes)
        return nominal / ETHERNET_NOMINAL_BYTES_PER_S

    def counts(self, devices: Sequence[int]) -> Ints:
        """Return GPUs per machine of a set: int64[num_machines]."""
        counts = np.zeros(len(self.sizes), dtype=np.int64)
        for device in devices:
            counts[self.hardware.cluster.node_of(device)] += 1
        return counts

    def all_reduce_line(self, devices: Sequence[int]) -> Line:
        """Return latency and seconds per byte of a large all-reduce among a set."""
        count = len(devices)
        if count == 1:
            return 0.0, 0.0
        counts = self.counts(devices)
        inside = int((counts > 0).sum()) == 1
        if self.model == "released":
            if inside:
                return 0.0, 2 * (count - 1) / count / NVLINK_BYTES_PER_S / (count // 2)
            return 0.0, 2 * (count - 1) / count / (ETHERNET_BYTES_PER_S * self._scale)
        # Between machines of a kind only the numbers matter: cards are the bottleneck, whichever GPUs are behind them.
        kinds = self.hardware.cluster.kind_of_node
        among = sorted((kinds[node], int(counts[node])) for node in np.flatnonzero(counts))
        key = tuple(sorted(devices)) if inside else tuple(among)
        known = self._lines
        if key not in known:
            small, large = (self.hardware.collective("all_reduce", size, devices).alone_s for size in LINE_BYTES)
            slope = (large - small) / (LINE_BYTES[1] - LINE_BYTES[0])
            known[key] = max(0.0, small - slope * LINE_BYTES[0]), slope
        return known[key]

    def all_reduce_s(self, num_bytes: float, devices: Sequence[int]) -> float:
        """Return seconds of an all-reduce of ``num_bytes``."""
        latency, slope = self.all_reduce_line(devices)
        return latency + slope * num_bytes if num_bytes > 0 else 0.0

    def transfer_s(self, num_bytes: float, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Return seconds in which ``num_bytes`` of all replicas go from one stage's devices to another's."""
        if num_bytes <= 0:
            return 0.0
        latency, slope = transfer_line(self.counts(sources), self.counts(targets), self.rates)
        return float(latency + slope * num_bytes)
