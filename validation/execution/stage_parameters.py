"""The parameters of one stage on one rank: whole, or sharded as ZeRO says, gathered layer by layer.

A sharded parameter is flattened, padded, and cut into one chunk per rank of its sharded axes. ZeRO-1 and
ZeRO-2 keep the whole parameter, of which the own chunk is a view; ZeRO-3 keeps the chunk and gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from simulator.lowering.mesh import MeshSizes, parameter_layout
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups
from validation.execution.groups import GroupKey, StageGroups, group_keys
from validation.execution.parameters import boxed, initial_parameter, parameter_key
from validation.kinds.operator_context import Box, OperatorContext, box_shape
from workloads.kinds.base import Shape


@dataclass(frozen=True)
class Placed:
    """A parameter of a stage, whichever rank.

    Attributes:
        key: Name of the trainable tensor (tie key, or operator and parameter).
        operator, number: Where it is first used.
        group: How it is synchronised.
    """

    key: str
    operator: int
    number: int
    group: ParameterGroup

    @property
    def is_gathered(self) -> bool:
        """Whether the parameter itself is sharded (ZeRO-3)."""
        return self.group.zero == 3 and self.group.num_shards > 1


def placed_parameters(view: StageView) -> tuple[list[Placed], dict[int, list[int]]]:
    """Return the stage's parameters, tied ones once per layout, and per operator the positions it uses."""
    workload = view.costs.problem.workload
    groups = iter(parameter_groups(view))
    placed: list[Placed] = []
    used: dict[int, list[int]] = {}
    known: dict[object, int] = {}
    for index in view.operators:
        sharding = view.shardings[index]
        splits = view.costs.splits(index, sharding)
        for number, parameter in enumerate(workload.parameters(index)):
            key = parameter_key(workload, index, parameter)
            layout = (key, parameter_layout(sharding, splits, number))
            if layout not in known:
                group = next(groups)
                assert (group.operator, group.tie) == (index, parameter.tie), (group, index)
                known[layout] = len(placed)
                placed.append(Placed(key, index, number, group))
            used.setdefault(index, []).append(known[layout])
    assert next(groups, None) is None, "the plan derives more parameters than the stage has"
    return placed, used


