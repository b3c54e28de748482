"""What is said of a plan: by the closed form, by the simulator, or by an objective of one's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from simulator.closed_forms.estimate import estimate
from simulator.costs import cost_tables
from simulator.fast.estimate import FastEstimator
from simulator.plan import Plan
from simulator.problem import Problem

OBJECTIVES = ("paper", "simulator")


@dataclass(frozen=True)
class Score:
    """What an objective says of one plan.

    Attributes:
        objective: What is minimised, >= 0; seconds per iteration unless the paper says otherwise.
        fits: No device needs more memory than it has.
        peak_bytes: Peak of the device that is nearest to, or farthest over, its capacity.
        capacity_bytes: That device's capacity.
        where: Which device or stage that is.
    """

    objective: float
    fits: bool
    peak_bytes: float
    capacity_bytes: float
    where: str


Objective = Callable[[Plan, Problem], Score]


@lru_cache(maxsize=2)
def _estimator(problem: Problem) -> FastEstimator:
    return FastEstimator(problem, cost_tables(problem))


def estimated(plan: Plan, problem: Problem) -> Score:
    """Score by the closed form on the cost tables (``simulator.closed_forms.estimate``; no engine)."""
    try:
        found = _estimator(problem).estimate(plan)  # the same, quicker
    except ValueError:  # what has no array form, or was measured as the fast estimate does not know it
        found = estimate(plan, problem, cost_tables(problem))
    pairs = list(zip(found.peak_bytes, found.capacity_bytes, strict=True))
    # Of plans that fit the fullest device, of others the one that lacks most.
    fullness = [peak / capacity if found.fits else peak - capacity for peak, capacity in pairs]
    worst = fullness.index(max(fullness))
    return Score(
        objective=found.iteration_time_s,
        fits=found.fits,
        peak_bytes=found.peak_bytes[worst],
        capacity_bytes=found.capacity_bytes[worst],
        where=f"stage {worst}",
    )


def simulated(plan: Plan, problem: Problem) -> Score:
    """Score by a simulation with every effect on: slower, and what finally judges every plan."""
    from simulator.simulate import simulate

    result = simulate(plan, problem, engine="compiled", costs=cost_tables(problem), leave_out_periods=True)
    tightest = max(result.memory, key=lambda memory: memory.peak_reserved_bytes - memory.capacity_bytes)
    return Score(
        objective=result.iteration_time_s,
        fits=result.fits,
        peak_bytes=tightest.peak_reserved_bytes,
        capacity_bytes=tightest.capacity_bytes,
        where=tightest.peak_where,
    )
