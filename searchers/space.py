"""The space that `exhaustive` and `random` share: pipelines cut between layers, one mesh per stage.

A point says, stage by stage, how many layers it has, how many devices, how many of them share one operator
(tp; the rest are replicas) and whether its layers are recomputed; and for the whole plan the microbatch.
Stages take devices in order, tensor-parallel ranks next to each other. The schedule is 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import comb, lcm

import numpy as np

from searchers.degrees import compositions
from simulator.divisors import divisors
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments


@dataclass(frozen=True)
class Mesh:
    """What one stage does with its devices: ``tp * dp`` of them."""

    tp: int
    dp: int
    recompute: bool


@dataclass(frozen=True)
class Point:
    """One member of the space.

    Attributes:
        num_layers: Layers of each stage, in order.
        meshes: One per stage.
        microbatch_size: Samples of a microbatch over all replicas.
    """

    num_layers: tuple[int, ...]
    meshes: tuple[Mesh, ...]
    microbatch_size: int


class LayerSpace:
    """All plans of this form for one problem.

    Args:
        problem: What to plan for.
        max_microbatch: Largest microbatch in samples per replica.
        recompute: Offer recomputation, for all layers of a stage or none.
    """

    def __init__(self, problem: Problem, *, max_microbatch: int = 8, recompute: bool = True) -> None:
        self.problem = problem
        self.max_microbatch = max_microbatch
        self.recompute = recompute

    @cached_property
    def tensor_degrees(self) -> list[int]:
        """Degrees of tensor parallelism that every operator allows."""
        limits = []
        for operator in self.problem.workload.operators:
            limit = operator.definition.split_limit(operator.attributes, operator.tensor_split)
            if limit is not None:
                limits.append(limit)
        return [tp for tp in divisors(self.problem.num_devices) if all(limit % tp == 0 for limit in limits)]

    def meshes(self, num_devices: int) -> list[Mesh]:
        """Return the ways to use a stage's devices whose replicas can share the batch evenly."""
        return [
            Mesh(tp, num_devices // tp, recompute)
            for tp in self.tensor_degrees
            if num_devices >= tp
            and num_devices % tp == 0
            and self.problem.global_batch % (num_devices // tp) == 0
            for recompute in ((False, True) if self.recompute else (False,))
        ]

    def microbatch_sizes(self, meshes: tuple[Mesh, ...]) -> list[int]:
        """Return the microbatches that all stages can cut evenly, over all replicas, ascending."""
        common = lcm(*(mesh.dp for mesh in meshes))
        if self.problem.global_batch % common:
            return []
        largest = self.max_microbatch * min(mesh.dp for mesh in meshes)
        return [common * k for k in divisors(self.problem.global_batch // common) if common * k <= largest]

    @cached_property
    def _counts(self) -> list[list[int]]:
        """Per number of stages and of devices, how many sequences of meshes there are."""
        total = self.problem.num_devices
        choices = [0] + [len(self.meshes(count)) for count in range(1, total + 1)]
        counts = [[1] + [0] * total]
        for _ in range(min(total, len(self.problem.workload.layers))):
            last = counts[-1]
            counts.append(
                [
                    sum(choices[k] * last[n - k] for k in range(1, n + 1) if choices[k])
                    for n in range(total + 1)
                ]
            )
        return counts

    def _weights(self) -> list[int]:
        """Return how many (layers, meshes) there are with p stages, p = 1, 2, ..."""
        num_layers = len(self.problem.workload.layers)
        return [comb(num_layers - 1, p - 1) * row[-1] for p, row in enumerate(self._counts) if p >= 1]

    @property
    def size_bound(self) -> int:
        """At most this many points (exact, but for microbatches that only some meshes allow)."""
        batch = self.problem.global_batch
        largest = self.max_microbatch * self.problem.num_devices
        return sum(self._weights()) * sum(1 for size in divisors(batch) if size <= largest)

    def __iter__(self) -> Iterator[Point]:
        """Yield every point, few stages first."""
        num_layers = len(self.problem.workload.layers)
        num_devices = self.problem.num_devices
        for num_stages in range(1, len(self._counts)):
            for devices in compositions(num_devices, num_stages):
                for meshes in product(*(self.meshes(count) for count in devices)):
                    for size in self.microbatch_sizes(meshes):
                        for layers in compositions(num_layers, num_stages):
                            yield Point(layers, meshes, size)

    def sample(self, random: np.random.Generator) -> Point | None:
        """Return a random point (layers and meshes uniform, then the microbatch), or None if it has none."""
        weights = self._weights()
        if not any(weights):
            return None
        num_stages = 1 + _choice(random, weights)
        num_layers = len(self.problem.workload.layers)
        cuts = np.sort(random.choice(num_layers - 1, size=num_stages - 1, replace=False) + 1)
        layers = tuple(int(count) for count in np.diff(cuts, prepend=0, append=num_layers))
        meshes = []
        left = self.problem.num_devices
        for stage in range(num_stages):
            later = self._counts[num_stages - stage - 1]
            options = [self.meshes(count) for count in range(left + 1)]
            count = _choice(random, [len(options[k]) * later[left - k] for k in range(left + 1)])
            meshes.append(options[count][int(random.integers(len(options[count])))])
            left -= count
        sizes = self.microbatch_sizes(tuple(meshes))
        return Point(layers, tuple(meshes), sizes[int(random.integers(len(sizes)))]) if sizes else None

    def plan(self, point: Point) -> Plan:
        """Return the plan that a point stands for."""
        workload = self.problem.workload
        stages = []
        layer = device = 0
        for count, mesh in zip(point.num_layers, point.meshes, strict=True):
            own = workload.layers[layer : layer + count]
            start, stop = own[0][0], own[-1][1]
            num_devices = mesh.tp * mesh.dp
            stages.append(
                Stage(
                    operators=((start, stop),),
                    devices=tuple(range(device, device + num_devices)),
                    shardings=((stop - start, (Axis("batch", mesh.dp), Axis("tensor", mesh.tp))),),
                    recompute=recompute_segments(workload, start, stop, "full" if mesh.recompute else "none"),
                )
            )
            layer += count
            device += num_devices
        return Plan(
            stages=tuple(stages),
            microbatch_size=point.microbatch_size,
            num_microbatches=self.problem.global_batch // point.microbatch_size,
        )

    def contains(self, plan: Plan) -> bool:
        """Return whether a plan, however it is spelt, belongs to the space."""
        workload = self.problem.workload
        point = self._point_like(plan)
        return point is not None and self.plan(point).canonical(workload) == plan.canonical(workload)

    def _point_like(self, plan: Plan) -> Point | None:
        """Return the only point that could equal ``plan``; None if there is none."""
        starts = {start: index for index, (start, _) in enumerate(self.problem.workload.layers)}
        edges = [stage.operators[0][0] for stage in plan.stages]
        if any(edge not in starts for edge in edges):
            return None
        firsts = [*(starts[edge] for edge in edges), len(starts)]
        layers = tuple(later - first for first, later in pairwise(firsts))
        meshes = []
        for stage in plan.stages:
            dp = 1
            for axis in stage.shardings[0][1]:
                dp *= axis.size if axis.split == "batch" else 1
            meshes.append(Mesh(len(stage.devices) // dp, dp, bool(stage.recompute)))
        known = all(mesh in self.meshes(mesh.tp * mesh.dp) for mesh in meshes)
        if not known or min(layers) < 1 or plan.microbatch_size not in self.microbatch_sizes(tuple(meshes)):
            return None
        return Point(layers, tuple(meshes), plan.microbatch_size)


def _choice(random: np.random.Generator, weights: list[int]) -> int:
    """Return an index with probability proportional to its weight (any size of integer)."""
    total = sum(weights)
    return int(random.choice(len(weights), p=[weight / total for weight in weights]))
