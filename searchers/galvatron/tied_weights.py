"""The search of a stage whose first and last layers share a weight: embedding and head.

A stage holds the weight once for the layers that lay it out alike, so what one of them costs depends on the strategy
of another, far away. The dynamic program is run for one layout of the weight at a time, best bound first, until no
other can be better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from searchers.galvatron.dynamic_programming import MAX_RESERVES, Ints, LayerTable, bounds_s, reserves_of, search


@dataclass(frozen=True)
class TiedTable:
    """What the search of a stage works on if later layers share a tied weight with one of them, the keeper.

    Attributes:
        shared: Where they find it laid out alike.
        alone: Where every layer holds its own.
        keeper: Row of the layer that holds it for them.
        weights: int64[S]: how each strategy lays weights out.
    """

    shared: LayerTable
    alone: LayerTable
    keeper: int
    weights: Ints

    def under(self, layout: int) -> LayerTable:
        """Return the table in which the keeper lays the weight out so."""
        alike = self.weights == layout
        first, second = self.shared, self.alone
        cost = np.where(alike, first.cost_s, second.cost_s)
        cost[self.keeper, ~alike] = np.inf
        return replace(
            first,
            cost_s=cost,
            kept_bytes=np.where(alike, first.kept_bytes, second.kept_bytes),
            backward_bytes=np.where(alike, first.backward_bytes, second.backward_bytes),
        )

    @property
    def num_differing(self) -> int:
        """Layers whose row depends on the keeper's strategy, and the keeper."""
        differ = (self.shared.kept_bytes != self.alone.kept_bytes) | (self.shared.cost_s != self.alone.cost_s)
        return 1 + int(differ.any(axis=1).sum())


def search_tied(
    tables: Sequence[TiedTable], budget_bytes: float, granularity_bytes: float, max_reserves: int | None = MAX_RESERVES
) -> Ints | None:
    """Return the cheapest strategy per layer whose peak is within the budget, or None; see `search`.

    Exact for a weight of two or three layers; of more, only those count as sharing it that lay it out as one of them.

    Args:
        tables: One for each layer that later ones can share a weight with, in order.
        budget_bytes, granularity_bytes, max_reserves: As of `search`.
    """
    reserves = reserves_of(
        [each for table in tables for each in (table.shared, table.alone)], granularity_bytes, max_reserves
    )
    candidates = []
    for number, table in enumerate(tables):
        # What a row that depends on the layout is rounded up by can differ by a step.
        ample = budget_bytes + table.num_differing * granularity_bytes
        bounds = bounds_s(table.shared, ample, granularity_bytes, reserves, table.keeper)
        for layout in np.unique(table.weights):
            bound = float(bounds[table.weights == layout].min())
            if np.isfinite(bound):
                candidates.append((bound, number, int(layout)))
    best: Ints | None = None
    best_s = np.inf
    for bound, number, layout in sorted(candidates):
        if bound >= best_s * (1 - 1e-12):
            break
        own = tables[number].under(layout)
        found = search(own, budget_bytes, granularity_bytes, max_reserves, reserves)
        if found is not None and own.total_s(found) < best_s:
            best, best_s = found, own.total_s(found)
    return best
