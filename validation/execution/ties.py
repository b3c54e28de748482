"""Tensors that several stages hold, or one stage in several layouts (tied embeddings): gradients are summed.

Where every stage holds the tensor alike, rank i of one stage and rank i of the others sum up what they hold,
as ``simulator.lowering.epilogue.tied_groups`` derives. Where layouts differ, the whole tensor is summed over
all ranks, which costs more than derived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from simulator.lowering.epilogue import tied_groups
from simulator.lowering.mesh import groups
from simulator.lowering.transfers import regions
from validation.execution.groups import GroupKey, GroupPool
from validation.execution.stage_parameters import Held, Placed, placed_parameters
from validation.execution.wiring import StageWiring
from validation.kinds.operator_context import Box, box_of
from workloads.kinds.base import Shape


@dataclass(frozen=True)
class TiedPlace:
    """One hold on a tied tensor: a stage, and one of its layouts there.

    Attributes:
        stage: Index.
        number: Position among the stage's parameters.
        ranks: Global ranks of the stage.
        parts: What each of them holds: its box, and which chunk of how many if ZeRO shards the gradient.
    """

    stage: int
    number: int
    ranks: tuple[int, ...]
    parts: tuple[tuple[Box, int, int], ...]


@dataclass(frozen=True)
class Tie:
    """One tensor that is held in several places.

    Attributes:
        key: Its name.
        shape: Whole.
        places: The places.
        matches: Different stages, and all hold it alike.
    """

    key: str
    shape: Shape
    places: tuple[TiedPlace, ...]
    matches: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks concerned."""
        return tuple(sorted({rank for place in self.places for rank in place.ranks}))

    def groups(self) -> set[tuple[int, ...]]:
        """Return the sets of ranks that sum up."""
        if not self.matches:
            return {self.ranks}
        columns = zip(*(place.ranks for place in self.places), strict=True)
        return {tuple(sorted(set(column))) for column in columns}


def find_ties(wirings: Sequence[StageWiring]) -> list[Tie]:
    """Return the tensors that are held in several places."""
    holders: dict[str, list[TiedPlace]] = {}
    shapes: dict[str, Shape] = {}
    for wiring in wirings:
        for number, placed in enumerate(placed_parameters(wiring.view)[0]):
            if placed.group.tie is not None:
                parameter = wiring.workload.parameters(placed.operator)[placed.number]
                shapes[placed.key] = parameter.shape
                holders.setdefault(placed.key, []).append(_place(wiring, placed, number, parameter.shape))
    found = []
    for key, places in holders.items():
        if len(places) > 1:
            alike = all(place.parts == places[0].parts for place in places)
            several = len({place.stage for place in places}) == len(places)
            found.append(Tie(key, shapes[key], tuple(places), alike and several))
    derived = {key for key, _, _ in tied_groups([wiring.view for wiring in wirings])}
    summed = {tie.key for tie in found if any(len(ranks) > 1 for ranks in tie.groups())}
    assert derived == summed, (derived, found)
    return found


def _place(wiring: StageWiring, placed: Placed, number: int, shape: Shape) -> TiedPlace:
    view, group = wiring.view, placed.group
    splits = view.costs.splits(placed.operator, view.shardings[placed.operator])
    held = regions(group.sizes, [split.parameters[placed.number] for split in splits], shape[0])
    chunks = [0] * len(held)
    if group.num_shards > 1:
        for members in groups(group.sizes, group.sharded_axes):
            for chunk, member in enumerate(members):
                chunks[member] = chunk
    parts = tuple((box_of(region, shape), chunk, group.num_shards) for region, chunk in zip(held, chunks, strict=True))
    return TiedPlace(view.position, number, wiring.ranks, parts)


def tie_keys(ties: Sequence[Tie]) -> set[GroupKey]:
    """Return the communicators that ties need."""
    return {("reduce", ranks) for tie in ties for ranks in tie.groups()}


def sum_tied_gradients(ties: Sequence[Tie], held: Mapping[int, Sequence[Held]], pool: GroupPool) -> None:
    """Give every holder of a tied tensor the sum of all places' gradients.

    Args:
        ties: All of the plan.
        held: By stage of this rank, its parameters.
        pool: Communicators.
    """
    for tie in ties:
        mine = [(place, held[place.stage][place.number]) for place in tie.places if place.stage in held]
        if mine:
            sum_up = _sum_alike if tie.matches else _sum_whole
            sum_up(tie, mine, pool)


def _gradient(held: Held) -> torch.Tensor:
    assert held.gradient is not None, held.placed.key
    return held.gradient


def _sum_alike(tie: Tie, mine: Sequence[tuple[TiedPlace, Held]], pool: GroupPool) -> None:
    total = _gradient(mine[0][1])
    for _, other in mine[1:]:
        total.add_(_gradient(other))
    (ranks,) = [group for group in tie.groups() if pool.rank in group]
    if len(ranks) > 1:
        pool.group("reduce", ranks).all_reduce(total)
    for _, other in mine[1:]:
        _gradient(other).copy_(total)


def _sum_whole(tie: Tie, mine: Sequence[tuple[TiedPlace, Held]], pool: GroupPool) -> None:
    total = _gradient(mine[0][1]).new_zeros(tie.shape)
    for place, held in mine:
        # The first rank that holds a part speaks for it.
        local = place.ranks.index(pool.rank)
        if place.parts.index(place.parts[local]) == local:
            padded = total.new_zeros(held.num_shards, held.chunk_elements)
            padded[held.shard] = _gradient(held).reshape(-1)
            total[held.box] += padded.view(-1)[: held.num_elements].view(held.shape)
    if len(tie.ranks) > 1:
        pool.group("reduce", tie.ranks).all_reduce(total)
    for _, held in mine:
        _gradient(held).copy_(held.part_of(total).view_as(_gradient(held)))
