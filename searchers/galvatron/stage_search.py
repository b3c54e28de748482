"""One pipeline degree: the search within each of its stages, and the plans of one strategy throughout beside it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from searchers.galvatron.degree_costs import DegreeCosts
from searchers.galvatron.dynamic_programming import search
from searchers.galvatron.layer_profiles import Layer, LayerProfiles
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_plan import Partition, PipelinePlan, split
from searchers.galvatron.printed_recurrence import search_as_printed
from searchers.galvatron.stage_table import StageTable
from searchers.galvatron.tied_weights import TiedTable, search_tied
from simulator.problem import Problem

ROUNDING = 1e-9
"""By what sums in another order may differ, and more."""


class DegreeSearch(DegreeCosts):
    """Finds plans of one pipeline degree, for any batch.

    Args:
        problem, profiles, num_stages, options, budget_bytes: As of `DegreeCosts`.
    """

    def __init__(
        self,
        problem: Problem,
        profiles: LayerProfiles,
        num_stages: int,
        options: Options,
        budget_bytes: float | None = None,
    ) -> None:
        super().__init__(problem, profiles, num_stages, options, budget_bytes)
        self._found: dict[object, NDArray[np.int64] | None] = {}
        self.num_searches = 0

    def plan(self, partition: Partition, batch: int, cut: Cut) -> PipelinePlan | None:
        """Return the best plan found with this partition, or None if nothing fits (Galvatron_Search).

        Every stage is searched alone; plans with one strategy for all layers compete too, so that none of them is
        ever better. What is found is assessed, and returned, with the microbatches that the rule gives it.
        """
        stages = split(self.layers, partition)
        plans = []
        # What the optimizer works in is no part of Eq. 2: where it is too much, it counts as a state of each layer.
        for steps in (False, True) if self._has_workspace else (False,):
            plans += self._searched(stages, batch, cut, steps=steps)
            if any(plan.fits for plan in plans):
                break
        fitting = [plan for plan in plans if plan.fits]
        if not self.options.paper:
            below_s = min((plan.iteration_time_s for plan in fitting), default=inf)
            pure = self.pure(partition, batch, cut, below_s=below_s, most_bytes=self.budget_bytes)
            fitting += [plan for plan in pure if plan.fits]
        return min(fitting, key=lambda plan: plan.iteration_time_s, default=None)

    def _searched(
        self, stages: Sequence[tuple[Layer, ...]], batch: int, cut: Cut, *, steps: bool
    ) -> list[PipelinePlan]:
        """Return plans of stages that are searched one by one.

        First every stage counts its step once for each microbatch. Only the slowest one delays all of them: the others
        are searched again with steps that count once.
        """
        chosen = [self._search(stage, place, batch, cut, steps=steps) for place, stage in enumerate(stages)]
        first = self._of_numbers(stages, chosen, batch, cut)
        alike = cut.parts == 1 or len(stages) == 1 or self.estimator.released_time is not None
        if first is None or alike or self.options.paper:
            return [first] if first else []
        slowest = max(range(len(stages)), key=lambda place: first.stages[place].step_s)
        for place, stage in enumerate(stages):
            if place != slowest:
                chosen[place] = self._search(stage, place, batch, cut, steps=steps, once=True)
        second = self._of_numbers(stages, chosen, batch, cut)
        return [plan for plan in (first, second) if plan is not None]

    def _of_numbers(
        self, stages: Sequence[tuple[Layer, ...]], numbers: Sequence[NDArray[np.int64] | None], batch: int, cut: Cut
    ) -> PipelinePlan | None:
        """Return the plan of strategies by number, or None where a stage has none."""
        found = [each for each in numbers if each is not None]
        if len(found) < len(stages):
            return None
        chosen = [[self.strategies[number] for number in each] for each in found]
        tensor = max(strategy.tensor for stage in chosen for strategy in stage)
        return self.assess(stages, chosen, batch, self.own_cut(tensor, batch, cut))

    def leanest(self, partition: Partition, batch: int, cut: Cut) -> PipelinePlan | None:
        """Return the plan of one strategy that needs the least memory, whether it fits or not."""
        return min(self.pure(partition, batch, cut), key=lambda plan: plan.peak_bytes, default=None)

    def pure(
        self, partition: Partition, batch: int, cut: Cut, *, below_s: float = inf, most_bytes: float = inf
    ) -> list[PipelinePlan]:
        """Return the plans of one strategy throughout, whether they fit or not.

        Args:
            partition: Layers per stage.
            batch: Samples.
            cut: Microbatches.
            below_s, most_bytes: Plans that take as long or longer, or that need more, may be left out.
        """
        stages = split(self.layers, partition)
        least: dict[Cut, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}
        plans = []
        for number, strategy in enumerate(self.strategies):
            own = self.own_cut(strategy.tensor, batch, cut)
            if own not in least:
                least[own] = self._least(stages, batch, own)
            seconds, num_bytes = least[own]
            if seconds[number] < below_s and num_bytes[number] <= most_bytes:
                choice = [[strategy] * len(stage) for stage in stages]
                plans.append(self.assess(stages, choice, batch, own))
        return [plan for plan in plans if plan is not None]

    def _least(
        self, stages: Sequence[tuple[Layer, ...]], batch: int, cut: Cut
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what a plan of one strategy takes and needs at least, float64[strategies] each, inf if unusable.

        Its steps alone, and what its fullest stage keeps.
        """
        several = cut.parts > 1
        found = np.array([self.tables.least(stage, cut.samples, several) for stage in stages])
        steps_s = last_s = found[:, 0]
        if cut.last is not None:
            last_s = np.array([self.tables.least(stage, cut.last, several)[0] for stage in stages])
        seconds = last_s.sum(axis=0)
        if several:
            seconds = seconds + (cut.parts - 1) * steps_s.max(axis=0)
        if self.estimator.released_time is not None:  # knows no steps
            seconds[np.isfinite(seconds)] = 0.0
        held = np.array([[self.held(place, batch, cut)] for place in range(len(stages))])
        kept = held * found[:, 1] + found[:, 2]
        return seconds * (1 - ROUNDING), kept.max(axis=0) * (1 - ROUNDING)

    @property
    def _has_workspace(self) -> bool:
        return self.estimator.released is None and self.estimator.problem.runtime.optimizer_workspace_bytes > 0

    def _search(
        self, layers: tuple[Layer, ...], place: int, batch: int, cut: Cut, *, steps: bool, once: bool = False
    ) -> NDArray[np.int64] | None:
        """Return a strategy number per layer.

        Args:
            layers: Of the stage.
            place: Which of the stages it is.
            batch: Samples.
            cut: Microbatches.
            steps: There is room for the optimizer's work in any case.
            once: A step counts once, not once for each microbatch.
        """
        held = self.held(place, batch, cut)
        outside = self.outside_bytes(place, cut, batch)
        sends = place < self.num_stages - 1
        key = (tuple(layer.kind for layer in layers), held, outside, cut, sends, steps, once)
        if key not in self._found:
            self.num_searches += 1
            groups = self._groups(layers)
            shared = 0.0 if self.estimator.released else self.estimator.problem.matmul_workspace_bytes
            left = self.budget_bytes - outside - shared
            found = self._found_for(groups, held, cut, left, sends=sends, steps=steps, once=once)
            if found is not None:
                found = np.repeat(found, [len(group) for group in groups])
            self._found[key] = found
        return self._found[key]

    def _found_for(
        self,
        groups: Sequence[tuple[Layer, ...]],
        held: float,
        cut: Cut,
        budget_bytes: float,
        *,
        sends: bool,
        steps: bool,
        once: bool,
    ) -> NDArray[np.int64] | None:
        """Return a strategy number per group of layers."""
        granularity = float(self.options.granularity_bytes)
        layers = [group[0] for group in groups]

        def table(ties: Sequence[frozenset[str]]) -> StageTable:
            return self.tables.table(groups, held, cut, ties, sends=sends, steps=steps, once=once)

        if self.options.outside == "data":  # tied weights lie alike under every strategy
            plain = table(self.tables.held_before(layers))
        else:
            plain = table([frozenset()] * len(groups))
            if self.options.paper:
                return search_as_printed(plain, budget_bytes, granularity)
            tied = [
                TiedTable(table(ties), plain, keeper, self.tables.weights)
                for keeper, ties in self.tables.keepers(layers, granularity)
            ]
            if tied:
                return search_tied(tied, budget_bytes, granularity)
        find = search_as_printed if self.options.paper else search
        return find(plain, budget_bytes, granularity)

    def _groups(self, layers: tuple[Layer, ...]) -> list[tuple[Layer, ...]]:
        """Return runs of equal layers, at most ``fused_layers`` each."""
        groups: list[tuple[Layer, ...]] = []
        for layer in layers:
            if groups and groups[-1][-1].kind == layer.kind and len(groups[-1]) < self.options.fused_layers:
                groups[-1] = (*groups[-1], layer)
            else:
                groups.append((layer,))
        return groups
