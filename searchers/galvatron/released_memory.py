"""The memory model of Galvatron's first releases: what their planner takes a layer and a stage to need.

It is coarser than Eq. 2 on the shared cost tables, and decides which batches and plans the paper ran: its budgets of
8 to 20 GB are the planner's, on cards of 24 GB. Its rules, with sizes from shapes:

- a layer has its model states, split over tensor ranks; sharded ones take ``1 / d`` of them and a share that stands
  for gathered parameters; and what it keeps for backward of the samples in flight, split as the strategy splits it;
- under checkpointing it keeps its input, and one layer's inner activations are needed on top;
- embedding and head are no layers. They run data-parallel over a stage's devices with whole states, and on one node
  the first stage is charged with both, whatever stage holds the head; on more nodes first and last stage have their own;
- nothing else: no workspace of kernels, no gathered layer, no stage outputs, no padding of microbatches.

Source: Galvatron data README (``titan_v1``) and its maintainers' constants; releases of June and November 2022.
"""

from __future__ import annotations

from typing import NamedTuple

from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.strategies import Strategy
from simulator.costs import saved_tensors
from simulator.problem import Problem

ONE_NODE = 8
"""Devices up to which the release has one set of constants for embedding and head, charged to the first stage."""

GATHERED_SHARE = {True: 0.025, False: 0.003}
"""Of sharded states, what the release adds to the shard: up to eight devices, and beyond."""


class Outside(NamedTuple):
    """What embedding or head takes: model states, and activations of one sample."""

    state_bytes: float
    sample_bytes: float


class LayerMemory(NamedTuple):
    """A layer for one microbatch: kept, needed on top in backward, model states."""

    forward_bytes: float
    backward_bytes: float
    state_bytes: float


class ReleasedMemory:
    """The release's memory model of one problem.

    Args:
        problem: Gives devices and the runtime's bytes per parameter.
        profiles: Costs of its layers.
        num_stages: P.
    """

    def __init__(self, problem: Problem, profiles: LayerProfiles, num_stages: int) -> None:
        self.profiles = profiles
        self.num_stages = num_stages
        self.num_devices = problem.num_devices // num_stages
        self.one_node = problem.num_devices <= ONE_NODE
        self.state_bytes_per_parameter = problem.runtime.state_bytes_per_parameter
        self._outside = self._first_and_last(problem)

    def layer(self, kind: int, strategy: Strategy, samples: int) -> LayerMemory:
        """Return what a repeated layer takes for a microbatch of that many samples over the stage."""
        profile = self.profiles.profile(kind, strategy.tensor, samples // strategy.data)
        states = self.state_bytes_per_parameter * self.profiles.core_parameters(kind, strategy.tensor)
        if strategy.sharded > 1:
            states *= 1 / strategy.sharded + GATHERED_SHARE[self.one_node]
        inner, entering = profile.core_saved_bytes, profile.core_input_bytes
        if strategy.checkpoint:
            return LayerMemory(entering, inner, states)
        return LayerMemory(entering + inner, 0.0, states)

    def outside_bytes(self, stage: int, samples: float) -> float:
        """Return what embedding and head take on a device of a stage, ``samples`` in flight over the stage."""
        total = 0.0
        for place, part in self._outside:
            if place == stage:
                total += part.state_bytes + part.sample_bytes * samples / self.num_devices
        return total

    def _first_and_last(self, problem: Problem) -> tuple[tuple[int, Outside], ...]:
        layers = self.profiles.layers
        cores = {index for layer in layers for index in range(*layer.core)}
        rest = [index for index in range(len(problem.workload)) if index not in cores]
        if self.one_node or self.num_stages == 1:
            return ((0, self._part(rest)),)
        first = [index for index in rest if index < layers[0].core[0]]
        last = [index for index in rest if index >= layers[0].core[0]]
        return (0, self._part(first)), (self.num_stages - 1, self._part(last))

    def _part(self, operators: list[int]) -> Outside:
        """Return operators as a whole: a tied weight once, with the gradient that its second use adds to the first."""
        costs = self.profiles.costs
        workload = costs.problem.workload
        elements = repeated = 0
        kept: dict[str, float] = {}
        workspace = 0.0
        ties: set[str] = set()
        for index in operators:
            cost = costs.operator(index, (), 1, self.profiles.gpu_type)
            for parameter, count in cost.parameters:
                if parameter.tie in ties:
                    repeated = max(repeated, count)
                    continue
                elements += count
                if parameter.tie is not None:
                    ties.add(parameter.tie)
            kept.update(saved_tensors(workload, index, cost))
            workspace = max(workspace, cost.workspace_forward_bytes, cost.workspace_backward_bytes)
        gradient_bytes = costs.problem.runtime.gradient_bytes
        return Outside(
            elements * self.state_bytes_per_parameter + repeated * gradient_bytes, sum(kept.values()) + workspace
        )
