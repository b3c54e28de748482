"""A branched layer graph as the states PipeDream plans over: its antichains.

An antichain stands for everything up to it: itself and all its predecessors. Cuts go between states, and a cut
carries what its antichain makes and what nodes further up make for readers beyond it. On a chain the states are
the layers.

Source:
    Narayanan et al., "PipeDream", SOSP 2019; its public optimizer (msr-fiddle/pipedream) walks the antichains
    from the first source of the graph, and so does this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.layer_profile import LayerNode, LayerProfile

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
MAX_STATES = 20_000


@dataclass(frozen=True, eq=False)
class States:
    """States in topological order, s of them.

    Attributes:
        nodes: Names of the nodes of each state: all up to its antichain.
        time_s: float64[s]. Forward and backward of these nodes.
        parameter_bytes: float64[s]. Their weights.
        activation_bytes: float64[s]. Their outputs.
        output_bytes: float64[s]. What a cut behind the state carries.
        before: bool[s, s]. ``before[j, k]``: state k comes before state j.
    """

    nodes: tuple[frozenset[str], ...]
    time_s: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    output_bytes: Floats
    before: Flags

    @property
    def num_states(self) -> int:
        """States."""
        return len(self.nodes)


class _Graph:
    """Successors, ancestors and descendants of every node, as bit sets over the order of the file."""

    def __init__(self, nodes: Sequence[LayerNode]) -> None:
        number = {node.name: index for index, node in enumerate(nodes)}
        count = len(nodes)
        self.successors: list[list[int]] = [[] for _ in range(count)]
        self.predecessors: list[list[int]] = [[number[name] for name in node.predecessors] for node in nodes]
        for node, before in enumerate(self.predecessors):
            for other in before:
                self.successors[other].append(node)
        order = [number[node.name] for node in LayerProfile("", 1, tuple(nodes)).topological()]
        self.ancestors, self.descendants = [0] * count, [0] * count
        for node in order:
            for other in self.predecessors[node]:
                self.ancestors[node] |= self.ancestors[other] | 1 << other
        for node in reversed(order):
            for other in self.successors[node]:
                self.descendants[node] |= self.descendants[other] | 1 << other

    def frontier(self, antichain: tuple[int, ...]) -> list[int]:
        """Return the antichain and the ancestors of its members that have readers beyond it, by member."""
        members = set(antichain)
        extra: list[int] = []
        for member in antichain:
            above = self.ancestors[member]
            for other in _bits(above):
                readers = self.successors[other]
                if any(reader != member and not above >> reader & 1 for reader in readers) and other not in extra:
                    extra.append(other)
        return [other for other in extra if other not in members] + list(antichain)

    def steps(self, antichain: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the antichains that one more node makes."""
        frontier = self.frontier(antichain)
        held = sum(1 << node for node in frontier)
        found = []
        for node in frontier:
            for reader in self.successors[node]:
                if reader in antichain or self.descendants[reader] & held:
                    continue
                swapped = dict.fromkeys(reader if other == node else other for other in frontier)
                mask = sum(1 << other for other in swapped)
                found.append(tuple(sorted(other for other in swapped if not self.descendants[other] & mask)))
        return found


def antichain_states(profile: LayerProfile) -> States:
    """Return the states of a profile.

    Input nodes are left out, and so are outputs that nobody reads (``__getitem__``).

    Raises:
        ValueError: If there are more than MAX_STATES: the graph branches too much.
    """
    profile = profile.without_inputs()
    read = {name for node in profile.nodes for name in node.predecessors}
    unread = [node.name for node in profile.nodes if node.layer.startswith("__getitem__") and node.name not in read]
    nodes = profile.without(unread).nodes
    graph = _Graph(nodes)
    source = next(index for index, before in enumerate(graph.predecessors) if not before)
    chains: dict[tuple[int, ...], int] = {(source,): 0}
    queue = deque(chains)
    while queue:
        for step in graph.steps(queue.popleft()):
            if step not in chains:
                if len(chains) >= MAX_STATES:
                    raise ValueError(
                        f"{profile.name} has more than {MAX_STATES} antichains; merge branches into blocks first"
                    )
                chains[step] = len(chains)
                queue.append(step)
    upto = {chain: _closed(graph, chain) for chain in chains}
    order = sorted(chains, key=lambda chain: (upto[chain].bit_count(), chains[chain]))
    closed = [upto[chain] for chain in order]

    def total(values: list[float], mask: int) -> float:
        return sum(values[node] for node in _bits(mask))

    times = [node.forward_s + node.backward_s for node in nodes]
    weights = [node.parameter_bytes for node in nodes]
    outputs = [node.output_bytes for node in nodes]
    count = len(order)
    before = np.zeros((count, count), dtype=np.bool_)
    for j in range(count):
        for k in range(j):
            before[j, k] = closed[k] & closed[j] == closed[k] and closed[k] != closed[j]
    return States(
        nodes=tuple(frozenset(nodes[node].name for node in _bits(mask)) for mask in closed),
        time_s=np.array([total(times, mask) for mask in closed]),
        parameter_bytes=np.array([total(weights, mask) for mask in closed]),
        activation_bytes=np.array([total(outputs, mask) for mask in closed]),
        output_bytes=np.array([sum(outputs[node] for node in graph.frontier(chain)) for chain in order]),
        before=before,
    )


def _closed(graph: _Graph, chain: tuple[int, ...]) -> int:
    mask = 0
    for node in chain:
        mask |= graph.ancestors[node] | 1 << node
    return mask


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
