"""One pipeline degree: what a plan of given strategies costs, by Eq. 9, and how batches are cut for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from searchers.galvatron.estimator import Estimator
from searchers.galvatron.layer_profiles import Layer, LayerProfiles
from searchers.galvatron.layer_tables import LayerTables
from searchers.galvatron.microbatches import Cut, cuts
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_costs import LayerCost, in_flight, peak_bytes, pipeline_s, released_bytes
from searchers.galvatron.pipeline_plan import PipelinePlan, StagePlan
from searchers.galvatron.released_time import ReleasedTime
from searchers.galvatron.strategies import Strategy, strategies
from simulator.problem import Problem

FORWARD_SHARE = 1 / 3
"""Of a step, where two stages are compared and for what hides behind backward, which does about twice the work."""


class _StageCost(NamedTuple):
    """What a stage costs: fields as of `StagePlan` and `LayerCost`, and the last microbatch's step."""

    step_s: float
    sync_s: float
    stretch_s: float
    peak_bytes: float
    last_step_s: float


class DegreeCosts:
    """What plans of one pipeline degree cost, for any batch.

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
        self._stages: dict[object, _StageCost | None] = {}

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

    def own_cut(self, tensor: int, batch: int, cut: Cut) -> Cut:
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
        held = self.held(place, batch, cut)
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

    def held(self, place: int, batch: int, cut: Cut) -> float:
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
        held = self.held(place, cut.batch if batch is None else batch, cut)
        return released.outside_bytes(place, held * cut.samples, cut.samples)
