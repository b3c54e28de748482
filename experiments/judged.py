"""A searcher's plans judged by the simulator: in its order until one fits, as its user would try them for real."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datafiles.words import counted
from searchers.base import SearchResult
from searchers.budget import Budget
from searchers.plan_words import describe_plan
from simulator.costs import cost_tables
from simulator.fidelity import Fidelity
from simulator.memory.usage import DeviceMemory
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.result import SimulationResult
from simulator.simulate import simulate
from workloads.operators import Workload


@dataclass(frozen=True)
class Judged:
    """What became of a search's plans.

    Attributes:
        workload: The model it is for.
        plan: The first that fits; the searcher's best if none does.
        objective: The searcher's, of that plan.
        result: The simulator's, of that plan.
        reason: Why it is not the searcher's first, or that none fits; empty where the first fits.
        simulate_s: Seconds that this took.
    """

    workload: Workload
    plan: Plan
    objective: float
    result: SimulationResult
    reason: str
    simulate_s: float

    @property
    def tightest(self) -> DeviceMemory:
        """Memory of the device that is nearest to its capacity, or furthest beyond."""
        return max(self.result.memory, key=lambda memory: memory.peak_reserved_bytes - memory.capacity_bytes)

    def row(self, found: SearchResult, budget: Budget) -> dict[str, Any]:
        """Return the columns that every table of searches has, of the search that this came from and its budget."""
        result, tightest = self.result, self.tightest
        return {
            "status": "ok" if result.fits else "out of memory",
            "iteration_time_s": result.iteration_time_s,
            "samples_per_s": result.samples_per_s,
            "tokens_per_s_per_device": result.tokens_per_s_per_device,
            "mfu": result.mfu,
            "peak_reserved_bytes": tightest.peak_reserved_bytes,
            "capacity_bytes": tightest.capacity_bytes,
            "objective_s": self.objective,
            "search_s": found.wall_s,
            "evaluations": found.counters["evaluations"],
            "budget_ended": _ended(budget, found),
            "simulate_s": self.simulate_s,
            "plan": describe_plan(self.plan, self.workload),
            "reason": self.reason,
        }


def first_that_fits(
    found: SearchResult,
    problem: Problem,
    fidelity: Fidelity,
    engine: str,
    progress: Callable[[int | None], None] = lambda num_tasks: None,
) -> Judged:
    """Simulate a search's plans until one fits.

    Args:
        found: At least one plan, best first.
        problem: What they are for; its cost tables are shared.
        fidelity: Effects to include.
        engine: Name of the engine.
        progress: Called with None before each plan, then with the number of tasks done.
    """
    best: tuple[Plan, float, SimulationResult] | None = None
    started_s = time.perf_counter()
    for rank, ranked in enumerate(found.plans):
        progress(None)
        result = simulate(
            ranked.plan, problem, fidelity=fidelity, engine=engine, costs=cost_tables(problem), progress=progress
        )
        best = best or (ranked.plan, ranked.objective, result)
        if result.fits:
            reason = f"choice {rank + 1}: those before it ran out of memory" if rank else ""
            seconds = time.perf_counter() - started_s
            return Judged(problem.workload, ranked.plan, ranked.objective, result, reason, seconds)
    assert best is not None, "a search result has at least one plan"
    reason = f"of the search's {counted(len(found.plans), 'plan')} none fits"
    return Judged(problem.workload, *best, reason, time.perf_counter() - started_s)


def _ended(budget: Budget, found: SearchResult) -> bool:
    in_time = budget.seconds is None or found.wall_s < budget.seconds
    return not in_time or (budget.evaluations is not None and found.counters["evaluations"] >= budget.evaluations)
