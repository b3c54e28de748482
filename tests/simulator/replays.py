"""Iteration times of an independent exact replay of 1F1B, for tests of the engines and of DAPPLE's planner."""

from __future__ import annotations

REPLAYS = {
    (2, 0.3): ("214.20", "195.60", "195.60"),
    (4, 0.3): ("231.00", "202.80", "202.80"),
    (8, 0.3): ("250.20", "217.20", "217.20"),
    (4, 0.9): ("291.00", "206.40", "206.40"),
    (4, 1.5): ("351.00", "210.00", "241.50"),
    (8, 1.5): ("399.00", "234.00", "265.50"),
}
"""Forward 1, backward 2, 64 microbatches: ``(stages, seconds of a link)`` to P_A, P_B and GPipe."""
