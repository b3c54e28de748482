"""Seconds of a strategy's collectives, of resharding between two strategies and of transfers between stages.

All groups of an axis communicate at once, as in Galvatron's own measurements, so what they share (a NIC, the
PCIe bridge) is divided among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from hardware_models.communication import Communication
from hardware_models.model import HardwareModel
from searchers.galvatron.strategies import Layout
from simulator.lowering.mesh import MeshCollective, groups, reshard
from workloads.placements import REPLICATE, Placement, Shard

LARGE_BYTES = float(1 << 26)
"""Message at which shares of links are read: far above where latency matters."""


class CollectiveTimes:
    """Prices collectives on the devices of one stage, or of the slowest of several.

    Args:
        hardware: Cluster and cost functions.
        stages: The devices of each stage, in mesh order; of those that lie alike, one is enough.
    """

    def __init__(self, hardware: HardwareModel, *stages: Sequence[int]) -> None:
        self.hardware = hardware
        self.stages = tuple(map(tuple, stages))
        self._slowest: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[tuple[int, ...], float]]] = {}
        self._transitions: dict[tuple[Layout, Layout, float, float], float] = {}

    def seconds(self, collective: str, num_bytes: float, sizes: tuple[int, ...], axes: tuple[int, ...]) -> float:
        """Return seconds of a collective over some axes of a mesh, all of the axes' groups at once."""
        if num_bytes <= 0 or prod(sizes[axis] for axis in axes) == 1:
            return 0.0
        longest_s = 0.0
        for members, crowding in self._slowest_groups(collective, sizes, axes):
            cost = self.hardware.collective(collective, num_bytes, members)
            longest_s = max(longest_s, cost.latency_s + cost.work_s * crowding)
        return longest_s

    def _slowest_groups(
        self, collective: str, sizes: tuple[int, ...], axes: tuple[int, ...]
    ) -> list[tuple[tuple[int, ...], float]]:
        """Return the slowest group of each stage, and by what groups slow each other: the load of the fullest link."""
        key = (collective, sizes, axes)
        if key not in self._slowest:
            self._slowest[key] = []
            for devices in self.stages:
                load: dict[str, float] = {}
                costs = {}
                for group in groups(sizes, axes):
                    members = tuple(devices[local] for local in group)
                    costs[members] = self.hardware.collective(collective, LARGE_BYTES, members)
                    for resource, share in costs[members].shares:
                        load[resource] = load.get(resource, 0.0) + share
                slowest = max(costs, key=lambda members: costs[members].alone_s)
                self._slowest[key].append((slowest, max(1.0, *load.values()) if load else 1.0))
        return self._slowest[key]

    def item(self, item: MeshCollective) -> float:
        """Return seconds of a mesh collective."""
        return self.seconds(item.collective, item.num_bytes, item.sizes, item.axes)

    def transition(self, source: Layout, target: Layout, source_bytes: float, target_bytes: float) -> float:
        """Return seconds of Slice-Gather between two layers, activations forward and gradients back.

        Args:
            source, target: Layouts of the two layers.
            source_bytes, target_bytes: Bytes of the tensor between them on one rank under each.
        """
        key = (source, target, source_bytes, target_bytes)
        if key not in self._transitions:
            there = _moves(source, target, source_bytes)
            back = _moves(target, source, target_bytes)
            self._transitions[key] = sum(map(self.item, there)) + sum(map(self.item, back))
        return self._transitions[key]


@lru_cache(maxsize=65536)
def _moves(source: Layout, target: Layout, num_bytes: float) -> tuple[MeshCollective, ...]:
    if source == target or not source or not target:
        return ()
    return reshard(_sizes(source), _placements(source), _sizes(target), _placements(target), num_bytes)


def _sizes(layout: Layout) -> tuple[int, ...]:
    return tuple(size for _, size in layout)


def _placements(layout: Layout) -> tuple[Placement, ...]:
    return tuple(Shard(0) if split == "batch" else REPLICATE for split, _ in layout)


def transfer_s(hardware: HardwareModel, first: Sequence[int], second: Sequence[int], num_bytes: float) -> float:
    """Return seconds in which every device of a stage sends ``num_bytes`` to its counterpart in the next."""
    if num_bytes <= 0:
        return 0.0
    return at_once_s([hardware.transfer(num_bytes, *pair) for pair in zip(first, second, strict=True)])


def at_once_s(costs: Sequence[Communication]) -> float:
    """Return seconds of what runs at once and shares links: the slowest, by the load of the fullest link."""
    load: dict[str, float] = {}
    for cost in costs:
        for resource, share in cost.shares:
            load[resource] = load.get(resource, 0.0) + share
    slowest = max(costs, key=lambda cost: cost.alone_s)
    return slowest.latency_s + slowest.work_s * max(1.0, *load.values(), 1.0)