@dataclass(eq=False)
class Held:
    """A parameter as one rank holds it.

    Attributes:
        placed: What it is.
        box, shape: Its part of the whole tensor before ZeRO.
        num_shards, shard: Of ZeRO.
        chunk_elements: Elements of a chunk, padded.
        whole: The parameter before ZeRO; None while a ZeRO-3 parameter is not gathered.
        trained: What the optimizer updates: the whole, or the own chunk.
        gradient: Of ``trained``, once reduced.
    """

    placed: Placed
    box: Box
    shape: Shape
    num_shards: int
    shard: int
    chunk_elements: int
    whole: torch.Tensor | None
    trained: torch.Tensor
    gradient: torch.Tensor | None = None

    @property
    def num_elements(self) -> int:
        """Elements before ZeRO."""
        return prod(self.shape)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return what this rank trains of a whole tensor: its part, or its chunk of it."""
        own = whole[self.box]
        if self.num_shards == 1:
            return own
        padded = own.new_zeros(self.num_shards * self.chunk_elements)
        padded[: self.num_elements] = own.reshape(-1)
        return padded.view(self.num_shards, -1)[self.shard]

    def fetch(self) -> torch.Tensor:
        """Return the whole parameter for backward; a lone NaN where it is not gathered, as none is needed."""
        if self.whole is not None:
            return self.whole
        return self.trained.detach().new_full((), float("nan"))


@dataclass
class GatherUnit:
    """ZeRO-3 parameters of one layer that are gathered together.

    Attributes:
        layer: Index of the layer.
        sizes, axes: Mesh and sharded axes.
        members: The parameters.
        flat: Own chunks, one after the other.
        work, gathered: A gather under way.
    """

    layer: int
    sizes: MeshSizes
    axes: tuple[int, ...]
    members: list[Held] = field(default_factory=list)
    flat: torch.Tensor | None = None
    work: Any = None
    gathered: torch.Tensor | None = None

    def start(self, groups: StageGroups) -> None:
        """Launch the gather, unless it is under way or done."""
        if self.gathered is None and self.members[0].whole is None:
            assert self.flat is not None
            self.gathered, self.work = groups.along("gather", self.sizes, self.axes).all_gather(self.flat, wait=False)

    def finish(self) -> None:
        """Wait for the gather and cut out the parameters."""
        if self.gathered is None:
            return
        if self.work is not None:
            self.work.wait()
        offset = 0
        for held in self.members:
            columns = self.gathered[:, offset : offset + held.chunk_elements]
            held.whole = columns.reshape(-1)[: held.num_elements].view(held.shape)
            offset += held.chunk_elements
        self.gathered = self.work = None

    def release(self) -> None:
        """Let go of the gathered parameters."""
        self.finish()
        for held in self.members:
            held.whole = None


class StageParameters:
    """Everything a rank holds of a stage's parameters.

    Args:
        view: The stage.
        contexts: Per operator with parameters, this rank's context.
        groups: Communicators.
        device, dtype: Of the parameters.
    """

    def __init__(
        self,
        view: StageView,
        contexts: dict[int, OperatorContext],
        groups: StageGroups,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.view = view
        self.groups = groups
        self.placed, self.used = placed_parameters(view)
        self.held = [self._hold(placed, contexts[placed.operator], device, dtype) for placed in self.placed]
        self.units = self._make_units()
        layer_of = view.costs.problem.workload.operators
        self.units_of_layer: dict[int, list[GatherUnit]] = {}
        unit_of = {id(held): unit for unit in self.units for held in unit.members}
        for index, positions in self.used.items():
            for position in positions:
                unit = unit_of.get(id(self.held[position]))
                if unit is not None and unit not in self.units_of_layer.setdefault(layer_of[index].layer, []):
                    self.units_of_layer[layer_of[index].layer].append(unit)

    def _hold(self, placed: Placed, context: OperatorContext, device: torch.device, dtype: torch.dtype) -> Held:
        workload, group = self.view.costs.problem.workload, placed.group
        if device.type == "cuda":
            torch.cuda.empty_cache()  # or it would lie in what making the last one left, and hold it for good
        _, full = initial_parameter(workload, placed.operator, placed.number, dtype=dtype, device=device)
        box = context.parameter_boxes[placed.number]
        own, shape = boxed(full, box), box_shape(box)
        shards = group.num_shards
        chunk = -(-own.numel() // shards)
        held = Held(placed, box, shape, shards, 0, chunk, None, own)
        if shards == 1:
            held.whole = held.trained = own.requires_grad_()
            return held
        held.shard = self.groups.along("gather", group.sizes, group.sharded_axes).position
        flat = own.new_zeros(shards * chunk)
        flat[: own.numel()] = own.view(-1)
        mine = slice(held.shard * chunk, (held.shard + 1) * chunk)
        if placed.is_gathered:
            held.trained = flat[mine].clone().requires_grad_()
        else:
            held.whole = flat[: own.numel()].view(shape).requires_grad_()
            held.trained = flat[mine].requires_grad_()
        return held

    def _make_units(self) -> list[GatherUnit]:
        operators = self.view.costs.problem.workload.operators
        units: dict[object, GatherUnit] = {}
        for held in self.held:
            if held.placed.is_gathered:
                group = held.placed.group
                layer = operators[group.operator].layer
                key = (layer, group.sizes, group.sharded_axes)
                units.setdefault(key, GatherUnit(layer, group.sizes, group.sharded_axes)).members.append(held)
        for unit in units.values():
            unit.flat = torch.cat([held.trained.detach() for held in unit.members])
            offset = 0
            for held in unit.members:
                held.trained = unit.flat[offset : offset + held.chunk_elements].requires_grad_()
                offset += held.chunk_elements
        return list(units.values())

    def of_operator(self, index: int) -> list[Held]:
        """Return the parameters of an operator, in the order of its kind."""
        return [self.held[position] for position in self.used.get(index, ())]

    def refresh(self) -> None:
        """Gather updated chunks of ZeRO-1 and ZeRO-2 parameters (``parameter_refresh``)."""
        wanted: dict[tuple[MeshSizes, tuple[int, ...]], list[Held]] = {}
        for held in self.held:
            group = held.placed.group
            if held.num_shards > 1 and group.zero in (1, 2):
                wanted.setdefault((group.sizes, group.sharded_axes), []).append(held)
        for (sizes, axes), members in wanted.items():
            chunks = torch.cat([held.trained.detach() for held in members])
            gathered, _ = self.groups.along("gather", sizes, axes).all_gather(chunks)
            offset = 0
            for held in members:
                assert held.whole is not None
                columns = gathered[:, offset : offset + held.chunk_elements].reshape(-1)
                with torch.no_grad():
                    held.whole.view(-1).copy_(columns[: held.num_elements])
                offset += held.chunk_elements


def parameter_group_keys(view: StageView, ranks: tuple[int, ...]) -> Iterator[GroupKey]:
    """Yield the communicators that gathers need."""
    for group in parameter_groups(view):
        if group.num_shards > 1:
            yield from group_keys("gather", ranks, group.sizes, group.sharded_axes)


class LayerGathers:
    """Gathers sharded parameters while a pass goes from layer to layer; the next layer is prefetched.

    Args:
        parameters: Of the stage.
        layers: In the order of the pass.
        releases: A layer is let go of when the pass leaves it.
        prefetches: The next layer is gathered while one computes.
    """

    def __init__(self, parameters: StageParameters, layers: list[int], *, releases: bool, prefetches: bool) -> None:
        self.parameters = parameters
        self.layers = layers
        self.releases = releases
        self.prefetches = prefetches
        self.current: int | None = None

    def enter(self, layer: int) -> None:
        """Have the parameters of ``layer`` at hand."""
        if layer == self.current:
            return
        position = self.layers.index(layer)
        ahead = self.layers[position + 1 : position + 2] if self.prefetches else []
        here, next_units = self._units(layer), [unit for after in ahead for unit in self._units(after)]
        if self.current is not None and self.releases:
            for unit in self._units(self.current):
                if unit not in here and unit not in next_units:
                    unit.release()
        for unit in [*here, *next_units]:
            unit.start(self.parameters.groups)
        for unit in here:
            unit.finish()
        self.current = layer

    def _units(self, layer: int) -> list[GatherUnit]:
        return self.parameters.units_of_layer.get(layer, [])

    def also(self, layer: int) -> None:
        """Have a layer at hand besides (a recompute segment that reaches over several)."""
        for unit in self._units(layer):
            unit.start(self.parameters.groups)
            unit.finish()

    def end(self) -> None:
        """End the pass."""
        if self.releases:
            for layer in self.layers:
                for unit in self._units(layer):
                    unit.release()
        self.current = None
