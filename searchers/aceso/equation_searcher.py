"""What Aceso's search and its baseline share: the performance model of a problem, and plans scored by it."""

from __future__ import annotations

from searchers.aceso.configuration import from_plan
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import Price
from searchers.base import Searcher
from searchers.degrees import largest_profiled
from searchers.scores import Objective, Score
from simulator.costs import cost_tables
from simulator.plan import Plan
from simulator.problem import Problem


class EquationSearcher(Searcher):
    """A searcher whose own objective is Equation 2, under the memory of Equation 1.

    Args:
        compat, recompute, largest_samples: As in `searchers.aceso.searcher.Aceso`.
        objective, keep: As every searcher.
    """

    def __init__(
        self, *, compat: str, recompute: str, largest_samples: int | None = None, objective: str | Objective, keep: int
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        self.compat = compat
        self.recompute = recompute
        self.largest_samples = largest_samples
        self._known: tuple[Problem, PerformanceModel] | None = None

    def model(self, problem: Problem) -> PerformanceModel:
        """Return the performance model of a problem; the last one is remembered.

        Raises:
            ValueError: If an option is unknown or the release's model lacks its profile.
        """
        if self._known is None or self._known[0] is not problem:
            made = PerformanceModel.of(
                problem, cost_tables(problem), compat=self.compat, recompute=self.recompute,
                samples=self.largest_samples or largest_profiled(problem.workload),
            )  # fmt: skip
            self._known = (problem, made)
        return self._known[1]

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score a plan by Equations 1 and 2."""
        return score_of(self.model(problem).price(from_plan(plan.canonical(problem.workload), problem)))


def score_of(price: Price) -> Score:
    """Return a price in the words of every searcher."""
    memory = [stage.memory_bytes for stage in price.stages]
    worst = memory.index(max(memory))
    return Score(price.iteration_s, price.fits, memory[worst], price.limit_bytes, f"stage {worst}")
