"""Dynamic programming over Aceso's space, pruned: the baseline of its Exp#4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from searchers.aceso.configuration import Configuration, Run, StageChoice, to_plan
from searchers.aceso.equation_searcher import EquationSearcher
from searchers.aceso.initial import initial_configuration
from searchers.aceso.model import PerformanceModel
from searchers.aceso.stage_kernels import price_stops
from searchers.aceso.tables import powers_of_two
from searchers.base import Ledger, SearchResult, check_least
from searchers.budget import Budget
from searchers.degrees import largest_profiled, microbatch_sizes
from searchers.scores import Objective
from simulator.compiled_cache import moment_s
from simulator.problem import Problem

IMPOSSIBLE_S = 1e30
"""Stands for a stage that does not fit: finite, so that it can be multiplied by nothing."""


@dataclass(frozen=True)
class _Choice:
    """A last decision: the stage, where the next begins, and what was decided there."""

    gpus: int
    tp: int
    stop: int


@dataclass
class _Suffix:
    """Best pipelines of some stages on some GPUs for every first operator: arrays over operators.

    The two terms of Equation 2: of all stages the largest ``(N - 1) t + sync``, and the sum of ``t``.
    """

    slowest: NDArray[np.float64]
    summed: NDArray[np.float64]
    choice: dict[int, _Choice]


class AcesoDynamicProgram(EquationSearcher):
    """Dynamic programming over stages, devices and uniform degrees per stage, on Aceso's performance model.

    From the last stage backwards: the best pipeline of k stages on g GPUs that starts at an operator, by
    ``max((N - 1) t + sync) + sum(t)``, for every microbatch. The space is pruned as the paper does: borders at every
    n-th operator, at most so many operators a stage, bounded degrees and microbatch.

    Args:
        granularity: Borders lie at multiples of this many operators.
        slack: A stage has at most this many times its GPUs' share of the operators.
        max_degree: Largest tensor or data degree; None for a node's.
        max_microbatch: Largest aggregate microbatch; None for the largest that Aceso profiled on one GPU.
        max_stages: Deepest pipeline.
        compat, recompute: As in ``Aceso``.
        objective, keep: As every searcher.
    """

    name: ClassVar[str] = "aceso-dp"
    paper: ClassVar[str] = "Liu et al., Aceso, EuroSys 2024, Section 5.2, Exp#4 (the baseline there)"

    def __init__(
        self,
        *,
        granularity: int = 1,
        slack: float = 2.0,
        max_degree: int | None = None,
        max_microbatch: int | None = None,
        max_stages: int = 16,
        compat: str = "paper",
        recompute: str = "cheapest",
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(compat=compat, recompute=recompute, objective=objective, keep=keep)
        check_least(
            1,
            granularity=granularity,
            slack=slack,
            max_degree=max_degree,
            max_microbatch=max_microbatch,
            max_stages=max_stages,
        )
        self.granularity = granularity
        self.slack = slack
        self.max_degree = max_degree
        self.max_microbatch = max_microbatch
        self.max_stages = max_stages

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Run the program for every microbatch; the seed changes nothing.

        An evaluation is a plan scored at the end of a microbatch's program; the counter ``explored`` has the distinct
        stages priced, each of which extends partial configurations.
        """
        ledger = Ledger(self, problem, budget or Budget(), seed)
        model = self.model(problem)
        largest = self.max_microbatch or largest_profiled(problem.workload)
        for microbatch in microbatch_sizes(problem.global_batch, largest=largest, powers_of_two=True):
            if ledger.spent:
                break
            program = _Program(self, model, microbatch, ledger)
            for configuration in program.solve():
                if ledger.spent:
                    break
                plan = to_plan(configuration, model.price(configuration).flags, problem)
                if ledger.is_legal(plan):
                    ledger.evaluate(plan)
        if ledger.best_objective == float("inf"):
            self._score_the_even_ones(problem, model, ledger)
        return ledger.result()

    def _score_the_even_ones(self, problem: Problem, model: PerformanceModel, ledger: Ledger) -> None:
        """Score the even configurations where the program found none that fits, to say how close they come."""
        for stages in range(1, min(self.max_stages, model.num_devices, model.num_operators) + 1):
            configuration = initial_configuration(model, stages)
            if configuration is None or ledger.spent:
                continue
            plan = to_plan(configuration, model.price(configuration).flags, problem)
            if ledger.is_legal(plan):
                ledger.evaluate(plan)


