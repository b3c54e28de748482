"""The memory model of Galvatron's first releases: what their planner takes a layer and a stage to need.

It is coarser than Eq. 2 on the shared cost tables, and decides which batches and plans the paper ran: its budgets of
8 to 20 GB are the planner's, on cards of 24 GB. Its rules, with sizes from shapes:

- a layer has its model states, split over tensor ranks; sharded ones take ``1 / d`` of them and a share that stands
  for gathered parameters; and what it keeps for backward of the samples in flight, split as the strategy splits it;
- under checkpointing it keeps its input, and one layer's inner activations are needed on top;
- embedding and head are no layers. They run data-parallel over a stage's devices with whole states. In the first
  release (one node, GPipe) the first stage is charged with both, whatever stage holds the head. In later ones (more
  nodes, 1F1B) first and last stage have states of their own and the activations of both each, of which a part lives
  for one microbatch only;
- nothing else: no workspace of kernels, no gathered layer, no stage outputs, no padding of microbatches.

Outside the layers of BERT the first release's own measurement is taken, on one node (`released_profile.py`). Elsewhere
activations there are five tensors of the size of the logits for text, as shapes have it; for images they are
measured far above what shapes explain (IMAGE_TENSORS), so that constant is taken. A layer's own are measured a little
above its shapes (MEASURED_SHARES).

Source: Galvatron data README (``titan_v1``) and its maintainers' constants; releases of June and November 2022.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.released_profile import OUTSIDE_MIB
from searchers.galvatron.strategies import Strategy
from simulator.problem import Problem
from simulator.saved import saved_tensors

MIB = 1 << 20

ONE_NODE = 8
"""Devices up to which the release has one set of constants for embedding and head, charged to the first stage."""

GATHERED_SHARE = {True: 0.025, False: 0.003}
"""Of sharded states, what the release adds to the shard: up to eight devices, and beyond."""


IMAGE_TENSORS = {"vit": 13.25, "swin": 18.3}
"""Tensors of the size of the embedding's output that images take outside the layers (``embedding_head_memory.csv``,
8 GPUs: 10 MiB a sample for ViT-Large and 13 for ViT-Huge, of which the mean, and 70 for Swin-Huge)."""

MEASURED_SHARES = {
    "bert": {1: 1.004, 2: 1.002, 4: 1.0, 8: 1.004, 16: 0.995},
    "t5": {1: 1.001, 2: 1.032, 4: 1.026, 8: 1.033, 16: 1.049},
    "vit": {1: 1.008, 2: 1.009, 4: 1.009, 8: 1.011},
    "swin": {1: 1.034, 2: 0.997, 4: 1.029, 8: 1.008},
}
"""Measured activations of a layer over those of its shapes, by family and tensor degree: the geometric mean over the
family's layers in ``layer_profiles.csv`` (a test derives them again). No tensor explains them: Swin's single ratios lie
between 0.94 and 1.05 and neither grow nor shrink with the degree, and a caching allocator, which hands out blocks up to
1 MiB larger than asked for, gives such ratios for the same shapes (0.94 to 1.08, with one to eight samples)."""

PASSING_SHARE = {False: 0.4, True: 0.7}
"""Of the activations outside the layers, what lives for one microbatch only: two of five logits for text, and for
images (``peak_reduction_with_chunks_MiB``, 16 GPUs: 120 of 280 MiB for BERT-Huge, 7 of 10 for ViT-Huge)."""


LARGE_BYTES, ROUNDED_TO_BYTES = 10 << 20, 2 << 20
"""The caching allocator gives tensors from the first size on memory in multiples of the second: why 75.06 MiB of
parameters in a layer of 1,280 features are measured as 76.98, and 48.05 of 1,024 features as they are."""

ATTENTION_SOURCES = 3
"""Query, key and value are projected by weights of their own."""


class Outside(NamedTuple):
    """What embedding or head takes: model states, and activations of one sample, in flight and passing."""

    state_bytes: float
    sample_bytes: float
    passing_bytes: float


class ReleasedLayerMemory(NamedTuple):
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
        schedule: ``gpipe`` or ``1f1b``.
    """

    def __init__(self, problem: Problem, profiles: LayerProfiles, num_stages: int, schedule: str) -> None:
        self.profiles = profiles
        self.num_stages = num_stages
        self.num_devices = problem.num_devices // num_stages
        self.one_node = problem.num_devices <= ONE_NODE
        self.charges_first = self.one_node and schedule == "gpipe"
        runtime = problem.runtime
        self.state_bytes_per_parameter = runtime.state_bytes_per_parameter
        # Parameters, gradients and two halves of the optimizer's states are tensors of their own.
        self._state_sizes = (runtime.parameter_bytes, runtime.gradient_bytes, *(runtime.optimizer_bytes / 2,) * 2)
        self._measured_shares = MEASURED_SHARES.get(problem.workload.family, {})
        self._states: dict[int, float] = {}
        self._outside = self._first_and_last(problem)

    def layer(self, kind: int, strategy: Strategy, samples: int) -> ReleasedLayerMemory:
        """Return what a repeated layer takes for a microbatch of that many samples over the stage."""
        kind = self.profiles.plain_kinds[kind]
        profile = self.profiles.profile(kind, strategy.tensor, samples // strategy.data)
        states = self._layer_states(kind) / strategy.tensor
        if strategy.sharded > 1:
            states *= 1 / strategy.sharded + GATHERED_SHARE[self.one_node]
        entering = profile.memory.core_input_bytes
        whole = self._measured_shares.get(strategy.tensor, 1.0) * (entering + profile.memory.core_saved_bytes)
        if strategy.checkpoint:
            return ReleasedLayerMemory(entering, whole - entering, states)
        return ReleasedLayerMemory(whole, 0.0, states)

    def outside_bytes(self, stage: int, in_flight: float, microbatch: float) -> float:
        """Return what embedding and head take on a device of a stage.

        Args:
            stage: Its place.
            in_flight: Samples in flight over the stage.
            microbatch: Of those, samples of one microbatch.
        """
        total = 0.0
        for place, part in self._outside:
            if place == stage:
                samples = part.sample_bytes * in_flight + part.passing_bytes * microbatch
                total += part.state_bytes + samples / self.num_devices
        return total

    def _layer_states(self, kind: int) -> float:
        """Return model states of a layer, each tensor as the allocator rounds it."""
        if kind not in self._states:
            costs = self.profiles.costs
            total = 0.0
            for index in range(*self.profiles.examples[kind].core):
                op = costs.problem.workload.operators[index]
                pieces = ATTENTION_SOURCES if "qkv" in op.role else 1
                for _, count in costs.operator(index, (), 1, self.profiles.gpu_type).parameters:
                    for each in self._state_sizes:
                        total += pieces * _rounded(count * each / pieces)
            self._states[kind] = total
        return self._states[kind]

    def _first_and_last(self, problem: Problem) -> tuple[tuple[int, Outside], ...]:
        layers = self.profiles.layers
        inside = {index for core in self.profiles.plain_cores for index in range(*core)}
        rest = [index for index in range(len(problem.workload)) if index not in inside]
        sample = self._sample_bytes(rest)
        if self.charges_first:
            known = OUTSIDE_MIB.get((problem.workload.family, self.profiles.millions(layers[0].kind)))
            states, sample = (each * MIB for each in known) if known else (self._state_bytes(rest), sample)
            return ((0, Outside(states, sample, 0.0)),)
        passing = PASSING_SHARE[problem.workload.family in IMAGE_TENSORS] * sample
        if self.num_stages == 1:
            return ((0, Outside(self._state_bytes(rest), sample - passing, passing)),)
        start = layers[0].core[0]
        first, last = ([i for i in rest if i < start], [i for i in rest if i >= start])
        return tuple(
            (place, Outside(self._state_bytes(part), sample - passing, passing))
            for place, part in ((0, first), (self.num_stages - 1, last))
        )

    def _state_bytes(self, operators: list[int]) -> float:
        """Return model states: a tied weight once, with the gradient that its second use adds to the first's."""
        costs = self.profiles.costs
        elements = repeated = 0
        ties: set[str] = set()
        for index in operators:
            for parameter, count in costs.operator(index, (), 1, self.profiles.gpu_type).parameters:
                if parameter.tie in ties:
                    repeated = max(repeated, count)
                    continue
                elements += count
                if parameter.tie is not None:
                    ties.add(parameter.tie)
        return elements * self.state_bytes_per_parameter + repeated * costs.problem.runtime.gradient_bytes

    def _sample_bytes(self, operators: list[int]) -> float:
        """Return activations of one sample: what is kept and the largest workspace, or the constant of images."""
        costs = self.profiles.costs
        workload = costs.problem.workload
        kept: dict[str, float] = {}
        workspace = 0.0
        for index in operators:
            cost = costs.operator(index, (), 1, self.profiles.gpu_type)
            kept.update(saved_tensors(workload, index, cost))
            workspace = max(workspace, cost.workspace_forward_bytes, cost.workspace_backward_bytes)
        if workload.family in IMAGE_TENSORS:
            embedded = costs.operator(operators[0], (), 1, self.profiles.gpu_type).output_bytes[0]
            return IMAGE_TENSORS[workload.family] * embedded
        return sum(kept.values()) + workspace


def _rounded(num_bytes: float) -> float:
    """Return what the allocator takes for a tensor.

    >>> _rounded(25 << 20) / 2**20, _rounded(6.25 * 2**20) / 2**20
    (26.0, 6.25)
    """
    if num_bytes < LARGE_BYTES:
        return num_bytes
    return float(ceil(num_bytes / ROUNDED_TO_BYTES) * ROUNDED_TO_BYTES)
