"""One pipeline degree: the search within each of its stages, and Eq. 9 over them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from searchers.galvatron.dynamic_programming import search
from searchers.galvatron.estimator import Estimator
from searchers.galvatron.layer_profiles import Layer, LayerProfiles
from searchers.galvatron.layer_tables import LayerTables
from searchers.galvatron.microbatches import Cut, cuts
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_costs import LayerCost, in_flight, peak_bytes, pipeline_s, released_bytes
from searchers.galvatron.pipeline_plan import Partition, PipelinePlan, StagePlan, split
from searchers.galvatron.printed_recurrence import search_as_printed
from searchers.galvatron.released_time import ReleasedTime
from searchers.galvatron.stage_table import StageTable
from searchers.galvatron.strategies import Strategy, strategies
from searchers.galvatron.tied_weights import TiedTable, search_tied
from simulator.problem import Problem

FORWARD_SHARE = 1 / 3
"""Of a step, where two stages are compared and for what hides behind backward, which does about twice the work."""

ROUNDING = 1e-9
"""By what sums in another order may differ, and more."""


class _StageCost(NamedTuple):
    """What a stage costs: fields as of `StagePlan` and `LayerCost`, and the last microbatch's step."""

    step_s: float
    sync_s: float
    stretch_s: float
    peak_bytes: float
    last_step_s: float


