"""What Piper plans: a graph of layers, each with several implementations, and identical devices.

Source:
    Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021; file format of its
    public repository (msr-fiddle/piper). Its README calls the microbatches of a batch ``maxBatchSize``; the
    files say ``mbsInBatch``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping

MAX_IDEALS = 40_000


@dataclass(frozen=True)
class Implementation:
    """One way to run a layer on t devices: a "TMPC" of Piper.

    Attributes:
        name: ``vanilla``, ``activation recomp``, ...
        time_s: Forward and backward of one microbatch.
        weight_bytes: Per device.
        memory_per_microbatch_bytes, memory_bytes: Memory is the first times microbatches in flight plus the second.
        sync_forward_bytes, sync_backward_bytes: Extra traffic if the edge from a predecessor, or to a successor,
            is cut, by its id.
    """

    name: str
    time_s: float
    weight_bytes: float
    memory_per_microbatch_bytes: float
    memory_bytes: float
    sync_forward_bytes: Mapping[str, float]
    sync_backward_bytes: Mapping[str, float]


@dataclass(frozen=True)
class Edge:
    """A tensor from one layer to another.

    Attributes:
        source, target: Ids.
        num_bytes: For one microbatch.
    """

    source: str
    target: str
    num_bytes: float


@dataclass(frozen=True)
class Tie:
    """A weight that several layers use, and hold alike: a stage has it once. Not in Piper's files.

    Attributes:
        degree: Tensor degree at which they do.
        layers: The layer of each use, by its id.
        weight_bytes, memory_bytes: Of the weight, as each of the layers counts them.
    """

    degree: int
    layers: tuple[str, ...]
    weight_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class PiperInput:
    """A problem of Piper's.

    Attributes:
        names: Ids of the layers.
        implementations: Per layer, by tensor-parallel degree.
        edges: Between layers.
        num_devices: K.
        memory_bytes: Per device.
        bandwidth_bytes_per_s: Between any two devices.
        num_microbatches: N: microbatches in a batch.
        ties: Weights that layers share.
    """

    names: tuple[str, ...]
    implementations: tuple[Mapping[int, tuple[Implementation, ...]], ...]
    edges: tuple[Edge, ...]
    num_devices: int
    memory_bytes: float
    bandwidth_bytes_per_s: float
    num_microbatches: int
    ties: tuple[Tie, ...] = ()

    def ideals(self) -> list[int]:
        """Return all down-sets; see `down_sets`."""
        return down_sets(self.names, tuple((edge.source, edge.target) for edge in self.edges))

    def tied_weight_bytes(self, layers: Collection[str], degree: int) -> float:
        """Return weights that layers of one stage count again, as another of them has the same."""
        return sum(
            tie.weight_bytes * max(0, sum(name in layers for name in tie.layers) - 1)
            for tie in self.ties
            if tie.degree == degree
        )


def down_sets(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[int]:
    """Return all down-sets of a graph as bit masks, by size: the empty one first, the whole graph last.

    Raises:
        ValueError: If there are more than MAX_IDEALS, or the graph has a cycle.
    """
    number = {name: index for index, name in enumerate(names)}
    needs = [0] * len(names)
    for source, target in edges:
        needs[number[target]] |= 1 << number[source]
    found, level = [0], {0}
    for _ in names:
        level = {
            ideal | 1 << node
            for ideal in level
            for node in range(len(names))
            if not ideal >> node & 1 and not needs[node] & ~ideal
        }
        found += sorted(level)
        if len(found) > MAX_IDEALS:
            raise ValueError(f"the graph has more than {MAX_IDEALS} down-sets; merge branches into blocks first")
    if found[-1] != (1 << len(names)) - 1:
        raise ValueError("the graph of layers has a cycle")
    return found


def load_piper_input(path: str | Path) -> PiperInput:
    """Read one of Piper's JSON files (times in seconds, sizes in bytes).

    Raises:
        DataFileError: If the file cannot be read or lacks a field.
    """
    return piper_input(load_mapping(path), str(path))


def piper_input(mapping: Mapping[str, Any], source: str) -> PiperInput:
    """Return the problem that the content of a file describes.

    Raises:
        DataFileError: If a field is missing or malformed.
    """
    try:
        nodes: Sequence[Mapping[str, Any]] = mapping["nodes"]
        found = PiperInput(
            names=tuple(str(node["id"]) for node in nodes),
            implementations=tuple(
                {
                    int(degree): tuple(_implementation(entry) for entry in entries)
                    for degree, entries in node["TMPCs"].items()
                }
                for node in nodes
            ),
            edges=tuple(
                Edge(str(edge["sourceId"]), str(edge["destId"]), float(edge["communicationCost"]))
                for edge in mapping["edges"]
            ),
            num_devices=int(mapping["maxDevices"]),
            memory_bytes=float(mapping["maxMemoryPerDevice"]),
            bandwidth_bytes_per_s=float(mapping["bandwidth"]),
            num_microbatches=int(mapping["mbsInBatch"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataFileError(source, f"not an input of Piper: {type(error).__name__} {error}") from None
    known = set(found.names)
    for edge in found.edges:
        if edge.source not in known or edge.target not in known:
            raise DataFileError(source, f"an edge must join two nodes of the file, got {edge.source} to {edge.target}")
    return found


def _implementation(entry: Mapping[str, Any]) -> Implementation:
    return Implementation(
        name=str(entry["id"]),
        time_s=float(entry["timePerSample"]),
        weight_bytes=float(entry["parameterSize"]),
        memory_per_microbatch_bytes=float(entry["memoryUsageA"]),
        memory_bytes=float(entry["memoryUsageB"]),
        sync_forward_bytes={str(key): float(value) for key, value in entry["syncTimeFw"].items()},
        sync_backward_bytes={str(key): float(value) for key, value in entry["syncTimeBw"].items()},
    )
