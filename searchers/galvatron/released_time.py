"""The time model of Galvatron's first release: what its planner takes a layer to cost in an iteration of GPipe.

It is coarser than Eq. 9 on the shared cost tables, and decides which plans the paper ran under "DP+TP", "DP+PP" and
"Galvatron". Its rules, with times of one layer on one device from the cost tables:

- a layer computes in proportion to its samples and to 1 / tensor degree: kernels lose nothing by being smaller.
  Backward takes twice forward, thrice under checkpointing;
- its tensor-parallel all-reduces, as many backward as forward (and forward again under checkpointing), hide nothing;
- its gradients are reduced behind all of its backward pass where data parallelism is wider than tensor parallelism,
  else behind half of it (two thirds in decoders), both slowed by the overlap factors. What is left over is added up
  over all layers, though stages reduce side by side;
- sharded parameters are gathered once, before the forward pass, at half an all-reduce, and nothing hides it;
- P stages and m microbatches make computation and tensor parallelism (P + m - 1) / (P m) of the sum over all layers,
  however uneven the stages are; m is each layer's own, by its own data-parallel degree. Sends cost nothing;
- between two layers activations cost the gathering of a constant per sample where the tensor degree grows or ranks lie
  otherwise, nothing where it shrinks;
- on eight and sixteen RTX TITANs layers and collectives take what was measured there (`released_profile.py`);
- data parallelism of T5 has fixed seconds per layer; embedding, head and optimizer have none; every time is multiplied
  by 1.1.

Source: Galvatron data README (``titan_v1``); releases of June and November 2022.
"""

from __future__ import annotations

from searchers.galvatron.communication import CollectiveTimes
from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.microbatches import replica_count
from searchers.galvatron.overlap import overlapped_s
from searchers.galvatron.released_profile import FORWARD_MS, GPU, GPUS_PER_NODE, MS_PER_MIB
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Strategy
from simulator.problem import Problem

FACTOR = 1.1
"""What the release multiplies every time by."""

FORWARD_COLLECTIVES_OF_DECODERS = 3
"""Self-attention, cross-attention and MLP."""

HIDING_SHARES = {"encoder": 1 / 2, "decoder": 2 / 3}
"""Of backward, what gradients hide behind where tensor parallelism is at least as wide as data parallelism."""

GATHER_SHARE = 0.5
"""Of an all-reduce of the gradients, what gathering the parameters takes."""

MIB = 1 << 20

MOVED_BYTES = MIB
"""Between two layers the release counts all-reducing that much per sample, whatever the model."""

FIXED_S = {"t5": 0.060 / 24}
"""Seconds per layer that data parallelism takes besides."""

MANY_SAMPLES = 8
"""Samples at which a layer's time per sample is read."""


