"""An iteration that somebody measured: what calibrations on whole iterations are fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from experiments.accuracy.run import fastest_engine
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate_time_s

IN_DOUBT = 20.0
"""If all runs take so many times what is predicted, or so small a part, their unit is wrong, not the machine."""
WANTED = "times must be in seconds, of one iteration"
A_THOUSAND = (400.0, 2500.0)
"""Such ratios are nothing but milliseconds: no prediction is off by more than that from 1,000."""

NEAR, FEW_GPUS = 1.3, 4
"""How near a ratio must be to a number of GPUs to look like it; of fewer any error may."""


def doubt(ratios: Iterable[float]) -> str | None:
    """Return what speaks against the unit of measured times, in words, or None.

    Args:
        ratios: Measured over predicted seconds.

    >>> doubt([900.0, 1100.0])
    'every run took about 1,000 times the predicted seconds (900 to 1100): are they in milliseconds? times must be in \
seconds, of one iteration'
    >>> doubt([90.0, 110.0])
    'every run took 90 times the predicted seconds or more: times must be in seconds, of one iteration'
    >>> doubt([900.0, 1.1])
    """
    least, most = min(found := list(ratios)), max(found)
    if A_THOUSAND[0] < least and most < A_THOUSAND[1]:
        span = f"{least:.4g} to {most:.4g}"
        return f"every run took about 1,000 times the predicted seconds ({span}): are they in milliseconds? {WANTED}"
    if least > IN_DOUBT:
        return f"every run took {least:.3g} times the predicted seconds or more: {WANTED}"
    if most < 1 / IN_DOUBT:
        return f"every run took {most:.3g} of the predicted seconds or less: {WANTED}"
    return None


def doubt_of_one(ratio: float, num_gpus: int) -> str | None:
    """Return what one run's measured seconds over predicted ones look like, in words, or None.

    >>> doubt_of_one(8.4, 8)
    'took as many times the predicted seconds as there are GPUs (a rate of tokens or samples must be of all of them)'
    >>> doubt_of_one(0.12, 8)
    'took the predicted seconds over the number of GPUs (seconds must be of one iteration, tflops_per_gpu of one GPU)'
    >>> doubt_of_one(1020.0, 8)
    'took about 1,000 times the predicted seconds (times must be in seconds, of one iteration)'
    >>> doubt_of_one(1.5, 2), doubt_of_one(8.4, 16)
    (None, None)
    """
    found = []
    if num_gpus >= FEW_GPUS and 1 / NEAR < ratio / num_gpus < NEAR:
        rates = "a rate of tokens or samples must be of all of them"
        found.append(f"as many times the predicted seconds as there are GPUs ({rates})")
    if num_gpus >= FEW_GPUS and 1 / NEAR < ratio * num_gpus < NEAR:
        wanted = "seconds must be of one iteration, tflops_per_gpu of one GPU"
        found.append(f"the predicted seconds over the number of GPUs ({wanted})")
    if A_THOUSAND[0] < ratio < A_THOUSAND[1]:
        found.append(f"about 1,000 times the predicted seconds ({WANTED})")
    return f"took {', '.join(found)}" if found else None


def doubt_among(ratios: Mapping[str, float]) -> str | None:
    """Return which runs are so far from each other that a row must be wrong, in words, or None.

    Args:
        ratios: Measured over predicted seconds, by run.

    >>> doubt_among({"a": 1.1, "b": 0.9, "c": 1e6})
    'c took 1e+06 times the predicted seconds, and the others 0.9 to 1.1: look at its row, or remove it'
    >>> doubt_among({"a": 1.0, "b": 1e6})
    'runs took from 1 (a) to 1e+06 (b) times the predicted seconds: look at their rows'
    >>> doubt_among({"a": 1.1, "b": 0.9, "c": 3.0})
    """
    quickest, slowest = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    if ratios[slowest] < IN_DOUBT * ratios[quickest]:
        return None
    for name in (quickest, slowest):
        others = [ratio for other, ratio in ratios.items() if other != name]
        if len(others) > 1 and max(others) < IN_DOUBT * min(others):
            return (
                f"{name} took {ratios[name]:.3g} times the predicted seconds, and the others {min(others):.3g} to "
                f"{max(others):.3g}: look at its row, or remove it"
            )
    return (
        f"runs took from {ratios[quickest]:.3g} ({quickest}) to {ratios[slowest]:.3g} ({slowest}) times the predicted "
        "seconds: look at their rows"
    )


@dataclass(frozen=True)
class MeasuredRun:
    """A measured iteration.

    Attributes:
        name: Row or file.
        problem: What was run, on the shipped constants.
        plan: How.
        seconds: Measured iteration time.
    """

    name: str
    problem: Problem
    plan: Plan
    seconds: float

    def simulated_s(self, problem: Problem) -> float:
        """Return the simulated iteration time of the plan on a problem of other prices."""
        return simulate_time_s(self.plan, problem, engine=fastest_engine())
