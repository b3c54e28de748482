"""Intra-operator optimum under a limit on one attribute (memory): Lagrangian bisection over exact eliminations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from searchers.alpa.elimination import solve
from searchers.alpa.strategy_graph import StrategyGraph

BISECTIONS = 40


@dataclass(frozen=True)
class Point:
    """One point of the trade-off.

    Attributes:
        objective: Cost of the assignment.
        attribute: Its sum of the limited attribute.
        assignment: One strategy per node.
    """

    objective: float
    attribute: float
    assignment: tuple[int, ...]


def solve_within(graph: StrategyGraph, attribute: int, most: float) -> tuple[Point, float]:
    """Return the best point found within the limit, and a lower bound on the optimum.

    Each price of the attribute gives the exact minimum of cost plus price times attribute; bisection finds the
    price at which the limit just holds. What is found lies on the convex hull of the trade-off: exact where the
    bound equals its objective, else within the gap (Everett 1963).

    Raises:
        ValueError: If no assignment keeps the limit.
    """
    free = _at_price(graph, attribute, 0.0)
    if free.attribute <= most:
        return free, free.objective
    least = _least(graph, attribute)
    if least.attribute > most:
        raise ValueError(f"no assignment keeps the limit: at least {least.attribute:g} is needed, {most:g} is allowed")
    best, bound = least, free.objective
    low, high = 0.0, _price_scale(graph, attribute)
    while _at_price(graph, attribute, high).attribute > most:
        high *= 4.0
    for _ in range(BISECTIONS):
        price = (low + high) / 2
        point = _at_price(graph, attribute, price)
        bound = max(bound, point.objective + price * (point.attribute - most))
        if point.attribute <= most:
            high = price
            if point.objective < best.objective:
                best = point
        else:
            low = price
    return best, min(bound, best.objective)


def front(graph: StrategyGraph, attribute: int) -> list[Point]:
    """Return the convex hull of the trade-off between cost and attribute, cheapest first."""
    ends = [_at_price(graph, attribute, 0.0), _least(graph, attribute)]
    found = {ends[0].attribute: ends[0], ends[1].attribute: ends[1]}
    pending = [(ends[0], ends[1])] if ends[0].attribute > ends[1].attribute else []
    while pending:
        dear, frugal = pending.pop()
        price = (frugal.objective - dear.objective) / (dear.attribute - frugal.attribute)
        between = _at_price(graph, attribute, price)
        on_chord = dear.objective + price * dear.attribute
        if between.objective + price * between.attribute >= on_chord * (1 - 1e-12) or between.attribute in found:
            continue
        found[between.attribute] = between
        pending += [(dear, between), (between, frugal)]
    return sorted(found.values(), key=lambda point: point.objective)


def _at_price(graph: StrategyGraph, attribute: int, price: float) -> Point:
    costs = [cost + price * table[attribute] for cost, table in zip(graph.costs, graph.attributes, strict=True)]
    priced = {edge: graph.edges[edge] + price * table[attribute] for edge, table in graph.pairs.items()}
    _, assignment = solve(StrategyGraph(costs, {**graph.edges, **priced}))
    return Point(graph.objective(assignment), graph.total(attribute, assignment), assignment)


def _least(graph: StrategyGraph, attribute: int) -> Point:
    """Return the cheapest of what needs least of the attribute."""
    return _at_price(graph, attribute, 1e6 * _price_scale(graph, attribute))


def _price_scale(graph: StrategyGraph, attribute: int) -> float:
    costs = sum(float(np.max(cost[np.isfinite(cost)])) for cost in graph.costs)
    costs += sum(float(np.max(table[np.isfinite(table)])) for table in graph.edges.values())
    values = [np.unique(table[attribute]) for table in graph.attributes]
    steps = [float(np.min(np.diff(each))) for each in values if len(each) > 1]
    return (costs + 1.0) / min(steps, default=1.0)