class _Program:
    """The program of one microbatch."""

    def __init__(self, searcher: AcesoDynamicProgram, model: PerformanceModel, microbatch: int, ledger: Ledger) -> None:
        self.model = model
        self.microbatch = microbatch
        self.ledger = ledger
        self.slack = searcher.slack
        self.max_stages = min(searcher.max_stages, model.num_devices, model.num_operators)
        count = model.num_operators
        self.starts = [*range(0, count, searcher.granularity)]
        self.stops = np.array([*self.starts[1:], count], np.int32)
        limit = searcher.max_degree or model.per_node
        self.shapes = [
            (gpus, tp)
            for gpus in powers_of_two(model.per_node)
            for tp in model.space.degrees
            if tp <= limit and gpus // tp <= limit and model.allows(gpus, tp, microbatch)
        ]
        self.known: dict[tuple[int, int, int, int, int], NDArray[np.float64]] = {}
        self.end_s = moment_s() + ledger.budget.seconds if ledger.budget.seconds is not None else None

    def solve(self) -> list[Configuration]:
        """Return the best configuration of every stage count that has one."""
        model, count = self.model, self.model.num_operators
        weight = self.model.problem.global_batch // self.microbatch - 1
        size = count + 1
        done = _Suffix(np.full(size, IMPOSSIBLE_S), np.full(size, IMPOSSIBLE_S), {})
        done.slowest[count] = done.summed[count] = 0.0
        layers: list[dict[int, _Suffix]] = [{0: done}]
        found: list[Configuration] = []
        for stages in range(1, self.max_stages + 1):
            layer: dict[int, _Suffix] = {}
            for used, rest in layers[-1].items():
                for gpus, tp in self.shapes:
                    total = used + gpus
                    first = model.num_devices - total
                    if first < 0 or first // model.per_node != (first + gpus - 1) // model.per_node:
                        continue
                    if not self._extend(layer, rest, stages, total, gpus, tp, weight):
                        return found
            layers.append(layer)
            if not layer:
                break
            whole = layer.get(model.num_devices)
            if whole is not None and whole.summed[0] < IMPOSSIBLE_S:
                found.append(self._configuration(layers, stages))
        return found

    def _extend(
        self,
        layer: dict[int, _Suffix],
        rest: _Suffix,
        stages: int,
        total: int,
        gpus: int,
        tp: int,
        weight: int,
    ) -> bool:
        """Put one stage shape before every suffix; return whether there was time."""
        model, count = self.model, self.model.num_operators
        suffix = layer.setdefault(
            total, _Suffix(np.full(count + 1, IMPOSSIBLE_S), np.full(count + 1, IMPOSSIBLE_S), {})
        )
        longest = int(np.ceil(self.slack * count * gpus / model.num_devices)) + 1
        first = model.num_devices - total
        nodes = (first % model.per_node == 0) << 2 | ((first + gpus) % model.per_node == 0) << 3
        for place, start in enumerate(self.starts):
            if self.end_s is not None and moment_s() > self.end_s:
                return False
            if (start == 0) != (total == model.num_devices):
                continue
            stops = self.stops[place:]
            stops = stops[(stops - start <= longest) & (rest.summed[stops] < IMPOSSIBLE_S)]
            if not len(stops):
                continue
            links = (start > 0) | (stages > 1) << 1 | nodes
            seconds, sync = self._priced(start, stops, gpus, tp, stages, links)
            slowest = np.maximum(rest.slowest[stops], weight * seconds + sync)
            summed = rest.summed[stops] + seconds
            best = int(np.argmin(slowest + summed))
            if summed[best] >= IMPOSSIBLE_S:
                continue
            if slowest[best] + summed[best] < suffix.slowest[start] + suffix.summed[start]:
                suffix.slowest[start], suffix.summed[start] = slowest[best], summed[best]
                suffix.choice[start] = _Choice(gpus, tp, int(stops[best]))
        return True

    def _priced(
        self, start: int, stops: NDArray[np.int32], gpus: int, tp: int, in_flight: int, links: int
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return seconds of a microbatch and of synchronisation for each stop, each distinct stage priced once."""
        key = (start, gpus, tp, in_flight, links)
        known = self.known.setdefault(key, np.full((2, self.model.num_operators + 1), np.nan))
        missing = stops[np.isnan(known[0, stops])]
        if len(missing):
            self.ledger.count("explored", len(missing))
            cell = self.model.space.cell(tp, self.microbatch // (gpus // tp))
            seconds, sync = np.zeros(len(missing)), np.zeros(len(missing))
            copies = in_flight
            if self.model.compat == "paper":
                copies = min(copies, self.model.problem.global_batch // self.microbatch)
            price_stops(
                self.model.tables.arrays, np.full(int(missing[-1]) - start, cell, np.int32), start, missing, gpus,
                copies, links, self.model.limit_bytes, self.model.order, seconds, sync,
            )  # fmt: skip
            known[0, missing], known[1, missing] = np.minimum(seconds, IMPOSSIBLE_S), sync
        return known[0, stops], known[1, stops]

    def _configuration(self, layers: list[dict[int, _Suffix]], stages: int) -> Configuration:
        """Follow the decisions from the first operator."""
        total, start = self.model.num_devices, 0
        found = []
        for left in range(stages, 0, -1):
            choice = layers[left][total].choice[start]
            found.append(StageChoice(choice.gpus, (Run(choice.stop - start, choice.tp),)))
            total, start = total - choice.gpus, choice.stop
        return Configuration(self.microbatch, tuple(found))
