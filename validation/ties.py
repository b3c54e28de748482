"""Tensors shared between stages (tied embeddings): their gradients are summed over the stages.

Where every stage holds the tensor alike, rank i of one stage and rank i of the others sum up what they hold,
as ``simulator.lowering.epilogue.tied_groups`` derives. Where layouts differ, the whole tensor is summed over
all ranks, which costs more than derived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from simulator.lowering.epilogue import tied_groups
from simulator.lowering.mesh import mesh_sizes
from simulator.lowering.transfers import regions
from validation.groups import GroupKey, GroupPool
from validation.operator_context import Box, box_of
from validation.stage_parameters import Held, placed_parameters
from validation.wiring import StageWiring
from workloads.kinds.base import Shape


@dataclass(frozen=True)
class TiedPlace:
    """One stage's hold on a tied tensor.

    Attributes:
        stage: Index.
        ranks: Global ranks of the stage.
        boxes: What each of them holds.
        shards: ZeRO mesh and axes, and ranks that share.
    """

    stage: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    shards: tuple[object, ...]


@dataclass(frozen=True)
class Tie:
    """One tensor that several stages hold.

    Attributes:
        key: Its name.
        shape: Whole.
        places: The stages.
        matches: All hold it alike.
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
    """Return the tensors that several stages hold.

    Raises:
        ValueError: If stages hold one in different layouts and ZeRO shards its gradient.
    """
    views = [wiring.view for wiring in wirings]
    placed = [placed_parameters(view)[0] for view in views]
    known = {key for key, _, _ in tied_groups(views)}
    holders: dict[str, list[tuple[StageWiring, int]]] = {}
    for position, parameters in enumerate(placed):
        for number, parameter in enumerate(parameters):
            if parameter.group.tie is not None:
                holders.setdefault(parameter.key, []).append((wirings[position], number))
    found = []
    for key, stages in holders.items():
        if len(stages) < 2:
            continue
        places: list[TiedPlace] = []
        shape: Shape = ()
        for wiring, number in stages:
            parameter = placed[wiring.view.position][number]
            place, shape = _place(wiring, parameter.operator, parameter.number, parameter.group.num_shards)
            places.append(place)
        matches = all((place.boxes, place.shards) == (places[0].boxes, places[0].shards) for place in places)
        if not matches and any(place.shards for place in places):
            raise ValueError(
                f"stages {', '.join(str(place.stage) for place in places)}: tied tensor {key!r} lies differently in "
                "these stages and ZeRO shards its gradient; the executor sums such tensors only where all stages "
                "hold them alike (same devices count, same axes), or without ZeRO"
            )
        found.append(Tie(key, shape, tuple(places), matches))
    spread = {tie.key for tie in found if any(len(group) > 1 for group in tie.groups())}
    assert known <= spread, (known, spread)
    return found


def _place(wiring: StageWiring, operator: int, number: int, num_shards: int) -> tuple[TiedPlace, Shape]:
    view = wiring.view
    sharding = view.shardings[operator]
    shape = view.costs.problem.workload.parameters(operator)[number].shape
    placements = [split.parameters[number] for split in view.costs.splits(operator, sharding)]
    held = regions(mesh_sizes(sharding), placements, shape[0])
    shards: tuple[object, ...] = ()
    if num_shards > 1:
        shards = (mesh_sizes(sharding), tuple(axis.zero for axis in sharding))
    boxes = tuple(box_of(region, shape) for region in held)
    return TiedPlace(view.position, wiring.ranks, boxes, shards), shape


def tie_keys(ties: Sequence[Tie]) -> set[GroupKey]:
    """Return the communicators that ties need."""
    return {("reduce", ranks) for tie in ties for ranks in tie.groups()}


def sum_tied_gradients(ties: Sequence[Tie], held: dict[int, dict[str, Held]], pool: GroupPool) -> None:
    """Give every holder of a tied tensor the sum of all stages' gradients.

    Args:
        ties: All of the plan.
        held: By stage of this rank, parameters by key.
        pool: Communicators.
    """
    for tie in ties:
        mine = [held[place.stage][tie.key] for place in tie.places if place.stage in held]
        if not mine:
            continue
        if tie.matches:
            _sum_alike(tie, mine, pool)
        else:
            _sum_whole(tie, held, pool)


def _gradient(held: Held) -> torch.Tensor:
    assert held.gradient is not None, held.placed.key
    return held.gradient


def _sum_alike(tie: Tie, mine: Sequence[Held], pool: GroupPool) -> None:
    total = _gradient(mine[0])
    for other in mine[1:]:
        total.add_(_gradient(other))
    (ranks,) = [group for group in tie.groups() if pool.rank in group]
    if len(ranks) > 1:
        pool.group("reduce", ranks).all_reduce(total)
    for other in mine[1:]:
        _gradient(other).copy_(total)


def _sum_whole(tie: Tie, held: dict[int, dict[str, Held]], pool: GroupPool) -> None:
    total: torch.Tensor | None = None
    for place in tie.places:
        if place.stage not in held:
            continue
        own = held[place.stage][tie.key]
        if total is None:
            total = _gradient(own).new_zeros(tie.shape)
        # The first rank that holds a part speaks for it.
        local = place.ranks.index(pool.rank)
        if place.boxes.index(place.boxes[local]) == local:
            total[own.box] += _gradient(own)
    assert total is not None
    if len(tie.ranks) > 1:
        pool.group("reduce", tie.ranks).all_reduce(total)
    for place in tie.places:
        if place.stage in held:
            own = held[place.stage][tie.key]
            _gradient(own).copy_(total[own.box])
