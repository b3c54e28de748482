"""Which devices behave alike: the coarsest equitable partition of devices, groups, transfers and links.

Two devices share a class if they play the same part (stage, device type, samples) and belong to equal
groups and transfers over equal links, recursively. Equal classes start equal and meet equal influences at
every event, so they stay equal to the end of the iteration: simulating one of each is exact. A link's class
carries, for each class of traffic, how much of it meets on one such link; that sum is the representative's
share.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

Traffic = Hashable
"""Identifies one kind of traffic of a static channel: what, how many bytes."""


@dataclass(frozen=True)
class Channel:
    """One group of devices that communicate together, or one pair.

    Attributes:
        family: Channels of one family are instances of the same item of a stage's program.
        members: Physical devices; order matters for transfers (source, target).
        ordered: True for transfers.
        costs: Per traffic: (latency_s, work_s, shares) of this very channel.
    """

    family: Hashable
    members: tuple[int, ...]
    ordered: bool
    costs: tuple[tuple[Traffic, float, float, tuple[tuple[str, float], ...]], ...]

    def carries(self, traffic: Traffic) -> bool:
        """Return whether some traffic passes through."""
        return any(known == traffic for known, _, _, _ in self.costs)


@dataclass(frozen=True)
class Partition:
    """Classes of devices, channels and resources.

    Attributes:
        device_class: Physical device to class index; classes are numbered by first member.
        members: Devices of each class, ascending.
        channel_class: Channel index (in the given order) to class index.
        channel_examples: One channel index per class.
        shares: Per channel class and traffic: ``{resource class: share on one such resource}``.
        resource_names: One name per resource class.
    """

    device_class: Mapping[int, int]
    members: tuple[tuple[int, ...], ...]
    channel_class: tuple[int, ...]
    channel_examples: tuple[int, ...]
    shares: tuple[dict[Traffic, dict[int, float]], ...]
    resource_names: tuple[str, ...]


def partition(roles: Mapping[int, Hashable], channels: Sequence[Channel], *, merge: bool) -> Partition:
    """Return the coarsest equitable partition that refines ``roles``; every device alone if not ``merge``.

    Args:
        roles: Physical device to what it is: stage, device type, samples, ...
        channels: All groups and transfers.
        merge: False keeps every device, channel and resource apart.
    """
    devices = sorted(roles)
    uses, names = _uses(channels)
    if not merge:
        device_color = {device: position for position, device in enumerate(devices)}
        channel_color: list[int] = list(range(len(channels)))
        resource_color = list(range(len(names)))
    else:
        device_color, channel_color, resource_color = _refine(devices, roles, channels, uses, len(names))
    return _assemble(devices, channels, device_color, channel_color, resource_color, names)


class _Uses(NamedTuple):
    """Which channel uses which resource, and how much of it with which traffic (a number for that). int64[U]."""

    channel: Ids
    resource: Ids
    kind: Ids


def _uses(channels: Sequence[Channel]) -> tuple[_Uses, list[str]]:
    """Return all uses, and the names of the resources."""
    numbers: dict[str, int] = {}
    kinds: dict[Hashable, int] = {}
    rows: list[tuple[int, int, int]] = []
    for position, channel in enumerate(channels):
        found: dict[str, Hashable] = {}
        for traffic, _, _, shares in channel.costs:
            for name, fraction in shares:
                found[name] = (found.get(name), traffic, round(fraction, 12))
        for name, kind in found.items():
            rows.append((position, numbers.setdefault(name, len(numbers)), kinds.setdefault(kind, len(kinds))))
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return _Uses(*columns), list(numbers)


def _refine(
    devices: Sequence[int],
    roles: Mapping[int, Hashable],
    channels: Sequence[Channel],
    uses: _Uses,
    num_resources: int,
) -> tuple[dict[int, int], list[int], list[int]]:
    place_of = {device: number for number, device in enumerate(devices)}
    device_color = _numbered(roles[device] for device in devices)
    resource_color = np.zeros(num_resources, dtype=np.int64)
    channel_color = _numbered(
        (
            channel.family,
            tuple((traffic, round(latency, 15), round(work, 15)) for traffic, latency, work, _ in channel.costs),
        )
        for channel in channels
    )
    # Who is in which channel, in which place if that matters.
    sizes = [len(channel.members) for channel in channels]
    member_channel = np.repeat(np.arange(len(channels)), sizes)
    member_device = np.array([place_of[device] for channel in channels for device in channel.members], dtype=np.int64)
    member_place = np.array(
        [place if channel.ordered else 0 for channel in channels for place in range(len(channel.members))],
        dtype=np.int64,
    )
    places, kinds = _count(member_place), _count(uses.kind)
    counts = (0, 0, 0)
    while True:
        members = (device_color[member_device] * places + member_place) * 2
        used = (resource_color[uses.resource] * kinds + uses.kind) * 2 + 1
        channel_color = _renumbered(
            channel_color, np.concatenate([member_channel, uses.channel]), np.concatenate([members, used])
        )
        device_color = _renumbered(
            device_color, member_device, channel_color[member_channel] * places + member_place
        )
        resource_color = _renumbered(resource_color, uses.resource, channel_color[uses.channel] * kinds + uses.kind)
        now = (_count(device_color), _count(channel_color), _count(resource_color))
        if now == counts:
            found = dict(zip(devices, device_color.tolist(), strict=True))
            return found, channel_color.tolist(), resource_color.tolist()
        counts = now


def _count(colors: Ids) -> int:
    return int(colors.max(initial=-1)) + 1


def _numbered(values: Iterable[Hashable]) -> Ids:
    """Return a number for each value, equal ones the same, counted as they first appear."""
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(value, len(ids)) for value in values], dtype=np.int64)


def _renumbered(own: Ids, rows: Ids, codes: Ids) -> Ids:
    """Return a number for each own number together with the codes of its row, in any order.

    Args:
        own: int64[N].
        rows: int64[M]. Which of the N each code belongs to.
        codes: int64[M], >= 0.
    """
    width = int(codes.max(initial=0)) + 1
    assert len(own) * width < 1 << 62, "rows and codes must fit into one number"
    ordered = np.sort(rows * width + codes)
    text = (ordered % width).tobytes()
    bounds = (np.searchsorted(ordered, np.arange(len(own) + 1) * width) * 8).tolist()
    return _numbered((color, text[a:b]) for color, a, b in zip(own.tolist(), bounds, bounds[1:], strict=False))


def _assemble(
    devices: Sequence[int],
    channels: Sequence[Channel],
    device_color: Mapping[int, int],
    channel_color: Sequence[int],
    resource_color: Sequence[int],
    names: Sequence[str],
) -> Partition:
    order: dict[int, int] = {}
    for device in devices:
        order.setdefault(device_color[device], len(order))
    device_class = {device: order[device_color[device]] for device in devices}
    members: list[list[int]] = [[] for _ in order]
    for device in devices:
        members[device_class[device]].append(device)
    examples: list[int] = []
    channel_order: dict[int, int] = {}
    for position, color in enumerate(channel_color):
        if color not in channel_order:
            channel_order[color] = len(channel_order)
            examples.append(position)
    channel_class = tuple(channel_order[color] for color in channel_color)
    class_of_resource = {name: resource_color[number] for number, name in enumerate(names)}
    resource_names: dict[int, str] = {}
    for number, name in enumerate(names):
        resource_names.setdefault(resource_color[number], name)
    loads: list[dict[Traffic, dict[str, float]]] = [{} for _ in examples]
    for position, channel in enumerate(channels):
        table = loads[channel_class[position]]
        for traffic, _, _, shares in channel.costs:
            row = table.setdefault(traffic, {})
            for name, fraction in shares:
                row[name] = row.get(name, 0.0) + fraction
    merged: list[dict[Traffic, dict[int, float]]] = []
    for table in loads:
        merged.append({})
        for traffic, row in table.items():
            target = merged[-1].setdefault(traffic, {})
            for name, load in row.items():
                kind = class_of_resource[name]
                target[kind] = max(target.get(kind, 0.0), load)
    return Partition(
        device_class=device_class,
        members=tuple(tuple(found) for found in members),
        channel_class=channel_class,
        channel_examples=tuple(examples),
        shares=tuple(merged),
        resource_names=tuple(resource_names[color] for color in range(len(resource_names))),
    )
