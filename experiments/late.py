"""Time that a search takes beyond its budget: its own code alone ends it, so whoever waits is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from threading import TIMEOUT_MAX, Event, Thread

from searchers.budget import Budget
from simulator.compiled_cache import moment_s

LOOK_AGAIN_S = 0.1
"""Least seconds between two looks at the clock, which stands still now and then."""

PATIENCE_S = 20.0
"""Seconds beyond the budget, or the budget again if that is more, after which a search is late."""


@contextmanager
def told_when_late(budget: Budget, tell: Callable[[], None]) -> Iterator[None]:
    """Call a function, from another thread, should the block run far beyond the seconds of a budget; once.

    What the machine compiles meanwhile is no time of the search (``compiled_cache.moment_s``).
    """
    patience_s = inf if budget.seconds is None else budget.seconds + max(PATIENCE_S, budget.seconds)
    if patience_s > TIMEOUT_MAX:
        yield
        return
    due_s, ended = moment_s() + patience_s, Event()

    def watch() -> None:
        while (left_s := due_s - moment_s()) > 0:
            if ended.wait(max(left_s, LOOK_AGAIN_S)):
                return
        if not ended.is_set():
            tell()

    Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
