"""Collectives between an operator and where its inputs come from: an operator of its stage, or another stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardware_models.links import GATHERS
from simulator.lowering.crossing import SEQUENCE, Crossing, made_in_shards
from simulator.lowering.mesh import REDUCTIONS, MeshCollective, MeshSizes, batch_degree, mesh_sizes, reshard
from simulator.plan import Sharding
from workloads.kinds.base import BACKWARD_INPUT, FORWARD
from workloads.placements import PARTIAL, Placement

if TYPE_CHECKING:
    from simulator.costs import CostTables
    from simulator.operator_cost import OperatorCost

NOTHING: Mapping[str, Crossing] = {}

ShardingOf = Callable[[int], Sharding | None]
"""Sharding of the operators of a stage; None for others."""

Moves = list[tuple[str, MeshCollective, int, int]]
"""What ``input_collectives`` finds."""


@dataclass(frozen=True)
class _Source:
    """Where an input comes from.

    Attributes:
        owner: Operator whose split causes what turns the layout into a reader's.
        sharding: Of the operator whose mesh it is.
        sizes, placements: Mesh and layout of the tensor.
        gradient: Layout in which its gradient is wanted.
        in_shards: It lies in shards of the sequence, as it was made.
        bytes_on: Bytes of it on one rank, from the samples that each rank of the mesh works on.
    """

    owner: int
    sharding: Sharding
    sizes: MeshSizes
    placements: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    in_shards: bool
    bytes_on: Callable[[int], float]


def input_collectives(
    costs: CostTables,
    index: int,
    sharding_of: ShardingOf,
    samples: int,
    gpu_type: str,
    arrivals: Mapping[str, Crossing] = NOTHING,
) -> Moves:
    """Return the collectives between an operator and the sources of its inputs.

    Args:
        costs: Cost tables.
        index: The operator.
        sharding_of: Of its stage.
        samples: That one rank of it works on.
        gpu_type: Device type.
        arrivals: Tensors of other stages, as they arrive; others are taken to arrive as they are read.

    Returns:
        ``(phase, collective, owner, input position)``: in FORWARD the source's layout becomes this operator's, in
        BACKWARD_INPUT the gradient's layout becomes the one in which the source wants it. The owner is the operator
        whose split causes it (the row-parallel producer, the column-parallel consumer; the reader of what arrives).
    """
    own = sharding_of(index)
    assert own is not None
    sizes = mesh_sizes(own)
    joins = costs.problem.runtime.joins_gathers
    found: Moves = []
    for position, name in enumerate(costs.problem.workload.operators[index].inputs):
        source = _source(costs, index, name, sharding_of, gpu_type, arrivals)
        if source is None:
            continue
        splits = costs.splits(index, own)
        want = tuple(split.inputs[position] for split in splits)
        gradient = tuple(split.input_gradient(position) for split in splits)
        if sizes == source.sizes and source.placements == want and source.gradient == gradient:
            continue
        done_forward, done_backward = _served_before(costs, index, position, sharding_of, want, gradient)
        if not done_forward or gathers_alone(costs, want, in_shards=source.in_shards):
            source_bytes = source.bytes_on(samples * batch_degree(own) // batch_degree(source.sharding))
            for item in reshard(source.sizes, source.placements, sizes, want, source_bytes, joins=joins):
                found.append((FORWARD, item, source.owner, position))
        if not done_backward:
            input_bytes = costs.operator(index, own, samples, gpu_type).input_bytes[position]
            for item in reshard(sizes, gradient, source.sizes, source.gradient, input_bytes, joins=joins):
                found.append((BACKWARD_INPUT, item, index, position))
    return found


def gathered_inputs(cost: OperatorCost, moves: Moves) -> list[tuple[int, MeshCollective]]:
    """Return ``(input position, all-gather)`` of inputs that forward gathers and backward needs whole."""
    saved = {ref for ref, _ in cost.saved}
    return [
        (position, item)
        for phase, item, _, position in moves
        if phase == FORWARD and item.collective in GATHERS and f"input:{position}" in saved
    ]


def gathers_again(costs: CostTables, moves: Moves, position: int, *, in_shards: bool) -> bool:
    """Return whether backward gathers again what is among ``gathered_inputs``.

    Args:
        costs: Cost tables.
        moves: Before the operator.
        position: The input.
        in_shards: Its maker works on shards of the sequence, or another stage sent such.
    """
    moves_batch = any(item.moves_batch for phase, item, _, place in moves if phase == FORWARD and place == position)
    return in_shards and not (costs.problem.runtime.keeps_gathered_inputs or moves_batch)


def reduced_beside(costs: CostTables, cost: OperatorCost, index: int, moves: Moves) -> list[tuple[MeshCollective, int]]:
    """Return reductions of input gradients that travel while an operator's weight gradients are made, by input.

    Args:
        costs: Cost tables.
        cost: Of the operator.
        index: The operator.
        moves: Before it.
    """
    runtime = costs.problem.runtime
    if not (runtime.overlaps_input_reductions and runtime.host_runs_ahead and cost.backward_weight.device_s):
        return []
    own = [(item, position) for phase, item, owner, position in moves if (phase, owner) == (BACKWARD_INPUT, index)]
    return [(item, position) for item, position in own if item.collective in REDUCTIONS and not item.moves_batch]


def gathers_alone(costs: CostTables, want: Sequence[Placement], *, in_shards: bool) -> bool:
    """Return whether each reader that wants a layout makes its own copy of a tensor.

    Where operators reduce their own input gradients, they gather their own inputs from shards of the sequence.
    """
    return in_shards and SEQUENCE not in want and not costs.problem.runtime.sums_input_gradients


def _source(
    costs: CostTables, index: int, name: str, sharding_of: ShardingOf, gpu_type: str, arrivals: Mapping[str, Crossing]
) -> _Source | None:
    workload = costs.problem.workload
    producer = workload.producer.get(name)
    theirs = None if producer is None else sharding_of(producer)
    if producer is not None and theirs is not None:
        number = workload.operators[producer].outputs.index(name)
        splits = costs.splits(producer, theirs)
        return _Source(
            owner=producer,
            sharding=theirs,
            sizes=mesh_sizes(theirs),
            placements=tuple(split.outputs[number] for split in splits),
            gradient=tuple(split.output_gradient(number) for split in splits),
            in_shards=made_in_shards(theirs, [split.outputs[number] for split in splits]),
            bytes_on=lambda samples: costs.operator(producer, theirs, samples, gpu_type).output_bytes[number],
        )
    if name not in arrivals:
        return None
    arrival = arrivals[name]
    return _Source(
        owner=index,
        sharding=arrival.sharding,
        sizes=arrival.sizes,
        placements=arrival.placements,
        gradient=arrival.placements,
        in_shards=arrival.in_shards,
        bytes_on=lambda samples: arrival.arriving_bytes(
            costs.operator(arrival.reader[0], arrival.sharding, samples, gpu_type)
        ),
    )


def _served_before(
    costs: CostTables,
    index: int,
    before_position: int,
    sharding_of: ShardingOf,
    want: tuple[Placement, ...],
    gradient: tuple[Placement, ...],
) -> tuple[bool, bool]:
    """Return whether an earlier reader, or an earlier input of this one, has the tensor moved the same way.

    Readers that want one layout share its copy; their gradients are summed before they move, but for partial ones
    where the runtime has each operator reduce its own.
    """
    operators = costs.problem.workload.operators
    name, own = operators[index].inputs[before_position], sharding_of(index)
    assert own is not None
    forward = backward = False
    summed = costs.problem.runtime.sums_input_gradients or PARTIAL not in gradient
    for reader in costs.problem.workload.consumers[name]:
        if reader > index:
            break
        sharding = sharding_of(reader)
        if sharding is None or mesh_sizes(sharding) != mesh_sizes(own):
            continue
        splits = costs.splits(reader, sharding)
        for position, other in enumerate(operators[reader].inputs):
            if reader == index and position >= before_position:
                break
            if other == name:
                forward |= tuple(split.inputs[position] for split in splits) == want
                backward |= summed and tuple(split.input_gradient(position) for split in splits) == gradient
    return forward, backward
