"""Somebody's profile of a model, layer by layer, as a graph: DAPPLE's and PipeDream's CSV, Piper's JSON.

A profile has no operators, only times and sizes, so its workload consists of ``opaque`` operators: it can be
planned for and simulated, not executed. Everything is linear in the samples, as these systems assume.

The CSV has one row per node: ``node`` (id), ``layer`` (name), ``fw_ms``, ``bw_ms``, ``output_activation_bytes``,
``param_bytes`` (fp32 weights), ``preds`` (ids, separated by blanks) and optionally ``block``. Its times and sizes
are those of one batch, whose size the file does not hold: it is read from the name (``vgg19_b32.csv``) or given
after an ``@`` (``alexnet.csv@256``).

Sources:
    Fan et al., "DAPPLE", PPoPP 2021, and Narayanan et al., "PipeDream", SOSP 2019 (text graphs of their public
    repositories, as CSV); Tarnawski et al., "Piper", NeurIPS 2021 (JSON of its public repository).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_table
from workloads.graph_builder import GraphBuilder
from workloads.operators import Workload

PARAMETER_BYTES = 4
MAX_SIZE = 1e15
"""Milliseconds and bytes of a node: a petabyte, and far above any time."""

MAX_BATCH = 1_000_000
_NAMED = re.compile(r"(?P<path>.+\.csv(?:\.gz)?)(?:@(?P<batch>[^@]*))?", re.IGNORECASE)
_BATCH = re.compile(r"_b(\d{1,7})(?=\.csv)", re.IGNORECASE)
SIDE_TIME_SHARE = 1e-3
"""A node with a smaller share of the time counts as a view of an input, not as a layer."""


@dataclass(frozen=True)
class LayerNode:
    """One node of a profile, at the profile's batch.

    Attributes:
        name: Id in the file.
        layer: What it is called there.
        forward_s, backward_s: Seconds.
        output_bytes: Of its output activation.
        parameter_bytes: fp32 weights.
        saved_bytes: Kept from forward to backward.
        predecessors: Names.
        block: Coarser layer it belongs to; empty if the file has none.
    """

    name: str
    layer: str
    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float
    saved_bytes: float
    predecessors: tuple[str, ...]
    block: str = ""


@dataclass(frozen=True)
class LayerProfile:
    """A profile.

    Attributes:
        name: Of the model.
        batch: Samples that times and sizes are for.
        nodes: In the order of the file, which need not be topological.
    """

    name: str
    batch: int
    nodes: tuple[LayerNode, ...]

    @property
    def num_parameters(self) -> float:
        """Trainable elements."""
        return sum(node.parameter_bytes for node in self.nodes) / PARAMETER_BYTES

    def topological(self) -> tuple[LayerNode, ...]:
        """Return the nodes in topological order; among those that are ready the first in the file.

        Raises:
            ValueError: If the graph has a cycle.
        """
        position = {node.name: index for index, node in enumerate(self.nodes)}
        done: set[str] = set()
        order: list[LayerNode] = []
        state: dict[str, int] = {}
        for root in self.nodes:
            stack = [root]
            while stack:
                node = stack[-1]
                if node.name in done:
                    stack.pop()
                    continue
                waiting = [name for name in node.predecessors if name not in done]
                if not waiting:
                    done.add(node.name)
                    order.append(node)
                    stack.pop()
                    continue
                if state.setdefault(node.name, 0) > len(node.predecessors):
                    raise ValueError(f"profile {self.name}: node {node.name!r} waits for itself")
                state[node.name] += 1
                stack.append(self.nodes[position[min(waiting, key=position.__getitem__)]])
        return tuple(order)

    def without(self, names: Sequence[str]) -> LayerProfile:
        """Return the profile without some nodes; their readers no longer read them."""
        gone = set(names)
        kept = tuple(
            replace(node, predecessors=tuple(name for name in node.predecessors if name not in gone))
            for node in self.nodes
            if node.name not in gone
        )
        return replace(self, nodes=kept)

    def without_inputs(self) -> LayerProfile:
        """Return the profile without its ``Input`` nodes, which planners place with the first stage at no cost."""
        readers = {name for node in self.nodes for name in node.predecessors}
        inputs = [
            node.name
            for node in self.nodes
            if not node.predecessors and node.layer.startswith("Input") and node.name in readers
        ]
        return self.without(inputs)

    def without_side_inputs(self) -> LayerProfile:
        """Return the profile without masks, ids and the like: whatever has only such ancestors and no parameters,
        takes next to no time and is read more than once. Every stage is fed its own copy of them.
        """
        total = sum(node.forward_s + node.backward_s for node in self.nodes)
        count: dict[str, int] = {}
        for node in self.nodes:
            for name in node.predecessors:
                count[name] = count.get(name, 0) + 1
        side: set[str] = set()
        for node in self.topological():
            cheap = node.layer.startswith("Input") or node.forward_s + node.backward_s <= SIDE_TIME_SHARE * total
            if set(node.predecessors) <= side and not node.parameter_bytes and cheap and count.get(node.name, 0) > 1:
                side.add(node.name)
        return self.without(sorted(side))

    def with_saved_bytes(self, bytes_per_sample: float) -> LayerProfile:
        """Return the profile with activations of a known total, spread over the layers as the forward time is."""
        total = sum(node.forward_s for node in self.nodes)
        share = bytes_per_sample * self.batch / total
        return replace(self, nodes=tuple(replace(node, saved_bytes=node.forward_s * share) for node in self.nodes))

    def by_block(self) -> LayerProfile:
        """Return the profile with one node per block; nodes without a block stay as they are."""
        names = [node.block or node.name for node in self.nodes]
        block_of = {node.name: name for node, name in zip(self.nodes, names, strict=True)}
        read_outside = {
            name for node in self.nodes for name in node.predecessors if block_of[name] != block_of[node.name]
        }
        merged: dict[str, LayerNode] = {}
        for node in self.topological():
            name = block_of[node.name]
            before = tuple(block_of[other] for other in node.predecessors if block_of[other] != name)
            leaving = node.output_bytes if node.name in read_outside else 0.0
            if name not in merged:
                merged[name] = replace(
                    node, name=name, layer=node.block or node.layer, output_bytes=leaving, predecessors=before
                )
                continue
            old = merged[name]
            merged[name] = replace(
                old,
                forward_s=old.forward_s + node.forward_s,
                backward_s=old.backward_s + node.backward_s,
                output_bytes=old.output_bytes + leaving,
                parameter_bytes=old.parameter_bytes + node.parameter_bytes,
                saved_bytes=old.saved_bytes + node.saved_bytes,
                predecessors=tuple(dict.fromkeys((*old.predecessors, *before))),
            )
        return replace(self, nodes=tuple(merged.values()))

    def workload(self) -> Workload:
        """Return the workload of ``opaque`` operators, one per node, each a layer of its own.

        Raises:
            ValueError: If the graph has a cycle.
        """
        builder = GraphBuilder(name=self.name, family="profile", tokens_per_sample=0)
        source = builder.input("samples", (1,))
        tensors: dict[str, str] = {}
        for node in self.topological():
            inputs = [tensors[name] for name in node.predecessors] or [source]
            builder.layer(f"{node.name}:{node.layer}" if node.layer != node.name else node.name)
            attributes: dict[str, int | float | bool | str] = {
                "forward_s": node.forward_s / self.batch,
                "backward_s": node.backward_s / self.batch,
                "output_bytes": round(node.output_bytes / self.batch),
                "saved_bytes": round(node.saved_bytes / self.batch),
                "num_parameters": round(node.parameter_bytes / PARAMETER_BYTES),
                "num_inputs": len(inputs),
            }
            tensors[node.name] = builder.add("layer", "opaque", inputs, attributes)
        return builder.build()


def is_profile_name(name: str) -> bool:
    """Return whether a model name is that of a CSV profile."""
    return _NAMED.fullmatch(name) is not None


def load_layer_profile(name: str | Path) -> LayerProfile:
    """Read a CSV profile.

    Args:
        name: Path; ``path@batch`` where the file name does not end in ``_b<batch>``.

    Raises:
        DataFileError: If the file cannot be read, a column is missing, or a node is unknown or named twice.
        ValueError: If the batch is unknown.
    """
    found = _NAMED.fullmatch(str(name))
    if found is None:
        raise ValueError(f"a profile must be a .csv file, got {str(name)!r}")
    path, stated = found["path"], found["batch"] or next(iter(_BATCH.findall(found["path"])), None)
    if stated is None or not re.fullmatch(r"\d{1,7}", stated) or not 1 <= int(stated) <= MAX_BATCH:
        raise ValueError(
            f"the batch of a profile must be known (1..{MAX_BATCH}), got {stated}: name the file like vgg19_b32.csv "
            f"or write {path}@32"
        )
    sizes = ("fw_ms", "bw_ms", "output_activation_bytes", "param_bytes")
    rows = load_table(path, floats=sizes)
    for column in ("node", "layer", "preds"):
        if rows and column not in rows[0]:
            raise DataFileError(path, f"column {column!r} is missing; a profile has node, layer, preds, {sizes}")
    nodes = []
    for row in rows:
        values = {column: row[column] or 0.0 for column in sizes}
        if min(values.values()) < 0:
            raise DataFileError(path, f"node {row['node']!r}: times and sizes must be 0 or more, got {values}")
        for column, value in values.items():
            if value > MAX_SIZE:
                raise DataFileError(path, f"node {row['node']!r}: {column} must be at most {MAX_SIZE:g}, got {value:g}")
        nodes.append(
            LayerNode(
                name=row["node"],
                layer=row["layer"],
                forward_s=values["fw_ms"] * 1e-3,
                backward_s=values["bw_ms"] * 1e-3,
                output_bytes=values["output_activation_bytes"],
                parameter_bytes=values["param_bytes"],
                saved_bytes=values["output_activation_bytes"],
                predecessors=tuple(row["preds"].split()),
                block=row.get("block", ""),
            )
        )
    return _checked(LayerProfile(Path(path).name.split(".")[0], int(stated), tuple(nodes)), path)


def is_piper_mapping(mapping: Mapping[str, Any]) -> bool:
    """Return whether the content of a JSON file is one of Piper's inputs."""
    return "nodes" in mapping and "edges" in mapping and "mbsInBatch" in mapping


