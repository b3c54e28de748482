"""The intra-operator problem: one strategy per operator, costs on nodes and edges, and its factors.

A `StrategyGraph` is what the solvers share. A `Factor` is a table over some of its variables; eliminating a
variable from the factors that mention it leaves one factor over its neighbours (OptCNN, ICML 2018; for a chain
this is the Viterbi algorithm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class StrategyGraph:
    """Costs of choosing one strategy per node.

    Attributes:
        costs: Per node float64[num_strategies]; infinite where a strategy is forbidden.
        edges: ``(u, v)`` with u < v to float64[strategies of u, strategies of v].
        attributes: Per node float64[num_attributes, num_strategies]: what else a choice brings (bytes).
        pairs: By edge float64[num_attributes, strategies of u, strategies of v]: what two choices bring together.
    """

    costs: Sequence[Array]
    edges: Mapping[tuple[int, int], Array]
    attributes: Sequence[Array] = field(default=())
    pairs: Mapping[tuple[int, int], Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (u, v), table in self.edges.items():
            assert u < v, "edges go from the earlier node to the later"
            assert table.shape == (len(self.costs[u]), len(self.costs[v])), "an edge has a row per strategy"
        assert self.edges.keys() >= self.pairs.keys(), "what pairs bring is of edges"

    def objective(self, assignment: Sequence[int]) -> float:
        """Return the cost of an assignment."""
        nodes = sum(float(cost[chosen]) for cost, chosen in zip(self.costs, assignment, strict=True))
        return nodes + sum(float(table[assignment[u], assignment[v]]) for (u, v), table in self.edges.items())

    def total(self, attribute: int, assignment: Sequence[int]) -> float:
        """Return the sum of one attribute over an assignment."""
        nodes = sum(
            float(table[attribute, chosen]) for table, chosen in zip(self.attributes, assignment, strict=True)
        )
        pairs = self.pairs.items()
        return nodes + sum(float(table[attribute, assignment[u], assignment[v]]) for (u, v), table in pairs)


@dataclass(frozen=True)
class Factor:
    """A table over variables, with attributes that follow its choices.

    Attributes:
        variables: Ascending; one array axis each.
        cost: float64[strategies of each variable].
        attributes: float64[num_attributes, strategies of each variable], summed when factors are joined.
    """

    variables: tuple[int, ...]
    cost: Array
    attributes: Array

    def aligned(self, variables: tuple[int, ...]) -> tuple[Array, Array]:
        """Return cost and attributes with an axis (of length one where missing) per given variable."""
        shape = [1] * len(variables)
        for position, variable in enumerate(variables):
            if variable in self.variables:
                shape[position] = self.cost.shape[self.variables.index(variable)]
        return self.cost.reshape(shape), self.attributes.reshape((len(self.attributes), *shape))


def graph_factors(graph: StrategyGraph) -> list[Factor]:
    """Return one factor per node and per edge."""
    count = len(graph.attributes[0]) if graph.attributes else 0
    factors = []
    for node, cost in enumerate(graph.costs):
        attributes = graph.attributes[node] if graph.attributes else np.zeros((0, len(cost)))
        factors.append(Factor((node,), np.asarray(cost, dtype=float), attributes))
    for (u, v), table in graph.edges.items():
        both = graph.pairs.get((u, v), np.zeros((count, *table.shape)))
        factors.append(Factor((u, v), np.asarray(table, dtype=float), both))
    return factors


def join(factors: Sequence[Factor]) -> Factor:
    """Return the sum of factors as one over all their variables."""
    variables = tuple(sorted({variable for factor in factors for variable in factor.variables}))
    parts = [factor.aligned(variables) for factor in factors]
    cost, attributes = parts[0]
    for more_cost, more_attributes in parts[1:]:
        cost, attributes = cost + more_cost, attributes + more_attributes
    return Factor(variables, cost, attributes)


def minimised(factor: Factor, variable: int) -> tuple[Factor, NDArray[np.intp]]:
    """Return the factor without a variable, and the variable's best strategy per remaining choice."""
    axis = factor.variables.index(variable)
    chosen = factor.cost.argmin(axis=axis)
    count = len(factor.attributes)
    last = (*range(axis + 1), *range(axis + 2, factor.attributes.ndim), axis + 1)
    choices = factor.attributes.transpose(last).reshape(count, chosen.size, factor.cost.shape[axis])
    best = choices[:, np.arange(chosen.size), chosen.ravel()]
    cost, attributes = factor.cost.min(axis=axis), best.reshape(count, *chosen.shape)
    rest = tuple(other for other in factor.variables if other != variable)
    return Factor(rest, cost, attributes), chosen
