"""How a group of ranks lies on a cluster, as measured tables name it, and which groups lie beside it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hardware_models.cluster import Cluster


@dataclass(frozen=True)
class GroupShape:
    """A group of ranks, wherever it is.

    Attributes:
        size: Ranks.
        num_nodes: Nodes they lie on, equally many on each.
        stride: Distance between neighbours inside a node, in GPUs; None where it is not recorded, uneven, or where
            there is one rank on each node.
        groups_per_node: Groups of this shape that ran at once on each node while this was measured.
    """

    size: int
    num_nodes: int = 1
    stride: int | None = None
    groups_per_node: int = 1

    def __post_init__(self) -> None:
        if self.size < 2 or self.num_nodes < 1 or self.groups_per_node < 1 or self.size % self.num_nodes:
            raise ValueError(
                "a group must have at least 2 ranks, equally many on each of its nodes, and run at least once on a "
                f"node, got size {self.size}, nodes {self.num_nodes}, groups on a node {self.groups_per_node}"
            )
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"a stride must be at least 1, got {self.stride}; leave it out where it is not known")

    def __str__(self) -> str:
        words = [f"{self.size} ranks"]
        if self.num_nodes > 1:
            words.append(f"on {self.num_nodes} nodes")
        if self.stride is not None and self.stride > 1:
            words.append(f"stride {self.stride}")
        if self.groups_per_node > 1:
            words.append(f"{self.groups_per_node} groups at once on a node")
        return ", ".join(words)


def shape_of(cluster: Cluster, devices: Sequence[int]) -> GroupShape | None:
    """Return the shape of a group, or None where its nodes hold unequal numbers of ranks.

    >>> from hardware_models.cluster import parse_cluster
    >>> str(shape_of(parse_cluster("v100-32g-dgx1:2x8"), (0, 2, 8, 10)))
    '4 ranks, on 2 nodes, stride 2'
    """
    slots = slots_by_node(cluster, devices)
    return shape_from_slots(slots.values()) if len({len(own) for own in slots.values()}) == 1 else None


def shape_from_slots(slots: Collection[Sequence[int]], groups_per_node: int = 1) -> GroupShape:
    """Return the shape of a group from its GPUs inside each of its nodes.

    Raises:
        ValueError: If its nodes hold unequal numbers of ranks, or there is one rank only.

    >>> shape_from_slots([[0, 4], [0, 4]])
    GroupShape(size=4, num_nodes=2, stride=4, groups_per_node=1)
    """
    counts = {len(own) for own in slots}
    if len(counts) != 1:
        raise ValueError(f"a group must have equally many ranks on each of its nodes, got {sorted(counts)}")
    gaps = {after - before for own in slots for before, after in pairwise(sorted(own))}
    stride = gaps.pop() if len(gaps) == 1 else None
    return GroupShape(counts.pop() * len(slots), len(slots), stride or None, groups_per_node)


def slots_by_node(cluster: Cluster, devices: Sequence[int]) -> dict[int, list[int]]:
    """Return the GPUs of a group, counted inside their nodes, by node."""
    found: dict[int, list[int]] = {}
    for device in sorted(devices):
        found.setdefault(cluster.node_of(device), []).append(cluster.slot_of(device))
    return found


def full_nodes(cluster: Cluster) -> Cluster:
    """Return the cluster with all GPUs of its nodes in use, as they were where whole nodes were measured."""
    nodes, first = [], 0
    for node in cluster.nodes:
        nodes.append(replace(node, first_device=first, num_devices=node.num_slots))
        first += node.num_slots
    return Cluster(name=f"{cluster.name}, whole nodes", nodes=tuple(nodes))


def groups_at_once(whole: Cluster, nodes: Sequence[int], shape: GroupShape) -> list[tuple[int, ...]]:
    """Return the groups of a shape that ran at once on these nodes; fewer where the nodes hold no more.

    Args:
        whole: From ``full_nodes``.
        nodes: Nodes of one of the groups.
        shape: With ``groups_per_node``.

    >>> from hardware_models.cluster import parse_cluster
    >>> groups_at_once(parse_cluster("v100-32g-dgx1:1x8"), (0,), GroupShape(2, 1, 4, groups_per_node=3))
    [(0, 4), (1, 5), (2, 6)]
    """
    per_node = shape.size // shape.num_nodes
    stride = shape.stride or 1
    num_slots = min(whole.nodes[node].num_slots for node in nodes)
    found = []
    for block in range(0, num_slots - per_node * stride + 1, per_node * stride):
        for start in range(block, block + stride):
            slots = range(start, start + per_node * stride, stride)
            found.append(tuple(whole.nodes[node].first_device + slot for node in nodes for slot in slots))
    return found[: shape.groups_per_node]
