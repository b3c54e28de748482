"""Strategies of every operator on one logical mesh, and what they and the edges between them cost.

Source: Alpa (OSDI 2022), section 4. Costs are seconds of the shared hardware model instead of XLA's unit costs:
computation, collectives inside and between operators (all groups of a mesh at once), and the synchronisation of
gradients, which happens once for all microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from hardware_models.gpus import DtypeError
from searchers.alpa.meshes import LogicalMesh
from searchers.alpa.strategy_graph import Array, Factor, StrategyGraph
from simulator.costs import CostTables
from simulator.lowering.crossing import is_sequence_parallel
from simulator.lowering.edges import gathered_inputs, gathers_again, input_collectives
from simulator.lowering.mesh import MeshCollective, batch_degree, mesh_sizes, parameter_layout
from simulator.operator_cost import OperatorCost
from simulator.plan import Axis, Sharding, resolve
from simulator.saved import is_private, saved_tensors
from simulator.segments import Segment
from workloads.kinds.base import FORWARD
from workloads.placements import PARTIAL

NOT_OF_ALPA = ("row_sequence",)
"""Splits that are Megatron-LM's: to Alpa a row split whose sum is scattered is a row split."""
ATTRIBUTES = ("seconds", "sync_s", "elements", "sharded_elements", "saved_bytes", "remaining_bytes")
"""What a choice of strategies adds up besides its objective: seconds of one microbatch forward and backward,
seconds of gradient synchronisation, elements of parameters (whole, and divided over the batch axes that sum their
gradients, as ZeRO-2 shards states), tensors kept for backward, what remains of them where the layer is recomputed (what
leaves it, and inputs of the graph)."""


@dataclass(frozen=True)
class IntraOpOptions:
    """How the intra-operator problem is posed.

    Attributes:
        recompute: Layers keep their inputs only and run forward again in backward.
        counts_computation: Node costs include computation; without (as printed), only communication counts and
            heavy operators must not be replicated, which makes computation equal.
        free_axes: Operators may use any split on every axis, also where the batch is forced elsewhere.
        min_samples: Samples of a microbatch that a rank has at least: a profile may know no fewer.
    """

    recompute: bool = True
    counts_computation: bool = True
    free_axes: bool = False
    min_samples: int = 1


WHOLE_BYTES = 2.0**28
"""What stands for all gradients of a stage where a runtime reduces them at once: larger ones are no quicker a byte."""


@lru_cache(maxsize=4)
def saved_first(costs: CostTables) -> dict[int, tuple[str, ...]]:
    """Return per operator the tensors that it is the first to keep: a tensor kept twice counts once."""
    workload = costs.problem.workload
    gpu_type = costs.problem.hardware.gpu_type(0)
    seen: set[str] = set()
    found: dict[int, tuple[str, ...]] = {}
    for index in range(len(workload)):
        names = [name for name, _ in saved_tensors(workload, index, costs.operator(index, (), 1, gpu_type))]
        found[index] = tuple(name for name in dict.fromkeys(names) if name not in seen)
        seen.update(names)
    return found


