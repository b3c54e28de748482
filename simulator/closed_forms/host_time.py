"""Closed forms of a host that launches what comes next while the device works."""

from __future__ import annotations

from simulator.compiled_cache import also_compiled


@also_compiled
def longer_s(
    forward_s: float, backward_s: float, forward_host_s: float, backward_host_s: float, waits: bool, apart: bool
) -> tuple[float, float, float]:
    """Return the seconds of either pass of a microbatch, and what the host takes longer than both.

    Args:
        forward_s, backward_s: Of the device.
        forward_host_s, backward_host_s: Of the host.
        waits: The host begins each pass when the device does, so the longer of them counts; else it goes on from one to
            the next, so that what comes to a stage while it waits is passed on as quickly as the device can.
        apart: All forward passes come before the first backward pass (GPipe), so that a host which does not wait is
            ahead in these by what it was quicker in those; else passes alternate.

    >>> longer_s(1.0, 4.0, 2.0, 2.0, True, False), longer_s(1.0, 4.0, 2.0, 2.0, False, False)
    ((2.0, 4.0, 0.0), (1.0, 4.0, 0.0))
    >>> longer_s(1.0, 3.0, 2.0, 4.0, False, False), longer_s(1.0, 4.0, 2.0, 2.0, False, True)
    ((1.0, 3.0, 2.0), (1.0, 4.0, 1.0))
    >>> longer_s(2.0, 3.0, 1.0, 5.0, False, True)  # one second ahead
    (2.0, 3.0, 1.0)
    """
    if waits:
        return max(forward_s, forward_host_s), max(backward_s, backward_host_s), 0.0
    if not apart:
        return forward_s, backward_s, max(0.0, forward_host_s + backward_host_s - forward_s - backward_s)
    ahead_s = max(0.0, forward_s - forward_host_s)
    behind_s = max(0.0, forward_host_s - forward_s) + max(0.0, backward_host_s - ahead_s - backward_s)
    return forward_s, backward_s, behind_s


@also_compiled
def left_s(before_s: float, device_s: float, bound_s: float) -> float:
    """Return what the device has left of some kernels when their host has launched the last one.

    Args:
        before_s: What it has left of those before.
        device_s, bound_s: Of these, beyond what they take the host: ``Segment.device_s`` and ``Segment.bound_s``.

    >>> left_s(0.0, -3.0, 1.0), left_s(1.0, 2.0, 2.5)
    (1.0, 3.0)
    """
    return max(before_s + device_s, bound_s)


@also_compiled
def lags_s(
    forward_s: float,
    backward_s: float,
    forward_host_s: float,
    backward_host_s: float,
    pass_s: float,
    end_s: float,
    waits: bool,
    apart: bool,
    is_first: bool,
    num_microbatches: int,
) -> tuple[float, float]:
    """Return how long a device that has what its passes need waits for its host to begin them.

    Where the host waits, all that the framework does before a pass, but for what the host takes longer than the device
    anyway. Else it is behind in the first pass of an iteration alone, or at the end of the last.

    Args:
        forward_s, backward_s, forward_host_s, backward_host_s, waits, apart: As in ``longer_s``.
        pass_s: Of what a pass takes the host, what comes before its first launch.
        end_s: Of the backward pass, reductions at its end.
        is_first: Nothing comes to the stage's forward passes.
        num_microbatches: At least one.

    >>> lags_s(5.0, 5.0, 2.0, 5.5, 1.0, 0.0, True, False, False, 8)
    (1.0, 0.5)
    >>> lags_s(4.0, 6.0, 2.0, 2.0, 1.0, 0.0, False, False, True, 8)
    (1.0, 0.0)
    >>> lags_s(4.0, 6.0, 7.0, 2.0, 1.0, 0.0, False, False, True, 8)
    (4.0, 0.0)
    >>> lags_s(4.0, 6.0, 9.0, 2.0, 1.0, 0.0, False, False, True, 8)  # 8 (9 + 2), and 5 until the device ends
    (5.0, 0.0)
    """
    m = num_microbatches
    if waits:
        forward_lag_s = min(pass_s, max(0.0, pass_s + forward_s - forward_host_s))
        return forward_lag_s, min(pass_s, max(0.0, pass_s + backward_s - backward_host_s))
    if not is_first:
        return 0.0, 0.0
    host_s, device_s = forward_host_s + backward_host_s, forward_s + backward_s
    behind_s = pass_s + forward_host_s - forward_s  # So far in the first backward pass, if no pass waited before.
    if apart:
        ahead_s = max(0.0, forward_s - forward_host_s)
        known_s = max(forward_s, forward_host_s) + max(backward_s, backward_host_s - ahead_s)
        begun_s = m * device_s + max(pass_s, behind_s, pass_s + m * (forward_host_s - forward_s))
    else:
        known_s = max(host_s, device_s)
        begun_s = m * device_s + max(pass_s, behind_s)
    ended_s = m * host_s + end_s + max(0.0, pass_s + backward_s - end_s - backward_host_s)
    return max(0.0, max(begun_s, ended_s) - m * known_s), 0.0
