"""The search over stage counts: independent searches side by side, the worse half dropped after each round."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil, log2

from joblib import Parallel, delayed

from searchers.aceso.initial import initial_configuration
from searchers.aceso.model import PerformanceModel
from searchers.aceso.multihop import Limits, StageCountSearch
from searchers.budget import Budget

MAX_STAGES = 16
SURVIVORS = 0.5
RESERVED = 0.1
"""Share of a time budget left for turning configurations into plans, at least."""
PLAN_S_PER_OPERATOR = 5e-4
"""What checking one plan takes."""


@dataclass(frozen=True)
class Round:
    """What was spent by the end of a round: wall seconds, evaluations, and the best iteration time."""

    seconds: float
    evaluations: int
    best_s: float


def stage_counts_of(model: PerformanceModel, largest: int = MAX_STAGES) -> list[int]:
    """Return the stage counts that devices and operators can be dealt to."""
    counts = range(1, min(model.num_devices, largest, model.num_operators) + 1)
    return [count for count in counts if initial_configuration(model, count) is not None]


def search_stage_counts(
    model: PerformanceModel,
    searches: list[StageCountSearch],
    budget: Budget,
    *,
    workers: int = 1,
    races: bool = True,
) -> list[Round]:
    """Continue the searches, one per stage count, in place, and return the state of all at the end of each round.

    With ``races``, the budget is spent in rounds; after each, the half of the stage counts with the slowest best
    configurations is dropped. Without, every stage count gets an equal share of the budget in one round.

    Args:
        model: Prices.
        searches: One per stage count; a search that went on in another process takes the place of the one before.
        budget: Over all stage counts: wall time, or evaluations.
        workers: Processes.
        races: See above.
    """
    began = time.perf_counter()
    rounds: list[Round] = []
    active = list(range(len(searches)))
    number = max(1, ceil(log2(len(searches) + 1))) if races else 1
    seconds = None
    if budget.seconds is not None:
        reserved = max(RESERVED * budget.seconds, PLAN_S_PER_OPERATOR * model.num_operators)
        seconds = budget.seconds - min(reserved, budget.seconds / 2)
    for position in range(number):
        if not active:
            break
        left_evaluations = None
        if budget.evaluations is not None:
            left_evaluations = budget.evaluations - sum(search.evaluations for search in searches)
            if left_evaluations < 1:
                break
        left_s = None if seconds is None else seconds - (time.perf_counter() - began)
        if left_s is not None and left_s <= 0 and rounds:
            break
        limits = _shares(left_evaluations, left_s, len(active), number - position, min(workers, len(active)))
        continued = _run([searches[place] for place in active], model, limits, workers)
        for place, search in zip(active, continued, strict=True):
            searches[place] = search
        rounds.append(
            Round(
                time.perf_counter() - began,
                sum(search.evaluations for search in searches),
                min((_standing(search)[1] for search in searches if _is_feasible(search)), default=float("inf")),
            )
        )
        open_ones = [place for place in active if not searches[place].is_exhausted]
        order = sorted(active, key=lambda place: _standing(searches[place]))
        survivors = set(order[: max(1, ceil(len(order) * SURVIVORS))])
        active = [place for place in open_ones if place in survivors]
    return rounds


def _shares(
    evaluations: int | None, seconds: float | None, searches: int, rounds: int, workers: int
) -> list[Limits]:
    """Return each search's limits of this round: an equal part of what the remaining rounds have."""
    own_seconds = None if seconds is None else max(0.0, seconds) / rounds * workers / searches
    if evaluations is None:
        return [Limits(None, own_seconds)] * searches
    now = max(1, evaluations // rounds) if evaluations >= searches * rounds else evaluations
    base, extra = divmod(now, searches)
    return [Limits(base + (position < extra), own_seconds) for position in range(searches)]


def _run(
    searches: Sequence[StageCountSearch], model: PerformanceModel, limits: Sequence[Limits], workers: int
) -> list[StageCountSearch]:
    result = list(searches)
    work = [(place, limit) for place, limit in enumerate(limits) if limit.evaluations != 0]
    if workers <= 1 or len(work) <= 1:
        for place, limit in work:
            result[place] = searches[place].run(model, limit)
        return result
    # Arrays mapped into memory are read-only, for which numba would compile everything once more.
    pool = Parallel(n_jobs=min(workers, len(work)), backend="multiprocessing", max_nbytes=None)
    with ExitStack() as stack:
        with _forked_to_end_at_sigterm():
            stack.enter_context(pool)
        found: list[StageCountSearch] = pool(delayed(searches[place].run)(model, limit) for place, limit in work)
    for (place, _), search in zip(work, found, strict=True):
        result[place] = search
    return result


@contextmanager
def _forked_to_end_at_sigterm() -> Iterator[None]:
    """Let processes that start in the block end at SIGTERM, with which a pool ends those that wait for work.

    Where the command line takes it as Ctrl-C, they would too: print a traceback, or wait for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may say what signals do.
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _is_feasible(search: StageCountSearch) -> bool:
    return search.best is not None and search.best[1].fits


def _standing(search: StageCountSearch) -> tuple[bool, float]:
    """Return how a search stands: feasible first, then by time, else by memory."""
    if search.best is None:
        return True, float("inf")
    price = search.best[1]
    return not price.fits, price.iteration_s if price.fits else price.memory_bytes
