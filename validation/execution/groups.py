"""Process groups, made in advance: every rank makes all of them in the same order.

A pool outlives a plan, so that many plans can share one set of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from simulator.lowering.mesh import MeshSizes, groups

GroupKey = tuple[str, tuple[int, ...]]
"""Role and global ranks in ascending order. What has communicators of its own: activations (``tensor``), gathered
parameters (``gather``), gradients (``reduce``), and the lanes of transfers (``boundaries.Boundary.lane``)."""

Connection = tuple[GroupKey, int, int]
"""A lane, and the global ranks that send and receive on it."""

# Renamed in torch 2.13.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def _no_note(collective: str, size: int, num_bytes: int) -> None:
    """Forget it."""


Timer = Callable[[str], AbstractContextManager[None]]
"""Given a collective's name, returns a context that times the wait for it."""


def untimed(name: str) -> AbstractContextManager[None]:
    """Time nothing."""
    return nullcontext()


@dataclass(frozen=True)
class _TimedWork:
    """A collective under way, the wait for which is timed."""

    work: Any
    name: str
    timer: Timer

    def wait(self) -> None:
        """Wait until it is done."""
        with self.timer(self.name):
            self.work.wait()


@dataclass(frozen=True)
class Group:
    """One communicator as one of its ranks sees it.

    Attributes:
        ranks: Global ranks in mesh order.
        handle: The process group, whose own order is ascending; None for a group of one.
        rank: This process.
        note: Told of every collective: name and bytes, as ``MeshCollective`` counts them.
        timer: Times the wait for every collective.
    """

    ranks: tuple[int, ...]
    handle: Any
    rank: int
    note: Callable[[str, int, int], None] = _no_note
    timer: Timer = untimed

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    @cached_property
    def position(self) -> int:
        """Place of this process in mesh order."""
        return self.ranks.index(self.rank)

    @cached_property
    def _order(self) -> list[int] | None:
        """Mesh position of each rank in ascending order; None where the orders agree."""
        order = [self.ranks.index(rank) for rank in sorted(self.ranks)]
        return None if order == sorted(order) else order

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum", *, wait: bool = True) -> Any:
        """Reduce in place; return the work if ``wait`` is false."""
        if self.size == 1:
            return None
        self.note("all_reduce", self.size, tensor.nbytes)
        return self._run(
            "all_reduce",
            lambda: dist.all_reduce(tensor, _OPERATIONS[operation], self.handle, async_op=not wait),
            wait=wait,
        )

    def _run(self, name: str, start: Callable[[], Any], *, wait: bool) -> Any:
        """Start a collective; return the work, or None once it was waited for."""
        if not wait:
            return _TimedWork(start(), name, self.timer)
        with self.timer(name):
            return start()

    def all_gather(self, tensor: torch.Tensor, *, wait: bool = True) -> tuple[torch.Tensor, Any]:
        """Return ``(size, *shape)`` with the ranks' tensors in mesh order, and the work if ``wait`` is false.

        The tensor must be contiguous. Where mesh order is not ascending, the result is waited for.
        """
        out = tensor.new_empty((self.size, *tensor.shape))
        if self.size == 1:
            out[0].copy_(tensor)
            return out, None
        self.note("all_gather", self.size, out.nbytes)
        work = self._run(
            "all_gather",
            lambda: all_gather_flat(out.view(-1), tensor.view(-1), self.handle, async_op=not wait),
            wait=wait,
        )
        if self._order is None:
            return out, work
        if work is not None:
            work.wait()
        ascending = out.clone()
        out[self._order] = ascending
        return out, None

    def reduce_scatter(self, tensor: torch.Tensor, *, wait: bool = True) -> tuple[torch.Tensor, Any]:
        """Return the sum of the ranks' ``tensor[position]``, and the work if ``wait`` is false.

        ``tensor`` is ``(size, ...)`` in mesh order.
        """
        if self.size == 1:
            return tensor[0], None
        if self._order is not None:
            tensor = tensor[self._order]
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor[0])
        self.note("reduce_scatter", self.size, tensor.nbytes)
        work = self._run(
            "reduce_scatter",
            lambda: reduce_scatter_flat(out.view(-1), tensor.view(-1), group=self.handle, async_op=not wait),
            wait=wait,
        )
        return out, work

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``(size, ...)``: part ``i`` came from rank ``i``'s part for this rank; mesh order."""
        if self.size == 1:
            return tensor
        if self._order is not None:
            tensor = tensor[self._order]
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        self.note("all_to_all", self.size, tensor.nbytes)
        self._run("all_to_all", lambda: dist.all_to_all_single(out, tensor, group=self.handle), wait=True)
        if self._order is None:
            return out
        ordered = torch.empty_like(out)
        ordered[self._order] = out
        return ordered


