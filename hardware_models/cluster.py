"""Clusters: nodes with GPUs, links and NICs; presets and the strings that name them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import FileModel, validated
from hardware_models.gpus import GpuType, load_gpu
from hardware_models.links import LinkType, NetworkType, load_link, load_network
from hardware_models.schema import Cards, Text

PRESETS = Path(__file__).parent / "presets"
MAX_DEVICES = 1_000_000
FILE_SUFFIXES = (".yaml", ".yml", ".json")
DIGEST_LENGTH = 12
"""Hexadecimal digits: 48 bits tell apart the cluster files of any user."""

Edge = tuple[int, int, int]
"""``(gpu, gpu, number of physical links)`` inside a node."""


class NodePreset(FileModel):
    """The file format of a cluster: one kind of node.

    Attributes:
        description: One line for ``windtunnel list clusters``.
        gpu: GPU type.
        gpus_per_node: GPUs in a full node.
        links, network: Entries of ``link_types.yaml``.
        nics_per_node: Network cards; GPU i uses card ``i * nics // gpus``, and where there are more cards than GPUs,
            those up to the next GPU's too.
        mesh: For ``mesh`` links: which GPUs are joined by how many links.
        source: Where the facts come from.
    """

    description: Text
    gpu: Text
    gpus_per_node: Annotated[int, Field(ge=1, le=1024)]
    links: Text
    network: Text
    nics_per_node: Cards
    source: Text
    mesh: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Node:
    """One machine of a cluster.

    Attributes:
        preset: What it came from, as ``measured_name`` has it.
        gpu: Type of its GPUs.
        first_device, num_devices: Its device ids are ``first_device .. first_device + num_devices - 1``.
        num_slots: GPUs a full node of this preset has; the first ``num_devices`` are in use.
        links: Technology inside; ``mesh`` lists its edges.
        network: Technology between nodes; ``num_nics`` cards.
    """

    preset: str
    gpu: GpuType
    first_device: int
    num_devices: int
    num_slots: int
    links: LinkType
    mesh: tuple[Edge, ...]
    network: NetworkType
    num_nics: int

    def nics_of(self, slot: int) -> range:
        """Return the cards that GPU ``slot`` (counted inside the node) uses."""
        first, following = (at * self.num_nics // self.num_slots for at in (slot, slot + 1))
        return range(first, max(first + 1, following))


@dataclass(frozen=True, eq=False)
class Cluster:
    """Nodes whose devices are numbered 0..N-1, node by node. Two clusters are equal if their names are."""

    name: str
    nodes: tuple[Node, ...]
    _node_of_device: tuple[int, ...] = dataclass_field(init=False, repr=False)
    _starts: dict[tuple[int, str | None], tuple[int, ...]] = dataclass_field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        owners = [index for index, node in enumerate(self.nodes) for _ in range(node.num_devices)]
        object.__setattr__(self, "_node_of_device", tuple(owners))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self.name == other.name and self.nodes == other.nodes

    def __hash__(self) -> int:
        return hash((self.name, len(self.nodes)))

    @property
    def num_devices(self) -> int:
        """Devices in all."""
        return len(self._node_of_device)

    @property
    def num_nodes(self) -> int:
        """Nodes in all."""
        return len(self.nodes)

    @cached_property
    def devices_per_node(self) -> int:
        """Devices of the largest node (of every node, in the usual uniform cluster)."""
        return max(node.num_devices for node in self.nodes)

    @cached_property
    def kind_of_node(self) -> tuple[int, ...]:
        """Per node a number that nodes share which differ in nothing but their devices' ids."""
        kinds = [replace(node, first_device=0) for node in self.nodes]
        return tuple(kinds.index(kind) for kind in kinds)

    def unlike_starts(self, num_devices: int, gpu_type: str | None = None) -> tuple[int, ...]:
        """Return first devices of nodes from which that many in a row meet unlike nodes; the last that do if none can.

        Those that a cluster cut into so many devices each begins anew at, if any.

        Args:
            num_devices: At most all.
            gpu_type: Of the first node; None for any.

        >>> parse_cluster("p3.8xlarge:2x4+g4dn.12xlarge:2x4").unlike_starts(8)
        (0, 8)
        """
        key = (num_devices, gpu_type)
        if key not in self._starts:
            found: dict[bool, dict[tuple[int, ...], int]] = {True: {}, False: {}}
            for node in self.nodes:
                first, last = node.first_device, node.first_device + num_devices - 1
                if last < self.num_devices and gpu_type in (None, node.gpu.name):
                    met = self.kind_of_node[self.node_of(first) : self.node_of(last) + 1]
                    found[first % num_devices == 0].setdefault(met, first)
                if len(set(self.kind_of_node)) == 1:
                    break
            starts = found[True] or found[False]
            self._starts[key] = tuple(starts.values()) or (max(0, self.num_devices - num_devices),)
        return self._starts[key]

    def node_of(self, device: int) -> int:
        """Return the index of the node that holds ``device``."""
        if not 0 <= device < self.num_devices:
            raise ValueError(f"device must be in 0..{self.num_devices - 1} on {self.name}, got {device}")
        return self._node_of_device[device]

    def slot_of(self, device: int) -> int:
        """Return the index of ``device`` inside its node."""
        return device - self.nodes[self.node_of(device)].first_device

    def gpu(self, device: int) -> GpuType:
        """Return the GPU at ``device``."""
        return self.nodes[self.node_of(device)].gpu

    def gpu_type(self, device: int) -> str:
        """Return the name of the GPU type at ``device``."""
        return self.gpu(device).name

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        """Names of the GPU types present, in order of first appearance."""
        return tuple(dict.fromkeys(node.gpu.name for node in self.nodes))

    def memory_bytes(self, device: int) -> int:
        """Return the memory of ``device`` in bytes."""
        return self.gpu(device).memory_bytes


