"""Closed form of the optimizer's step of one stage, and of what ranks wait for on the way to its end."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hardware_models.runtime import Runtime
from simulator.closed_forms.stage_rows import DOWN, FORWARD, WEIGHT
from simulator.compiled_cache import also_compiled


def step_s(
    pass_s: float,
    update_s: float,
    num_kernels: float,
    launch_s: float,
    ahead_s: float,
    runs_ahead: bool,
    waits: bool,
) -> tuple[float, float]:
    """Return the seconds of going over gradients, and of the optimizer.

    A kernel begins when its launch is through, ``ahead_s`` early, and of several that the device waits for, the last
    one takes its own time after its launch.

    Args:
        pass_s: Of the kernel that goes over gradients; 0 for none.
        update_s, num_kernels: Of the optimizer's, on the device.
        launch_s: The host's, for each kernel.
        ahead_s: So long before gradients are reduced the host has come to this.
        runs_ahead: It launches what comes next while the device works.
        waits: It waits for the norm.

    >>> step_s(1.0, 6.0, 3, 0.5, 2.0, True, False), step_s(1.0, 6.0, 3, 0.5, 2.0, True, True)
    ((1.0, 6.0), (1.0, 6.5))
    >>> step_s(0.0, 1.5, 3, 1.0, 0.0, True, False), step_s(0.0, 1.5, 3, 1.0, 2.5, True, False)
    ((0.0, 3.5), (0.0, 1.5))
    >>> step_s(0.0, 0.5, 3, 0.5, 2.0, False, True)
    (0.0, 1.5)
    """
    if not runs_ahead:
        return max(pass_s, launch_s) if pass_s > 0.0 else 0.0, max(update_s, num_kernels * launch_s)
    passed_s = 0.0
    if pass_s > 0.0:
        passed_s = pass_s + max(0.0, launch_s - ahead_s)
        ahead_s = max(0.0, ahead_s + passed_s - launch_s)
    if waits:
        ahead_s = 0.0
    slowly_s = max(update_s, (num_kernels - 1) * launch_s + update_s / num_kernels)
    return passed_s, max(update_s, launch_s - ahead_s + slowly_s)


def host_goes_on(runtime: Runtime) -> bool:
    """Return whether hosts launch all passes without waiting for what comes from other stages."""
    return runtime.host_runs_ahead and not set(runtime.host_waits) - {"optimizer"}


@also_compiled
def waited_s(
    rows: NDArray[np.float64],
    times_s: NDArray[np.float64],
    stage: int,
    num_microbatches: int,
    apart: bool,
    weight_s: float,
) -> float:
    """Return how long a stage waits for others before its last backward pass ends, while its host goes on.

    For the first microbatch, for slower stages with each other one, and until the last one's gradient is there.

    Args:
        rows: float64[stages, NUM_COLUMNS]. As ``stage_rows`` has them.
        times_s: float64[stages]. All that a microbatch takes.
        stage: Which of them.
        num_microbatches: At least one.
        apart: All forward passes come before the first backward pass (GPipe).
        weight_s: Of weight gradients that it makes meanwhile (zb-h1).

    >>> rows = np.zeros((3, 8))
    >>> rows[:, FORWARD] = 1.0
    >>> [waited_s(rows, np.array([3.0, 3.0, 3.0]), stage, 8, False, 0.0) for stage in range(3)]
    [6.0, 4.0, 2.0]
    >>> [waited_s(rows, np.array([3.0, 3.0, 4.0]), stage, 8, False, 0.0) for stage in range(3)]
    [14.0, 12.0, 2.0]
    """
    before_s, after_s, slowest_s, forward_s, backward_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for other in range(len(times_s)):
        own_s = rows[other, FORWARD] + rows[other, DOWN]
        left_s = times_s[other] - rows[other, WEIGHT] - own_s
        if other < stage:
            before_s += own_s
        elif other > stage:
            after_s += own_s + left_s
        if other <= stage:
            forward_s = max(forward_s, own_s)
        if other >= stage:
            backward_s = max(backward_s, left_s)
        slowest_s = max(slowest_s, times_s[other])
    found_s = before_s + max(0.0, after_s - min(num_microbatches - 1, len(times_s) - 1 - stage) * weight_s)
    slower_s = slowest_s - times_s[stage]
    if apart:
        slower_s = forward_s + backward_s - (times_s[stage] - rows[stage, WEIGHT])
    return float(found_s + (num_microbatches - 1) * slower_s)


@also_compiled
def ahead_s(
    forward_s: float,
    backward_s: float,
    forward_host_s: float,
    backward_host_s: float,
    waits: bool,
    num_microbatches: int,
) -> float:
    """Return how long before the last backward pass of a stage that never waits for another its host has launched it.

    Args:
        forward_s, backward_s: Passes of a microbatch, as ``host_time.longer_s`` has them.
        forward_host_s, backward_host_s: What they take the host.
        waits: It begins each pass when the device does; else it goes on from the first to the last.
        num_microbatches: At least one.

    >>> ahead_s(1.0, 4.0, 1.0, 2.0, True, 8), ahead_s(1.0, 4.0, 1.0, 2.0, False, 8)
    (2.0, 16.0)
    """
    if waits:
        return max(0.0, backward_s - backward_host_s)
    return num_microbatches * max(0.0, forward_s + backward_s - forward_host_s - backward_host_s)


def phases_s(
    reduced_s: float, passed_s: float, updated_s: float, has_ties: bool, has_norm: bool
) -> tuple[float, float, float]:
    """Return what a stage does from its last pass on: until ranks sum tied weights, until the norm, and behind it.

    Where ranks do not wait for one another, what follows is part of what comes before.

    Args:
        reduced_s: Its gradients.
        passed_s, updated_s: Going over them, and what follows.
        has_ties, has_norm: Whether ranks wait there.

    >>> phases_s(4.0, 2.0, 1.0, True, False), phases_s(4.0, 2.0, 1.0, False, True)
    ((4.0, 3.0, 0.0), (6.0, 0.0, 1.0))
    """
    if not has_norm:
        passed_s, updated_s = passed_s + updated_s, 0.0
    if not has_ties:
        reduced_s, passed_s = reduced_s + passed_s, 0.0
    return reduced_s, passed_s, updated_s
