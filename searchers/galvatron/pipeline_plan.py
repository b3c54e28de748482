"""A plan in the planner's words: stages, the strategies of their layers, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from searchers.galvatron.layer_profiles import Layer
from searchers.galvatron.microbatches import Cut
from searchers.galvatron.strategies import Strategy

Partition = tuple[int, ...]
"""Layers of each stage."""

ATTEMPTS = 5
"""Budgets tried until a plan is let fit by whoever judges it."""
MARGIN = 0.99
"""What the next budget is at most, times the last."""


@dataclass(frozen=True)
class StagePlan:
    """Strategies of one stage's layers, and what they cost.

    Attributes:
        layers: Its layers.
        chosen: A strategy per layer.
        step_s: One microbatch, forward and backward, without gradient synchronisation.
        sync_s: What the last microbatch takes longer than one like it.
        peak_bytes: Eq. 2, or the release's memory model.
    """

    layers: tuple[Layer, ...]
    chosen: tuple[Strategy, ...]
    step_s: float
    sync_s: float
    peak_bytes: float


@dataclass(frozen=True)
class PipelinePlan:
    """A whole plan in the planner's words.

    Attributes:
        batch: Samples per iteration.
        cut: Microbatches.
        schedule: ``gpipe`` or ``1f1b``.
        stages: In order.
        iteration_time_s: Eq. 9, or the release's time model.
        capacity_bytes: The memory budget.
        outside: How embedding and head are cut, see `searchers.galvatron.options.Options`.
    """

    batch: int
    cut: Cut
    schedule: str
    stages: tuple[StagePlan, ...]
    iteration_time_s: float
    capacity_bytes: float
    outside: str = "layers"

    @property
    def partition(self) -> Partition:
        """Layers of each stage."""
        return tuple(len(stage.layers) for stage in self.stages)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per iteration."""
        return self.cut.parts

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.batch / self.iteration_time_s

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Every stage is within the budget."""
        return self.peak_bytes <= self.capacity_bytes

    def lowered_budget_bytes(self, excess_bytes: float) -> float:
        """Return the budget to plan for next where this plan turned out to need so much more than there is."""
        return min(MARGIN * self.capacity_bytes, self.peak_bytes - max(0.0, excess_bytes))


def split(layers: Sequence[Layer], partition: Partition) -> list[tuple[Layer, ...]]:
    """Return the layers of each stage."""
    stages, start = [], 0
    for count in partition:
        stages.append(tuple(layers[start : start + count]))
        start += count
    assert start == len(layers), (partition, len(layers))
    return stages
