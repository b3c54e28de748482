"""Time that a search takes beyond its budget: its own code alone ends it, so whoever waits is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from threading import TIMEOUT_MAX, Timer

from searchers.budget import Budget

PATIENCE_S = 20.0
"""Seconds beyond the budget, or the budget again if that is more, after which a search is late."""


@contextmanager
def told_when_late(budget: Budget, tell: Callable[[], None]) -> Iterator[None]:
    """Call a function, from another thread, should the block run far beyond the seconds of a budget; once."""
    due_s = inf if budget.seconds is None else budget.seconds + max(PATIENCE_S, budget.seconds)
    if due_s > TIMEOUT_MAX:
        yield
        return
    timer = Timer(due_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
