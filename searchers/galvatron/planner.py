"""Galvatron-Base (Algorithm 1), Galvatron-BMW (Algorithm 2) and the exploration of batch sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.galvatron.partitions import (
    base_partition,
    between,
    least_maximum,
    neighbours,
    quickest_within_memory,
    weigh,
    with_outside,
)
from searchers.galvatron.pipeline_plan import Partition, PipelinePlan, split
from searchers.galvatron.stage_search import DegreeSearch
from searchers.galvatron.strategies import Strategy, pipeline_degrees
from simulator.costs import CostTables
from simulator.problem import Problem

PATIENCE = 8
"""Batch sizes in a row that fit nowhere before exploration ends: a microbatch rule can let a larger one fit again."""

SATURATED = 0.03
"""Rise of throughput below which a doubled batch is not worth exploring further."""

WAYPOINTS = 7
"""Partitions between the memory- and the time-balanced one from which Algorithm 2 walks besides."""


@dataclass(frozen=True)
class Exploration:
    """What the exploration of batch sizes found.

    Attributes:
        plans: The best plan of every batch that fits, in order of batch.
        num_batches: Batch sizes tried.
    """

    plans: tuple[PipelinePlan, ...]
    num_batches: int

    @property
    def best(self) -> PipelinePlan | None:
        """The plan with the highest throughput, None if nothing fits."""
        return max(self.plans, key=lambda plan: plan.throughput, default=None)


class Planner:
    """Finds plans for one model on one cluster, for any batch.

    Args:
        problem: Workload, hardware, runtime and memory limit; its batch is not read.
        options: The variant.
        costs: Shared cost tables.
        budget_bytes: Memory budget; None for the problem's own.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options,
        costs: CostTables | None = None,
        budget_bytes: float | None = None,
        profiles: LayerProfiles | None = None,
    ) -> None:
        self.problem = problem
        self.options = options
        self.profiles = profiles or LayerProfiles(costs or CostTables(problem))
        num_layers = len(self.profiles.layers)
        degrees = pipeline_degrees(problem.num_devices) if options.pipeline else (1,)
        self.searches = {
            degree: DegreeSearch(problem, self.profiles, degree, options, budget_bytes)
            for degree in degrees
            if degree <= num_layers
        }
        self.num_partitions = 0

    def degree_search(self, num_stages: int) -> DegreeSearch | None:
        """Return the search of a pipeline degree, None if the variant does not try it."""
        return self.searches.get(num_stages)

    def best(self, batch: int) -> PipelinePlan | None:
        """Return the best plan of one batch size over pipeline degrees, microbatches and partitions."""
        return min(self.plans(batch), key=lambda plan: plan.iteration_time_s, default=None)

    def plans(self, batch: int, only: int | None = None) -> Iterator[PipelinePlan]:
        """Yield the plans that fit, one per pipeline degree, number of microbatches and partition tried.

        Args:
            batch: Samples.
            only: The pipeline degree, None for all.
        """
        for degree, search in self.searches.items():
            for cut in self.cuts(batch, degree) if only in (None, degree) else ():
                if degree == 1:
                    partitions: Iterator[Partition] = iter([(len(search.layers),)])
                elif self.options.partition == "base":
                    partitions = iter([base_partition(search, cut)])
                else:
                    yield from self.balanced(search, batch, cut)
                    continue
                for partition in partitions:
                    plan = self._plan(search, partition, batch, cut)
                    if plan is not None:
                        yield plan

    def cuts(self, batch: int, degree: int) -> list[Cut]:
        """Return how the batch may be cut under the rule, which can depend on the tensor degrees of a plan."""
        return self.searches[degree].rule_cuts(batch)

    def _plan(self, search: DegreeSearch, partition: Partition, batch: int, cut: Cut) -> PipelinePlan | None:
        self.num_partitions += 1
        return search.plan(partition, batch, cut)

    def balanced(self, search: DegreeSearch, batch: int, cut: Cut) -> Iterator[PipelinePlan]:
        """Yield plans of the balanced partitions of one pipeline degree.

        Bi-objective: Base's partition is the incumbent, then Algorithm 2 walks from the memory-balanced one
        towards the time-balanced one. Its greedy step can stick at once (the neighbour of the slowest stage is
        nearly as slow), so some partitions between the two ends, and the end, start walks as well.
        """
        weighed = weigh(search, cut)
        if weighed is None:
            return
        memory, seconds = with_outside(search, cut, weighed[0]), weighed[1]
        by_memory, by_time = least_maximum(memory), least_maximum(seconds)
        if self.options.partition != "bi-objective":
            only = by_memory if self.options.partition == "memory" else by_time
            plan = self._plan(search, only, batch, cut)
            if plan is not None:
                yield plan
            return
        queue = deque([by_memory])
        extra = deque([base_partition(search, cut), base_partition(search, cut, counts_outside=False)])
        if not self.options.paper:
            extra.extend((*between(by_memory, by_time, WAYPOINTS), by_time))
            extra.extend(quickest_within_memory(memory, seconds, by_memory, by_time, WAYPOINTS))
        seen: set[Partition] = set()
        while queue or extra:
            walks = bool(queue)
            partition = queue.popleft() if walks else extra.popleft()
            if partition in seen:
                continue
            seen.add(partition)
            plan = self._plan(search, partition, batch, cut)
            if plan is None:
                continue
            yield plan
            queue.extend(self._adjusted(search, plan, by_time, seen))

    def _adjusted(
        self, search: DegreeSearch, plan: PipelinePlan, by_time: Partition, seen: set[Partition]
    ) -> Iterator[Partition]:
        """Yield partitions one layer away that pass the three checks of section IV-B2."""
        strategies = list(chain.from_iterable(stage.chosen for stage in plan.stages))
        slowest = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].step_s)
        longest_s = plan.stages[slowest].step_s
        limit: float | None = None
        for partition in neighbours(plan.partition, slowest):
            if partition in seen:
                continue
            moved = self._assess(search, partition, strategies, plan)
            if moved is None:
                continue
            if limit is None:
                timed = self._assess(search, by_time, strategies, plan)
                limit = min(search.budget_bytes, timed.peak_bytes) if timed else search.budget_bytes
            if all(stage.step_s <= longest_s for stage in moved.stages) and moved.peak_bytes <= limit:
                yield partition

    @staticmethod
    def _assess(
        search: DegreeSearch, partition: Partition, strategies: Sequence[Strategy], like: PipelinePlan
    ) -> PipelinePlan | None:
        stages = split(search.layers, partition)
        ordered = iter(strategies)
        chosen = [[strategy for _, strategy in zip(stage, ordered, strict=False)] for stage in stages]
        return search.assess(stages, chosen, like.batch, like.cut)

    def pure(self, batch: int, partitions: Iterable[Partition]) -> list[PipelinePlan]:
        """Return the plans of one strategy throughout, with these partitions, that fit."""
        found = [
            plan
            for partition in partitions
            for cut in self.cuts(batch, len(partition))
            for plan in self.searches[len(partition)].pure(partition, batch, cut)
        ]
        return [plan for plan in dict.fromkeys(found) if plan.fits]

    def leanest(self, batch: int) -> PipelinePlan | None:
        """Return the plan of one strategy that needs the least memory; it need not fit."""
        found = [
            plan
            for degree, search in self.searches.items()
            for cut in self.cuts(batch, degree)
            if (plan := search.leanest(base_partition(search, cut), batch, cut))
        ]
        return min(found, key=lambda plan: plan.peak_bytes, default=None)

    def explore(self, batches: Iterable[int] | None = None, *, step: int = 8, growth: float = 0.0) -> Exploration:
        """Return the best plan of every batch size, in growing steps of samples until nothing fits.

        Under some rules of microbatches a 1F1B pipeline fits any batch, so exploration also ends where the batch has
        doubled and throughput has risen by less than three per cent, counted from one sample per device on: fewer leave
        some degrees unused.

        Args:
            batches: Batch sizes to try instead, all of them.
            step: Samples between batch sizes.
            growth: Of the batch, what the next one is larger at least: 0.1 skips most large batches.
        """
        found: list[PipelinePlan] = []
        missed = tried = 0
        patience = 1 if self.options.paper else PATIENCE
        best, turn = 0.0, 0
        for batch in batches if batches is not None else _steps(step, growth):
            plan = self.best(batch)
            tried += 1
            missed = 0 if plan is not None else missed + 1
            if plan is not None:
                found.append(plan)
                if plan.throughput > (1 + SATURATED) * best:
                    best, turn = plan.throughput, max(batch, self.problem.num_devices)
            if batches is None and (missed >= patience or (turn and batch >= 2 * turn)):
                break
        return Exploration(tuple(found), tried)


def _steps(step: int, growth: float) -> Iterator[int]:
    """Yield multiples of ``step``, each at least ``growth`` larger than the one before."""
    batch = step
    while True:
        yield batch
        batch += max(step, int(growth * batch) // step * step)
