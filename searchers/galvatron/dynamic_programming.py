"""Layer-level dynamic programming: the cheapest strategy of every layer of a stage within a memory budget.

Source: Galvatron-BMW (TKDE 2024), Eq. 4, section IV-A2 and Algorithm 3. The state is the layer, the memory
spent so far and how the layer's activations lie: moving them costs the same whatever else two strategies
differ in, so this is as exact as a state that holds the previous layer's whole strategy. The printed Eq. 4
keeps one strategy per memory state instead; `search_as_printed` does that, with Algorithm 3's early break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_cache import compiled, inlined

Floats = NDArray[np.float64]
Choices = NDArray[np.int16]
Ints = NDArray[np.int64]

MAX_RESERVES = 16
"""Levels of backward memory that are tried for one stage."""


@dataclass(frozen=True)
class LayerTable:
    """What the search of one stage works on: L layers, S strategies, K layouts.

    Attributes:
        cost_s: float64[L, S], infinity where a strategy cannot be used.
        kept_bytes: float64[L, S]: forward memory of all microbatches in flight, and model states.
        backward_bytes: float64[L, S]: needed on top during the layer's own backward pass.
        forward_bytes: float64[L, S]: forward memory of one microbatch, for the full check.
        layout: int64[S]: layout of each strategy.
        transition_s: float64[L, K, K]: before layer l, from layout to layout; zero for l = 0.
    """

    cost_s: Floats
    kept_bytes: Floats
    backward_bytes: Floats
    forward_bytes: Floats
    layout: Ints
    transition_s: Floats

    @cached_property
    def reserved_bytes(self) -> Floats:
        """What each strategy needs set aside: of its backward need, what later layers surely hold is free by then.

        float64[L, S].
        """
        least = np.where(np.isfinite(self.forward_bytes), self.forward_bytes, np.inf).min(axis=1)
        later = np.append(least[:0:-1].cumsum()[::-1], 0.0)
        return np.maximum(0.0, self.backward_bytes - np.where(np.isfinite(later), later, 0.0)[:, None])

    def peak_bytes(self, chosen: Ints) -> float:
        """Return Eq. 2 for a strategy per layer: what is kept, plus the largest backward need over what is held."""
        rows = np.arange(len(chosen))
        forward = self.forward_bytes[rows, chosen]
        later = forward[::-1].cumsum()[::-1] - forward
        kept = float(self.kept_bytes[rows, chosen].sum())
        return kept + max(0.0, float((self.backward_bytes[rows, chosen] - later).max()))

    def total_s(self, chosen: Ints) -> float:
        """Return seconds of a strategy per layer, transitions included."""
        rows = np.arange(len(chosen))
        lies = self.layout[chosen]
        moved = self.transition_s[rows[1:], lies[:-1], lies[1:]].sum()
        return float(self.cost_s[rows, chosen].sum() + moved)


def search(
    table: LayerTable,
    budget_bytes: float,
    granularity_bytes: float,
    max_reserves: int | None = MAX_RESERVES,
    reserves: Sequence[float] | None = None,
) -> Ints | None:
    """Return the cheapest strategy per layer whose peak is within the budget, or None.

    Backward memory is set aside: for each level X of it, strategies that need at most X share the rest. What
    is found obeys Eq. 2, which is never more than this bound; so does the best of all levels.
    Of the need of a layer, what those behind it hold under their leanest strategies is not set aside.

    Args:
        table: Costs.
        budget_bytes: E, a device's memory.
        granularity_bytes: Memory step. What a layer needs beyond its cheapest-in-memory strategy is rounded up
            to it, so a coarse step wastes some memory and never breaks the budget.
        max_reserves: Levels of X at most, None for every distinct one.
        reserves: The levels, where they are not the table's own.
    """
    best: Ints | None = None
    best_s = np.inf
    for reserve in reserves_of([table], granularity_bytes, max_reserves) if reserves is None else reserves:
        rounded = _rounded(table, budget_bytes, granularity_bytes, reserve)
        if rounded is not None:
            found, seconds = _solve(rounded.cost_s, rounded.need, table.layout, table.transition_s, rounded.steps)
            if seconds < best_s:
                best, best_s = found, seconds
    return best


class _Rounded(NamedTuple):
    """A table in steps of memory: what strategies cost and need beyond each layer's leanest, and how many are left."""

    cost_s: Floats
    need: Ints
    steps: int


