"""The search of a stage whose first and last layers share a weight: embedding and head.

A stage holds the weight once for the layers that lay it out alike, so what one of them costs depends on the strategy
of another, far away. The dynamic program is run for one layout of the weight at a time, in the order of what each
costs without a budget, for what is cheaper than the best so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from searchers.galvatron.dynamic_programming import MOST, search
from searchers.galvatron.priced_memory import without_budget
from searchers.galvatron.stage_table import Ints, StageTable


@dataclass(frozen=True)
class TiedTable:
    """What the search of a stage works on if later layers share a tied weight with one of them, the keeper.

    Attributes:
        shared: Where they find it laid out alike.
        alone: Where every layer holds its own.
        keeper: Row of the layer that holds it for them.
        weights: int64[S]: how each strategy lays weights out.
    """

    shared: StageTable
    alone: StageTable
    keeper: int
    weights: Ints

    def under(self, layout: int) -> StageTable:
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


def search_tied(
    tables: Sequence[TiedTable], budget_bytes: float, granularity_bytes: float, most: int = MOST
) -> Ints | None:
    """Return the cheapest strategy per layer whose peak is within the budget, or None; see `search`.

    Exact for a weight of two or three layers; of more, only those count as sharing it that lay it out as one of them.

    Args:
        tables: One for each layer that later ones can share a weight with, in order.
        budget_bytes, granularity_bytes, most: As of `search`.
    """
    best: Ints | None = None
    best_s = np.inf
    under = [table.under(layout) for table in tables for layout in np.unique(table.weights)]
    for own in sorted(under, key=_least_s):
        found = search(own, budget_bytes, granularity_bytes, most, below_s=best_s * (1 - 1e-12))
        if found is not None:
            best, best_s = found, own.total_s(found)
    return best


def _least_s(table: StageTable) -> float:
    return without_budget(table.cost_s, table.layout, table.transition_s)[2]
