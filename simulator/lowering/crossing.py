"""Which layout a tensor has where it crosses from one stage to another: decided here, for everybody who asks.

It is that of its first reader in the receiving stage; a stage that only passes a tensor on holds it whole but for its
samples. One thing comes before: shards of the sequence cross as such where the receiving stage would hold the tensor
whole, since that moves fewer bytes, and readers gather them. Partial sums are reduced before they cross.

Source:
    Megatron-LM (core/pipeline_parallel/schedules.py, get_tensor_shapes): under sequence parallelism pipelines send
    sequence length / tensor-parallel degree of every tensor, whatever reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from simulator.lowering.mesh import MeshCollective, MeshSizes, mesh_sizes
from simulator.operator_cost import OperatorCost
from simulator.plan import Sharding
from workloads.placements import REPLICATE, Placement, Shard

SEQUENCE = Shard(1)


@dataclass(frozen=True)
class Crossing:
    """How a stage holds a tensor that crosses a boundary of it.

    Attributes:
        sizes, placements: Mesh and layout.
        sharding: Of the operator whose mesh it is.
        num_parts: Shards into which what that operator would hold is cut; 1 where it lies as that one has it.
        reader: ``(operator, input)`` that reads it first, of what arrives to be read.
        in_shards: It lies in shards of the sequence, as it was made.
    """

    sizes: MeshSizes
    placements: tuple[Placement, ...]
    sharding: Sharding
    num_parts: int = 1
    reader: tuple[int, int] = (-1, -1)
    in_shards: bool = False

    def arriving_bytes(self, reader: OperatorCost) -> float:
        """Return the bytes of what arrives on one rank, from the cost of its first reader."""
        return reader.input_bytes[self.reader[1]] / self.num_parts


def is_sequence_parallel(sharding: Sharding) -> bool:
    """Return whether an operator works on shards of the sequence."""
    return any(axis.split == "sequence" for axis in sharding)


def gathers_shards(item: MeshCollective, maker: Sharding | None) -> bool:
    """Return whether a collective gathers shards of the sequence that an operator, so sharded, has just made."""
    return item.collective == "all_gather" and maker is not None and is_sequence_parallel(maker)


def made_in_shards(sharding: Sharding, made: Sequence[Placement]) -> bool:
    """Return whether an operator leaves an output in shards of the sequence.

    Args:
        sharding: Canonical sharding of the operator.
        made: Layout of the output.
    """
    return is_sequence_parallel(sharding) and SEQUENCE in made


def arriving(
    sharding: Sharding,
    wanted: tuple[Placement, ...],
    shape: Sequence[int],
    *,
    in_shards: bool,
    reader: tuple[int, int] = (-1, -1),
) -> Crossing:
    """Return how a stage receives a tensor.

    Args:
        sharding: Of its first reader, or, if the stage only passes it on, of the stage's first operator.
        wanted: Layout in which that operator reads it, or would pass it on.
        shape: Of the tensor, per sample.
        in_shards: It was made in shards of the sequence.
        reader: ``(operator, input)`` that reads it first, if any does.
    """
    parts = num_parts(sharding, wanted, shape) if in_shards else 1
    if parts > 1:
        wanted = tuple(
            SEQUENCE if placement == REPLICATE and axis.split != "batch" else placement
            for axis, placement in zip(sharding, wanted, strict=True)
        )
    return Crossing(mesh_sizes(sharding), wanted, sharding, parts, reader, in_shards and SEQUENCE in wanted)


def num_parts(sharding: Sharding, wanted: Sequence[Placement], shape: Sequence[int]) -> int:
    """Return into how many shards what arrives is cut if it was made in shards: as many as would hold the same.

    1 where the reader wants a part of each sample anyway, or where the tokens cannot be divided so.
    """
    if any(isinstance(placement, Shard) and placement.dim > 0 for placement in wanted):
        return 1
    copies = prod(
        axis.size
        for axis, placement in zip(sharding, wanted, strict=False)
        if placement == REPLICATE and axis.split != "batch"
    )
    return copies if shape and shape[0] % copies == 0 else 1


def passing(sharding: Sharding) -> tuple[Placement, ...]:
    """Return how a stage holds a tensor that it only passes on, were it not in shards of the sequence.

    Args:
        sharding: Of the stage's first operator.
    """
    return tuple(Shard(0) if axis.split == "batch" else REPLICATE for axis in sharding) or (REPLICATE,)
