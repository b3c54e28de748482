"""Exhaustive search: the truth on tiny problems, for tests and for judging other searchers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from datafiles.words import counted
from searchers.base import CandidateSearcher, Ledger, check_least
from searchers.scores import Objective
from searchers.space import LayerSpace
from simulator.plan import Plan
from simulator.problem import Problem


class Exhaustive(CandidateSearcher):
    """Scores every plan of `searchers.space.LayerSpace`, so its answer is exact for its objective.

    Args:
        max_plans: Refuse larger spaces. 20,000 plans take about a minute.
        max_microbatch: Largest microbatch in samples per replica.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "exhaustive"
    paper = "none; the reference for tiny problems"
    always_legal = True

    def __init__(
        self,
        *,
        max_plans: int = 20_000,
        max_microbatch: int = 8,
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, max_plans=max_plans, max_microbatch=max_microbatch)
        self.max_plans = max_plans
        self.max_microbatch = max_microbatch

    def candidates(self, problem: Problem, random: np.random.Generator, ledger: Ledger) -> Iterator[Plan]:
        """Yield the whole space.

        Raises:
            ValueError: If the space is larger than ``max_plans``.
        """
        space = LayerSpace(problem, max_microbatch=self.max_microbatch)
        if space.size_bound > self.max_plans:
            size = f"{counted(len(problem.workload.layers), 'layer')}, {counted(problem.num_devices, 'device')}"
            raise ValueError(
                f"exhaustive search must have at most {self.max_plans:,} plans, this problem has up to "
                f"{_rounded(space.size_bound)} ({size}, batch {problem.global_batch}); take another "
                f"searcher, such as random, or a smaller problem"
            )
        for point in space:
            yield space.plan(point)


def _rounded(number: int) -> str:
    """Return two digits of a large number.

    >>> _rounded(314159), _rounded(10**20)
    ('310,000', '1e+20')
    """
    return f"{int(float(f'{number:.2g}')):,}" if number < 10**12 else f"{number:.2g}"
