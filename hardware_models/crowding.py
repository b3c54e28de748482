"""Collectives and transfers that run at once: who shares links with whom, and how much longer that takes.

The rule: a resource needs the seconds of all that cross it, and work takes at least what the fullest of its resources
needs. Where all are alike this is what the engine's loads amount to. Where they are not, short ones end earlier there
and leave the links to the others, so a load in force all the time would be too much (for groups with one, two or three
ranks on a node up to 16 %; this is at most 4 % off). What the library chose, it chose as if alone.

>>> from hardware_models.cluster import parse_cluster
>>> unlike_groups(parse_cluster("p3.8xlarge:2x4"), [(0, 4), (1, 5), (2, 6), (3, 7)])[0]
CrowdedGroup(members=(0, 4), beside=((1, 5), (2, 6), (3, 7)))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from hardware_models.cluster import Cluster
from hardware_models.collectives import Flow
from hardware_models.communication import Communication

ROUNDING = 1e-12
"""Resources that need no more than this share beyond a work's own time are full, not overfull."""


@dataclass(frozen=True)
class CrowdedGroup:
    """A group of ranks, and the groups that run the same collective at the same time on its nodes.

    Attributes:
        members: Devices.
        beside: Devices of each of the other groups.
    """

    members: tuple[int, ...]
    beside: tuple[tuple[int, ...], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of many devices, and asked for often."""
        return hash((self.members, self.beside))


def unlike_groups(cluster: Cluster, groups: Iterable[tuple[int, ...]]) -> tuple[CrowdedGroup, ...]:
    """Return groups that run at once: one of those that stand alike in nodes of one kind, beside groups that do.

    Args:
        cluster: Whose nodes they are on.
        groups: All of them.
    """
    found, kind_of = list(groups), cluster.kind_of_node
    forms: dict[object, int] = {}
    standing: list[tuple[int, list[int]]] = []
    on_node: dict[int, list[tuple[int, int, int]]] = {}
    for number, members in enumerate(found):
        places: dict[int, list[int]] = {}
        for device in members:
            places.setdefault(cluster.node_of(device), []).append(cluster.slot_of(device))
        form = forms.setdefault(tuple((kind_of[node], *slots) for node, slots in places.items()), len(forms))
        standing.append((form, list(places)))
        for place, node in enumerate(places):
            on_node.setdefault(node, []).append((form, place, number))
    # What a group uses of a node depends on its form and on which of the form's nodes it is.
    views: dict[object, int] = {}
    view_of = {
        node: views.setdefault(tuple(sorted(each[:2] for each in there)), len(views))
        for node, there in on_node.items()
    }
    unlike: dict[object, CrowdedGroup] = {}
    for number, (form, nodes) in enumerate(standing):
        key = (form, tuple(view_of[node] for node in nodes))
        if key not in unlike:
            near = sorted({other for node in nodes for _, _, other in on_node[node]} - {number})
            unlike[key] = CrowdedGroup(found[number], tuple(found[other] for other in near))
    return tuple(unlike.values())


def slowdowns(flows: Sequence[Flow], beside: Sequence[Sequence[Flow]]) -> tuple[tuple[float, ...], ...]:
    """Return by what groups beside it stretch a group's work, per flow and protocol: at least 1.

    Args:
        flows: Of the group.
        beside: Of each other group. They take the same flow and protocol, or their last where they have fewer.
    """
    found = []
    for index, flow in enumerate(flows):
        others = [theirs[min(index, len(theirs) - 1)] for theirs in beside]
        row = []
        for protocol in range(len(flow.protocols)):
            work_s, own_shares = _work_per_byte(flow, protocol)
            parts: dict[str, list[float]] = {resource: [share * work_s] for resource, share in own_shares}
            for other in others:
                their_s, shares = _work_per_byte(other, protocol)
                for resource, share in shares:
                    if resource in parts:
                        parts[resource].append(share * their_s)
            slowdown = max(map(fsum, parts.values()), default=0.0) / work_s
            row.append(slowdown if slowdown > 1 + ROUNDING else 1.0)
        found.append(tuple(row))
    return tuple(found)


def together_s(costs: Iterable[Communication]) -> float:
    """Return the seconds until the last of some transfers or collectives has ended that start together.

    >>> one = Communication(latency_s=0.5, work_s=2.0, shares=(("nic", 0.75),))
    >>> together_s([one]), together_s([one, one]), together_s([])
    (2.5, 3.5, 0.0)
    """
    alone_s = 0.0
    needed_s: dict[str, float] = {}
    latency_s: dict[str, float] = {}
    for cost in costs:
        alone_s = max(alone_s, cost.latency_s + cost.work_s)
        for resource, share in cost.shares:
            needed_s[resource] = needed_s.get(resource, 0.0) + share * cost.work_s
            latency_s[resource] = max(latency_s.get(resource, 0.0), cost.latency_s)
    crowded_s = max((latency_s[resource] + seconds for resource, seconds in needed_s.items()), default=0.0)
    return crowded_s if crowded_s > alone_s * (1 + ROUNDING) else alone_s


def _work_per_byte(flow: Flow, protocol: int) -> tuple[float, tuple[tuple[str, float], ...]]:
    """Return the seconds of a byte, and the share of each resource that is used meanwhile."""
    protocol = min(protocol, len(flow.protocols) - 1)
    return flow.s_per_byte(flow.protocols[protocol]), flow.shares(protocol)
