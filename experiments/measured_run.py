"""An iteration that somebody measured: what calibrations on whole iterations are fitted to."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.accuracy import fastest_engine
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate


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
        return simulate(self.plan, problem, engine=fastest_engine()).iteration_time_s
