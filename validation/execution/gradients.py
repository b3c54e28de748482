"""Sums gradients over microbatches and reduces them over replicas, in buckets.

Buckets and collectives are those of ``simulator.lowering.synchronisation.gradient_buckets``. A
bucket's buffer is ``(shards, elements)``: column ranges are parameters, row i is what rank i of the sharded
axes keeps after a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hardware_models.links import OWNER_REDUCE
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import gradient_buckets
from validation.execution.groups import GroupKey, StageGroups, group_keys
from validation.execution.operator_call import storage_key
from validation.execution.stage_parameters import Held, StageParameters


def is_overlapped(view: StageView) -> bool:
    """Return whether buckets are reduced during backward passes (else after the last)."""
    plan = view.plan
    return (plan.overlap_gradient_sync or plan.gradient_reduction == "every") and not plan.rotates


def bucket_members(view: StageView, *, merged: bool) -> list[tuple[list[int], tuple[MeshCollective, ...], int]]:
    """Return ``(positions among the stage's parameters, collectives, last operator)`` of every bucket."""
    return [
        (list(bucket.members), bucket.collectives, bucket.last_operator if not merged else -1)
        for bucket in gradient_buckets(view, merged=merged)
    ]


def gradient_group_keys(view: StageView, ranks: tuple[int, ...]) -> set[GroupKey]:
    """Return the communicators that reductions need."""
    return {
        key
        for _, collectives, _ in bucket_members(view, merged=not is_overlapped(view))
        for collective in collectives
        for key in group_keys("reduce", ranks, collective.sizes, collective.axes)
    }


@dataclass(eq=False)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        members: Parameters, in the order of their columns.
        collectives: What reduces it; empty where nothing needs to be.
        last_operator: Its backward completes the bucket.
        is_transient: The buffer lives during one backward pass only.
        buffer: ``(shards, elements)`` or None.
        written: Members whose columns hold this round's gradient.
        result: Reduced sum over microbatches; ``(elements,)``.
        pending, work: A reduction under way.
    """

    members: list[Held]
    collectives: tuple[MeshCollective, ...]
    last_operator: int
    is_transient: bool
    buffer: torch.Tensor | None = None
    written: set[int] = field(default_factory=set)
    result: torch.Tensor | None = None
    pending: torch.Tensor | None = None
    work: Any = None

    @property
    def adopts(self) -> bool:
        """Whether the first gradient becomes the buffer, as torch's own accumulation has it: nothing to reduce."""
        return not self.collectives and self.num_shards == 1

    @property
    def num_shards(self) -> int:
        """Rows of the buffer."""
        return self.members[0].num_shards


class Gradients:
    """The gradients of a stage on one rank.

    Args:
        view: The stage.
        parameters: What they belong to.
        groups: Communicators.
        dtype: Type in which gradients are summed.
    """

    def __init__(self, view: StageView, parameters: StageParameters, groups: StageGroups, dtype: torch.dtype) -> None:
        self.groups = groups
        self.dtype = dtype
        self.every = view.plan.gradient_reduction == "every" and view.plan.num_microbatches > 1
        self.overlapped = is_overlapped(view)
        once = view.plan.gradient_reduction == "every" or view.plan.num_microbatches == 1
        self.buckets: list[Bucket] = []
        reduced = set()
        for positions, collectives, last in bucket_members(view, merged=not self.overlapped):
            members = [parameters.held[position] for position in positions]
            reduced.update(positions)
            transient = once and members[0].placed.group.zero >= 2 and members[0].num_shards > 1
            self.buckets.append(Bucket(members, collectives, last, transient))
        for position, held in enumerate(parameters.held):
            if position not in reduced:
                self.buckets.append(Bucket([held], (), -1, False))
        self._last_transient: Bucket | None = None
        self._place: dict[int, tuple[Bucket, int]] = {}
        self.completed_by: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            offset = 0
            for held in bucket.members:
                self._place[id(held)] = (bucket, offset)
                offset += held.chunk_elements
            if bucket.collectives and self.overlapped:
                self.completed_by.setdefault(bucket.last_operator, []).append(bucket)

    def begin(self) -> None:
        """Start an iteration."""
        self._last_transient = None
        for bucket in self.buckets:
            bucket.written.clear()
            bucket.result = None

    def make_room(self, held: Held) -> None:
        """Free last iteration's gradient just before an operator makes the parameter's new one."""
        bucket, _ = self._place[id(held)]
        if bucket.adopts and not bucket.written:
            bucket.buffer = None

    def add(self, held: Held, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient of a parameter."""
        bucket, offset = self._place[id(held)]
        self._settle(bucket)
        if bucket.adopts and not bucket.written and gradient.dtype == self.dtype:
            owns = gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes
            bucket.buffer = (gradient if owns else gradient.clone(memory_format=torch.contiguous_format)).view(1, -1)
            bucket.written.add(id(held))
            return
        target = self._buffer(bucket)[:, offset : offset + held.chunk_elements]
        flat = gradient.reshape(-1)
        padding = held.num_shards * held.chunk_elements - flat.numel()
        if padding:
            flat = torch.nn.functional.pad(flat, (0, padding))
        rows = flat.view(held.num_shards, held.chunk_elements)
        if id(held) in bucket.written:
            target.add_(rows)
        else:
            target.copy_(rows)
            bucket.written.add(id(held))

    def _buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket.buffer is None:
            first = bucket.members[0].trained
            elements = sum(held.chunk_elements for held in bucket.members)
            bucket.buffer = torch.empty((bucket.num_shards, elements), dtype=self.dtype, device=first.device)
        return bucket.buffer

    def _complete(self, bucket: Bucket) -> torch.Tensor:
        """Return the buffer with zeros where no microbatch gave a gradient."""
        buffer, offset = self._buffer(bucket), 0
        for held in bucket.members:
            if id(held) not in bucket.written:
                buffer[:, offset : offset + held.chunk_elements] = 0
            offset += held.chunk_elements
        return buffer

    def operator_done(self, index: int) -> None:
        """Reduce the buckets that the backward of an operator completes; called in passes that synchronise.

        Of buffers that live during a pass only, the one before the last is done with by then.
        """
        for bucket in self.completed_by.get(index, ()):
            self._reduce(bucket, wait=False)
            if bucket.is_transient:
                if self._last_transient is not None:
                    self._settle(self._last_transient)
                self._last_transient = bucket

    def _reduce(self, bucket: Bucket, *, wait: bool) -> None:
        current, work = self._complete(bucket), None
        for collective in bucket.collectives:
            if work is not None:
                work.wait()
            group = self.groups.along("reduce", collective.sizes, collective.axes)
            if collective.collective in ("reduce_scatter", OWNER_REDUCE):  # the same shards are left
                current, work = group.reduce_scatter(current, wait=wait)
            else:
                work = group.all_reduce(current, wait=wait)
        if bucket.num_shards > 1 and current.dim() > 1:
            current = current[bucket.members[0].shard]
        bucket.pending, bucket.work = current.view(-1), work
        bucket.written.clear()

    def _settle(self, bucket: Bucket) -> None:
        """Wait for a reduction and add it to what earlier microbatches gave."""
        if bucket.pending is None:
            return
        if bucket.work is not None:
            bucket.work.wait()
        if bucket.result is None:
            shares = bucket.buffer is not None and storage_key(bucket.pending) == storage_key(bucket.buffer)
            bucket.result = bucket.pending.clone() if self.every and shares else bucket.pending
        else:
            bucket.result.add_(bucket.pending)
        bucket.pending = bucket.work = None
        if bucket.is_transient:
            bucket.buffer = None

    def finish(self) -> None:
        """Reduce what is left and give every parameter its gradient."""
        for bucket in self.buckets:
            if bucket.collectives and not self.overlapped:
                self._reduce(bucket, wait=True)
            if bucket.collectives:
                self._settle(bucket)
                assert bucket.result is not None, [held.placed.key for held in bucket.members]
                result = bucket.result
            else:
                buffer = self._complete(bucket)
                held = bucket.members[0]
                result = buffer[held.shard] if held.num_shards > 1 else buffer.view(-1)
            _hand_out(bucket.members, result)


def _hand_out(members: Sequence[Held], result: torch.Tensor) -> None:
    offset = 0
    for held in members:
        part = result[offset : offset + held.chunk_elements]
        held.gradient = part if held.num_shards > 1 else part.view(held.shape)
        offset += held.chunk_elements
