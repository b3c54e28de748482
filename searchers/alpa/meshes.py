"""Submeshes of the cluster and logical meshes over them: what a stage can run on, and what each costs to try.

Source: Alpa (OSDI 2022), sections 5.2 and 7; the search space of its public code with
``submesh_logical_shape_space="all"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hardware_models.cluster import Cluster
from simulator.divisors import divisors

SubmeshSpace = Literal["all", "power_of_two"]


@dataclass(frozen=True)
class Submesh:
    """A slice of the cluster: some nodes, or some GPUs of one node.

    Attributes:
        nodes: Nodes it spans.
        gpus_per_node: GPUs it takes of each.
    """

    nodes: int
    gpus_per_node: int

    @property
    def num_devices(self) -> int:
        """GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class LogicalMesh:
    """A two-dimensional view of a submesh.

    Attributes:
        submesh: What it views.
        rows, columns: Its shape; the product is the submesh's number of devices.
        batch_forced: The batch is split over the rows; else operators may do what they like there.
    """

    submesh: Submesh
    rows: int
    columns: int
    batch_forced: bool

    @property
    def num_devices(self) -> int:
        """GPUs."""
        return self.rows * self.columns

    @property
    def name(self) -> str:
        """As in tables: ``(2,4)``, with a star where the batch is not forced."""
        return f"({self.rows},{self.columns}){'' if self.batch_forced else '*'}"


def submeshes(cluster: Cluster, space: SubmeshSpace = "all") -> tuple[Submesh, ...]:
    """Return the submesh shapes that tile the cluster: 1, 2, 4 ... GPUs of a node, then whole nodes.

    Args:
        cluster: Nodes of equal size.
        space: ``all`` takes every number of nodes, ``power_of_two`` only powers of two.

    Raises:
        ValueError: If nodes differ, or GPUs per node is no power of two (the theorem that such shapes always tile
            needs it).
    """
    per_node, nodes = cluster.devices_per_node, cluster.num_nodes
    if len(cluster.gpu_types) > 1 or any(node.num_devices != per_node for node in cluster.nodes):
        raise ValueError(f"submeshes need nodes of one kind and size, got {cluster.name}")
    if per_node & (per_node - 1):
        raise ValueError(f"Alpa's submeshes need GPUs per node that are a power of two, got {per_node}")
    inside = [Submesh(1, 1 << power) for power in range(per_node.bit_length())]
    whole = range(2, nodes + 1) if space == "all" else [n for n in range(2, nodes + 1) if n & (n - 1) == 0]
    return (*inside, *(Submesh(count, per_node) for count in whole))


def logical_meshes(submesh: Submesh) -> tuple[LogicalMesh, ...]:
    """Return every (rows, columns) with the batch on the rows, and one more (n, 1) without: divisors + 1.

    >>> [mesh.name for mesh in logical_meshes(Submesh(1, 4))]
    ['(4,1)', '(2,2)', '(1,4)', '(4,1)*']
    """
    count = submesh.num_devices
    forced = tuple(
        LogicalMesh(submesh, rows, count // rows, True) for rows in sorted(divisors(count), reverse=True)
    )
    return (*forced, LogicalMesh(submesh, count, 1, False))


def all_logical_meshes(cluster: Cluster, space: SubmeshSpace = "all") -> tuple[LogicalMesh, ...]:
    """Return the logical meshes of all submeshes: 14 for one node of eight GPUs."""
    return tuple(mesh for submesh in submeshes(cluster, space) for mesh in logical_meshes(submesh))
