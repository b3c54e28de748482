"""How far a power limit slows the clock of a GPU that works on matrix products most of the time.

A kernel alone says little of it: the limit is held over many of them. What a whole model's kernels would draw at full
clock decides, and everything that the multiprocessors' clock rules takes longer until the mean is within the limit;
memory has a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hardware_models.gpus import EfficiencyCurves, GpuType, PowerCurve
from workloads.kernels import Kernel, MemoryBound

HALVINGS = 50
"""Of the interval that holds the slowdown: to rounding."""


def clock_slowdown(
    gpu: GpuType,
    curves: EfficiencyCurves,
    dtype: str,
    kernels: Iterable[tuple[Kernel, int]],
    seconds_of: Callable[[Kernel], float],
) -> float:
    """Return the time of products, attention and convolutions over that at full clock: 1 within the power limit.

    Args:
        gpu: Its peaks.
        curves: Its curves; without a power limit the slowdown is 1.
        dtype: Of the products.
        kernels: All that a device runs, with how often: a forward and a backward pass.
        seconds_of: Device seconds of one at full clock.
    """
    power = curves.power
    if power is None or dtype not in power.products:
        return 1.0
    total_s = clocked_s = busy_s = 0.0
    rate = gpu.peak(dtype) * curves.matmul[dtype].limit["forward"]
    for kernel, count in kernels:
        seconds = count * seconds_of(kernel)
        total_s += seconds
        if not isinstance(kernel, MemoryBound):
            clocked_s += seconds
            busy_s += count * kernel.flop / rate
    return slowdown_of_shares(power, dtype, clocked_s / total_s, busy_s / total_s) if total_s > 0 else 1.0


def slowdown_of_shares(power: PowerCurve, dtype: str, clocked: float, busy: float) -> float:
    """Return the slowdown with which the mean power is the limit.

    Slowed by m, time is ``1 + clocked (m - 1)``; products draw ``products / m ** exponent`` for ``busy m`` of it.

    Args:
        power: What products and the rest draw.
        dtype: Of the products.
        clocked: Share of the time at full clock that takes longer where the clock is slower.
        busy: Share that products would take at the curve's limit, at most ``clocked`` but for rounding.

    >>> cube = PowerCurve(memory=0.6, products={"bf16": 1.331}, exponent=3.0, source="an example")
    >>> round(slowdown_of_shares(cube, "bf16", 1.0, 1.0), 6), slowdown_of_shares(cube, "bf16", 0.4, 0.3)
    (1.1, 1.0)
    """
    full = power.products[dtype]

    def is_beyond(slowdown: float) -> bool:
        total, working = 1.0 + clocked * (slowdown - 1.0), busy * slowdown
        drawn = working * full / float(slowdown**power.exponent) + (total - working) * power.memory
        return bool(drawn > total)

    low, high = 1.0, float(max(1.0, full) ** (1.0 / power.exponent))
    if not is_beyond(low):
        return low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_beyond(middle) else (low, middle)
    return high
