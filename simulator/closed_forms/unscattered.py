"""Closed form of gradients that ZeRO-2 and 3 have not scattered yet when a backward pass ends."""

from __future__ import annotations

from simulator.compiled_cache import also_compiled


@also_compiled
def unscattered_bytes(
    root: float, above: float, lowest: float, wait: float, waits: bool, given_back: float
) -> tuple[float, float]:
    """Return what is there beside the needs of a stage's first operator, and the most when that is through.

    Args:
        root: All of the root, which is reduced last, in bytes as it is reduced.
        above: What of that is above all other units.
        lowest: The last unit before the root.
        wait: How wide gradients are until their unit is reduced, as a share of that.
        waits: They wait from when they are made, and are then copied into what is reduced, beside which the unit before
            is still there.
        given_back: What is no longer there when the root is copied.

    >>> unscattered_bytes(6.0, 4.0, 3.0, 1.0, False, 0.0)
    (9.0, 9.0)
    >>> cases = (6.0, 4.0, 3.0, 0.5), (4.0, 4.0, 8.0, 0.5), (4.0, 4.0, 8.0, 1.0)
    >>> [unscattered_bytes(*each, True, 0.0) for each in cases]
    [(5.0, 9.0), (10.0, 14.0), (12.0, 20.0)]
    >>> unscattered_bytes(6.0, 4.0, 3.0, 0.5, True, 2.0)
    (5.0, 7.0)
    """
    if not waits:
        return root + lowest, root + lowest
    return above * wait + lowest, max(
        root * wait + lowest, above * wait + lowest * (1.0 + wait), root * (1.0 + wait) - given_back
    )
