"""Costs of operators with durations that were measured: which row of a profile is about which operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hardware_models.profile import OperatorProfile, ProfileLookup
from hardware_models.profile import Split as SplitWord
from simulator.operator_cost import OperatorCost
from simulator.plan import Sharding
from simulator.problem import Problem
from simulator.segments import Segment
from workloads.operators import Operator


def with_profile(
    modelled_at: Callable[[int], OperatorCost],
    problem: Problem,
    index: int,
    sharding: Sharding,
    samples: int,
    gpu_type: str,
) -> OperatorCost:
    """Return a cost with the durations of the problem's profile, where that has rows for the operator so split.

    Outside the numbers of samples that it has, durations are those of the nearest, times what the model grows by from
    there.

    Args:
        modelled_at: Returns what the model says of the operator at a number of samples.
        problem: With the profile.
        index: Operator.
        sharding: Canonical sharding.
        samples: Samples that one rank works on.
        gpu_type: Device type.
    """
    cost = modelled_at(samples)
    profile = problem.hardware.operator_profile
    dtype = problem.runtime.implementation.dtype
    if profile is None or profile.gpu_type != gpu_type or profile.dtype != dtype:
        return cost
    op = problem.workload.operators[index]
    measured_as = profiled_as(op, sharding)
    if measured_as is None:
        return cost
    found = profile.lookup(op.role, samples, *measured_as) or _extended(
        profile, op.role, samples, *measured_as, cost, modelled_at
    )
    if found is None:
        return cost
    modelled = cost.backward_alone.device_s
    share = cost.backward_weight_alone.device_s / modelled if modelled > 0 else 0.0
    measured = partial(_measured, source=found.source, kernels_only=profile.kernels_only)
    return replace(
        cost,
        forward=measured(cost.forward, found.row.forward_s),
        backward_input=measured(cost.backward_input, found.row.backward_s * (1 - share)),
        backward_weight_alone=measured(cost.backward_weight_alone, found.row.backward_s * share),
        includes_collectives=found.row.includes_collectives,
    )


def _extended(
    profile: OperatorProfile,
    role: str,
    samples: int,
    tensor_size: int,
    split: SplitWord,
    cost: OperatorCost,
    modelled_at: Callable[[int], OperatorCost],
) -> ProfileLookup | None:
    nearest = profile.nearest(role, samples, tensor_size, split)
    if nearest is None:
        return None
    there = modelled_at(nearest.samples)

    def alone_s(segment: Segment) -> float:
        return segment.device_s if profile.kernels_only else max(segment.device_s, segment.host_s)

    def grown(seconds: float, here: Segment, there: Segment) -> float:
        return seconds * alone_s(here) / alone_s(there) if alone_s(there) > 0 else seconds

    row = replace(
        nearest,
        samples=samples,
        forward_s=grown(nearest.forward_s, cost.forward, there.forward),
        backward_s=grown(nearest.backward_s, cost.backward_alone, there.backward_alone),
    )
    return ProfileLookup(row, "modelled")


def profiled_as(op: Operator, sharding: Sharding) -> tuple[int, SplitWord] | None:
    """Return tensor-parallel ranks and split of the profile row that an operator under a canonical sharding has.

    Returns:
        None where no row describes it: split along two axes, or along one that profiles have no word for.
    """
    tensor_axes = [axis for axis in sharding if axis.split != "batch"]
    if not tensor_axes:
        return 1, "default"
    (axis, *others), own = tensor_axes, op.tensor_split
    split = "row" if axis.split == "row_sequence" else axis.split
    if others or split not in (own, op.alternative_split):
        return None
    return axis.size, "default" if split == own else "alternative"


def _measured(modelled: Segment, seconds: float, source: str, kernels_only: bool) -> Segment:
    """Return a segment with a measured duration; launch time is kept, at most the duration where that contains it."""
    host_s = modelled.host_s if kernels_only else min(modelled.host_s, seconds)
    recorded = {"measured": (seconds, 0.0, 0.0), "interpolated": (0.0, seconds, 0.0), "modelled": (0.0, 0.0, seconds)}
    return Segment(seconds, host_s, seconds, 0.0, recorded[source])
