"""Eq. 4 and Algorithm 3 of Galvatron-BMW as printed, for comparison with the exact search.

Source: Galvatron-BMW (TKDE 2024), Eq. 4, section IV-A2 and Algorithm 3.
"""

from __future__ import annotations

import numpy as np

from searchers.galvatron.stage_table import Floats, Ints, StageTable
from simulator.compiled_cache import compiled


def search_as_printed(table: StageTable, budget_bytes: float, granularity_bytes: float) -> Ints | None:
    """Return what Algorithm 3 finds with Eq. 4 as printed, or None.

    One strategy per layer and memory state is kept, so a transition is judged against the previous layer's
    single best; memory is rounded up per layer; forward budgets grow until the first that fails Eq. 2.
    """
    usable = np.isfinite(table.cost_s)
    steps = int(budget_bytes // granularity_bytes)
    need = np.ceil(np.where(usable, table.kept_bytes, 0.0) / granularity_bytes).astype(np.int64)
    cost = np.where(usable, table.cost_s, np.inf)
    value, chosen = _printed(cost, need, table.layout, table.transition_s, steps)
    safe = int((budget_bytes - float(table.backward_bytes[usable].max())) // granularity_bytes)
    best: Ints | None = None
    for forward in range(max(0, safe), steps + 1):
        if not np.isfinite(value[forward]):
            continue
        found = _walk_back(chosen, need, forward)
        if table.peak_bytes(found) > budget_bytes:
            break
        best = found
    return best


@compiled
def _printed(cost: Floats, need: Ints, layout: Ints, transition: Floats, steps: int) -> tuple[Floats, Ints]:
    """Return the last layer's costs, float64[E + 1], and the strategies kept, int64[L, E + 1]."""
    num_layers, num_strategies = cost.shape
    width = steps + 1
    before = np.zeros(width)
    chosen = np.zeros((num_layers, width), dtype=np.int64)
    for layer in range(num_layers):
        value = np.full(width, np.inf)
        for strategy in range(num_strategies):
            own = cost[layer, strategy]
            memory = need[layer, strategy]
            for e in range(memory, width):
                seconds = before[e - memory] + own
                if layer > 0:
                    seconds += transition[layer, layout[chosen[layer - 1, e - memory]], layout[strategy]]
                if seconds < value[e]:
                    value[e] = seconds
                    chosen[layer, e] = strategy
        before = value
    return before, chosen


def _walk_back(chosen: Ints, need: Ints, steps: int) -> Ints:
    found = np.zeros(len(chosen), dtype=np.int64)
    for layer in range(len(chosen) - 1, -1, -1):
        found[layer] = chosen[layer, steps]
        steps -= int(need[layer, found[layer]])
    return found
