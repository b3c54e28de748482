"""Exact intra-operator optimum by variable elimination, and transfer tables for repeated layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.strategy_graph import Factor, StrategyGraph, graph_factors, join, minimised

LARGEST_TABLE = 4_000_000
"""Entries; beyond it a graph is not tree-like enough for elimination, and the MILP solver is the way."""

Trail = list[tuple[int, tuple[int, ...], NDArray[np.intp]]]
"""Eliminated variables in order: each with the variables its best choice depends on, and that choice."""


def eliminate(factors: Sequence[Factor], keep: Collection[int] = (), trail: Trail | None = None) -> Factor:
    """Return the exact minimum over all variables that are not kept, as one factor over those kept.

    Variables go in the order of the smallest table they make; any order is exact.

    Args:
        factors: What is summed.
        keep: Variables that stay.
        trail: Gets what `follow` needs.

    Raises:
        ValueError: If a table would exceed LARGEST_TABLE entries.
    """
    return _eliminate(list(factors), keep, [] if trail is None else trail)


def follow(trail: Trail, chosen: dict[int, int]) -> None:
    """Add the best choices of eliminated variables to those of the variables that were kept."""
    for variable, others, table in reversed(trail):
        chosen[variable] = int(table[tuple(chosen[other] for other in others)])


def solve(graph: StrategyGraph) -> tuple[float, tuple[int, ...]]:
    """Return the least objective and an assignment that has it.

    Raises:
        ValueError: If a table would exceed LARGEST_TABLE entries, or no assignment is allowed.
    """
    trail: Trail = []
    best = float(_eliminate(graph_factors(graph), (), trail).cost)
    if not np.isfinite(best):
        raise ValueError("no assignment of strategies is allowed")
    chosen: dict[int, int] = {}
    follow(trail, chosen)
    return best, tuple(chosen[node] for node in range(len(graph.costs)))


def _eliminate(factors: list[Factor], keep: Collection[int], trail: Trail) -> Factor:
    sizes = {
        variable: factor.cost.shape[axis] for factor in factors for axis, variable in enumerate(factor.variables)
    }
    neighbours: dict[int, set[int]] = {variable: set() for variable in sizes}
    holders: dict[int, dict[int, Factor]] = {variable: {} for variable in sizes}
    for factor in factors:
        for variable in factor.variables:
            neighbours[variable].update(factor.variables)
            holders[variable][id(factor)] = factor
    alive = {id(factor): factor for factor in factors}
    entries = {v: prod(sizes[u] for u in neighbours[v]) for v in sizes if v not in keep}
    # Ties by number, so that the result does not depend on hashing. Entries whose size has changed are passed over.
    smallest = [(size, variable) for variable, size in entries.items()]
    heapify(smallest)
    while entries:
        size, variable = heappop(smallest)
        if entries.get(variable) != size:
            continue
        if size > LARGEST_TABLE:
            raise ValueError(
                f"elimination needs a table of {size:,} entries, at most {LARGEST_TABLE:,} are allowed; "
                "use the MILP"
            )
        touched = list(holders[variable].values())
        reduced, chosen = minimised(join(touched), variable)
        trail.append((variable, reduced.variables, chosen))
        for factor in touched:
            del alive[id(factor)]
            for other in factor.variables:
                del holders[other][id(factor)]
        alive[id(reduced)] = reduced
        del entries[variable]
        around = set(reduced.variables)
        for other in around:
            holders[other][id(reduced)] = reduced
            neighbours[other] = (neighbours[other] | around) - {variable}
            if other in entries:
                entries[other] = prod(sizes[u] for u in neighbours[other])
                heappush(smallest, (entries[other], other))
    return join(list(alive.values()))
