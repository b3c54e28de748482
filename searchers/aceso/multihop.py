"""The search with a given number of stages: Algorithms 1 and 2.

An iteration starts from one configuration, takes its bottleneck and tries chains of primitives, up to ``max_hops``,
until one is better. If none is, the search goes on from the best configuration that it has seen and not started
from.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from searchers.aceso.balance import balanced
from searchers.aceso.configuration import Configuration
from searchers.aceso.finetune import fine_tuned
from searchers.aceso.heuristics import load_order, primitive_groups, random_groups
from searchers.aceso.initial import initial_configuration, uniform_relatives
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import Price
from searchers.aceso.primitives import Move, Primitive

POOL_MARGIN = 1.2
"""Configurations slower than this much of the best are not gone back to (the public code's figure)."""
KEPT = 24


@dataclass(frozen=True)
class SearchOptions:
    """How the search goes.

    Attributes:
        max_hops: Longest chain of primitives in one iteration.
        heuristic_2: Primitives are ordered by Heuristic 2, else at random.
        balances: Borders move all at once, attached to every primitive, else relay by relay as in the paper.
        breadth: Argument choices of one primitive that are priced in full.
        initial: See ``searchers.aceso.initial``.
        fine_tunes: Degrees and partitions inside stages are tuned after each success.
        uniform_starts: The pool begins with the same stages at every uniform degree and microbatch (ours).
        exchanges: Degrees inside a stage may trade places as one primitive (ours).
        iteration_evaluations: After so many an iteration counts as failed; None for no limit (the paper).
    """

    max_hops: int = 7
    heuristic_2: bool = True
    balances: bool = True
    breadth: int = 3
    initial: str = "balanced"
    fine_tunes: bool = True
    uniform_starts: bool = True
    exchanges: bool = True
    iteration_evaluations: int | None = 120


@dataclass
class Statistics:
    """What Exp#5 counts, per successful iteration, and the convergence.

    Attributes:
        bottlenecks_tried, hops: One entry per iteration that found something better.
        failures: Iterations that did not.
        improvements: ``(moment, evaluations, best iteration time)``; moments are those of ``time.perf_counter``, which
            processes of one machine share.
        ends: ``(moment, evaluations)`` at the end of every run.
    """

    bottlenecks_tried: list[int] = field(default_factory=list)
    hops: list[int] = field(default_factory=list)
    failures: int = 0
    improvements: list[tuple[float, int, float]] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Limits:
    """When to stop: evaluations and seconds of this call; None for no limit."""

    evaluations: int | None
    seconds: float | None


class StageCountSearch:
    """One search; it can be continued.

    Args:
        num_stages: Pipeline depth.
        options: How it goes.
        seed: For random choices.
    """

    def __init__(self, num_stages: int, options: SearchOptions, seed: int = 0) -> None:
        self.num_stages = num_stages
        self.options = options
        self.random = random.Random(seed * 1009 + num_stages)
        self.statistics = Statistics()
        self.best: tuple[Configuration, Price] | None = None
        self.found: dict[Configuration, Price] = {}
        self.pool: dict[Configuration, Price] = {}
        self.started: set[Configuration] = set()
        self.seen: set[Configuration] = set()
        self.current: Configuration | None = None
        self.is_exhausted = False
        self._opened: dict[Configuration, Price] = {}
        self.evaluations = 0
        self.stages_priced = 0

    def run(self, model: PerformanceModel, limits: Limits) -> StageCountSearch:
        """Search until a limit, or until nothing is left to start from; return self (for other processes)."""
        self._model = model
        self._first = model.evaluations
        self._before = self.evaluations
        self._priced_before = model.stages_priced
        self._end_evaluations = None if limits.evaluations is None else model.evaluations + limits.evaluations
        model.last_evaluation = self._end_evaluations
        self._end = None if limits.seconds is None else time.perf_counter() + limits.seconds
        while not self._spent() and not self.is_exhausted:
            self._iterate()
        self.evaluations = self._before + model.evaluations - self._first
        self.statistics.ends.append((time.perf_counter(), self.evaluations))
        self.stages_priced += model.stages_priced - self._priced_before
        del self._model
        return self

    def _spent(self) -> bool:
        if self._end_evaluations is not None and self._model.evaluations >= self._end_evaluations:
            return True
        return self._end is not None and time.perf_counter() >= self._end

    def _iterate(self) -> None:
        """One iteration of Algorithm 1."""
        if self.current is None and not self.found and not self.started and not self._begin():
            self.is_exhausted = True
            return
        if self.current is None:
            self.current = self._from_pool()
            if self.current is None:
                self.is_exhausted = True
                return
        start, self.current = self.current, None
        price = self.found[start]
        self._opened = {}
        limit = self.options.iteration_evaluations
        self._iteration_end = None if limit is None else self._model.evaluations + limit
        for tried, bottleneck in enumerate(load_order(price), 1):
            result = self._multi_hop(start, price, bottleneck, 0, price)
            if result is not None:
                configuration, hops = result
                self.statistics.bottlenecks_tried.append(tried)
                self.statistics.hops.append(hops)
                self.current = self._tuned(configuration)
                return
            if self._spent():  # to be taken up again where it was begun
                self.started.difference_update(self._opened)
                self.pool.update(self._opened)
                self.found.update(self._opened)  # Those far from the best may have been dropped meanwhile.
                self.current = start
                return
            if self._stops():
                break
        self.statistics.failures += 1

    def _begin(self) -> bool:
        """Price the initial configuration and, to go back to, its uniform relatives; return whether there is one."""
        first = initial_configuration(self._model, self.num_stages, self.options.initial)
        if first is None:
            return False
        self._price(first)
        self.current = first
        if not self.options.balances:
            return True
        moved = balanced(self._model, first)
        if moved != first and not self._spent():
            self._price(moved)
            self.current = moved
        if self.options.uniform_starts:
            for relative in uniform_relatives(self._model, first):
                if self._spent():
                    break
                relative = balanced(self._model, relative)
                if relative not in self.seen:
                    self._price(relative)
            if self.best is not None and self.best[0] not in self.started:
                self.current = self.best[0]
        return True

    def _stops(self) -> bool:
        if self._iteration_end is not None and self._model.evaluations >= self._iteration_end:
            return True
        return self._spent()

    def _from_pool(self) -> Configuration | None:
        """Return the best configuration not started from, and forget those far from the best."""
        assert self.best is not None
        bound = self.best[1].iteration_s * POOL_MARGIN if self.best[1].fits else float("inf")
        self.pool = {
            configuration: price
            for configuration, price in self.pool.items()
            if configuration not in self.started and price.iteration_s < bound
        }
        if not self.pool:
            return None
        return min(self.pool, key=lambda each: _rank(self.pool[each]))

    def _price(self, configuration: Configuration) -> Price:
        """Price a configuration and book it."""
        price = self._model.price(configuration)
        self.seen.add(configuration)
        self.pool[configuration] = price
        self.found[configuration] = price
        if self.best is None or price.better_than(self.best[1]):
            self.best = (configuration, price)
            if price.fits:
                spent = self._before + self._model.evaluations - self._first
                self.statistics.improvements.append((time.perf_counter(), spent, price.iteration_s))
        if len(self.found) > 40 * KEPT:
            keep = sorted(self.found, key=lambda each: _rank(self.found[each]))[: 20 * KEPT]
            wanted = set(keep) | set(self.pool)
            self.found = {each: self.found[each] for each in self.found if each in wanted}
        return price

    def _multi_hop(
        self, configuration: Configuration, price: Price, bottleneck: int, hop: int, initial: Price
    ) -> tuple[Configuration, int] | None:
        """Return a configuration better than ``initial`` and how many hops it took, or None (Algorithm 2)."""
        self.started.add(configuration)
        self._opened[configuration] = price
        self.pool.pop(configuration, None)
        if hop == self.options.max_hops:
            return None
        if self.options.heuristic_2:
            groups = primitive_groups(self._model, configuration, price, bottleneck)
        else:
            groups = random_groups(self.random)
        for group in groups:
            children: list[tuple[Configuration, Price]] = []
            for primitive in group:
                children += self._apply(primitive, configuration, price, bottleneck)
                if self._stops():
                    break
            children.sort(key=lambda child: _rank(child[1]))
            if children and children[0][1].better_than(initial):
                return children[0][0], hop + 1
            for child, found in children:
                if self._stops():
                    return None
                if child in self.started:
                    continue
                result = self._multi_hop(child, found, load_order(found)[0], hop + 1, initial)
                if result is not None:
                    return result
            if self._stops():
                return None
        return None

    def _apply(
        self, primitive: Primitive, configuration: Configuration, price: Price, stage: int
    ) -> list[tuple[Configuration, Price]]:
        """Return the new configurations of one primitive, with its most promising arguments."""
        balances = self.options.balances
        move = Move(self._model, configuration, price, stage, balances, self.options.exchanges)
        candidates = list(dict.fromkeys(primitive.apply(move)))
        if primitive.moves_load and balances:
            candidates.sort(key=self._model.rough_s)
        children: list[tuple[Configuration, Price]] = []
        for candidate in candidates:
            if len(children) >= self.options.breadth or self._spent():
                break
            if primitive.moves_load and balances:
                candidate = balanced(self._model, candidate)
            if candidate in self.seen:
                continue
            children.append((candidate, self._price(candidate)))
        return children

    def _tuned(self, configuration: Configuration) -> Configuration:
        """Return the configuration after fine-tuning, booked if it is better."""
        if not self.options.fine_tunes or self._spent():
            return configuration
        tuned = fine_tuned(self._model, configuration)
        if tuned == configuration or tuned in self.seen or self._spent():
            return configuration
        return tuned if self._price(tuned).better_than(self.found[configuration]) else configuration

    def top(self, number: int, share: float = 1.0) -> list[tuple[Configuration, Price]]:
        """Return the best configurations that fit a share of their limit, best first."""
        fitting = [
            (each, price)
            for each, price in self.found.items()
            if price.fits and price.memory_bytes <= share * price.limit_bytes
        ]
        return sorted(fitting, key=lambda item: item[1].iteration_s)[:number]


def _rank(price: Price) -> tuple[bool, float]:
    return not price.fits, price.iteration_s if price.fits else price.memory_bytes
