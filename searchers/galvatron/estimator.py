"""The cost estimator: time and memory of a layer under a strategy, of a stage, and of a pipeline (Eq. 9).

Source: Galvatron-BMW (TKDE 2024), section V and Appendix C. Computation comes from the shared cost tables,
communication from the hardware model. While gradients are synchronised behind a backward pass both are
slower by the device's overlap factors.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from hardware_models.crowding import together_s, unlike_groups
from hardware_models.gpus import DtypeError
from searchers.galvatron.communication import CollectiveTimes, transfer_s
from searchers.galvatron.layer_profiles import Collective, Layer, LayerProfiles
from searchers.galvatron.overlap import overlapped_s, stretch_s
from searchers.galvatron.pipeline_costs import LayerCost
from searchers.galvatron.released_memory import ReleasedMemory
from searchers.galvatron.released_time import ReleasedTime
from searchers.galvatron.strategies import DATA, SHARDED, TENSOR, Strategy
from simulator.lowering.step import adam_bytes
from simulator.problem import Problem


class Estimator:
    """Costs of layers and pipelines of one problem, memoised.

    Args:
        problem: Gives hardware and runtime.
        profiles: Costs of its layers.
        num_devices: Devices of a stage; all stages are taken to be alike, and as slow as the slowest.
        overlap_slowdown: Whether overlapping slows both sides (section V); off for Fig. 7's comparison.
        paper: Backward gathers of SDP and sums of gradients hide behind computation, whatever the runtime does.
        memory: ``shapes`` or ``released``, see `searchers.galvatron.released_memory`.
        time: ``tables`` or ``released``, see `searchers.galvatron.released_time`.
        schedule: ``gpipe`` or ``1f1b``.
        microbatches: Rule of `searchers.galvatron.microbatches`, which the release's times ask.
        outside: How embedding and head are cut, see `searchers.galvatron.options.Options`.
    """

    def __init__(
        self,
        problem: Problem,
        profiles: LayerProfiles,
        num_devices: int,
        *,
        overlap_slowdown: bool = True,
        paper: bool = False,
        memory: str = "shapes",
        time: str = "tables",
        schedule: str = "gpipe",
        microbatches: str = "released",
        outside: str = "layers",
    ) -> None:
        self.problem = problem
        self.outside = outside
        self.profiles = profiles
        self.num_devices = num_devices
        self.num_stages = problem.num_devices // num_devices
        self.released = (
            ReleasedMemory(problem, profiles, self.num_stages, schedule) if memory == "released" else None
        )
        self.factors = (1.0, 1.0)
        if overlap_slowdown:
            each = [problem.hardware.overlap_slowdown(gpu_type) for gpu_type in profiles.gpu_types]
            self.factors = max(computation for computation, _ in each), max(other for _, other in each)
        starts = range(0, problem.num_devices - num_devices + 1, num_devices)
        stages = unlike_groups(
            problem.hardware.cluster, (tuple(range(start, start + num_devices)) for start in starts)
        )
        members = (stage.members for stage in stages)
        self.times = CollectiveTimes(problem.hardware, *members, handover_s=problem.runtime.handover_s)
        self.released_time = None
        if time == "released":
            self.released_time = ReleasedTime(
                problem, profiles, self.num_stages, times=self.times, factors=self.factors, rule=microbatches
            )
        runtime = problem.runtime
        self.paper = paper
        self.gathers_ahead = paper or runtime.prefetches_gathers
        touched_bytes = adam_bytes(runtime)
        self._optimizer_s = max(
            problem.hardware.optimizer_step_s(gpu_type, touched_bytes) for gpu_type in profiles.gpu_types
        )
        self._costs: dict[tuple[object, ...], LayerCost | None] = {}
        self._transfers: dict[tuple[int, float], float] = {}
        self._ties: dict[tuple[tuple[int, ...], float], float] = {}
        self._elements: dict[tuple[int, int], float] = {}

    def capacity_bytes(self) -> float:
        """Return the memory budget E of a device."""
        return float(min(map(self.problem.capacity_bytes, range(self.problem.num_devices))))

    def layer(
        self, layer: Layer, strategy: Strategy, samples: int, *, accumulates: bool, held_ties: frozenset[str]
    ) -> LayerCost | None:
        """Return what a layer costs, or None where the strategy cannot cut it or the microbatch.

        Args:
            layer: The layer.
            strategy: On the stage's devices.
            samples: Samples of a microbatch over the whole stage.
            accumulates: More than one microbatch: sharded gradients stay whole until the last.
            held_ties: Tied parameters that an earlier layer of the stage holds already, laid out alike.
        """
        if samples % strategy.data:
            return None
        own = held_ties & frozenset(self.profiles.parameters(layer.kind, 1))
        key = (layer.kind, strategy, samples, accumulates, own)
        if key not in self._costs:
            try:
                self._costs[key] = self._layer(layer.kind, strategy, samples, accumulates, own)
            except DtypeError:
                raise
            except ValueError:  # heads or features do not divide: no strategy for this layer
                self._costs[key] = None
        return self._costs[key]

    def _layer(
        self, kind: int, strategy: Strategy, samples: int, accumulates: bool, held_ties: frozenset[str]
    ) -> LayerCost:
        local = samples // strategy.data
        profile = self.profiles.profile(kind, strategy.tensor, local)
        times, memory = profile.times, profile.memory
        moved = self.profiles.collectives(kind, strategy.tensor)
        parameters = self.profiles.parameters(kind, strategy.tensor)
        elements = sum(count for tie, count in parameters.items() if tie not in held_ties)
        runtime = self.problem.runtime
        by_use = runtime.reduces_ties_by_use and strategy.sharded == 1
        again = sum(parameters[tie] for tie in held_ties) if by_use else 0
        parameter_bytes, gradient_bytes = elements * runtime.parameter_bytes, elements * runtime.gradient_bytes
        travelling = runtime.travelling_gradient_bytes  # Gradients are kept in gradient_bytes.
        sizes = tuple(degree for _, degree in strategy.levels)
        # A sharded weight is gathered for every layer that uses it, also where an earlier one holds it.
        used = elements + sum(parameters[tie] for tie in held_ties)
        used_bytes = used * runtime.gathered_parameter_bytes
        gather_s = self._axis_s("all_gather", used_bytes, strategy, sizes, SHARDED)
        reduce_s = self._axis_s("reduce_scatter", elements * travelling, strategy, sizes, SHARDED)
        hidden_s, after_s = self._bucketed_s((elements / strategy.sharded + again) * travelling, strategy, sizes)
        reduce_s += hidden_s
        forward_s = times.forward_s + self._collectives_s(moved.forward, local, strategy, sizes) + gather_s
        forward_s = max(forward_s, times.forward_host_s)
        behind_s, exposed_s = times.backward_s, self._collectives_s(moved.backward, local, strategy, sizes)
        host_s = times.backward_host_s
        if strategy.checkpoint:
            behind_s += times.core_forward_s
            host_s += times.core_host_s
            exposed_s += self._collectives_s(moved.core_forward, local, strategy, sizes)
            exposed_s += gather_s if runtime.regathers_recomputed else 0.0
        prefetched_s = gather_s if self.gathers_ahead else 0.0
        exposed_s += gather_s - prefetched_s
        # The host launches ahead while the device communicates; where it takes longer than both, it alone counts.
        plain_s = max(overlapped_s(behind_s, prefetched_s, self.factors) + exposed_s, host_s)
        synced_s = max(overlapped_s(behind_s, prefetched_s + reduce_s, self.factors) + exposed_s, host_s) + after_s
        slowed_s = stretch_s(behind_s, prefetched_s + reduce_s, self.factors)
        slowed_s -= stretch_s(behind_s, prefetched_s, self.factors)
        shards = strategy.sharded
        whole_gradients = 1 if accumulates else shards
        forward_bytes = memory.checkpointed_bytes if strategy.checkpoint else memory.saved_bytes
        # A sharded layer's backward holds its parameters whole, and its gradients until they are scattered: all from
        # the first, or each from when it is made until they are joined, when nothing else of the layer is there.
        share = runtime.waiting_gradient_share
        scatters = shards > 1 and not accumulates
        peak_bytes = memory.again_peak_bytes if strategy.checkpoint else memory.peak_bytes
        early_bytes = memory.again_early_peak_bytes if strategy.checkpoint else memory.early_peak_bytes
        if scatters and share is not None:
            peak_bytes = memory.again_waiting_peak_bytes if strategy.checkpoint else memory.waiting_peak_bytes
            peak_bytes = max(peak_bytes, (1.0 + share) * elements * travelling)
        gathered_bytes = used_bytes if shards > 1 else 0.0
        gathered_bytes += elements * travelling if scatters and share is None else 0.0
        cost = LayerCost(
            step_s=forward_s + plain_s,
            sync_s=synced_s - plain_s + self._optimizer_s * elements / shards,
            stretch_s=min(slowed_s, synced_s - plain_s),
            forward_bytes=forward_bytes,
            backward_bytes=peak_bytes - forward_bytes + gathered_bytes,
            state_bytes=parameter_bytes / shards
            + gradient_bytes / whole_gradients
            + elements * runtime.optimizer_bytes / shards,
            optimizer_bytes=elements * runtime.optimizer_workspace_bytes / shards,
            output_bytes=memory.output_bytes,
            sent_bytes=memory.unkept_output_bytes if runtime.keeps_stage_outputs else 0.0,
            received_bytes=memory.far_input_bytes,
            buffer_bytes=memory.buffer_bytes,
            early_bytes=early_bytes - forward_bytes + gathered_bytes,
        )
        return replace(cost, **self.released.layer(kind, strategy, samples)._asdict()) if self.released else cost

    def waiting_bytes(
        self, holder: Layer, ties: Collection[str], strategy: Strategy, *, accumulates: bool
    ) -> float:
        """Return bytes of tied gradients that wait for a layer's, while others of their stage go backward.

        Args:
            holder: The layer.
            ties: Of its parameters, those that a later layer of the stage made gradients of.
            strategy: Of the layer.
            accumulates: More than one microbatch; else what is sharded is scattered, and whole for as long anyway.
        """
        if not ties or (strategy.sharded > 1 and not accumulates) or self.released:
            return 0.0
        try:
            parameters = self.profiles.parameters(holder.kind, strategy.tensor)
        except ValueError:  # the degree does not divide this layer
            return 0.0
        return float(sum(parameters[tie] for tie in ties) * self.problem.runtime.tied_gradient_bytes)

    def tied_layouts(self, layer: Layer, strategy: Strategy) -> Mapping[str, Hashable]:
        """Return how a layer lays its tied parameters out: layers of a stage that agree in this hold one once.

        Where embedding and head are whole on every device they always agree.
        """
        try:
            found = self.profiles.tied_layouts(layer.kind, strategy.tensor)
        except ValueError:  # the degree does not divide this layer
            return {}
        if self.outside == "data":
            return dict.fromkeys(found)
        return {tie: (strategy.levels, layout) for tie, layout in found.items()}

    def _axis_s(
        self, collective: str, num_bytes: float, strategy: Strategy, sizes: tuple[int, ...], kind: str
    ) -> float:
        position = strategy.axis_position(kind)
        return 0.0 if position is None else self.times.seconds(collective, num_bytes, sizes, (position,))

    def _bucketed_s(self, num_bytes: float, strategy: Strategy, sizes: tuple[int, ...]) -> tuple[float, float]:
        """Return seconds of summing a layer's whole gradients behind backward passes, and after the last of them.

        A layer has its share of a bucket that takes several; of such the last is complete when nothing is left to hide
        it behind.
        """
        if not num_bytes:
            return 0.0, 0.0
        stage_bytes = max(num_bytes, self._stage_elements(strategy) * self.problem.runtime.travelling_gradient_bytes)
        bucket_bytes = min(self.problem.runtime.gradient_bucket_bytes or float("inf"), stage_bytes)
        together = max(1.0, bucket_bytes / num_bytes)
        reduce_s = self._axis_s("all_reduce", together * num_bytes, strategy, sizes, DATA) / together
        last = bucket_bytes / stage_bytes if together > 1 and not self.paper else 0.0
        return (1 - last) * reduce_s, last * reduce_s

    def _stage_elements(self, strategy: Strategy) -> float:
        """Return the parameters that a rank reduces whole on average, if all layers of its stage have a strategy."""
        key = (strategy.tensor, strategy.sharded)
        if key not in self._elements:
            own, ties = 0.0, {}
            for layer in self.profiles.layers:
                try:
                    found = self.profiles.parameters(layer.kind, strategy.tensor)
                except ValueError:  # the degree does not divide this layer
                    continue
                own += found[""]
                ties.update({tie: count for tie, count in found.items() if tie})
            self._elements[key] = (own + sum(ties.values())) / strategy.sharded / self.num_stages
        return self._elements[key]

    def _collectives_s(
        self, items: Sequence[Collective], samples: int, strategy: Strategy, sizes: tuple[int, ...]
    ) -> float:
        position = strategy.axis_position(TENSOR)
        if position is None:
            return 0.0
        seconds, idle_s = self.times.seconds, self.times.handover_s
        return sum(idle_s + seconds(name, size * samples, sizes, (position,)) for name, size in items)

    def transition_s(self, before: LayerCost, first: Strategy, second: Strategy) -> float:
        """Return seconds of moving activations and gradients between two layers of a stage."""
        if first.layout == second.layout:
            return 0.0
        arriving = before.output_bytes * first.data / second.data
        return self.times.transition(first.layout, second.layout, before.output_bytes, arriving)

    def transfer_s(self, boundary: int, num_bytes: float) -> float:
        """Return seconds of one transfer behind stage ``boundary``, one direction."""
        key = (boundary, num_bytes)
        if key not in self._transfers:
            start, count = boundary * self.num_devices, self.num_devices
            self._transfers[key] = transfer_s(
                self.problem.hardware,
                range(start, start + count),
                range(start + count, start + 2 * count),
                num_bytes,
            )
        return self._transfers[key]

    def tie_sync_s(
        self, stages: Sequence[Sequence[Layer]], chosen: Sequence[Sequence[Strategy]], *, whole: bool
    ) -> float:
        """Return seconds of summing tied gradients that several stages hold, once an iteration.

        Every device does so with its counterparts at once: over nodes they share the NICs.

        Args:
            stages: Layers of each stage.
            chosen: A strategy for each.
            whole: Whether embedding and head are whole on each device, whatever the layers do.
        """
        holders: dict[str, dict[int, float]] = {}
        for position, (layers, choice) in enumerate(zip(stages, chosen, strict=True)):
            for layer, strategy in zip(layers, choice, strict=True):
                tensor, shards = (1, 1) if whole else (strategy.tensor, strategy.sharded)
                for tie, count in self.profiles.parameters(layer.kind, tensor).items():
                    if tie:
                        own = holders.setdefault(tie, {})
                        own[position] = max(own.get(position, 0.0), count / shards)
        total = 0.0
        for found in holders.values():
            if len(found) > 1:
                num_bytes = max(found.values()) * self.problem.runtime.gradient_accumulation_bytes
                total += self._counterparts_s(tuple(found), num_bytes)
        return total

    def _counterparts_s(self, positions: tuple[int, ...], num_bytes: float) -> float:
        """Return seconds in which each device of a stage all-reduces with its counterparts in others."""
        key = (positions, num_bytes)
        if key not in self._ties:
            size = self.num_devices
            members = [tuple(position * size + rank for position in positions) for rank in range(size)]
            self._ties[key] = together_s(self.problem.hardware.collective("all_reduce", num_bytes, m) for m in members)
        return self._ties[key]
