"""Plans that the simulator lets fit: what a user does whose planned run is out of memory, he lowers the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_plan import ATTEMPTS, PipelinePlan
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from simulator.costs import CostTables
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.result import SimulationResult
from simulator.simulate import simulate


@dataclass(frozen=True)
class Judged:
    """A searched plan and what the simulator says of it.

    Attributes:
        found: In the planner's words, with its estimates.
        plan: The same as a plan.
        result: The simulation.
        attempts: Budgets tried.
    """

    found: PipelinePlan
    plan: Plan
    result: SimulationResult
    attempts: int

    @property
    def throughput(self) -> float:
        """Simulated samples per second."""
        return self.found.batch / self.result.iteration_time_s


def judged_plan(
    problem_of: Callable[[int], Problem],
    options: Options,
    find: Callable[[Planner], PipelinePlan | None],
    profiles: LayerProfiles | None = None,
) -> Judged | None:
    """Return the first plan that fits by the simulator, lowering the planner's budget by what was missing.

    With the release's memory model the plan is what its planner lets fit, whatever the simulator says.

    Args:
        problem_of: The problem of a batch.
        options: The variant.
        find: What is asked of each planner: ``lambda planner: planner.best(64)``.
        profiles: Layer costs, where several searches share a model and cluster.

    Returns:
        The plan, or None if no budget gives one.
    """
    problem = problem_of(1)
    profiles = profiles or LayerProfiles(CostTables(problem))
    budget: float | None = None
    for attempt in range(1, ATTEMPTS + 1):
        planner = Planner(problem, options, profiles=profiles, budget_bytes=budget)
        found = find(planner)
        if found is None:
            return None
        own = problem_of(found.batch)
        plan = to_plan(found, own)
        result = simulate(plan, own, engine="compiled")
        if result.fits or options.memory == "released":
            return Judged(found, plan, result, attempt)
        reserved = max(memory.peak_reserved_bytes - memory.capacity_bytes for memory in result.memory)
        budget = found.lowered_budget_bytes(float(reserved))
    return None


def judged_exploration(
    problem_of: Callable[[int], Problem],
    options: Options,
    batches: Iterable[int] | None = None,
    *,
    step: int = 8,
    growth: float = 0.0,
    profiles: LayerProfiles | None = None,
) -> Judged | None:
    """Return the plan of the best batch size; batch sizes as in `searchers.galvatron.planner.Planner.explore`."""
    chosen = None if batches is None else list(batches)
    return judged_plan(
        problem_of,
        options,
        lambda planner: planner.explore(chosen, step=step, growth=growth).best,
        profiles,
    )
