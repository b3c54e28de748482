"""The intra-operator problem as a mixed-integer linear program: the reference, and the way for any graph.

Source: Alpa (OSDI 2022), section 4.2, in a tighter form: edge variables are continuous and their sums equal the
node variables, instead of being bounded by them.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from searchers.alpa.strategy_graph import StrategyGraph


def solve_milp(
    graph: StrategyGraph, *, limit: tuple[int, float] | None = None, time_limit_s: float = 600.0
) -> tuple[float, tuple[int, ...]]:
    """Return the least objective, computed anew from the rounded assignment, and the assignment.

    Args:
        graph: The problem; infinite costs forbid a choice.
        limit: ``(attribute, most)``: the sum of an attribute must not exceed it.
        time_limit_s: For the solver (Alpa's is 600 s).

    Raises:
        ValueError: If no assignment is allowed, or none was found in time.
    """
    node_start = np.concatenate([[0], np.cumsum([len(cost) for cost in graph.costs])])
    edge_sizes = [table.size for table in graph.edges.values()]
    edge_start = node_start[-1] + np.concatenate([[0], np.cumsum(edge_sizes)]).astype(int)
    total = int(edge_start[-1])
    objective = np.concatenate([*graph.costs, *(table.ravel() for table in graph.edges.values())])
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    bound: list[float] = []

    def add(entries: list[tuple[int, float]], equals: float) -> None:
        rows.extend([len(bound)] * len(entries))
        columns.extend(column for column, _ in entries)
        values.extend(value for _, value in entries)
        bound.append(equals)

    for node, cost in enumerate(graph.costs):
        add([(int(node_start[node]) + choice, 1.0) for choice in range(len(cost))], 1.0)
    for number, ((u, v), table) in enumerate(graph.edges.items()):
        first = int(edge_start[number])
        for i in range(table.shape[0]):
            entries = [(first + i * table.shape[1] + j, 1.0) for j in range(table.shape[1])]
            add([*entries, (int(node_start[u]) + i, -1.0)], 0.0)
        for j in range(table.shape[1]):
            entries = [(first + i * table.shape[1] + j, 1.0) for i in range(table.shape[0])]
            add([*entries, (int(node_start[v]) + j, -1.0)], 0.0)
    matrix = sparse.csr_array((values, (rows, columns)), shape=(len(bound), total))
    constraints = [LinearConstraint(matrix, bound, bound)]
    if limit is not None:
        attribute, most = limit
        weights = np.zeros(total)
        weights[: node_start[-1]] = np.concatenate([table[attribute] for table in graph.attributes])
        for first, (edge, cost) in zip(edge_start, graph.edges.items(), strict=False):
            if edge in graph.pairs:
                weights[first : first + cost.size] = graph.pairs[edge][attribute].ravel()
        constraints.append(LinearConstraint(weights[np.newaxis], -np.inf, most))
    allowed = np.isfinite(objective)
    integrality = np.zeros(total, dtype=np.int64)
    integrality[: node_start[-1]] = 1
    found = milp(
        np.where(allowed, objective, 0.0),
        constraints=constraints,
        integrality=integrality,
        bounds=Bounds(0.0, allowed.astype(float)),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise ValueError(f"no assignment of strategies was found: {found.message}")
    assignment = tuple(
        int(np.argmax(found.x[node_start[node] : node_start[node + 1]])) for node in range(len(graph.costs))
    )
    return graph.objective(assignment), assignment
