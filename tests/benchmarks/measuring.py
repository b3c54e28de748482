"""How a figure is measured: processor seconds of one core, and a yardstick timed around it.

A figure is the least processor time of several repeats, divided by that of a yardstick (a fixed piece of Python
and numpy) timed before and after it in the same process: what the machine does besides cancels, mostly.
"""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What is timed.
        make: Sets up and returns what to time; what it returns is called again for each repeat.
        units: How many of ``unit`` one call does.
        unit: ``tasks``, ``plans``, ``runs``.
        repeats: Calls timed.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    units: float
    unit: str
    repeats: int = 5


@dataclass(frozen=True)
class Measured:
    """A measured figure; seconds of processor time of one call.

    Attributes:
        least_s, median_s, most_s: Of the repeats.
        yardstick_s: Least of those timed around it.
    """

    least_s: float
    median_s: float
    most_s: float
    yardstick_s: float

    @property
    def ratio(self) -> float:
        """Yardsticks per call."""
        return self.least_s / self.yardstick_s


def yardstick() -> float:
    """Return a number: about a tenth of a second of interpreter and numpy work.

    No sort: that of numpy's vector code takes 3.6 times as long on descending numbers as its plain one, so that the
    yardstick told which of them a processor gets.
    """
    total = 0
    for number in range(800_000):
        total += number % 7
    values = np.arange(2_000_000, dtype=np.float64)
    for _ in range(4):
        values = np.cumsum(values[::-1]) / 1e6
    return float(total + values[-1])


def processor_s(call: Callable[[], object]) -> float:
    """Return processor seconds of a call, those of child processes included."""
    gc.collect()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time()
    call()
    own = time.process_time() - own
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime


def measure(figure: Figure) -> Measured:
    """Return a figure, after one call to warm up."""
    call = figure.make()
    call()
    around = [processor_s(yardstick)]
    seconds = sorted(processor_s(call) for _ in range(figure.repeats))
    around += [processor_s(yardstick), processor_s(yardstick)]
    return Measured(seconds[0], seconds[len(seconds) // 2], seconds[-1], min(around))


def yardsticks(call: Callable[[], object], repeats: int = 3) -> float:
    """Return what a call takes, the least of its repeats, in yardsticks (the mean of one before and one after).

    A limit in seconds is as many yardsticks of 0.131 s, that of ``docs/performance``. Neighbours on a machine slow some
    code and not other: a limit should be a few times what was measured.
    """
    around = [processor_s(yardstick)]
    least_s = min(processor_s(call) for _ in range(repeats))
    around.append(processor_s(yardstick))
    return least_s / (sum(around) / len(around))


def peak_mebibytes(statement: str) -> float:
    """Return the peak resident memory of a fresh process that runs a statement."""
    # Not ru_maxrss, which a process inherits from the one that started it.
    words = "; print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    found = subprocess.run([sys.executable, "-c", statement + words], check=True, capture_output=True, text=True)
    return int(found.stdout.split()[-1]) / 1024