class GroupPool:
    """All communicators of a process, by role and ranks.

    Args:
        rank: This process.
        world_size: Processes.
        backend: ``gloo`` or ``nccl``; None where there is one process and no process group.
        timeout_s: Seconds after which a collective gives up.
    """

    def __init__(self, *, rank: int, world_size: int, backend: str | None, timeout_s: float = 120.0) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.timeout_s = timeout_s
        self.note: Callable[[str, int, int], None] = _no_note
        """Told of every collective of this process: its name, ranks and bytes."""
        self.timer: Timer = untimed
        """Times the wait for every collective of this process."""
        self._handles: dict[GroupKey, Any] = {}
        self._connected: set[GroupKey | Connection] = set()

    @property
    def num_groups(self) -> int:
        """Communicators made so far."""
        return len(self._handles)

    def prepare(self, wanted: Iterable[GroupKey]) -> None:
        """Make the communicators that are not there yet. All processes must call this with the same keys."""
        for role, ranks in sorted(set(wanted)):
            assert list(ranks) == sorted(ranks), (role, ranks)
            if len(ranks) < 2 or (role, ranks) in self._handles:
                continue
            self._handles[role, ranks] = dist.new_group(
                list(ranks), timeout=timedelta(seconds=self.timeout_s), backend=self.backend
            )

    def connect(self, groups: Iterable[GroupKey], connections: Iterable[Connection], device: torch.device) -> None:
        """Let ranks meet that will talk, all of them in one order. All processes must call this with the same.

        NCCL connects ranks when they first need each other, and the host of each waits there for the others: within
        an iteration, where replicas take turns, it may wait for one that waits for a third that waits for it.

        Args:
            groups: Communicators of collectives.
            connections: Who sends whom on which lane.
            device: Of this process.
        """
        token = torch.zeros(1, device=device)
        for key in sorted(set(groups) - self._connected):
            if len(key[1]) > 1 and self.rank in key[1]:
                dist.all_reduce(token, group=self._handles[key])
                self._connected.add(key)
        for key, source, target in sorted(set(connections) - self._connected):
            if self.rank == source:
                dist.send(token, target, group=self._handles[key])
            elif self.rank == target:
                dist.recv(token, source, group=self._handles[key])
            self._connected.add((key, source, target))

    def group(self, role: str, ranks: Sequence[int]) -> Group:
        """Return the communicator of ``ranks`` (mesh order), which must have been prepared."""
        handle = None if len(ranks) < 2 else self._handles[role, tuple(sorted(ranks))]
        return Group(tuple(ranks), handle, self.rank, self.note, self.timer)


@dataclass(frozen=True)
class StageGroups:
    """The communicators of one stage as one of its ranks sees them.

    Attributes:
        pool: All communicators.
        ranks: Global ranks of the stage's devices, mesh order.
        local_rank: Which of them this process is.
    """

    pool: GroupPool
    ranks: tuple[int, ...]
    local_rank: int

    def along(self, role: str, sizes: MeshSizes, axes: tuple[int, ...]) -> Group:
        """Return the group of this rank that differs along ``axes`` only."""
        for members in groups(sizes, axes):
            if self.local_rank in members:
                return self.pool.group(role, [self.ranks[member] for member in members])
        raise AssertionError((sizes, axes, self.local_rank))


def group_keys(role: str, ranks: Sequence[int], sizes: MeshSizes, axes: tuple[int, ...]) -> list[GroupKey]:
    """Return the keys of all groups along ``axes`` of a stage on ``ranks``."""
    return [(role, tuple(sorted(ranks[member] for member in members))) for members in groups(sizes, axes)]