class ReleasedTime:
    """The release's time model of one problem and pipeline degree.

    Args:
        problem: Gives devices and the runtime's bytes per gradient.
        profiles: Costs of its layers.
        num_stages: P.
        times: Prices collectives on a stage's devices.
        factors: By what overlap slows computation and communication.
        rule: Of `searchers.galvatron.microbatches`.
    """

    def __init__(
        self,
        problem: Problem,
        profiles: LayerProfiles,
        num_stages: int,
        *,
        times: CollectiveTimes,
        factors: tuple[float, float],
        rule: str,
    ) -> None:
        self.profiles = profiles
        self.num_stages = num_stages
        self.num_devices = problem.num_devices
        self.family = problem.workload.family
        self.gradient_bytes = problem.runtime.gradient_bytes
        self.times = times
        whole_nodes = problem.num_devices == GPUS_PER_NODE * len(problem.hardware.cluster.nodes)
        known = problem.gpu_types[0] == GPU and whole_nodes
        self.measured = MS_PER_MIB.get(problem.num_devices, {}) if known else {}
        self.factors = factors
        self.rule = rule

    def layer_s(self, kind: int, strategy: Strategy, batch: int) -> float:
        """Return the seconds that a layer adds to an iteration of ``batch`` samples."""
        kind = self.profiles.plain_kinds[kind]
        samples = batch / strategy.data
        forward_s = self._forward_s_per_sample(kind) * samples / strategy.tensor
        backward_s = (3 if strategy.checkpoint else 2) * forward_s
        collectives = self.profiles.collectives(kind, strategy.tensor).core_forward
        one_way_s = sum(self._all_reduce_s(size * samples, strategy, TENSOR) for _, size in collectives)
        tensor_s = (3 if strategy.checkpoint else 2) * one_way_s
        parts = self.parts(strategy, batch)
        share = (self.num_stages + parts - 1) / (self.num_stages * parts)
        once_s, gather_s = self._data_parallel_s(kind, strategy, backward_s)
        return FACTOR * ((forward_s + backward_s + tensor_s) * share + once_s + gather_s)

    def _data_parallel_s(self, kind: int, strategy: Strategy, backward_s: float) -> tuple[float, float]:
        """Return what gradients take longer than the backward pass they hide behind, and gathering parameters."""
        if strategy.data == 1:
            return 0.0, 0.0
        num_bytes = self.profiles.core_parameters(kind, strategy.tensor) * self.gradient_bytes
        reduce_s = self._all_reduce_s(num_bytes, strategy, DATA)
        sharded_s = self._all_reduce_s(num_bytes, strategy, SHARDED)
        share = 1.0
        if strategy.tensor >= strategy.data:
            share = HIDING_SHARES["decoder" if self._is_decoder(kind) else "encoder"]
        hiding_s = share * backward_s
        once_s = overlapped_s(hiding_s, reduce_s + sharded_s, self.factors) - hiding_s
        return once_s + FIXED_S.get(self.family, 0.0), GATHER_SHARE * sharded_s

    def _is_decoder(self, kind: int) -> bool:
        return len(self.profiles.collectives(kind, 2).core_forward) >= FORWARD_COLLECTIVES_OF_DECODERS

    def _forward_s_per_sample(self, kind: int) -> float:
        if self.measured:
            forward_ms = FORWARD_MS.get((self.family, self.profiles.millions(kind)))
            if forward_ms is not None:
                return forward_ms * 1e-3
        profile = self.profiles.profile(kind, 1, MANY_SAMPLES)
        return max(profile.times.core_forward_s, profile.times.core_host_s) / MANY_SAMPLES

    def _all_reduce_s(self, num_bytes: float, strategy: Strategy, axis: str) -> float:
        """Return seconds of an all-reduce over an axis of the stage's mesh, all of its groups at once."""
        position = strategy.axis_position(axis)
        if position is None or num_bytes <= 0:
            return 0.0
        sizes = tuple(degree for _, degree in strategy.levels)
        size, consecutive = sizes[position], position == len(sizes) - 1
        ms_per_mib = self.measured.get((self.num_stages, size, consecutive))
        if ms_per_mib is not None:
            return ms_per_mib * 1e-3 * 2 * (size - 1) / size * num_bytes / MIB
        return self.times.seconds("all_reduce", num_bytes, sizes, (position,))

    def transition_s(self, first: Strategy, second: Strategy, batch: int) -> float:
        """Return seconds between two layers of a stage, in an iteration."""
        moves = second.tensor > first.tensor or (second.tensor == first.tensor and second.layout != first.layout)
        if not moves:
            return 0.0
        return FACTOR * self._all_reduce_s(MOVED_BYTES * batch / second.data, second, TENSOR)

    def parts(self, strategy: Strategy, batch: int) -> float:
        """Return the number of microbatches that a layer is taken to run with; fractional where the rule is."""
        if self.num_stages == 1:
            return 1.0
        samples = batch / strategy.data
        return replica_count(self.rule, self.family, samples, strategy.tensor, self.num_stages, self.num_devices)
