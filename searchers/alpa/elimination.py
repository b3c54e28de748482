"""Exact intra-operator optimum by variable elimination, and transfer tables for repeated layers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.strategy_graph import Factor, StrategyGraph, graph_factors, join, minimised

LARGEST_TABLE = 4_000_000
"""Entries; beyond it a graph is not tree-like enough for elimination, and the MILP solver is the way."""


def eliminate(factors: Sequence[Factor], keep: Collection[int] = ()) -> Factor:
    """Return the exact minimum over all variables that are not kept, as one factor over those kept.

    Variables go in the order of the smallest table they make; any order is exact.

    Raises:
        ValueError: If a table would exceed LARGEST_TABLE entries.
    """
    return _eliminate(list(factors), keep, [])


def solve(graph: StrategyGraph) -> tuple[float, tuple[int, ...]]:
    """Return the least objective and an assignment that has it.

    Raises:
        ValueError: If a table would exceed LARGEST_TABLE entries, or no assignment is allowed.
    """
    trail: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    best = float(_eliminate(graph_factors(graph), (), trail).cost)
    if not np.isfinite(best):
        raise ValueError("no assignment of strategies is allowed")
    chosen: dict[int, int] = {}
    for variable, others, table in reversed(trail):
        chosen[variable] = int(table[tuple(chosen[other] for other in others)])
    return best, tuple(chosen[node] for node in range(len(graph.costs)))


def _eliminate(
    factors: list[Factor], keep: Collection[int], trail: list[tuple[int, tuple[int, ...], NDArray[np.intp]]]
) -> Factor:
    sizes = {
        variable: factor.cost.shape[axis] for factor in factors for axis, variable in enumerate(factor.variables)
    }
    left = set(sizes) - set(keep)
    neighbours: dict[int, set[int]] = {variable: set() for variable in sizes}
    for factor in factors:
        for variable in factor.variables:
            neighbours[variable].update(factor.variables)
    while left:
        # Ties by number, so that the result does not depend on hashing.
        variable = min(left, key=lambda v: (prod(sizes[u] for u in neighbours[v]), v))
        entries = prod(sizes[u] for u in neighbours[variable])
        if entries > LARGEST_TABLE:
            raise ValueError(
                f"elimination needs a table of {entries:,} entries, at most {LARGEST_TABLE:,} are allowed; use the MILP"
            )
        touched = [factor for factor in factors if variable in factor.variables]
        factors = [factor for factor in factors if variable not in factor.variables]
        reduced, chosen = minimised(join(touched), variable)
        trail.append((variable, reduced.variables, chosen))
        factors.append(reduced)
        left.remove(variable)
        around = set(reduced.variables)
        for other in around:
            neighbours[other] = (neighbours[other] | around) - {variable}
    return join(factors)
