"""From stage costs to the arrays of the inter-operator dynamic programming, and from its solution to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.inter_op import NO_LIMIT, Pipeline
from searchers.alpa.meshes import LogicalMesh, Submesh
from searchers.alpa.oracle import Oracle, StageCost
from searchers.alpa.stage_costs import Room, Solver
from simulator.plan import Plan, Stage, run_lengths
from simulator.problem import Problem

Lookup = Callable[[LogicalMesh, int, int], StageCost]


def stage_arrays(
    lookup: Lookup, meshes: Sequence[Sequence[LogicalMesh]], num_layers: int, capacity_bytes: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return seconds and successors, [layers, layers, submeshes, configs], of every stage.

    Args:
        lookup: Cost of layers first to last on a mesh.
        meshes: Logical meshes per submesh.
        num_layers: Layers.
        capacity_bytes: Of one device. A stage with s stages behind it keeps s + 1 microbatches under 1F1B.
    """
    configs = max(len(group) for group in meshes)
    shape = (num_layers, num_layers, len(meshes), configs)
    seconds = np.full(shape, np.inf)
    successors = np.full(shape, -1, dtype=np.int64)
    for number, group in enumerate(meshes):
        for config, mesh in enumerate(group):
            for first in range(num_layers):
                for last in range(first, num_layers):
                    cost = lookup(mesh, first, last)
                    if not np.isfinite(cost.seconds):
                        continue
                    seconds[first, last, number, config] = cost.seconds
                    successors[first, last, number, config] = max_successors(cost, capacity_bytes)
    return seconds, successors


def max_successors(cost: StageCost, capacity_bytes: float) -> int:
    """Return how many stages may follow before a device is full; -1 if it does not fit even as the last."""
    left = capacity_bytes - cost.state_bytes - cost.working_bytes
    if left < 0 or cost.state_bytes + cost.step_bytes > capacity_bytes:
        return -1
    if cost.microbatch_bytes <= 0:
        return NO_LIMIT
    return max(-1, min(NO_LIMIT, int(np.floor(left / cost.microbatch_bytes)) - 1))


def placed(sizes: Sequence[Submesh], devices_per_node: int) -> list[tuple[int, ...]]:
    """Return the devices of each stage: the largest submeshes get theirs first, so that all lie inside nodes."""
    order = sorted(range(len(sizes)), key=lambda stage: -sizes[stage].num_devices)
    found: dict[int, tuple[int, ...]] = {}
    next_device = 0
    for stage in order:
        count = sizes[stage].num_devices
        found[stage] = tuple(range(next_device, next_device + count))
        if count < devices_per_node:
            assert found[stage][0] // devices_per_node == found[stage][-1] // devices_per_node
        next_device += count
    return [found[stage] for stage in range(len(sizes))]


def to_plan(
    solution: Pipeline,
    problem: Problem,
    oracle: Oracle,
    meshes: Sequence[Sequence[LogicalMesh]],
    *,
    microbatch_size: int,
    recompute: bool,
    solver: Solver = "elimination",
    capacity_bytes: float = np.inf,
) -> Plan:
    """Return the plan of a solution: every operator as the intra-operator problem chose.

    Raises:
        ValueError: If the solver keeps to the memory and a stage does not fit.
    """
    chosen = [meshes[stage.submesh][stage.config] for stage in solution.stages]
    devices = placed([mesh.submesh for mesh in chosen], problem.hardware.cluster.devices_per_node)
    stages = []
    for position, (stage, mesh, own) in enumerate(zip(solution.stages, chosen, devices, strict=True)):
        cost, held = oracle.answer(mesh, stage.first, stage.last), len(chosen) - position
        room = Room(capacity_bytes - cost.working_bytes - held * cost.ends_bytes, held)
        spans = oracle.spans[stage.first : stage.last + 1]
        stages.append(
            Stage(
                operators=((spans[0][0], spans[-1][1]),),
                devices=own,
                shardings=run_lengths(oracle.shardings(mesh, stage.first, stage.last, solver, room)),
                recompute=tuple(spans) if recompute else (),
            )
        )
    return Plan(
        stages=tuple(stages),
        microbatch_size=microbatch_size,
        num_microbatches=problem.global_batch // microbatch_size,
        gradient_reduction=problem.runtime.reduce_gradients,
        overlap_gradient_sync=problem.runtime.overlap_gradient_sync,
    )
