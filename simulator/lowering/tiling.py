"""Tile templates over the microbatches of a schedule into one task graph, with arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from simulator.lowering.rows import StreamKey, Template
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

    def add_previous_action_edges(self, *, after_sends: bool) -> None:
        """Let what comes first wait for the action before; with ``after_sends`` the chain, for its sends too.

        Args:
            after_sends: Computation goes on only when what was sent has arrived (blocking transfers).
        """
        for block in self.blocks:
            for c in dict.fromkeys(c for number in set(block.template.tolist()) for c in self.templates[number].tails):
                takes_part = np.array([c in template.tails for template in self.templates])
                own = np.flatnonzero(takes_part[block.template])
                earlier, later = block.template[own][:-1], block.template[own][1:]
                for pair in np.unique(np.stack([earlier, later], axis=1), axis=0):
                    chosen = np.flatnonzero((earlier == pair[0]) & (later == pair[1]))
                    tasks, before = self._waits(self.templates[pair[0]], self.templates[pair[1]], c, after_sends)
                    self._add(block.base[own[1:][chosen]], tasks, before, block.base[own[:-1][chosen]])

    @staticmethod
    def _waits(first: Template, second: Template, c: int, after_sends: bool) -> tuple[Ids, Ids]:
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
        if after_sends:
            pairs += [
                (head, send.task) for send in first.sends if send.source == c for head in starters
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


def csr_of_edges(tasks: Ids, before: Ids, num_tasks: int) -> Csr:
    """Return predecessors as rows from two parallel arrays of edges."""
    order = np.argsort(tasks, kind="stable")
    offsets = np.zeros(num_tasks + 1, dtype=np.int64)
    np.cumsum(np.bincount(tasks, minlength=num_tasks), out=offsets[1:])
    return Csr(offsets=offsets.astype(np.int32), items=before[order].astype(np.int32))