@cache
def cluster_presets() -> tuple[str, ...]:
    """Return the names of all shipped cluster presets, sorted."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


@cache
def cluster_description(preset: str) -> str:
    """Return the one-line description of a shipped preset."""
    return _load_preset(preset).description


def cluster_gpus_per_node(preset: str) -> int:
    """Return the GPUs of a full node of a preset (a name or a path).

    Raises:
        ValueError: If there is none of that name.
    """
    return _load_preset(preset).gpus_per_node


def measured_name(preset: str) -> str:
    """Return the name under which links of a preset are measured, wherever it lies and however its path is written.

    A shipped one's is its own; a file's is ``NAME#DIGEST`` of what the file says, but for its ``source``. Words of the
    description count: where no catalogue entry fits, they are all that tells two machines apart.

    Args:
        preset: A name or a path.

    Raises:
        ValueError: If there is none of that name.
    """
    return _measured_name(preset, _load_preset(preset))


def _measured_name(name: str, preset: NodePreset) -> str:
    if name in cluster_presets():
        return name
    # Without defaults: a field that is added later leaves the digests of files that do not use it.
    says = preset.model_dump(mode="json", exclude={"source"}, exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(says, sort_keys=True).encode()).hexdigest()
    return f"{Path(name).name}#{digest[:DIGEST_LENGTH]}"


def same_preset(measured: str, preset: str) -> bool:
    """Return whether two measured names are of one preset: files of one digest are, whatever they are called.

    >>> same_preset("ours.yaml#0123456789ab", "copy.yaml#0123456789ab"), same_preset("p3.8xlarge", "p3.16xlarge")
    (True, False)
    """
    return measured.rpartition("#")[2] == preset.rpartition("#")[2]


def parse_cluster(text: str) -> Cluster:
    """Build the cluster that a string names.

    Args:
        text: ``preset:nodesxgpus``, for example ``v100-32g-dgx1:4x8``; ``1x4`` uses the first four GPUs of
            one node; ``+`` joins parts of different kind. A preset may be a path to a YAML file.

    Returns:
        The cluster, named ``text``.

    Raises:
        ValueError: If a part is malformed, unknown, or asks for more GPUs than a node has.

    >>> parse_cluster("v100-32g-dgx1:4x8").num_devices
    32
    """
    nodes: list[Node] = []
    for part in text.split("+"):
        match = re.fullmatch(r"\s*(.+):(\d{1,30})x(\d{1,30})\s*", part)
        if match is None:
            raise ValueError(
                f"a cluster must be written preset:NODESxGPUS, got {part.strip()!r}; {_shape_remedy(part.strip())}"
            )
        name, num_nodes, num_gpus = match[1], int(match[2]), int(match[3])
        preset = _load_preset(name)
        if num_nodes < 1 or not 1 <= num_gpus <= preset.gpus_per_node:
            raise ValueError(
                f"{name} must have at least one node and 1..{preset.gpus_per_node} GPUs a node, "
                f"got {num_nodes}x{num_gpus}; use more nodes for more GPUs"
            )
        if sum(node.num_devices for node in nodes) + num_nodes * num_gpus > MAX_DEVICES:
            raise ValueError(f"a cluster must have at most {MAX_DEVICES:,} GPUs, got {text!r}")
        nodes += _build_nodes(name, preset, num_nodes, num_gpus, first_node=nodes)
    return Cluster(name=text, nodes=tuple(nodes))


def _shape_remedy(part: str) -> str:
    name, _, _ = part.rpartition(":")
    named = name if name.endswith(FILE_SUFFIXES) or name in cluster_presets() else part
    if named in cluster_presets():
        return f"for example {named}:4x{cluster_gpus_per_node(named)}"
    if named.endswith(FILE_SUFFIXES):
        return f"for example {named}:2x1 for two of its nodes with one GPU each"
    return f"for example v100-32g-dgx1:4x8; presets: {', '.join(cluster_presets())}"


def _load_preset(name: str) -> NodePreset:
    if name in cluster_presets():
        return _parse_preset(load_mapping(PRESETS / f"{name}.yaml"), f"preset {name}")
    if name.endswith(FILE_SUFFIXES):
        return _parse_preset(load_mapping(Path(name)), name)
    raise ValueError(
        f"cluster preset must be a known one or a path to a YAML file, got {name!r}; "
        f"{nearest(name, cluster_presets())}"
    )


def _parse_preset(mapping: Mapping[str, object], where: str) -> NodePreset:
    preset = validated(NodePreset, mapping, where)
    try:
        load_gpu(preset.gpu), load_network(preset.network)
        is_mesh = load_link(preset.links).kind == "mesh"
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if is_mesh != bool(preset.mesh):
        raise ValueError(
            f"{where}: mesh must list edges exactly when the links are a mesh; got {preset.links!r}"
        )
    for a, b, count in preset.mesh:
        if not (0 <= a < b < preset.gpus_per_node and count >= 1):
            raise ValueError(
                f"{where}: mesh edges must be [a, b, count] with a < b < {preset.gpus_per_node} "
                f"and count >= 1, got {[a, b, count]}"
            )
    if len({edge[:2] for edge in preset.mesh}) != len(preset.mesh):
        raise ValueError(f"{where}: mesh must name each pair once; add up the counts of parallel links")
    return preset


def _build_nodes(
    name: str, preset: NodePreset, num_nodes: int, num_gpus: int, *, first_node: list[Node]
) -> list[Node]:
    first_device = first_node[-1].first_device + first_node[-1].num_devices if first_node else 0
    gpu, links, network = load_gpu(preset.gpu), load_link(preset.links), load_network(preset.network)
    measured = _measured_name(name, preset)
    return [
        Node(
            preset=measured,
            gpu=gpu,
            first_device=first_device + index * num_gpus,
            num_devices=num_gpus,
            num_slots=preset.gpus_per_node,
            links=links,
            mesh=preset.mesh,
            network=network,
            num_nics=preset.nics_per_node,
        )
        for index in range(num_nodes)
    ]