class IntraOp:
    """Strategies and costs on one logical mesh for one microbatch size; everything memoised by signature.

    Args:
        costs: Shared cost tables.
        mesh: The logical mesh.
        microbatch_size: Samples of one microbatch over the mesh.
        num_microbatches: Over which gradient synchronisation is spread.
        options: See `IntraOpOptions`.
    """

    def __init__(
        self,
        costs: CostTables,
        mesh: LogicalMesh,
        microbatch_size: int,
        num_microbatches: int,
        options: IntraOpOptions,
    ) -> None:
        self.costs = costs
        self.mesh = mesh
        self.microbatch_size = microbatch_size
        self.num_microbatches = num_microbatches
        self.options = options
        hardware = costs.problem.hardware
        per_node = hardware.cluster.devices_per_node
        span = mesh.submesh
        self.devices = tuple(
            node * per_node + gpu for node in range(span.nodes) for gpu in range(span.gpus_per_node)
        )
        self.gpu_type = hardware.gpu_type(0)
        self._strategies: dict[int, tuple[Sharding, ...]] = {}
        self._nodes: dict[tuple[int, bool, tuple[str, ...]], tuple[Array, Array]] = {}
        self._edges: dict[tuple[int, int, tuple[tuple[int, int], ...]], Array] = {}
        self._seconds: dict[MeshCollective, float] = {}
        self._keeps: dict[int, tuple[str, ...]] = {}

    def strategies(self, index: int) -> tuple[Sharding, ...]:
        """Return the shardings of an operator that are legal on the mesh, none if nothing is."""
        signature = self.costs.problem.workload.signatures[index]
        if signature not in self._strategies:
            self._strategies[signature] = tuple(self._legal(index))
        return self._strategies[signature]

    def _legal(self, index: int) -> list[Sharding]:
        op = self.costs.problem.workload.operators[index]
        table = op.definition.splits(op.attributes)
        axes: list[list[Axis | None]] = []
        for number, size in enumerate((self.mesh.rows, self.mesh.columns)):
            if size == 1:
                axes.append([None])
            elif number == 0 and self.mesh.batch_forced and not self.options.free_axes:
                axes.append([Axis("batch", size)])
            else:
                axes.append([Axis(name, size) for name in table if name not in NOT_OF_ALPA])
        found: list[Sharding] = []
        repeats: list[Sharding] = []
        for choice in itertools.product(*axes):
            sharding = resolve(tuple(axis for axis in choice if axis is not None), op)
            if sharding in found or sharding in repeats or not self._fits(index, sharding):
                continue
            heavy = self.cost(index, sharding).matmul_flop > 0
            replicated = any(axis.split == "replicate" for axis in sharding)
            (repeats if heavy and replicated else found).append(sharding)
        return found or repeats  # a heavy operator is repeated only where nothing else is legal

    def _fits(self, index: int, sharding: Sharding) -> bool:
        if self.microbatch_size % batch_degree(sharding) or self.samples(sharding) < self.options.min_samples:
            return False
        op = self.costs.problem.workload.operators[index]
        for name in {axis.split for axis in sharding}:
            limit = op.definition.split_limit(op.attributes, name)
            if limit is not None and limit % prod(axis.size for axis in sharding if axis.split == name):
                return False
        try:
            self.cost(index, sharding)
        except DtypeError:
            raise
        except ValueError:  # the shape cannot be cut so
            return False
        return True

    def samples(self, sharding: Sharding) -> int:
        """Return the samples of a microbatch on one rank."""
        return self.microbatch_size // batch_degree(sharding)

    def cost(self, index: int, sharding: Sharding) -> OperatorCost:
        """Return what an operator costs on one rank."""
        return self.costs.operator(index, sharding, self.samples(sharding), self.gpu_type)

    def collective_s(self, item: MeshCollective) -> float:
        """Return seconds of a collective that all its groups run at once, links and NICs shared."""
        if item not in self._seconds:
            crowded_s = self.costs.problem.hardware.crowded_collective_s
            self._seconds[item] = max(
                crowded_s(item.collective, item.num_bytes, group)
                for group in self.costs.unlike_groups(self.devices, item.sizes, item.axes)
            )
        return self._seconds[item]

    def between_s(self, item: MeshCollective) -> float:
        """Return seconds of a collective that the computation of operators stands still for."""
        return self.collective_s(item) + self.costs.problem.runtime.handover_s

    def node(self, index: int, leaves_layer: bool) -> tuple[Array, Array]:
        """Return objective float64[strategies] and attributes float64[len(ATTRIBUTES), strategies].

        Args:
            index: Operator.
            leaves_layer: Later layers read its output, so recomputation keeps it.
        """
        workload = self.costs.problem.workload
        key = (workload.signatures[index], leaves_layer, self.keeps_first(index))
        if key not in self._nodes:
            counted = saved_first(self.costs).get(index, ())
            columns = [self._choice(index, sharding, leaves_layer, counted) for sharding in self.strategies(index)]
            self._nodes[key] = (
                np.array([objective for objective, _ in columns]),
                np.array([values for _, values in columns]).T.reshape(len(ATTRIBUTES), len(columns)),
            )
        return self._nodes[key]

    def keeps_first(self, index: int) -> tuple[str, ...]:
        """Return which tensors an operator is the first to keep, in words that equal operators share."""
        if index not in self._keeps:
            op = self.costs.problem.workload.operators[index]
            named = (*op.inputs, *op.outputs)
            self._keeps[index] = tuple(
                name.rpartition("/")[2] if is_private(name) else str(named.index(name))
                for name in saved_first(self.costs).get(index, ())
            )
        return self._keeps[index]

    def _choice(
        self, index: int, sharding: Sharding, leaves_layer: bool, counted: Sequence[str]
    ) -> tuple[float, list[float]]:
        costs, runtime = self.costs, self.costs.problem.runtime
        cost = self.cost(index, sharding)
        forwards = 2 if self.options.recompute else 1
        computation = forwards * _busy_s(cost.forward) + _busy_s(cost.backward)
        communication = 0.0
        for phase, item in cost.internal:
            if not cost.contains(item):
                communication += self.between_s(item) * (forwards if phase == FORWARD else 1)
        sync, whole, sharded = 0.0, 0.0, 0.0
        splits = costs.splits(index, sharding)
        for number, (_, elements) in enumerate(cost.parameters):
            summed = tuple(
                axis for axis, split in enumerate(splits) if sharding and split.parameter_gradient(number) == PARTIAL
            )
            shards = prod(sharding[axis].size for axis in summed if sharding[axis].split == "batch")
            if summed:
                num_bytes = float(elements * runtime.travelling_gradient_bytes)
                # A gradient travels in a bucket with others, at the rate of the bucket.
                together = max(num_bytes, float(runtime.gradient_bucket_bytes or WHOLE_BYTES))
                reduction = MeshCollective("all_reduce", mesh_sizes(sharding), summed, together)
                sync += self.collective_s(reduction) * num_bytes / together
            whole += elements
            sharded += elements / shards
        # An operator may keep a tensor twice: scores of attention read queries and keys from one.
        workload = costs.problem.workload
        kept = {name: size for name, size in saved_tensors(workload, index, cost) if name in counted}
        seconds = computation + communication
        objective = sync / self.num_microbatches + (seconds if self.options.counts_computation else communication)
        saved, remaining = sum(kept.values()), sum(kept[name] for name in kept.keys() & workload.input_names)
        remaining += sum(cost.output_bytes) if leaves_layer else 0.0
        return objective, [seconds, sync, whole, sharded, float(saved), float(remaining)]

    @property
    def scatters_gradients(self) -> bool:
        """Whether ZeRO scatters gradients in each backward pass; else they add up whole, and go with the last."""
        runtime = self.costs.problem.runtime
        return runtime.reduce_gradients == "every" or (self.num_microbatches == 1 and runtime.overlap_gradient_sync)

    def state_bytes_per_element(self, *, sharded: bool) -> tuple[float, float]:
        """Return bytes of model states per element, and per element that is divided over the batch axes."""
        runtime = self.costs.problem.runtime
        if not sharded:
            return float(runtime.state_bytes_per_parameter), 0.0
        divided = self.scatters_gradients
        whole = runtime.parameter_bytes + (0 if divided else runtime.gradient_bytes)
        return float(whole), float(runtime.optimizer_bytes + (runtime.gradient_bytes if divided else 0))

    def tied_layouts(self, index: int, sharding: Sharding) -> Iterator[tuple[Hashable, float, float]]:
        """Yield tie and layout of an operator's shared weights, their elements, and those divided over batch axes.

        Operators of a stage for which the first is equal hold the weight once.
        """
        splits = self.costs.splits(index, sharding)
        for number, (parameter, elements) in enumerate(self.cost(index, sharding).parameters):
            if parameter.tie is not None:
                shards = prod(
                    axis.size
                    for axis, split in zip(sharding, splits, strict=False)  # a single device has a split, but no axis
                    if axis.split == "batch" and split.parameter_gradient(number) == PARTIAL
                )
                yield (parameter.tie, parameter_layout(sharding, splits, number)), float(elements), elements / shards

    def edge(self, producer: int, consumer: int) -> Array:
        """Return seconds of resharding, forward and backward: float64[strategies, strategies]."""
        workload = self.costs.problem.workload
        source, target = workload.operators[producer], workload.operators[consumer]
        wires = tuple(
            (position, source.outputs.index(name))
            for position, name in enumerate(target.inputs)
            if name in source.outputs
        )
        key = (workload.signatures[producer], workload.signatures[consumer], wires)
        if key not in self._edges:
            self._edges[key] = np.array(
                [
                    [self._reshard_s(producer, have, consumer, want) for want in self.strategies(consumer)]
                    for have in self.strategies(producer)
                ]
            )
        return self._edges[key]

    def _reshard_s(self, producer: int, have: Sharding, consumer: int, want: Sharding) -> float:
        chosen = {producer: have, consumer: want}
        forwards = 2 if self.options.recompute else 1
        total = 0.0
        moves = input_collectives(self.costs, consumer, chosen.get, self.samples(want), self.gpu_type)
        for phase, item, owner, _ in moves:
            if not self.cost(owner, chosen[owner]).contains(item):
                total += self.between_s(item) * (forwards if phase == FORWARD else 1)
        in_shards = is_sequence_parallel(have)
        for position, item in gathered_inputs(self.cost(consumer, want), moves):
            if gathers_again(self.costs, moves, position, in_shards=in_shards):
                total += self.between_s(item)
        return total

    def factors(self, operators: Sequence[int], leaving: set[int], inside: int) -> list[Factor]:
        """Return the factors of some operators and of their edges from operators not before ``inside``."""
        workload = self.costs.problem.workload
        found = []
        for index in operators:
            cost, attributes = self.node(index, index in leaving)
            found.append(Factor((index,), cost, attributes))
            for producer in self.producers(index):
                if producer >= inside:
                    table = self.edge(producer, index)
                    zeros = np.zeros((len(ATTRIBUTES), *table.shape))
                    zeros[0] = table
                    found.append(Factor((producer, index), table, zeros))
        assert len(workload) > operators[-1]
        return found

    def producers(self, index: int) -> list[int]:
        """Return the operators whose outputs an operator reads, ascending."""
        workload = self.costs.problem.workload
        return sorted(
            {workload.producer[name] for name in workload.operators[index].inputs if name in workload.producer}
        )

    def graph(self, start: int, stop: int, leaving: Collection[int] = ()) -> StrategyGraph:
        """Return the whole problem of operators ``[start, stop)``, numbered from 0."""
        nodes = [self.node(index, index in leaving) for index in range(start, stop)]
        edges = {
            (producer - start, index - start): self.edge(producer, index)
            for index in range(start, stop)
            for producer in self.producers(index)
            if producer >= start
        }
        return StrategyGraph([cost for cost, _ in nodes], edges, [attributes for _, attributes in nodes])


def _busy_s(work: Segment) -> float:
    """Return the seconds of an operator whose launches hide behind those before, unless they take longer."""
    return max(work.device_s, work.host_s)
