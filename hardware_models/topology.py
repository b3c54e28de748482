"""Rings and trees inside a node: what its link graph allows a group of GPUs to do at once.

NCCL's large collectives run on as many edge-disjoint rings as the NVLink graph holds, so the bandwidth of
a group is the number of rings times that of one link. On the DGX-1 this explains the measured bus
bandwidths of 2..8 GPUs (22.6, 45, 85, 37, 46, 87, 135 GB/s): 1, 2, 4, 0, 2, 4, 6 directed rings; five GPUs
hold no ring and fall back to one tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations

from hardware_models.cluster import Edge

MAX_RING_SEARCH = 8
"""Brute force over Hamiltonian cycles stays below 2,520 orders up to here."""


@dataclass(frozen=True)
class RingSet:
    """Edge-disjoint directed rings over a group.

    Attributes:
        num_rings: Directed rings, each at the rate of one link.
        use: ``(from, to, rings on that pair, links of that pair)`` for every directed pair in use.
    """

    num_rings: int
    use: tuple[tuple[int, int, int, int], ...]


def link_counts(mesh: tuple[Edge, ...], members: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """Return physical links by unordered pair ``(low, high)`` inside ``members``."""
    inside = set(members)
    return {(a, b): count for a, b, count in mesh if a in inside and b in inside}


@cache
def pack_rings(mesh: tuple[Edge, ...], members: tuple[int, ...]) -> RingSet:
    """Return the largest set of edge-disjoint rings through all ``members``.

    A cycle of links carries two directed rings, one each way; two GPUs hold one ring per link.

    Args:
        mesh: Link graph of the node.
        members: GPUs of the group, 2..8 of them.

    >>> quad = ((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2))
    >>> pack_rings(quad, (0, 1, 2, 3)).num_rings
    4
    """
    if len(members) > MAX_RING_SEARCH:
        raise ValueError(f"rings are searched for 2..{MAX_RING_SEARCH} GPUs of a mesh, got {len(members)}")
    counts = link_counts(mesh, members)
    if len(members) == 2:
        pair = (min(members), max(members))
        links = counts.get(pair, 0)
        a, b = pair
        return RingSet(links, ((a, b, links, links), (b, a, links, links)) if links else ())
    cycles = list(_cycles(counts, tuple(sorted(members))))
    best = _largest_packing(cycles, dict(counts), 0)
    use: dict[tuple[int, int], int] = {}
    for cycle in best:
        for edge in cycle:
            use[edge] = use.get(edge, 0) + 1
    directed = [(*pair, rings, counts[pair]) for pair, rings in sorted(use.items())]
    mirrored = [(b, a, rings, links) for a, b, rings, links in directed]
    return RingSet(2 * len(best), tuple(directed + mirrored))


Cycle = tuple[tuple[int, int], ...]


def _cycles(counts: dict[tuple[int, int], int], members: tuple[int, ...]) -> Iterator[Cycle]:
    first, *rest = members
    for order in permutations(rest):
        if order[0] > order[-1]:  # the same cycle walked the other way
            continue
        path = (first, *order, first)
        edges = tuple((min(a, b), max(a, b)) for a, b in pairwise(path))
        if all(counts.get(edge, 0) for edge in edges):
            yield edges


def _largest_packing(cycles: list[Cycle], left: dict[tuple[int, int], int], start: int) -> list[Cycle]:
    best: list[Cycle] = []
    bound = _packing_bound(left, cycles)
    for index in range(start, len(cycles)):
        cycle = cycles[index]
        if any(left[edge] < 1 for edge in cycle):
            continue
        for edge in cycle:
            left[edge] -= 1
        found = [cycle, *_largest_packing(cycles, left, index)]
        for edge in cycle:
            left[edge] += 1
        if len(found) > len(best):
            best = found
            if len(best) >= bound:
                break
    return best


def _packing_bound(left: dict[tuple[int, int], int], cycles: list[Cycle]) -> int:
    """Every ring takes two links of every GPU, so the poorest GPU bounds their number."""
    members = {gpu for cycle in cycles[:1] for edge in cycle for gpu in edge}
    degree = {gpu: sum(count for edge, count in left.items() if gpu in edge) for gpu in members}
    return min((value // 2 for value in degree.values()), default=0)


def is_connected(mesh: tuple[Edge, ...], members: tuple[int, ...]) -> bool:
    """Return whether links join all ``members`` without passing through others."""
    counts = link_counts(mesh, members)
    reached, frontier = {members[0]}, [members[0]]
    while frontier:
        gpu = frontier.pop()
        for a, b in counts:
            other = b if a == gpu else a if b == gpu else None
            if other is not None and other not in reached:
                reached.add(other)
                frontier.append(other)
    return len(reached) == len(set(members))


@cache
def tree_edges(mesh: tuple[Edge, ...], members: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return one spanning tree of a connected group as ``(a, b, links)``, doubled links first."""
    counts = link_counts(mesh, members)
    root = {gpu: gpu for gpu in members}

    def find(gpu: int) -> int:
        while root[gpu] != gpu:
            gpu = root[gpu]
        return gpu

    tree = []
    for (a, b), links in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if find(a) != find(b):
            root[find(a)] = find(b)
            tree.append((a, b, links))
    return tuple(tree)