def _rounded(table: LayerTable, budget_bytes: float, granularity_bytes: float, reserve: float) -> _Rounded | None:
    """Return the table of the strategies that need at most ``reserve``, or None where nothing fits beside it."""
    allowed = np.isfinite(table.cost_s) & (table.reserved_bytes <= reserve)
    if not allowed.any(axis=1).all():
        return None
    kept = np.where(allowed, table.kept_bytes, np.inf)
    least = kept.min(axis=1)
    left = budget_bytes - reserve - float(least.sum())
    if left < 0:
        return None
    extra = np.where(allowed, kept - least[:, None], 0.0)
    most = float(extra.max(axis=1).sum())
    steps = int(min(left, most + len(least) * granularity_bytes) // granularity_bytes)
    need = np.ceil(extra / granularity_bytes - 1e-9).astype(np.int64)
    return _Rounded(np.where(allowed, table.cost_s, np.inf), need, steps)


def reserves_of(tables: Sequence[LayerTable], granularity_bytes: float, most: int | None) -> list[float]:
    """Return the levels of backward memory that are tried for the strategies of some tables, at most so many.

    The least is what every layer can do with; of those in one step of memory the highest stands for all.
    """
    needs = [np.where(np.isfinite(table.cost_s), table.reserved_bytes, np.inf) for table in tables]
    least = min(float(need.min(axis=1).max()) for need in needs)
    if not np.isfinite(least):
        return []
    levels = np.unique(np.concatenate([need[(need >= least) & np.isfinite(need)] for need in needs]))
    steps = np.ceil((levels - least) / granularity_bytes - 1e-9)
    levels = levels[np.append(np.diff(steps) > 0, True)]
    if most is not None and len(levels) > most:
        places = np.unique(np.linspace(0, len(levels) - 1, most).round().astype(int))
        levels = levels[places]
    return [float(level) for level in levels]


@inlined
def _move(value: Floats, moved_s: Floats, arrived: Floats, came_from: Choices) -> None:
    """Fill the least cost of arriving in each layout, and from which.

    Args:
        value: float64[K, E + 1]. Of ending in each, by memory spent.
        moved_s: float64[K, K]. Of going from one to another.
        arrived, came_from: [K, E + 1]. Results.
    """
    num_layouts, width = value.shape
    for target in range(num_layouts):
        for e in range(width):
            arrived[target, e] = np.inf
        for source in range(num_layouts):
            moved = moved_s[source, target]
            for e in range(width):
                seconds = value[source, e] + moved
                if seconds < arrived[target, e]:
                    arrived[target, e] = seconds
                    came_from[target, e] = source


@inlined
def _add_layer(cost: Floats, need: Ints, layout: Ints, arrived: Floats, value: Floats, chosen: Choices) -> None:
    """Fill the least cost of ending a layer in each layout, and its strategy.

    Args:
        cost, need, layout: [S]. Of its strategies.
        arrived: float64[K, E + 1]. Of what comes before, by memory spent.
        value, chosen: [K, E + 1]. Results.
    """
    width = value.shape[1]
    value[:] = np.inf
    for strategy in range(len(cost)):
        own = cost[strategy]
        if own == np.inf:
            continue
        memory = need[strategy]
        target = layout[strategy]
        for e in range(memory, width):
            seconds = arrived[target, e - memory] + own
            if seconds < value[target, e]:
                value[target, e] = seconds
                chosen[target, e] = strategy


@compiled
def _solve(cost: Floats, need: Ints, layout: Ints, transition: Floats, steps: int) -> tuple[Ints, float]:
    """Return strategies and seconds of the optimum within ``steps`` units of memory.

    ``value[k, e]`` is the least cost of the layers so far that end in layout k and spend at most e.
    """
    num_layers = len(cost)
    num_layouts = transition.shape[1]
    width = steps + 1
    value = np.zeros((num_layouts, width))
    arrived = np.zeros((num_layouts, width))
    chosen = np.zeros((num_layers, num_layouts, width), dtype=np.int16)
    came_from = np.zeros((num_layers, num_layouts, width), dtype=np.int16)
    for layer in range(num_layers):
        if layer > 0:
            _move(value, transition[layer], arrived, came_from[layer])
        _add_layer(cost[layer], need[layer], layout, arrived, value, chosen[layer])
    found = np.zeros(num_layers, dtype=np.int64)
    last = 0
    for target in range(num_layouts):
        if value[target, steps] < value[last, steps]:
            last = target
    best = value[last, steps]
    if best == np.inf:
        return found, best
    e = steps
    for layer in range(num_layers - 1, -1, -1):
        strategy = chosen[layer, last, e]
        found[layer] = strategy
        e -= need[layer, strategy]
        last = came_from[layer, last, e]
    return found, best


def bounds_s(
    table: LayerTable, budget_bytes: float, granularity_bytes: float, reserves: Sequence[float], layer: int
) -> Floats:
    """Return the least seconds that `search` finds with each strategy of one layer: float64[S]."""
    best = np.full(table.cost_s.shape[1], np.inf)
    turned = table.transition_s[:layer:-1].transpose(0, 2, 1)  # behind the last layer there is nothing to move
    turned = np.concatenate((np.zeros_like(turned[:1]), turned))
    for reserve in reserves:
        rounded = _rounded(table, budget_bytes, granularity_bytes, reserve)
        if rounded is None:
            continue
        cost, need, steps = rounded
        before = _arrived(cost[:layer], need[:layer], table.layout, table.transition_s[: layer + 1], steps)
        after = _arrived(cost[:layer:-1], need[:layer:-1], table.layout, turned, steps)
        for strategy in np.flatnonzero(np.isfinite(cost[layer]) & (need[layer] <= steps)):
            lies, left = table.layout[strategy], steps + 1 - need[layer, strategy]
            shared = before[lies, :left] + after[lies, :left][::-1]
            best[strategy] = min(best[strategy], cost[layer, strategy] + float(shared.min()))
    return best


@compiled
def _arrived(cost: Floats, need: Ints, layout: Ints, transition: Floats, steps: int) -> Floats:
    """Return the least cost of some layers and of moving on from the last to each layout: float64[K, E + 1].

    ``transition`` has one item more than there are layers: before each, and behind the last.
    """
    shape = (transition.shape[1], steps + 1)
    value, arrived = np.zeros(shape), np.zeros(shape)
    unread = np.zeros(shape, dtype=np.int16)  # Choices, which no bound needs.
    for layer in range(len(cost)):
        _add_layer(cost[layer], need[layer], layout, arrived, value, unread)
        _move(value, transition[layer + 1], arrived, unread)
    return arrived


def search_as_printed(table: LayerTable, budget_bytes: float, granularity_bytes: float) -> Ints | None:
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