def piper_layer_profile(mapping: Mapping[str, Any], source: str) -> LayerProfile:
    """Return the plain implementation on one device of every layer of a Piper input.

    Piper gives forward and backward time as one; a third of it is taken as forward. Activations are its
    ``memoryUsageA``. The many implementations are the business of ``searchers.piper``.

    Raises:
        DataFileError: If a layer has no implementation on one device, or an edge names an unknown node.
    """
    outputs: dict[str, float] = {}
    before: dict[str, list[str]] = {}
    try:
        for edge in mapping["edges"]:
            tail, head = str(edge["sourceId"]), str(edge["destId"])
            outputs[tail] = max(outputs.get(tail, 0.0), float(edge["communicationCost"]))
            before.setdefault(head, []).append(tail)
        nodes = []
        for node in mapping["nodes"]:
            name, plain = str(node["id"]), node["TMPCs"]["1"][0]
            nodes.append(
                LayerNode(
                    name=f"node{name}",
                    layer=str(node.get("name", name)),
                    forward_s=float(plain["timePerSample"]) / 3,
                    backward_s=2 * float(plain["timePerSample"]) / 3,
                    output_bytes=outputs.get(name, 0.0),
                    parameter_bytes=float(plain["parameterSize"]),
                    saved_bytes=float(plain["memoryUsageA"]),
                    predecessors=tuple(f"node{other}" for other in before.get(name, ())),
                )
            )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataFileError(source, f"not an input of Piper: {type(error).__name__} {error}") from None
    return _checked(LayerProfile(Path(source).name.split(".")[0], 1, tuple(nodes)), source)


def _checked(profile: LayerProfile, source: str) -> LayerProfile:
    names = {node.name for node in profile.nodes}
    if not names:
        raise DataFileError(source, "a profile must have at least one node")
    if len(names) != len(profile.nodes):
        raise DataFileError(source, "every node of a profile must have a name of its own")
    for node in profile.nodes:
        for name in node.predecessors:
            if name not in names:
                raise DataFileError(source, f"node {node.name!r} reads {name!r}, which is no node of the profile")
    return profile
