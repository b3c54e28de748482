"""Tile templates over the microbatches of a schedule into one task graph, with arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.lowering.rows import StreamKey, Template
from simulator.schedules.actions import BACKWARD, FORWARD, Action
from simulator.taskgraph import COMMUNICATION, Csr

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """All instances of actions of one pipeline rank, in program order.

    Attributes:
        template: int64[A]. Template of each action.
        base: int64[A]. First task id of each action.
        microbatch: int64[A].
        kind: One phase letter per action.
        stage: int64[A].
    """

    template: Ids
    base: Ids
    microbatch: Ids
    kind: NDArray[np.str_]
    stage: Ids

    @property
    def all_forwards_first(self) -> bool:
        """No forward pass comes after a backward pass."""
        forwards = self.kind == FORWARD
        return bool(forwards[: int(forwards.sum())].all())


def laid_out(
    orders: Sequence[Sequence[Action]], numbers: Sequence[Sequence[int]], templates: Sequence[Template]
) -> list[Block]:
    """Return the blocks of all ranks, one after the other.

    Args:
        orders: Actions of each rank.
        numbers: The template of each of them.
        templates: All templates.
    """
    lengths = np.array([len(template.rows) for template in templates], dtype=np.int64)
    blocks = []
    start = 0
    for order, own in zip(orders, numbers, strict=True):
        template = np.array(own, dtype=np.int64)
        base = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(lengths[template], out=base[1:])
        blocks.append(
            Block(
                template=template,
                base=base[:-1] + start,
                microbatch=np.array([action.microbatch for action in order], dtype=np.int64),
                kind=np.array([action.kind for action in order]),
                stage=np.array([action.stage for action in order], dtype=np.int64),
            )
        )
        start += int(base[-1])
    return blocks


def ragged(offsets_of: Ids, rows: Sequence[Sequence[int]], template: Ids, base: Ids) -> tuple[Ids, Ids]:
    """Return ``(values, row starts)``: per action ``base + rows[template]``, concatenated.

    Args:
        offsets_of: int64[T]. Length of each template's row.
        rows: Per template, positions inside the block.
        template, base: Per action.
    """
    lengths = offsets_of[template]
    starts = np.zeros(len(template) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    values = np.empty(starts[-1], dtype=np.int64)
    for number, row in enumerate(rows):
        if not row:
            continue
        chosen = np.flatnonzero(template == number)
        if len(chosen):
            inner = np.asarray(row, dtype=np.int64)
            values[(starts[chosen][:, None] + np.arange(len(inner))).ravel()] = (base[chosen][:, None] + inner).ravel()
    return values, starts


@dataclass
class Tiling:
    """Collects edges, stream orders and host orders while blocks are laid out."""

    templates: list[Template]
    blocks: list[Block]
    edges: list[tuple[Ids, Ids]] = field(default_factory=list)
    streams: dict[StreamKey, Ids] = field(default_factory=dict)
    hosts: dict[int, Ids] = field(default_factory=dict)
    _received: dict[tuple[int, int], list[tuple[Ids, Ids]]] = field(default_factory=dict)

    @property
    def num_tasks(self) -> int:
        """Tasks in all blocks."""
        lengths = np.array([len(template.rows) for template in self.templates], dtype=np.int64)
        return int(sum(int(lengths[block.template].sum()) for block in self.blocks))

    def add_inner_edges(self) -> None:
        """Add the predecessors inside every template."""
        for number, template in enumerate(self.templates):
            inner = template.inner_edges
            for block in self.blocks:
                bases = block.base[block.template == number]
                self._add(bases, inner[:, 0], inner[:, 1])

    def _add(self, bases: Ids, tasks: Ids, before: Ids, other_bases: Ids | None = None) -> None:
        if len(bases) and len(tasks):
            others = bases if other_bases is None else other_bases
            self.edges.append(((bases[:, None] + tasks).ravel(), (others[:, None] + before).ravel()))

    def add_previous_action_edges(self) -> None:
        """Let what comes first wait for the action before."""
        for block in self.blocks:
            for c in self._members(block):
                own = self._actions_of(block, c)
                for first, second, earlier, later in self._pairs(block, own[:-1], own[1:]):
                    self._add(later, *self._waits(first, second, c), earlier)

    def add_blocking_edges(self, *, exchanges_pairs: bool) -> None:
        """Let computation go on only when what the action before sent has arrived.

        Args:
            exchanges_pairs: What a forward pass sends leaves with what the backward pass right after it sends, and the
                rank waits once, for both.
        """
        for block in self.blocks:
            for c in self._members(block):
                own = self._actions_of(block, c)
                fused = np.zeros(len(own), dtype=bool)
                if exchanges_pairs and not block.all_forwards_first:
                    fused[:-1] = (block.kind[own][:-1] == FORWARD) & (block.kind[own][1:] == BACKWARD)
                alone = np.flatnonzero(~fused[:-1])
                for first, second, earlier, later in self._pairs(block, own[alone], own[alone + 1]):
                    self._add(later, *_after_sends(first, second.starters.get(c, ()), c), earlier)
                both = np.flatnonzero(fused)
                for first, second, earlier, later in self._pairs(block, own[both], own[both + 1]):
                    sends = [send.task for send in first.sends if send.source == c]
                    self._add(earlier, *_every(sends, second.tails[c]), later)
                both = both[both + 2 < len(own)]
                for first, second, earlier, later in self._pairs(block, own[both], own[both + 2]):
                    self._add(later, *_after_sends(first, second.starters.get(c, ()), c), earlier)

    def _members(self, block: Block) -> Iterable[int]:
        """Return the representatives that take part in a rank's actions."""
        return dict.fromkeys(c for number in set(block.template.tolist()) for c in self.templates[number].tails)

    def _actions_of(self, block: Block, c: int) -> Ids:
        takes_part = np.array([c in template.tails for template in self.templates])
        return np.flatnonzero(takes_part[block.template])

    def _pairs(self, block: Block, earlier: Ids, later: Ids) -> Iterator[tuple[Template, Template, Ids, Ids]]:
        """Yield each pair of templates among pairs of actions, and the first task ids of these actions."""
        table = np.stack([block.template[earlier], block.template[later]], axis=1)
        for pair in np.unique(table, axis=0):
            chosen = (table == pair).all(axis=1)
            first, second = (self.templates[number] for number in pair)
            yield first, second, block.base[earlier[chosen]], block.base[later[chosen]]

    @staticmethod
    def _waits(first: Template, second: Template, c: int) -> tuple[Ids, Ids]:
        """Return the edges from one action of a representative to its next."""
        starters = second.starters.get(c, ())
        beside = {*second.free_heads.get(c, ()), *second.openers.get(c, ())}
        # The compute stream keeps computation in order; it waits for a collective as for any other of the chain.
        pairs = [
            (head, tail)
            for head in sorted(beside.union(starters))
            for tail in first.tails[c]
            if head in beside or first.rows.kind[tail] == COMMUNICATION
        ]
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def add_received_edges(self, receiver: tuple[int, str], sender: tuple[int, str], shared: frozenset[int]) -> None:
        """Connect a stage's pass to the pass of the neighbour it receives from, microbatch by microbatch.

        Args:
            receiver, sender: ``(stage, phase)``.
            shared: Representatives that run both stages (no transfer between them).
        """
        theirs = self._instances(*sender)
        for rank, block in enumerate(self.blocks):
            chosen = np.flatnonzero((block.stage == receiver[0]) & (block.kind == receiver[1]))
            if not len(chosen):
                continue
            template_of, base_of = theirs
            numbers = block.microbatch[chosen]
            pairs = np.stack([block.template[chosen], template_of[numbers]], axis=1)
            for pair in np.unique(pairs, axis=0):
                mine, other = self.templates[pair[0]], self.templates[pair[1]]
                here = chosen[(pairs == pair).all(axis=1)]
                bases, other_bases = block.base[here], base_of[block.microbatch[here]]
                self._connect(rank, here, mine, other, bases, other_bases, shared)

    def _connect(
        self,
        rank: int,
        actions: Ids,
        mine: Template,
        other: Template,
        bases: Ids,
        other_bases: Ids,
        shared: frozenset[int],
    ) -> None:
        tasks, before = [], []
        received: dict[int, list[int]] = {}
        for send in other.sends:
            for head in mine.heads.get(send.target, ()):
                tasks.append(head)
                before.append(send.task)
            received.setdefault(send.target, []).append(send.task)
        for c in shared:
            for head in mine.heads.get(c, ()):
                for tail in other.tails.get(c, ()):
                    tasks.append(head)
                    before.append(tail)
        self._add(bases, np.array(tasks, dtype=np.int64), np.array(before, dtype=np.int64), other_bases)
        for c, found in received.items():
            ids = other_bases[:, None] + np.array(found, dtype=np.int64)
            self._received.setdefault((rank, c), []).append((actions, ids))

    def _instances(self, stage: int, kind: str) -> tuple[Ids, Ids]:
        """Return template and base of every microbatch of a stage's pass."""
        for block in self.blocks:
            chosen = np.flatnonzero((block.stage == stage) & (block.kind == kind))
            if len(chosen):
                size = int(block.microbatch[chosen].max()) + 1
                template, base = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
                template[block.microbatch[chosen]] = block.template[chosen]
                base[block.microbatch[chosen]] = block.base[chosen]
                return template, base
        raise AssertionError(f"stage {stage} has no pass {kind}")

    def order_streams(self) -> None:
        """Lay out the program order of every stream."""
        for block in self.blocks:
            used = sorted(set(block.template.tolist()))
            keys = dict.fromkeys(key for number in used for key in self.templates[number].rows.streams)
            for key in keys:
                rows = [template.rows.streams.get(key, []) for template in self.templates]
                lengths = np.array([len(row) for row in rows], dtype=np.int64)
                values, _ = ragged(lengths, rows, block.template, block.base)
                assert key not in self.streams, f"two ranks order stream {key}"
                self.streams[key] = values

    def order_hosts(self) -> None:
        """Lay out what each host launches: what an action receives, then the action's own tasks."""
        for rank, block in enumerate(self.blocks):
            used = sorted(set(block.template.tolist()))
            for c in dict.fromkeys(c for number in used for c in self.templates[number].rows.hosts):
                rows = [template.rows.hosts.get(c, []) for template in self.templates]
                lengths = np.array([len(row) for row in rows], dtype=np.int64)
                own, starts = ragged(lengths, rows, block.template, block.base)
                received = np.zeros(len(block.base), dtype=np.int64)
                for actions, ids in self._received.get((rank, c), ()):
                    received[actions] += ids.shape[1]
                shift = np.zeros(len(block.base) + 1, dtype=np.int64)
                np.cumsum(received, out=shift[1:])
                order = np.empty(len(own) + int(shift[-1]), dtype=np.int64)
                positions = np.arange(len(own)) + np.repeat(shift[1:], np.diff(starts))
                order[positions] = own
                for actions, ids in self._received.get((rank, c), ()):
                    slots = (starts[:-1] + shift[:-1])[actions][:, None] + np.arange(ids.shape[1])
                    order[slots.ravel()] = ids.ravel()
                self.hosts[c] = order


def _after_sends(first: Template, heads: Sequence[int], c: int) -> tuple[Ids, Ids]:
    """Return edges from what a representative sends after one action to tasks of a later one."""
    return _every(heads, [send.task for send in first.sends if send.source == c])


def _every(tasks: Sequence[int], before: Sequence[int]) -> tuple[Ids, Ids]:
    """Return edges from every one of ``before`` to every one of ``tasks``."""
    found = np.array([(task, other) for task in tasks for other in before], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def csr_of_edges(tasks: Ids, before: Ids, num_tasks: int) -> Csr:
    """Return predecessors as rows from two parallel arrays of edges."""
    order = np.argsort(tasks, kind="stable")
    offsets = np.zeros(num_tasks + 1, dtype=np.int64)
    np.cumsum(np.bincount(tasks, minlength=num_tasks), out=offsets[1:])
    return Csr(offsets=offsets.astype(np.int32), items=before[order].astype(np.int32))
