"""A problem's layers as a graph with costs: what systems that cut branched graphs plan on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from searchers.layers import LayerTables
from simulator.costs import CostTables
from simulator.plan import merge_ranges
from workloads.layer_profile import LayerNode, LayerProfile
from workloads.local import dtype_bytes
from workloads.operators import Workload


@dataclass(frozen=True)
class LayerGraph:
    """Layers of a workload as nodes.

    Attributes:
        profile: Nodes with costs on one device.
        spans: Operator range of each node, by its name.
        edge_bytes: What a node reads of another, by the names of both: of several tensors that leave a layer, a later
            one may read one only.
    """

    profile: LayerProfile
    spans: Mapping[str, tuple[int, int]]
    edge_bytes: Mapping[tuple[str, str], float]

    def ranges(self, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
        """Return the operator ranges of some nodes, sorted and joined."""
        return merge_ranges(self.spans[name] for name in names)


def layer_graph(costs: CostTables, samples: int, spans: Sequence[tuple[int, int]] | None = None) -> LayerGraph:
    """Return the layer graph of a problem; times are those of its slowest type of device.

    Args:
        costs: Shared cost tables.
        samples: Samples of the profile.
        spans: Operator ranges that count as layers; the workload's own if None.
    """
    workload, runtime = costs.problem.workload, costs.problem.runtime
    spans = tuple(spans or workload.layers)
    found = LayerTables(costs, spans).slowest((), samples)
    owner = {index: position for position, span in enumerate(spans) for index in range(*span)}
    names = [_name(workload, span, position) for position, span in enumerate(spans)]
    nodes = []
    sizes: dict[str, float] = {}
    edge_bytes: dict[tuple[str, str], float] = {}
    for position, (start, stop) in enumerate(spans):
        read = {tensor for index in range(start, stop) for tensor in workload.operators[index].inputs}
        for tensor in sorted(read & sizes.keys()):
            edge = names[owner[workload.producer[tensor]]], names[position]
            edge_bytes[edge] = edge_bytes.get(edge, 0.0) + sizes[tensor]
        before = {
            owner[workload.producer[tensor]]
            for index in range(start, stop)
            for tensor in workload.operators[index].inputs
            if tensor in workload.producer
        }
        leaving = 0.0
        for index in range(start, stop):
            op = workload.operators[index]
            for number, tensor in enumerate(op.outputs):
                if any(owner[reader] != position for reader in workload.consumers.get(tensor, ())):
                    elements = samples
                    for size in workload.tensors[tensor]:
                        elements *= size
                    sizes[tensor] = float(
                        elements * dtype_bytes(op.definition.output_dtype(number), runtime.implementation)
                    )
                    leaving += sizes[tensor]
        name, _, label = workload.layer_names[workload.operators[start].layer].partition(":")
        nodes.append(
            LayerNode(
                name=names[position],
                layer=label or name,
                forward_s=float(found.forward_s[position]),
                backward_s=float(found.backward_s[position]),
                output_bytes=leaving,
                parameter_bytes=float(found.parameter_elements[position]) * runtime.travelling_gradient_bytes,
                saved_bytes=float(found.saved_bytes[position]),
                predecessors=tuple(names[other] for other in sorted(before - {position})),
            )
        )
    return LayerGraph(
        LayerProfile(workload.name, samples, tuple(nodes)), dict(zip(names, spans, strict=True)), edge_bytes
    )


def _name(workload: Workload, span: tuple[int, int], position: int) -> str:
    layer = workload.layer_names[workload.operators[span[0]].layer].partition(":")[0]
    return f"{position}.{layer}"
