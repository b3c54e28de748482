"""Activations and gradients between stages: who sends which slice to whom, and the sending of it.

Routes are those of ``simulator.lowering.transfers`` (checked here byte for byte), so split and concat between
stages of unequal replication need no case of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from simulator.lowering.transfers import Region, boundary, route
from validation.execution.groups import Connection, GroupKey, GroupPool
from validation.execution.wiring import StageWiring
from validation.kinds.operator_context import DTYPES, Box, box_of, box_shape
from workloads.kinds.base import Shape
from workloads.local import dtype_bytes

FORWARD_WAY, BACKWARD_WAY = 0, 1
WAYS = ("forward", "backward")


@dataclass(frozen=True)
class Piece:
    """A slice of one tensor that one rank sends another.

    Attributes:
        source, target: Local devices of the sending and of the receiving stage.
        box: In the whole tensor.
        number: Position among the pieces of its tensor, for tags.
    """

    source: int
    target: int
    box: Box
    number: int


@dataclass(frozen=True)
class TensorRoute:
    """How one tensor crosses one boundary in one direction.

    Attributes:
        tensor: Name.
        shape: Of the whole tensor of one microbatch.
        dtype: Torch type.
        held, wanted: Box of each local device of the sending and of the receiving stage.
        pieces: All slices.
    """

    tensor: str
    shape: Shape
    dtype: torch.dtype
    held: dict[int, Box]
    wanted: dict[int, Box]
    pieces: tuple[Piece, ...]


def _intersection(a: Box, b: Box) -> Box:
    return tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


def _inside(box: Box, outer: Box) -> Box:
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer, strict=True))


def tensor_route(
    tensor: str, dtype: torch.dtype, shape: Shape, sender: dict[int, Region], receiver: dict[int, Region]
) -> TensorRoute:
    """Return how a tensor gets from one stage's layout to another's."""
    held = {rank: box_of(region, shape) for rank, region in sender.items()}
    wanted = {rank: box_of(region, shape) for rank, region in receiver.items()}
    pieces = tuple(
        Piece(source, target, _intersection(held[source], wanted[target]), number)
        for number, (source, target, _) in enumerate(route(sender, receiver))
    )
    return TensorRoute(tensor, shape, dtype, held, wanted, pieces)


@dataclass
class Boundary:
    """One boundary between consecutive stages, both directions, every turn.

    Attributes:
        position: Between stage ``position`` and the next.
        first, second: The stages.
        tensors: Names of what crosses.
        routes: By direction and turn.
        smaller: The same for the last microbatch, where it is smaller, and the number of that microbatch.
    """

    position: int
    first: StageWiring
    second: StageWiring
    tensors: tuple[str, ...]
    routes: dict[tuple[int, int], list[TensorRoute]] = field(default_factory=dict)
    smaller: tuple[Boundary, int] | None = None

    def __post_init__(self) -> None:
        workload = self.first.workload
        implementation = self.first.view.costs.problem.runtime.implementation
        self.turns = (self.first.view.num_turns, self.second.view.num_turns)
        num_turns = self.turns[0] * self.turns[1]
        for turn in range(num_turns):
            totals: dict[tuple[int, int, int], float] = {}
            for tensor in self.tensors:
                maker = workload.operators[workload.producer[tensor]]
                word = maker.definition.output_dtype(maker.outputs.index(tensor))
                dtype = DTYPES[implementation.dtype if word == "activation" else word]
                shape = self.first.shape(tensor)
                ends = self.first.boundary_regions(tensor, turn), self.second.boundary_regions(tensor, turn)
                for way in (FORWARD_WAY, BACKWARD_WAY):
                    found = tensor_route(tensor, dtype, shape, ends[way], ends[1 - way])
                    self.routes.setdefault((way, turn), []).append(found)
                    for piece in found.pieces:
                        source, target = self.ranks(way, piece)
                        if source != target:
                            size = dtype_bytes(word, implementation) * _numel(piece.box)
                            totals[way, source, target] = totals.get((way, source, target), 0.0) + size
            self._check(turn, totals)

    def _check(self, turn: int, totals: dict[tuple[int, int, int], float]) -> None:
        rank_of = {
            device: rank
            for wiring in (self.first, self.second)
            for device, rank in zip(wiring.view.stage.devices, wiring.ranks, strict=True)
        }
        derived = {
            (way, rank_of[item.source], rank_of[item.target]): item.num_bytes
            for way, items in enumerate(boundary(self.first.view, self.second.view, self.tensors, turn))
            for item in items
        }
        same = totals.keys() == derived.keys() and all(abs(totals[key] - derived[key]) < 0.5 for key in totals)
        assert same, f"boundary {self.position}: {totals} is not what the plan derives, {derived}"

    def routes_of(self, way: int, microbatch: int) -> list[TensorRoute]:
        """Return how the tensors of a microbatch cross in one direction."""
        if self.smaller is not None and microbatch == self.smaller[1]:
            return self.smaller[0].routes_of(way, microbatch)
        return self.routes[way, microbatch % (self.turns[0] * self.turns[1])]

    def ranks(self, way: int, piece: Piece) -> tuple[int, int]:
        """Return the global ranks that send and receive a piece."""
        sender, receiver = (self.first, self.second) if way == FORWARD_WAY else (self.second, self.first)
        return sender.ranks[piece.source], receiver.ranks[piece.target]

    def lane(self, way: int, source: int, target: int) -> GroupKey:
        """Return the communicator from one rank to another: of this boundary, one way, up or down the ranks.

        NCCL ignores tags: what two ranks send each other over one communicator happens in order. Over a common one
        each could wait with a send for the other's receive, which stands behind a send that waits as well.
        """
        ranks = tuple(sorted({*self.first.ranks, *self.second.ranks}))
        return f"{WAYS[way]} {self.position} {'up' if source < target else 'down'}", ranks

    def connections(self) -> set[Connection]:
        """Return who sends whom, and on which communicator."""
        ends = {
            (way, *self.ranks(way, piece))
            for (way, _), routes in self.routes.items()
            for found in routes
            for piece in found.pieces
        }
        found = {(self.lane(way, source, target), source, target) for way, source, target in ends if source != target}
        return found | self.smaller[0].connections() if self.smaller is not None else found


def _numel(box: Box) -> int:
    total = 1
    for part in box:
        total *= part.stop - part.start
    return total


@dataclass
class _Expected:
    """A tensor on its way to this rank."""

    whole: torch.Tensor
    parts: list[tuple[Any, torch.Tensor, Box]]


class Postman:
    """Sends and receives for one rank, over all boundaries.

    Args:
        boundaries: Of the plan.
        pool: Communicators.
        device: Where tensors live.
    """

    def __init__(self, boundaries: Sequence[Boundary], pool: GroupPool, device: torch.device) -> None:
        self.boundaries = boundaries
        self.pool = pool
        self.device = device
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._expected: dict[tuple[int, int, int], dict[str, _Expected]] = {}
        self._local: dict[tuple[int, int, int, str, int], torch.Tensor] = {}

    def _handle(self, position: int, way: int, source: int, target: int) -> Any:
        return self.pool.group(*self.boundaries[position].lane(way, source, target)).handle

    def _tag(self, position: int, way: int, number: int, piece: int) -> int:
        """Tags tell tensors, boundaries and directions apart; microbatches keep their order."""
        return ((position * 2 + way) * 64 + number) * 4096 + piece

    def send(self, position: int, way: int, microbatch: int, tensors: dict[str, torch.Tensor]) -> None:
        """Send this rank's slices of the tensors that cross a boundary."""
        self._forget_sent()
        for number, found in enumerate(self.boundaries[position].routes_of(way, microbatch)):
            for piece in found.pieces:
                source, target = self.boundaries[position].ranks(way, piece)
                if source != self.pool.rank:
                    continue
                part = tensors[found.tensor][_inside(piece.box, found.held[piece.source])]
                if target == self.pool.rank:
                    self._local[position, way, microbatch, found.tensor, piece.number] = part
                    continue
                part = part.contiguous()
                tag = self._tag(position, way, number, piece.number)
                group = self._handle(position, way, source, target)
                work = dist.isend(part, target, group=group, tag=tag)
                self._sent.append((work, part))

    def expect(self, position: int, way: int, microbatch: int) -> None:
        """Post the receives of a microbatch, so that the sender need not wait for this rank."""
        key = position, way, microbatch
        if key in self._expected:
            return
        arriving: dict[str, _Expected] = {}
        for number, found in enumerate(self.boundaries[position].routes_of(way, microbatch)):
            mine = [piece for piece in found.pieces if self.boundaries[position].ranks(way, piece)[1] == self.pool.rank]
            if not mine:
                continue
            box = found.wanted[mine[0].target]
            whole = torch.empty(box_shape(box), dtype=found.dtype, device=self.device)
            parts: list[tuple[Any, torch.Tensor, Box]] = []
            for piece in mine:
                place = _inside(piece.box, box)
                source = self.boundaries[position].ranks(way, piece)[0]
                if source == self.pool.rank:
                    parts.append((piece.number, whole, place))
                    continue
                is_all = len(mine) == 1 and box_shape(place) == tuple(whole.shape)
                part = whole if is_all else whole.new_empty(box_shape(place))
                tag = self._tag(position, way, number, piece.number)
                group = self._handle(position, way, source, self.pool.rank)
                work = dist.irecv(part, source, group=group, tag=tag)
                parts.append((work, part, place))
            arriving[found.tensor] = _Expected(whole, parts)
        self._expected[key] = arriving

    def receive(self, position: int, way: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Return this rank's part of every tensor that crosses a boundary, once it is there."""
        self.expect(position, way, microbatch)
        found = {}
        for tensor, expected in self._expected.pop((position, way, microbatch)).items():
            for work, part, place in expected.parts:
                if isinstance(work, int):
                    expected.whole[place] = self._local.pop((position, way, microbatch, tensor, work))
                    continue
                work.wait()
                if part is not expected.whole:
                    expected.whole[place] = part
            found[tensor] = expected.whole
        return found

    def _forget_sent(self) -> None:
        self._sent = [(work, part) for work, part in self._sent if not work.is_completed()]

    def finish(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        assert not self._expected, f"not received: {sorted(self._expected)}"
        assert not self._local, f"not taken: {sorted(self._local)}"
