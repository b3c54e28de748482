"""Closed forms of a host that launches what comes next while the device works."""

from __future__ import annotations


def longer_s(
    forward_s: float, backward_s: float, forward_host_s: float, backward_host_s: float, waits: bool, apart: bool
) -> tuple[float, float]:
    """Return the seconds of either pass of a microbatch where the host works beside the device.

    Args:
        forward_s, backward_s: Of the device.
        forward_host_s, backward_host_s: Of the host.
        waits: The host begins each pass when the device does; else it goes on from one to the next.
        apart: All forward passes come before the first backward pass (GPipe), so that a host which does not wait is
            ahead in these by what it was quicker in those; else passes alternate, and both take their share of what it
            needs for both.

    >>> longer_s(1.0, 4.0, 2.0, 2.0, True, False), longer_s(1.0, 4.0, 2.0, 2.0, False, False)
    ((2.0, 4.0), (1.0, 4.0))
    >>> longer_s(1.0, 3.0, 2.0, 4.0, False, False), longer_s(1.0, 4.0, 2.0, 2.0, False, True)
    ((1.5, 4.5), (2.0, 4.0))
    >>> longer_s(2.0, 3.0, 1.0, 5.0, False, True)  # one second ahead
    (2.0, 4.0)
    >>> longer_s(0.0, 0.0, 1.0, 2.0, False, False)  # a stage of nothing but passes
    (1.0, 2.0)
    """
    if waits:
        return max(forward_s, forward_host_s), max(backward_s, backward_host_s)
    if apart:
        ahead_s = max(0.0, forward_s - forward_host_s)
        return max(forward_s, forward_host_s), max(backward_s, backward_host_s - ahead_s)
    device_s = forward_s + backward_s
    if device_s <= 0.0:
        return forward_host_s, backward_host_s
    slower = max(1.0, (forward_host_s + backward_host_s) / device_s)
    return slower * forward_s, slower * backward_s


def lag_s(device_s: float, host_s: float, pass_s: float) -> float:
    """Return how long a device that has what its pass needs waits for its host to begin it.

    All that the framework does before a pass, but for what the host takes longer than the device anyway.

    Args:
        device_s, host_s: Of the pass, each by itself.
        pass_s: Of ``host_s``, what comes before the first launch.

    >>> lag_s(5.0, 2.0, 1.0), lag_s(5.0, 5.5, 1.0), lag_s(5.0, 7.0, 1.0)
    (1.0, 0.5, 0.0)
    """
    return min(pass_s, max(0.0, pass_s + device_s - host_s))
