"""Compiled: gradients that are added to none, where the first microbatch's are handed over."""

from __future__ import annotations

from simulator.compiled_cache import inlined
from simulator.fast.arrays import ADDED_S, ADDED_SCATTERED_S, Floats


@inlined
def handed_over_s(added_s: Floats, only_one: bool, every: bool) -> tuple[float, float, float, float]:
    """Return seconds of a stage's additions that no microbatch makes, and those that the first one alone does not.

    Args:
        added_s: From column ``ADDED_S`` on: device and host, of whole gradients and of those that ZeRO scatters.
        only_one: There is a single microbatch, which adds nothing.
        every: Scattered gradients leave in each pass, and are added to none.

    Returns:
        Of the device and the host, of all microbatches; of the device and the host, of the first.
    """
    never_s, never_host_s, less_s, less_host_s = 0.0, 0.0, 0.0, 0.0
    for column in range(0, len(added_s), 2):
        if only_one or (every and column == ADDED_SCATTERED_S - ADDED_S):
            never_s += added_s[column]
            never_host_s += added_s[column + 1]
        else:
            less_s += added_s[column]
            less_host_s += added_s[column + 1]
    return never_s, never_host_s, less_s, less_host_s
