"""A plan: every decision about how one training iteration is laid out, and nothing predicted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from workloads.operators import Operator, Workload

TENSOR_WORDS = ("tensor", "tensor_alternative", "tensor_sequence")
"""Split words that each operator translates into its own split: Megatron's choice, the opposite one
(Aceso's second algorithm), and Megatron's with sequence parallelism for what would be replicated."""

GRADIENT_REDUCTIONS = ("last", "every")
REPLICA_ASSIGNMENTS = ("slice", "round_robin")


class Axis(NamedTuple):
    """One mesh axis over a stage's devices.

    Attributes:
        split: ``batch``, ``replicate``, a split of the operator's kind, or one of TENSOR_WORDS.
        size: Ranks along the axis, >= 1.
        zero: 0-3, only with ``batch``: what is sharded over it (1 optimizer states, 2 and gradients,
            3 and parameters).
    """

    split: str
    size: int
    zero: int = 0


Sharding = tuple[Axis, ...]
"""Mesh axes of one operator, outermost first: device index = mixed-radix number of coordinates."""


@dataclass(frozen=True)
class Stage:
    """A set of operators on an ordered tuple of devices.

    Attributes:
        operators: Ascending, disjoint ranges ``(start, stop)`` of operator indices.
        devices: Device ids in mesh order.
        shardings: Run-length code ``(count, sharding)`` along the stage's operators.
        recompute: Segments ``(start, stop)`` of operator indices: backward keeps a segment's inputs only
            and computes it again.
    """

    operators: tuple[tuple[int, int], ...]
    devices: tuple[int, ...]
    shardings: tuple[tuple[int, Sharding], ...]
    recompute: tuple[tuple[int, int], ...] = ()

    def indices(self) -> list[int]:
        """Return the operator indices in order."""
        return [index for start, stop in self.operators for index in range(start, stop)]

    def holds(self, index: int) -> bool:
        """Return whether an operator is one of the stage's."""
        return any(start <= index < stop for start, stop in self.operators)

    def num_operators(self) -> int:
        """Return how many operators the stage has."""
        return sum(stop - start for start, stop in self.operators)

    def sharding_per_operator(self) -> Iterator[Sharding]:
        """Yield one sharding per operator of the stage, in order, as written."""
        for count, sharding in self.shardings:
            for _ in range(count):
                yield sharding


@dataclass(frozen=True)
class Plan:
    """How one iteration runs. Synchronous training only.

    Attributes:
        stages: Pipeline order. Two stages may share one device tuple (interleaved virtual stages).
        microbatch_size: Samples of one microbatch over all replicas.
        num_microbatches: Microbatches per iteration.
        schedule: Name of a pipeline schedule.
        warmup: Forwards before the first backward, per stage over all its replicas; None for the
            schedule's own.
        gradient_reduction: ``"last"`` synchronises gradients once per iteration, ``"every"`` per microbatch.
        overlap_gradient_sync: Buckets are reduced while the backward pass still runs.
        reshard_after_forward: ZeRO-3 parameters are freed after each pass and gathered for the next; else gathered in
            the first forward pass of an iteration and kept until the last backward pass is through with them (as
            FSDP2's modules that are told not to reshard after backward passes either, but for the last).
        replica_assignment: ``"slice"`` cuts each microbatch over the replicas (unequal parts allowed),
            ``"round_robin"`` gives whole microbatches to replicas in turn.
        last_microbatch_size: Samples of the last microbatch where it is smaller than the others: what is left of
            a batch that they do not divide. None where all are alike.
    """

    stages: tuple[Stage, ...]
    microbatch_size: int
    num_microbatches: int
    schedule: str = "1f1b"
    warmup: tuple[int, ...] | None = None
    gradient_reduction: str = "last"
    overlap_gradient_sync: bool = True
    reshard_after_forward: bool = True
    replica_assignment: str = "slice"
    last_microbatch_size: int | None = None

    @property
    def global_batch(self) -> int:
        """Samples per iteration."""
        if self.last_microbatch_size is None:
            return self.microbatch_size * self.num_microbatches
        return self.microbatch_size * (self.num_microbatches - 1) + self.last_microbatch_size

    def is_smaller(self, microbatch: int) -> bool:
        """Return whether a microbatch is the last one and smaller than the others."""
        return self.last_microbatch_size is not None and microbatch == self.num_microbatches - 1

    def all_like_last(self) -> Plan:
        """Return the plan with microbatches that all have the samples of the last one."""
        if self.last_microbatch_size is None:
            return self
        return replace(self, microbatch_size=self.last_microbatch_size, last_microbatch_size=None)

    @property
    def rotates(self) -> bool:
        """Whole microbatches go to replicas in turn."""
        return self.replica_assignment == "round_robin"

    def warmup_in_force(self) -> tuple[int, ...] | None:
        """Return the warm-up of a 1F1B pipeline, whose replicas may take whole microbatches in turn.

        While a replica of stage i runs a microbatch, those that stage i + 1 has in flight are on their way too, and are
        shared among all ``d_i`` replicas: ``K_i = d_i + d_i * ceil(K_{i+1} / d_i)``, with which all are busy. Where the
        replicas of each stage are a multiple of those of the next it is ``d_i * ceil(sum over j >= i of d_j / d_i)``,
        PipeDream's NUM_OPT_ACTIVE_MINIBATCHES for each stage; elsewhere that is too few.
        """
        if self.warmup is not None or not self.rotates or self.schedule != "1f1b":
            return self.warmup
        depths: list[int] = []
        for own in map(batch_replicas, reversed(self.stages)):
            depths.append(own + own * -(-depths[-1] // own) if depths else own)
        return tuple(min(self.num_microbatches, depth) for depth in reversed(depths))

    @property
    def devices(self) -> tuple[int, ...]:
        """All device ids in use, in order of first appearance."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """Pipeline rank of each stage: stages on the same device tuple share a rank."""
        ranks: dict[tuple[int, ...], int] = {}
        return tuple(ranks.setdefault(stage.devices, len(ranks)) for stage in self.stages)

    def canonical(self, workload: Workload) -> Plan:
        """Return the plan that every spelling of it shares.

        Split words are translated, axes of size 1 dropped, adjacent axes of the same split merged, equal
        neighbouring runs joined, a last microbatch that is like the others is not named, and parameters are freed
        after each pass where ZeRO-3 gathers none.
        """
        stages = []
        for stage in self.stages:
            in_order = sorted(zip(stage.indices(), stage.sharding_per_operator(), strict=True))
            resolved = (_resolved(sharding, *_split_words(workload.operators[index])) for index, sharding in in_order)
            stages.append(
                Stage(
                    operators=merge_ranges(stage.operators),
                    devices=stage.devices,
                    shardings=run_lengths(resolved),
                    recompute=tuple(sorted(stage.recompute)),
                )
            )
        last = None if self.last_microbatch_size == self.microbatch_size else self.last_microbatch_size
        gathers = any(axis.zero == 3 for stage in stages for _, sharding in stage.shardings for axis in sharding)
        return replace(
            self,
            stages=tuple(stages),
            last_microbatch_size=last,
            reshard_after_forward=self.reshard_after_forward or not gathers,
        )

    def canonical_hash(self, workload: Workload) -> str:
        """Return a hash that ignores spelling: plans that mean the same have the same."""
        return self.canonical(workload).own_hash()

    def own_hash(self) -> str:
        """Return a hash of the plan as it is spelled."""
        text = json.dumps(plan_to_mapping(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def batch_replicas(stage: Stage) -> int:
    """Return the product of the batch axes of a stage's first operator."""
    return prod(axis.size for axis in next(iter(stage.sharding_per_operator())) if axis.split == "batch")


def resolve(sharding: Sharding, operator: Operator | None) -> Sharding:
    """Return ``sharding`` in canonical form with split words translated for ``operator`` (dropped without one).

    >>> resolve((Axis("batch", 2), Axis("batch", 2), Axis("replicate", 1)), None)
    (Axis(split='batch', size=4, zero=0),)
    """
    return _resolved(tuple(sharding), *_split_words(operator))


def _split_words(operator: Operator | None) -> tuple[str, str, str]:
    if operator is None:
        return "", "", ""
    return operator.tensor_split, operator.alternative_split, operator.sequence_split


@lru_cache(maxsize=4096)
def _resolved(sharding: Sharding, tensor: str, alternative: str, sequence: str) -> Sharding:
    words = dict(zip(TENSOR_WORDS, (tensor, alternative, sequence), strict=True))
    merged: list[Axis] = []
    for axis in sharding:
        split = words.get(axis.split, axis.split)
        if axis.size == 1:
            continue
        if merged and merged[-1].split == split and merged[-1].zero == axis.zero:
            merged[-1] = Axis(split, merged[-1].size * axis.size, axis.zero)
        else:
            merged.append(Axis(split, axis.size, axis.zero))
    return tuple(merged)


def run_lengths(shardings: Iterable[Sharding]) -> tuple[tuple[int, Sharding], ...]:
    """Return the run-length code of a sequence of shardings."""
    runs: list[tuple[int, Sharding]] = []
    for sharding in shardings:
        if runs and runs[-1][1] == sharding:
            runs[-1] = (runs[-1][0] + 1, sharding)
        else:
            runs.append((1, sharding))
    return tuple(runs)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return sorted ranges with touching neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def plan_to_mapping(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data (what plan files hold)."""
    smaller = plan.last_microbatch_size
    return {
        "microbatch_size": plan.microbatch_size,
        "num_microbatches": plan.num_microbatches,
        **({} if smaller is None else {"last_microbatch_size": smaller}),
        "schedule": plan.schedule,
        "warmup": list(plan.warmup) if plan.warmup is not None else None,
        "gradient_reduction": plan.gradient_reduction,
        "overlap_gradient_sync": plan.overlap_gradient_sync,
        "reshard_after_forward": plan.reshard_after_forward,
        "replica_assignment": plan.replica_assignment,
        "stages": [
            {
                "operators": [list(pair) for pair in stage.operators],
                "devices": list(stage.devices),
                "shardings": [
                    {"count": count, "axes": [_axis_to_list(axis) for axis in sharding]}
                    for count, sharding in stage.shardings
                ],
                "recompute": [list(pair) for pair in stage.recompute],
            }
            for stage in plan.stages
        ],
    }


def _axis_to_list(axis: Axis) -> list[Any]:
    return [axis.split, axis.size] if axis.zero == 0 else [axis.split, axis.size, axis.zero]
