"""What layers cost where memory has a price in place of a budget: a Lagrangian relaxation of the layer-level search."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from searchers.galvatron.stage_table import Floats, Ints
from simulator.compiled_cache import compiled

PRICES = 24
"""Prices of memory that are tried."""


class Needs(NamedTuple):  # Compiled code that is kept knows fields by their order, which must stay.
    """Whole bytes, float64[L, S] each.

    Attributes:
        extra: Of what is kept, beyond the layer's least.
        backward, forward: As of `StageTable`.
    """

    extra: Floats
    backward: Floats
    forward: Floats


class Priced(NamedTuple):
    """What comes out where memory has a price in place of a budget: a Lagrangian relaxation.

    Attributes:
        price: Seconds of a byte, at which the bound is highest.
        bound_s: No plan within the budget costs less.
        ahead_s: float64[L, K]. Least seconds and price of the layers before each, with moving on to each layout.
        chosen: The cheapest of the plans seen that are within the budget.
        seconds: Of that plan, infinite if there is none.
    """

    price: float
    bound_s: float
    ahead_s: Floats
    chosen: Ints
    seconds: float


@compiled
def without_budget(cost: Floats, layout: Ints, transition: Floats) -> tuple[Floats, Ints, float]:
    """Return what is cheapest whatever it needs.

    Returns:
        float64[L, K], the least seconds of the layers before each, moving on to each layout included; and the optimum's
        strategies and seconds.
    """
    num_layers, num_layouts = len(cost), transition.shape[1]
    ahead = np.zeros((num_layers, num_layouts))
    value = np.zeros((num_layers, num_layouts))
    chosen = np.zeros((num_layers, num_layouts), dtype=np.int64)
    came_from = np.zeros((num_layers, num_layouts), dtype=np.int64)
    for layer in range(num_layers):
        for target in range(num_layouts if layer > 0 else 0):
            ahead[layer, target] = np.inf
            for source in range(num_layouts):
                seconds = value[layer - 1, source] + transition[layer, source, target]
                if seconds < ahead[layer, target]:
                    ahead[layer, target] = seconds
                    came_from[layer, target] = source
        for lies in range(num_layouts):
            value[layer, lies] = np.inf
        for strategy in range(len(layout)):
            lies = layout[strategy]
            seconds = ahead[layer, lies] + cost[layer, strategy]
            if seconds < value[layer, lies]:
                value[layer, lies] = seconds
                chosen[layer, lies] = strategy
    found = np.zeros(num_layers, dtype=np.int64)
    last = 0
    for lies in range(num_layouts):
        if value[-1, lies] < value[-1, last]:
            last = lies
    best = value[-1, last]
    for layer in range(num_layers - 1, -1, -1):
        found[layer] = chosen[layer, last]
        last = came_from[layer, last]
    return ahead, found, best


@compiled
def _peak(needs: Needs, chosen: Ints) -> float:
    """Return the peak of a plan beyond what every layer needs at least."""
    peak = held = 0.0
    for layer in range(len(chosen) - 1, -1, -1):
        strategy = chosen[layer]
        kept = needs.extra[layer, strategy]
        peak = kept + max(peak, held + needs.backward[layer, strategy])
        held += kept - needs.forward[layer, strategy]
    return peak


@compiled
def priced(cost: Floats, needs: Needs, layout: Ints, transition: Floats, left: float) -> Priced:
    """Return what comes out where memory has a price.

    The price is doubled until the plan is within the budget; then it lies between one that is and one that is not.

    Args:
        cost, layout, transition: As of `StageTable`.
        needs: Bytes.
        left: Bytes of the budget beyond the layers' least.
    """
    ahead, chosen, best = without_budget(cost, layout, transition)
    found, found_s = chosen, np.inf
    price, bound = 0.0, best
    low = high = 0.0
    tried = best / max(left, 1.0) / 64
    for _ in range(PRICES):
        own_ahead, chosen, least = without_budget(cost + tried * needs.extra, layout, transition)
        if least - tried * left > bound:
            bound, price, ahead = least - tried * left, tried, own_ahead
        if _peak(needs, chosen) > left:
            low = tried
        else:
            high = tried
            seconds = cost[0, chosen[0]]
            for layer in range(1, len(chosen)):
                seconds += transition[layer, layout[chosen[layer - 1]], layout[chosen[layer]]]
                seconds += cost[layer, chosen[layer]]
            if seconds < found_s:
                found, found_s = chosen, seconds
        tried = 2 * tried if high == 0.0 else (low + high) / 2
    return Priced(price, bound, ahead, found, found_s)
