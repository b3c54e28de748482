"""All plans of the gradient suite: written by hand, and returned by searchers, per number of processes."""

from __future__ import annotations

from functools import cache

from tests.validation import searched_plans, tiny_plans
from tests.validation.tiny import Case

WORLD_SIZES = (1, 2, 4)


@cache
def cases_of(world_size: int) -> list[Case]:
    """Return the cases for so many processes, for the test that runs them: no import waits for searches."""
    if world_size == 4:
        return [*tiny_plans.four_processes(), *searched_plans.four_processes()]
    return {1: tiny_plans.one_process, 2: tiny_plans.two_processes}[world_size]()
