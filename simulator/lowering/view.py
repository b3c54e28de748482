"""A stage of a plan with everything one may ask about its operators."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from simulator.costs import CostTables
from simulator.lowering.crossing import Crossing, arriving, is_sequence_parallel, made_in_shards, passing
from simulator.lowering.edges import Moves, gathered_inputs, gathers_again, gathers_alone, input_collectives
from simulator.lowering.mesh import MeshCollective, batch_degree, mesh_sizes, settled
from simulator.operator_cost import OperatorCost
from simulator.plan import Plan, Sharding, Stage
from simulator.saved import PART
from workloads.kinds.base import FORWARD
from workloads.placements import Shard


@dataclass(frozen=True)
class StageView:
    """A stage of a canonical plan with per-operator look-ups.

    Attributes:
        position: Index of the stage.
        stage: The stage.
        plan: The canonical plan.
        costs: Cost tables.
        gpu_type: Device type that sizes are asked for (sizes do not depend on it).
        entering: Tensors that earlier stages make in shards of the sequence and that reach this one.
    """

    position: int
    stage: Stage
    plan: Plan
    costs: CostTables
    gpu_type: str
    entering: tuple[str, ...] = ()

    @cached_property
    def operators(self) -> list[int]:
        """Operator indices in order."""
        return self.stage.indices()

    @cached_property
    def shardings(self) -> dict[int, Sharding]:
        """Canonical sharding of each operator."""
        return dict(zip(self.operators, self.stage.sharding_per_operator(), strict=True))

    @cached_property
    def kept(self) -> dict[Hashable, Any]:
        """What others have worked out for this stage and may need again."""
        return {}

    @cached_property
    def shared(self) -> dict[Hashable, Any]:
        """What was worked out for any stage of this form: all that holds for one whatever its operators are called.

        Operators named in it are to be counted from the stage's first one.
        """
        stage = self.stage
        if len(stage.operators) != 1:
            return {}
        costs, ((first, stop),) = self.costs, stage.operators
        form = (
            costs.operator_forms[first:stop].tobytes(),
            stage.shardings,
            tuple((a - first, b - first) for a, b in stage.recompute),
            self.plan.microbatch_size,
            self.plan.replica_assignment,
            self.gpu_types,
            tuple(name in self.entering for name in self.arrivals),
        )
        return costs.forms.get(form, dict[Hashable, Any])

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        """Device types of the stage, in the order of its devices."""
        types = self.costs.problem.gpu_types
        return tuple(dict.fromkeys(types[device] for device in self.stage.devices))

    def contains(self, owner: int, item: MeshCollective, gpu_types: Iterable[str] | None = None) -> bool:
        """Return whether an operator's durations contain a collective on all device types, or all of those given."""
        if len(self.gpu_types) == 1:
            return self.cost(owner).contains(item)
        types = self.gpu_types if gpu_types is None else gpu_types
        return all(self.cost_on(owner, gpu_type).contains(item) for gpu_type in types)

    def cost_on(self, index: int, gpu_type: str) -> OperatorCost:
        """Return what an operator costs on one of the stage's device types."""
        return self.costs.operator(index, self.shardings[index], self.samples(index), gpu_type)

    def samples(self, index: int) -> int:
        """Return the samples that the largest replica works on at once in operator ``index``."""
        return self._samples[index]

    @cached_property
    def _samples(self) -> dict[int, int]:
        size, rotates = self.plan.microbatch_size, self.plan.rotates
        found: dict[Sharding, int] = {}
        for _, sharding in self.stage.shardings:
            found[sharding] = size if rotates else -(-size // batch_degree(sharding))
        runs = (itertools.repeat(found[sharding], count) for count, sharding in self.stage.shardings)
        return dict(zip(self.operators, itertools.chain.from_iterable(runs), strict=True))

    def cost(self, index: int) -> OperatorCost:
        """Return the cost of operator ``index`` on the largest replica."""
        if index not in self._costs:
            self._costs[index] = self.costs.operator(index, self.shardings[index], self.samples(index), self.gpu_type)
        return self._costs[index]

    @cached_property
    def _costs(self) -> dict[int, OperatorCost]:
        return {}

    def input_collectives(self, index: int) -> Moves:
        """Return the collectives between an operator and the sources of its inputs (``edges``)."""
        key = ("input collectives", index)
        if key not in self.kept:
            self.kept[key] = input_collectives(
                self.costs, index, self.shardings.get, self.samples(index), self.gpu_type, self.arrivals
            )
        found: Moves = self.kept[key]
        return found

    def scattered_inputs(self, index: int) -> list[tuple[int, float]]:
        """Return ``(input position, bytes left)`` of inputs that are reduced to a shard on their way."""
        return [
            (position, item.num_bytes / prod(item.sizes[axis] for axis in item.axes))
            for phase, item, _, position in self.input_collectives(index)
            if phase == FORWARD and item.collective == "reduce_scatter"
        ]

    def sliced_inputs(self, index: int) -> dict[int, str]:
        """Return the inputs of which an operator copies a part, as ranks have them alike: position, name of the part.

        Who wants the same part shares it. Not of what is reduced to that part on its way to a reader; nor of what lies
        in one piece: such a part is a view, and holds the whole, unless the runtime copies it (``copies_parts``).
        """
        workload, cost, runtime = self.costs.problem.workload, self.cost(index), self.costs.problem.runtime
        moved = {position for phase, _, _, position in self.input_collectives(index) if phase == FORWARD}
        leading = 1 if runtime.implementation.sequence_first else 0
        found = {}
        for position, name in enumerate(workload.operators[index].inputs):
            producer = workload.producer.get(name)
            if position in moved or producer not in self.shardings or name in self._reduced_to_parts:
                continue
            number = workload.operators[producer].outputs.index(name)
            if cost.input_bytes[position] >= self.cost(producer).output_bytes[number]:
                continue
            reader, maker = self.shardings[index], self.shardings[producer]
            want = [split.inputs[position] for split in self.costs.splits(index, reader)]
            made = [split.outputs[number] for split in self.costs.splits(producer, maker)]
            cut = {each.dim for each in want if isinstance(each, Shard)}
            cut -= {each.dim for each in made if isinstance(each, Shard)}
            cut |= {0} if batch_degree(reader) != batch_degree(maker) else set()
            if runtime.copies_parts or cut != {leading}:
                found[position] = f"{name}/{PART} {mesh_sizes(reader)} {want}"
        return found

    @cached_property
    def _reduced_to_parts(self) -> frozenset[str]:
        operators = self.costs.problem.workload.operators
        scattered = ((index, position) for index in self.operators for position, _ in self.scattered_inputs(index))
        return frozenset(operators[index].inputs[position] for index, position in scattered)

    def gathered_inputs(self, index: int) -> list[tuple[int, MeshCollective]]:
        """Return ``(input position, all-gather)`` of inputs that forward gathers and backward needs whole."""
        return gathered_inputs(self.cost(index), self.input_collectives(index))

    def gathers_again(self, index: int, position: int) -> bool:
        """Return whether backward gathers again what is among ``gathered_inputs``: shards of the sequence."""
        workload = self.costs.problem.workload
        name = workload.operators[index].inputs[position]
        made_by = self.shardings.get(workload.producer[name])
        in_shards = name in self.entering if made_by is None else is_sequence_parallel(made_by)
        return gathers_again(self.costs, self.input_collectives(index), position, in_shards=in_shards)

    def saves_gathered(self, index: int, name: str) -> bool:
        """Return whether an operator keeps an input as it has gathered it, and does not need it as it was made."""
        workload = self.costs.problem.workload
        producer, op = workload.producer.get(name), workload.operators[index]
        keeps_shards = self.costs.problem.runtime.keeps_gathered_shards
        if keeps_shards or producer not in self.shardings or producer == index:
            return False
        made = self.cost(producer).output_bytes[workload.operators[producer].outputs.index(name)]
        position = op.inputs.index(name)
        return self.cost(index).input_bytes[position] > made and not self.gathers_again(index, position)

    def gathers_alone(self, index: int, position: int) -> bool:
        """Return whether an operator shares no gathered copy of an input with other readers."""
        name = self.costs.problem.workload.operators[index].inputs[position]
        want = tuple(split.inputs[position] for split in self.costs.splits(index, self.shardings[index]))
        return gathers_alone(self.costs, want, in_shards=self.crossing(name).in_shards)

    @cached_property
    def num_turns(self) -> int:
        """Replicas that take whole microbatches in turn; 1 where microbatches are sliced."""
        return batch_degree(self.shardings[self.operators[0]]) if self.plan.rotates else 1

    @cached_property
    def leaving(self) -> tuple[str, ...]:
        """Tensors made here and read in a later stage."""
        own = set(self.operators)
        consumers = self.costs.problem.workload.consumers
        return tuple(
            tensor
            for index in self.operators
            for tensor in self.costs.problem.workload.operators[index].outputs
            if any(reader not in own for reader in consumers.get(tensor, ()))
        )

    @cached_property
    def leaving_in_shards(self) -> tuple[str, ...]:
        """Those of the tensors ``leaving`` that are made in shards of the sequence."""
        return tuple(name for name in self.leaving if self.crossing(name).in_shards)

    @cached_property
    def arrivals(self) -> dict[str, Crossing]:
        """Tensors made elsewhere and read here, as they arrive."""
        workload = self.costs.problem.workload
        own = set(self.operators)
        found: dict[str, Crossing] = {}
        for index in self.operators:
            for position, name in enumerate(workload.operators[index].inputs):
                producer = workload.producer.get(name)
                if producer is not None and producer not in own and name not in found:
                    sharding = self.shardings[index]
                    wanted = tuple(split.inputs[position] for split in self.costs.splits(index, sharding))
                    shape, in_shards = workload.tensors[name], name in self.entering
                    reader = index, position
                    found[name] = arriving(sharding, wanted, shape, in_shards=in_shards, reader=reader)
        return found

    def crossing(self, tensor: str) -> Crossing:
        """Return how this stage holds a tensor that crosses a boundary of it: made, read or passed on here."""
        workload = self.costs.problem.workload
        producer = workload.producer[tensor]
        if producer in self.shardings:
            sharding = self.shardings[producer]
            number = workload.operators[producer].outputs.index(tensor)
            made = settled(split.outputs[number] for split in self.costs.splits(producer, sharding))
            return Crossing(mesh_sizes(sharding), made, sharding, in_shards=made_in_shards(sharding, made))
        if tensor in self.arrivals:
            return self.arrivals[tensor]
        sharding = self.shardings[self.operators[0]]
        shape, in_shards = workload.tensors[tensor], tensor in self.entering
        return arriving(sharding, passing(sharding), shape, in_shards=in_shards)
