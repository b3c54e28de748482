"""Closed form of gradients that ZeRO-2 and 3 have not scattered yet, and how wide they wait for that."""

from __future__ import annotations

from simulator.compiled_cache import also_compiled


@also_compiled
def unscattered_bytes(above: float, pair: float, root: float, lowest: float, wait: float) -> tuple[float, float]:
    """Return the most that waits during a backward pass, and at its end.

    Args:
        above: The part of the root that comes before all other units, in bytes as it is reduced.
        pair: The largest two neighbouring units, taken for equal.
        root: All of the root, which is reduced last.
        lowest: The last unit before that.
        wait: How wide gradients are until their unit is reduced, as a share of that: below 1 they are copied into what
            is reduced, beside which the unit before is still there.

    >>> unscattered_bytes(4.0, 8.0, 6.0, 3.0, 1.0), unscattered_bytes(4.0, 8.0, 6.0, 3.0, 0.5)
    ((12.0, 9.0), (8.0, 9.0))
    """
    end = root * wait + lowest
    if wait < 1.0:
        end = max(end, root * (1.0 + wait), lowest * (1.0 + wait))
    return above * wait + pair * (1.0 + wait) / 2.0, end
