"""What the layers of a workload cost under tensor parallelism, by distinct layer, from the shared cost tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from searchers.layer_memory import LayerMemory, LayerWalk
from searchers.layers import blocks
from simulator.costs import CostTables
from simulator.lowering.edges import input_collectives
from simulator.lowering.mesh import parameter_layout
from simulator.operator_cost import OperatorCost
from simulator.plan import Axis, Sharding, resolve
from simulator.uniform import repeated_layers
from workloads.kinds.base import FORWARD
from workloads.local import dtype_bytes

Collective = tuple[str, float]
"""Name of a collective and its bytes for one sample of a rank."""


@dataclass(frozen=True)
class Layer:
    """One layer as the planner counts: a repeated layer with what lies before the first and behind others.

    Attributes:
        number: Place in the model.
        kind: Equal for layers that cost the same.
        span: Operators ``[start, stop)``.
        core: The repeated layer itself: what activation checkpointing computes again.
    """

    number: int
    kind: int
    span: tuple[int, int]
    core: tuple[int, int]


class LayerTimes(NamedTuple):
    """Seconds of one layer for one microbatch on one rank, no collective.

    Attributes:
        forward_s, backward_s: On the device.
        core_forward_s: Of that, what is computed again under checkpointing.
        forward_host_s, backward_host_s, core_host_s: What launching these takes the host, whatever the device does.
    """

    forward_s: float
    backward_s: float
    core_forward_s: float
    forward_host_s: float
    backward_host_s: float
    core_host_s: float


@dataclass(frozen=True)
class LayerProfile:
    """One layer for one microbatch on one rank under a tensor degree: how long it takes and what it holds."""

    times: LayerTimes
    memory: LayerMemory


@dataclass(frozen=True)
class LayerCollectives:
    """Tensor-parallel collectives of a layer, bytes per sample: forward, of the core alone, backward."""

    forward: tuple[Collective, ...]
    core_forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]


class LayerProfiles:
    """Layers of one problem and what they cost, memoised per kind, tensor degree and samples.

    Args:
        costs: Shared cost tables.
    """

    def __init__(self, costs: CostTables) -> None:
        self.costs = costs
        self.gpu_types = tuple(dict.fromkeys(costs.problem.gpu_types))
        self.gpu_type = self.gpu_types[0]  # For sizes, which are the same on all; times are those of the slowest.
        self._profiles: dict[tuple[int, int, int], LayerProfile] = {}
        self._collectives: dict[tuple[int, int], LayerCollectives] = {}
        self._parameters: dict[tuple[int, int], Mapping[str, int]] = {}
        self._core_parameters: dict[tuple[int, int], int] = {}
        self._tied_layouts: dict[tuple[int, int], Mapping[str, Hashable]] = {}
        self._crossing: dict[int, float] = {}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The model's layers in order."""
        workload = self.costs.problem.workload
        known: dict[object, int] = {}
        found = []
        pairs = zip(blocks(workload), repeated_layers(workload), strict=True)
        start = 0
        for number, (span, core) in enumerate(pairs):
            # Which inputs come from before the last layer: an encoder's output, but for its first reader.
            far = tuple(
                workload.producer.get(name, start) < start
                for op in workload.operators[span[0] : span[1]]
                for name in op.inputs
            )
            signature = (tuple(workload.signatures[span[0] : span[1]]), core[0] - span[0], core[1] - span[0], far)
            start = span[0]
            found.append(Layer(number, known.setdefault(signature, len(known)), span, core))
        return tuple(found)

    @cached_property
    def examples(self) -> tuple[Layer, ...]:
        """The first layer of every kind."""
        first: dict[int, Layer] = {}
        for layer in self.layers:
            first.setdefault(layer.kind, layer)
        return tuple(first[kind] for kind in sorted(first))

    @cached_property
    def plain_cores(self) -> tuple[tuple[int, int], ...]:
        """Operators ``[start, stop)`` of every layer without what joins it to the one before.

        Swin merges patches before some layers: those are the next one with operators in front.
        """
        return tuple(
            (layer.core[0] + len(self._joining(layer, after)), layer.core[1]) for layer, after in self._with_next
        )

    @cached_property
    def plain_kinds(self) -> Mapping[int, int]:
        """The kind that stands for each kind: that of the layer without what joins it to the one before."""
        return {
            layer.kind: after.kind if self._joining(layer, after) else layer.kind for layer, after in self._with_next
        }

    @property
    def _with_next(self) -> Iterator[tuple[Layer, Layer]]:
        return zip(self.layers, (*self.layers[1:], self.layers[-1]), strict=True)

    def _joining(self, layer: Layer, after: Layer) -> list[str]:
        """Return the roles that a layer has in front of those of the next one, if it ends in the next one's."""
        operators = self.costs.problem.workload.operators
        own, plain = ([op.role for op in operators[each.core[0] : each.core[1]]] for each in (layer, after))
        extra = len(own) - len(plain)
        return own[:extra] if extra > 0 and own[extra:] == plain else []

    def crossing_bytes(self, layer: Layer) -> float:
        """Return the bytes, for one sample, of what crosses a boundary behind a layer.

        Its output, and what later layers read besides: an encoder's output crosses every boundary of the decoder.
        """
        if layer.number not in self._crossing:
            workload, problem = self.costs.problem.workload, self.costs.problem
            stop, total = layer.span[1], 0.0
            for op in workload.operators[:stop]:
                for number, name in enumerate(op.outputs):
                    if any(reader >= stop for reader in workload.consumers[name]):
                        dtype = op.definition.output_dtype(number)
                        total += prod(workload.tensors[name]) * dtype_bytes(dtype, problem.runtime.implementation)
            self._crossing[layer.number] = total
        return self._crossing[layer.number]

    def profile(self, kind: int, tensor: int, samples: int) -> LayerProfile:
        """Return the costs of a layer kind for that many samples on a rank.

        Raises:
            ValueError: If the layer cannot be split so.
        """
        low, high = _neighbours(samples)
        first = self._exact(kind, tensor, low)
        if high == low:
            return first
        second = self._exact(kind, tensor, high)
        share = (samples - low) / (high - low)
        seconds = ((1 - share) * one + share * other for one, other in zip(first.times, second.times, strict=True))
        sizes = ((1 - share) * one + share * other for one, other in zip(first.memory, second.memory, strict=True))
        return LayerProfile(LayerTimes(*seconds), LayerMemory(*sizes))

    def _exact(self, kind: int, tensor: int, samples: int) -> LayerProfile:
        key = (kind, tensor, samples)
        if key not in self._profiles:
            self._profiles[key] = self._build(*key)
        return self._profiles[key]

    def _build(self, kind: int, tensor: int, samples: int) -> LayerProfile:
        layer = self.examples[kind]
        by_type = [self._times(layer, tensor, samples, gpu_type) for gpu_type in self.gpu_types]
        times = LayerTimes(*map(max, zip(*by_type, strict=True)))
        before = self.layers[layer.number - 1].span[0] if layer.number else layer.span[0]

        def cost_of(index: int) -> OperatorCost:
            return self.costs.operator(index, self._sharding(tensor, index), samples, self.gpu_type)

        walk = LayerWalk(self.costs, layer.span, layer.core, before, cost_of)
        return LayerProfile(times, walk.memory())

    def _times(self, layer: Layer, tensor: int, samples: int, gpu_type: str) -> LayerTimes:
        costs = {
            index: self.costs.operator(index, self._sharding(tensor, index), samples, gpu_type)
            for index in range(*layer.span)
        }
        forward = [cost.forward for cost in costs.values()]
        again = [costs[index].recomputed for index in range(*layer.core)]
        pairs = [(cost.backward_input, cost.backward_weight) for cost in costs.values()]
        return LayerTimes(
            sum(each.device_s for each in forward),
            sum(first.device_s + second.device_s for first, second in pairs),
            sum(each.device_s for each in again),
            sum(each.host_s for each in forward),
            sum(first.host_s + second.host_s for first, second in pairs),
            sum(each.host_s for each in again),
        )

    def _sharding(self, tensor: int, index: int) -> Sharding:
        return resolve((Axis("tensor", tensor),), self.costs.problem.workload.operators[index])

    def collectives(self, kind: int, tensor: int) -> LayerCollectives:
        """Return the tensor-parallel collectives of a layer kind, bytes for one sample of a rank."""
        key = (kind, tensor)
        if key not in self._collectives:
            layer = self.examples[kind]
            forward: list[Collective] = []
            core: list[Collective] = []
            backward: list[Collective] = []

            def sharding_of(index: int) -> Sharding:
                return self._sharding(tensor, index)

            for index in range(*layer.span) if tensor > 1 else ():
                inside = layer.core[0] <= index < layer.core[1]
                found = input_collectives(self.costs, index, sharding_of, 1, self.gpu_type)
                items = [(phase, item) for phase, item, _, _ in found]
                items += self.costs.operator(index, sharding_of(index), 1, self.gpu_type).internal
                for phase, item in items:
                    entry = (item.collective, item.num_bytes)
                    if phase == FORWARD:
                        forward.append(entry)
                        if inside:
                            core.append(entry)
                    else:
                        backward.append(entry)
            self._collectives[key] = LayerCollectives(tuple(forward), tuple(core), tuple(backward))
        return self._collectives[key]

    def core_parameters(self, kind: int, tensor: int) -> int:
        """Return local parameter elements of the repeated layer of a kind."""
        key = (kind, tensor)
        if key not in self._core_parameters:
            self._core_parameters[key] = sum(
                count
                for index in range(*self.examples[kind].core)
                for _, count in self.costs.operator(index, self._sharding(tensor, index), 1, self.gpu_type).parameters
            )
        return self._core_parameters[key]

    def millions(self, kind: int) -> int:
        """Return the millions of parameters of a layer kind without what joins it to the one before."""
        return round(self.core_parameters(self.plain_kinds[kind], 1) / 1e6)

    def parameters(self, kind: int, tensor: int) -> Mapping[str, int]:
        """Return local parameter elements of a layer kind by tie key; ``""`` is what is not tied."""
        key = (kind, tensor)
        if key not in self._parameters:
            found: dict[str, int] = {"": 0}
            for index in range(*self.examples[kind].span):
                cost = self.costs.operator(index, self._sharding(tensor, index), 1, self.gpu_type)
                for parameter, count in cost.parameters:
                    if parameter.tie is None:
                        found[""] += count
                    else:
                        found[parameter.tie] = count
            self._parameters[key] = found
        return self._parameters[key]

    def tied_layouts(self, kind: int, tensor: int) -> Mapping[str, Hashable]:
        """Return how the tied parameters of a layer kind lie on tensor ranks, by tie key."""
        key = (kind, tensor)
        if key not in self._tied_layouts:
            found: dict[str, Hashable] = {}
            for index in range(*self.examples[kind].span):
                sharding = self._sharding(tensor, index)
                cost = self.costs.operator(index, sharding, 1, self.gpu_type)
                for number, (parameter, _) in enumerate(cost.parameters):
                    if parameter.tie is not None:
                        found[parameter.tie] = parameter_layout(sharding, self.costs.splits(index, sharding), number)
            self._tied_layouts[key] = found
        return self._tied_layouts[key]


def _neighbours(samples: int) -> tuple[int, int]:
    """Return the grid points around a number of samples: every number to 8, then eight per octave.

    >>> [_neighbours(number) for number in (7, 16, 19, 100)]
    [(7, 7), (16, 16), (18, 20), (96, 104)]
    """
    if samples <= 8:
        return samples, samples
    step = 1 << (samples.bit_length() - 4)
    low = samples // step * step
    return (low, low) if low == samples else (low, low + step)
