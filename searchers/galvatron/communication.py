"""Seconds of a strategy's collectives, of resharding between two strategies and of transfers between stages.

All groups of an axis communicate at once, as in Galvatron's own measurements, so what they share (a NIC, the
PCIe bridge) is divided among them; so it is among the transfers of a boundary (``hardware_models.crowding``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from hardware_models.crowding import CrowdedGroup, together_s, unlike_groups
from hardware_models.model import HardwareModel
from searchers.galvatron.strategies import Layout
from simulator.lowering.mesh import MeshCollective, groups, reshard
from workloads.placements import REPLICATE, Placement, Shard


class CollectiveTimes:
    """Prices collectives on the devices of one stage, or of the slowest of several.

    Args:
        hardware: Cluster and cost functions.
        stages: The devices of each stage, in mesh order; of those that lie alike, one is enough.
        handover_s: How long a device stands still around each, where computation waits for it.
    """

    def __init__(self, hardware: HardwareModel, *stages: Sequence[int], handover_s: float = 0.0) -> None:
        self.hardware = hardware
        self.handover_s = handover_s
        self.stages = tuple(map(tuple, stages))
        self._groups: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[CrowdedGroup, ...]] = {}
        self._seconds: dict[tuple[object, ...], float] = {}
        self._transitions: dict[tuple[Layout, Layout, float, float], float] = {}

    def seconds(self, collective: str, num_bytes: float, sizes: tuple[int, ...], axes: tuple[int, ...]) -> float:
        """Return seconds of a collective over some axes of a mesh, all of the axes' groups at once."""
        if num_bytes <= 0 or prod(sizes[axis] for axis in axes) == 1:
            return 0.0
        key = (collective, num_bytes, sizes, axes)
        if key not in self._seconds:
            crowded_s = self.hardware.crowded_collective_s
            self._seconds[key] = max(crowded_s(collective, num_bytes, group) for group in self._unlike(sizes, axes))
        return self._seconds[key]

    def _unlike(self, sizes: tuple[int, ...], axes: tuple[int, ...]) -> tuple[CrowdedGroup, ...]:
        """Return the groups of some axes of a mesh, one of those that stand alike."""
        key = (sizes, axes)
        if key not in self._groups:
            self._groups[key] = tuple(
                group
                for devices in self.stages
                for group in unlike_groups(
                    self.hardware.cluster,
                    (tuple(devices[local] for local in members) for members in groups(sizes, axes)),
                )
            )
        return self._groups[key]

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
            moves = (*there, *back)
            self._transitions[key] = len(moves) * self.handover_s + sum(map(self.item, moves))
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
    pairs = zip(first, second, strict=True)
    return together_s(hardware.transfer(num_bytes, source, target) for source, target in pairs)
