"""What the search of one stage works on: seconds and bytes of its layers under every strategy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageTable:
    """What the search of one stage works on: L layers, S strategies, K layouts.

    Attributes:
        cost_s: float64[L, S], infinity where a strategy cannot be used.
        kept_bytes: float64[L, S]: forward memory of all microbatches in flight, and model states.
        backward_bytes: float64[L, S]: needed on top during the layer's own backward pass.
        forward_bytes: float64[L, S]: of what is kept, what is free after the layer's backward pass; not negative.
        layout: int64[S]: layout of each strategy.
        transition_s: float64[L, K, K]: before layer l, from layout to layout; zero for l = 0.
    """

    cost_s: Floats
    kept_bytes: Floats
    backward_bytes: Floats
    forward_bytes: Floats
    layout: Ints
    transition_s: Floats

    def peak_bytes(self, chosen: Ints) -> float:
        """Return Eq. 2 for a strategy per layer: what is kept, and the most that backward needs beyond what is free."""
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