class DegreeSearch:
    """Plans of one pipeline degree, for any batch.

    Args:
        problem: Gives workload, hardware, runtime and memory limit; its batch is not read.
        profiles: Layer costs, shared by all degrees.
        num_stages: P.
        options: The variant.
        budget_bytes: E; None for the problem's own.
    """

    def __init__(
        self,
        problem: Problem,
        profiles: LayerProfiles,
        num_stages: int,
        options: Options,
        budget_bytes: float | None = None,
    ) -> None:
        self.num_stages = num_stages
        self.options = options
        self.layers = profiles.layers
        size = problem.num_devices // num_stages
        self.estimator = Estimator(
            problem,
            profiles,
            size,
            overlap_slowdown=options.overlap_slowdown,
            paper=options.paper,
            memory=options.memory,
            time=options.time,
            schedule=options.schedule,
            microbatches=options.microbatches,
            outside=options.outside,
        )
        self.budget_bytes = self.estimator.capacity_bytes() if budget_bytes is None else budget_bytes
        self.strategies = strategies(
            size,
            kinds=options.kinds,
            checkpoint=options.checkpoint,
            mix_data_and_sharded=options.mix_data_and_sharded,
        )
        self.tables = LayerTables(self.estimator, self.strategies, paper=options.paper)
        self.tensor_degrees = tuple(dict.fromkeys(strategy.tensor for strategy in self.strategies))
        self._cuts: dict[tuple[int, int], list[Cut]] = {}
        self._found: dict[object, NDArray[np.int64] | None] = {}
        self._stages: dict[object, _StageCost | None] = {}
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
        return self.assess(stages, chosen, batch, self._own_cut(tensor, batch, cut))

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
            own = self._own_cut(strategy.tensor, batch, cut)
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
        held = np.array([[self._held(place, batch, cut)] for place in range(len(stages))])
        kept = held * found[:, 1] + found[:, 2]
        return seconds * (1 - ROUNDING), kept.max(axis=0) * (1 - ROUNDING)

    def cuts(self, batch: int, tensor: int) -> list[Cut]:
        """Return how the rule lets a batch be cut for plans whose largest tensor degree is ``tensor``."""
        key = (batch, tensor)
        if key not in self._cuts:
            problem = self.estimator.problem
            self._cuts[key] = cuts(
                self.options.microbatches,
                problem.workload.family,
                batch,
                self.num_stages,
                problem.num_devices,
                tensor=tensor,
                unequal=self.options.unequal_microbatches,
            )
        return self._cuts[key]

    def rule_cuts(self, batch: int) -> list[Cut]:
        """Return every way in which the rule may cut a batch, whatever the tensor degrees."""
        return list(dict.fromkeys(cut for tensor in self.tensor_degrees for cut in self.cuts(batch, tensor)))

    def _own_cut(self, tensor: int, batch: int, cut: Cut) -> Cut:
        """Return how the rule cuts the batch for plans of this tensor degree; a cut that no rule gave stays."""
        own = self.cuts(batch, tensor)
        return cut if cut in own or cut not in self.rule_cuts(batch) else own[0]

    def assess(
        self,
        stages: Sequence[Sequence[Layer]],
        chosen: Sequence[Sequence[Strategy]],
        batch: int,
        cut: Cut,
    ) -> PipelinePlan | None:
        """Return the plan of given strategies with its costs, or None if one cannot be used."""
        found: list[StagePlan] = []
        steps: list[list[float]] = [[], []]
        delays_s: list[float] = []
        for place, (layers, choice) in enumerate(zip(stages, chosen, strict=True)):
            own = self._stage(layers, tuple(choice), place, batch, cut)
            if own is None:
                return None
            found.append(StagePlan(tuple(layers), tuple(choice), own.step_s, own.sync_s, own.peak_bytes))
            steps[0].append(own.step_s)
            steps[1].append(own.last_step_s)
            delays_s.append(own.stretch_s)
        if self.estimator.released_time is not None:
            return self._planned(batch, cut, found, self._released_s(self.estimator.released_time, found, batch))
        backward_s = [(1 - FORWARD_SHARE) * last for last in steps[1]]
        waits_s = self._add_transfers(stages, chosen, cut, steps)
        total_s = pipeline_s(
            steps[0],
            [stage.sync_s for stage in found],
            cut.parts,
            last_s=None if cut.last is None else steps[1],
            delays_s=delays_s,
            backward_s=backward_s,
            paper=self.options.paper,
        )
        total_s += (cut.parts - 1) * waits_s
        total_s += self.estimator.tie_sync_s(stages, chosen, whole=self.options.outside == "data")
        return self._planned(batch, cut, found, total_s)

    def _add_transfers(
        self,
        stages: Sequence[Sequence[Layer]],
        chosen: Sequence[Sequence[Strategy]],
        cut: Cut,
        steps: Sequence[list[float]],
    ) -> float:
        """Add transfers to the steps of the stages that send them, which wait: activations ahead, gradients back.

        Args:
            stages, chosen, cut: The plan.
            steps: Of a microbatch, and of the last.

        Returns:
            Seconds a microbatch takes longer than the slowest step: under GPipe one stage can be the slowest of all
            forward passes, since it sends on, and another of all backward passes.
        """
        own_s = tuple(steps[0])
        there_s, back_s = ([0.0] * len(stages) for _ in range(2))
        for boundary, layers in enumerate(stages[:-1]):
            sender, receiver = chosen[boundary][-1], chosen[boundary + 1][0]
            sample_bytes = self.estimator.profiles.crossing_bytes(layers[-1])
            for step_s, samples in ((steps[1], cut.last or cut.samples), (steps[0], cut.samples)):
                there, back = (samples / each.data * sample_bytes for each in (receiver, sender))
                there_s[boundary] = self.estimator.transfer_s(boundary, there)
                back_s[boundary + 1] = self.estimator.transfer_s(boundary, back)
                step_s[boundary] += there_s[boundary]
                step_s[boundary + 1] += back_s[boundary + 1]
        if self.options.schedule != "gpipe" or self.options.paper:
            return 0.0
        forward_s = max(FORWARD_SHARE * own + there for own, there in zip(own_s, there_s, strict=True))
        backward_s = max((1 - FORWARD_SHARE) * own + back for own, back in zip(own_s, back_s, strict=True))
        return max(0.0, forward_s + backward_s - max(steps[0]))

    def _planned(self, batch: int, cut: Cut, stages: Sequence[StagePlan], total_s: float) -> PipelinePlan:
        options = self.options
        return PipelinePlan(batch, cut, options.schedule, tuple(stages), total_s, self.budget_bytes, options.outside)

    @staticmethod
    def _released_s(times: ReleasedTime, stages: Sequence[StagePlan], batch: int) -> float:
        """Return the seconds that the release takes stages to need for a batch."""
        total_s = 0.0
        for stage in stages:
            total_s += sum(
                times.layer_s(layer.kind, strategy, batch)
                for layer, strategy in zip(stage.layers, stage.chosen, strict=True)
            )
            total_s += sum(times.transition_s(first, second, batch) for first, second in pairwise(stage.chosen))
        return total_s

    def _stage(
        self, layers: Sequence[Layer], chosen: tuple[Strategy, ...], place: int, batch: int, cut: Cut
    ) -> _StageCost | None:
        """Return what a stage costs, or None if a strategy cannot be used; equal stages are worked out once."""
        held = self._held(place, batch, cut)
        outside = self.outside_bytes(place, cut, batch)
        sends = place < self.num_stages - 1
        key = (tuple(layer.kind for layer in layers), chosen, held, outside, cut, sends)
        if key not in self._stages:
            self._stages[key] = self._stage_anew(layers, chosen, held, outside, cut, sends=sends)
        return self._stages[key]

    def _stage_anew(
        self,
        layers: Sequence[Layer],
        chosen: tuple[Strategy, ...],
        held: float,
        outside: float,
        cut: Cut,
        *,
        sends: bool,
    ) -> _StageCost | None:
        costs = self.tables.costs_of(layers, chosen, cut.samples, cut.parts > 1)
        last = costs if cut.last is None else self.tables.costs_of(layers, chosen, cut.last, cut.parts > 1)
        if costs is None or last is None:
            return None
        step_s = self._step_s(costs, chosen)
        last_step_s = step_s if cut.last is None else self._step_s(last, chosen)
        if self.estimator.released is None:
            peak = peak_bytes(costs, held, sends=sends)
        else:
            peak = released_bytes(costs, held) + outside
        sync_s, stretch_s = sum(cost.sync_s for cost in last), sum(cost.stretch_s for cost in last)
        return _StageCost(step_s, sync_s, stretch_s, peak, last_step_s)

    def _step_s(self, costs: Sequence[LayerCost], chosen: Sequence[Strategy]) -> float:
        """Return the seconds of a microbatch, forward and backward."""
        step_s = sum(cost.step_s for cost in costs)
        for (cost, first), (_, second) in pairwise(zip(costs, chosen, strict=True)):
            step_s += self.estimator.transition_s(cost, first, second)
        return step_s

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
        held = self._held(place, batch, cut)
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

    def _held(self, place: int, batch: int, cut: Cut) -> float:
        """Return the microbatches that a stage holds at once, the last one as the part it is of the others.

        The release takes all for equal parts of the batch.
        """
        held = in_flight(self.options.schedule, place, self.num_stages, cut.parts)
        if self.estimator.released is not None:
            return held * batch / (cut.parts * cut.samples)
        return held - 1 + cut.last / cut.samples if cut.last is not None and held == cut.parts else held

    def outside_bytes(self, place: int, cut: Cut, batch: int | None = None) -> float:
        """Return what the release charges a stage for embedding and head; here they belong to their layers."""
        released = self.estimator.released
        if released is None:
            return 0.0
        held = self._held(place, cut.batch if batch is None else batch, cut)
        return released.outside_bytes(place, held * cut.samples, cut.samples)

    def _groups(self, layers: tuple[Layer, ...]) -> list[tuple[Layer, ...]]:
        """Return runs of equal layers, at most ``fused_layers`` each."""
        groups: list[tuple[Layer, ...]] = []
        for layer in layers:
            if groups and groups[-1][-1].kind == layer.kind and len(groups[-1]) < self.options.fused_layers:
                groups[-1] = (*groups[-1], layer)
            else:
                groups.append((layer,))
        return groups
