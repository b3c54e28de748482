"""All groups and transfers of a plan, priced once, looked up by representative."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from hardware_models.communication import Communication
from simulator.lowering.mesh import MeshCollective, groups
from simulator.lowering.symmetry import Channel, Partition, Traffic
from simulator.lowering.transfers import Transfer

Shares = tuple[tuple[str, float], ...]


class ChannelTable:
    """All channels of a plan: collected first, then looked up by representative."""

    def __init__(
        self,
        collective: Callable[[str, float, Sequence[int]], Communication],
        transfer: Callable[[float, int, int], Communication],
        *,
        contention: bool,
    ) -> None:
        self._collective = collective
        self._transfer = transfer
        self._contention = contention
        self._groups: dict[tuple[Hashable, tuple[int, ...]], dict[Traffic, tuple[float, float, Shares]]] = {}
        self._ordered: set[Hashable] = set()
        self._known: set[Hashable] = set()
        self.channels: list[Channel] = []
        self._by_family: dict[Hashable, list[int]] = {}
        self._representatives: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.partition: Partition | None = None

    def add_collective(self, stage: int, devices: Sequence[int], item: MeshCollective) -> None:
        """Register every group of a collective of a stage."""
        if (stage, item) in self._known:
            return
        self._known.add((stage, item))
        for members in groups(item.sizes, item.axes):
            physical = tuple(devices[local] for local in members)
            self.add_group(("collective", stage, item.sizes, item.axes), physical, item.collective, item.num_bytes)

    def add_group(self, family: Hashable, devices: tuple[int, ...], collective: str, num_bytes: float) -> None:
        """Register one group and one size."""
        table = self._groups.setdefault((family, devices), {})
        traffic = (collective, num_bytes)
        if traffic not in table:
            table[traffic] = self._priced(self._collective(collective, num_bytes, devices))

    def add_transfer(self, family: Hashable, transfer: Transfer, traffic: Traffic) -> None:
        """Register one transfer; ``traffic`` tells it from others of its family between the same devices."""
        self._ordered.add(family)
        table = self._groups.setdefault((family, (transfer.source, transfer.target)), {})
        table[traffic] = self._priced(self._transfer(transfer.num_bytes, transfer.source, transfer.target))

    def _priced(self, cost: Communication) -> tuple[float, float, Shares]:
        return cost.latency_s, cost.work_s, cost.shares if self._contention else ()

    def freeze(self) -> list[Channel]:
        """Return all channels, in the order registered."""
        for (family, devices), table in self._groups.items():
            costs = tuple((traffic, latency, work, shares) for traffic, (latency, work, shares) in table.items())
            self._by_family.setdefault(family, []).append(len(self.channels))
            self.channels.append(Channel(family, devices, family in self._ordered, costs))
        return self.channels

    def carrying(self, family: Hashable, traffic: Traffic) -> list[tuple[int, Channel]]:
        """Return the classes of a family that some traffic passes through."""
        return [(number, channel) for number, channel in self.classes(family) if channel.carries(traffic)]

    def classes(self, family: Hashable) -> list[tuple[int, Channel]]:
        """Return ``(channel class, an example)`` of a family, one per class."""
        assert self.partition is not None
        found: dict[int, Channel] = {}
        for position in self._by_family.get(family, ()):
            found.setdefault(self.partition.channel_class[position], self.channels[position])
        return sorted(found.items())

    def of_family(self, family: Hashable) -> list[Channel]:
        """Return every channel of a family."""
        return [self.channels[position] for position in self._by_family.get(family, ())]

    def representatives(self, channel: Channel) -> tuple[int, ...]:
        """Return the representatives of a channel's members, without repeats, in order."""
        assert self.partition is not None
        if channel.members not in self._representatives:
            classes = self.partition.device_class
            self._representatives[channel.members] = tuple(dict.fromkeys(classes[device] for device in channel.members))
        return self._representatives[channel.members]

    def price(self, channel_class: int, traffic: Traffic) -> tuple[float, float, dict[int, float]]:
        """Return latency, work and the shares on representative resources."""
        assert self.partition is not None
        channel = self.channels[self.partition.channel_examples[channel_class]]
        for known, latency, work, _ in channel.costs:
            if known == traffic:
                return latency, work, self.partition.shares[channel_class].get(traffic, {})
        raise AssertionError(f"traffic {traffic} was not registered")
