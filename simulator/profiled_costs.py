"""Costs of operators with durations that were measured: which row of a profile is about which operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from hardware_models.profile import TAKEN, OperatorProfile, ProfileLookup, ProfileRow
from hardware_models.profile import Split as SplitWord
from simulator.operator_cost import OperatorCost, SizedStep
from simulator.plan import Axis, Sharding, resolve
from simulator.problem import Problem
from simulator.saved import is_private, saved_tensors
from simulator.segments import Segment
from workloads.kinds.base import LIBRARY, RESULTS
from workloads.operators import Operator, Workload

ROUNDED_BYTES = 4096
"""More than the blocks of a pass's few tensors are rounded up by, to 512 bytes each."""

Modelled = Callable[[Sharding, int], OperatorCost]
"""What the model says of an operator, so split, with so many samples a rank."""


def with_profile(
    modelled_at: Modelled,
    problem: Problem,
    index: int,
    sharding: Sharding,
    samples: int,
    gpu_type: str,
) -> OperatorCost:
    """Return a cost with the durations of the problem's profile, where that has rows for the operator.

    Outside the numbers of samples and the tensor-parallel degrees that it has, durations are those of the nearest,
    times what the model grows by from there. What the library of its kernels works in is the profile's, too.

    Args:
        modelled_at: Returns what the model says of the operator.
        problem: With the profile.
        index: Operator.
        sharding: Canonical sharding.
        samples: Samples that one rank works on.
        gpu_type: Device type.
    """
    cost = modelled_at(sharding, samples)
    profile = problem.hardware.operator_profile
    dtype = problem.runtime.implementation.dtype
    if profile is None or profile.gpu_type != gpu_type or profile.dtype != dtype:
        return cost
    op = problem.workload.operators[index]
    measured_as = profiled_as(op, sharding)
    if measured_as is None:
        return cost
    role = profile_role(profile, problem.workload, index)
    found = profile.lookup(role, samples, *measured_as)
    nearest = None if found else _nearest(profile, role, samples, *measured_as)
    if nearest is not None:
        there = modelled_at(_split_as(op, sharding, nearest.tensor_size, nearest.split), nearest.samples)
        found = ProfileLookup(_grown(nearest, there, cost, kernels_only=profile.kernels_only), "modelled")
    if found is None:
        return cost
    modelled = cost.backward_alone.device_s
    share = cost.backward_weight_alone.device_s / modelled if modelled > 0 else 0.0
    measured = partial(_measured, source=found.source, kernels_only=profile.kernels_only)
    row = found.row
    again_s = row.forward_host_s if row.recomputed_host_s is None else row.recomputed_host_s
    of_inputs_s, of_weights_s = (
        None if row.backward_host_s is None else row.backward_host_s * part for part in (1 - share, share)
    )
    return replace(
        cost,
        forward=measured(cost.forward, row.forward_s, row.forward_host_s),
        recomputed=measured(cost.recomputed, row.forward_s, again_s),
        backward_input=measured(cost.backward_input, row.backward_s * (1 - share), of_inputs_s),
        backward_weight_alone=measured(cost.backward_weight_alone, row.backward_s * share, of_weights_s),
        includes_collectives=row.includes_collectives,
        has_waited=not profile.kernels_only,
        **_library_memory(problem, index, cost, row),
    )


def _library_memory(problem: Problem, index: int, cost: OperatorCost, row: ProfileRow) -> dict[str, Any]:
    """Return the changed fields of a cost whose kernels' library was seen to work in more memory than the model has.

    It is one allocation with what the model has of the library's, taken when results are there and given back before
    anything else is made. What a backward pass takes more is counted beside the gradients of weights, whose partial
    sums it is in 16 bits (`Convolution`): those of inputs then fit where the forward pass worked, and these do not.
    """
    op = problem.workload.operators[index]
    if not op.definition.takes_library_memory:
        return {}
    inputs, made = zip(op.inputs, cost.input_bytes, strict=True), sum(cost.output_bytes)
    given = sum(size for name, size in inputs if name not in problem.workload.input_names)
    kept = sum(size for name, size in saved_tensors(problem.workload, index, cost) if is_private(name))
    forward = _excess(row.forward_taken_bytes, made + kept + cost.workspace_forward_bytes)
    at_inputs = given + cost.beside_input_gradients(given) - made
    at_weights = given + sum(cost.product_temporaries(problem.runtime.implementation.activation_bytes))
    is_more = _excess(row.backward_taken_bytes, max(at_inputs, at_weights)) > 0
    backward = _excess(row.backward_taken_bytes, at_weights) if is_more else 0
    changed: dict[str, Any] = {}
    if forward:
        known = max((size for name, size in cost.steps_forward if name == LIBRARY), default=0)
        changed["steps_forward"] = _with_library(cost.steps_forward, known + forward)
        changed["workspace_forward"] = _enlarged(cost.workspace_forward, known, forward)
    if backward:
        known = cost.workspace_weight[-1] if cost.workspace_weight else 0
        changed["workspace_weight"] = _enlarged(cost.workspace_weight, known, backward)
    return changed


def _excess(taken: float | None, modelled: float) -> int:
    """Return what was taken beyond what the model has, unless that is no more than blocks are rounded up by."""
    more = 0.0 if taken is None else taken - modelled
    return int(more) if more > ROUNDED_BYTES else 0


def _enlarged(tensors: tuple[int, ...], known: int, num_bytes: int) -> tuple[int, ...]:
    """Return sizes of tensors of which one of ``known`` bytes is larger; one more where none is known."""
    others = list(tensors)
    if known:
        others.remove(known)
    return (*others, known + num_bytes)


def _with_library(steps: tuple[SizedStep, ...], num_bytes: int) -> tuple[SizedStep, ...]:
    """Return the steps of a pass with what its library takes behind the results, and gives back at once."""
    others = [step for step in steps if step[0] != LIBRARY]
    place = 1 + [name for name, _ in others].index(RESULTS)
    return (*others[:place], (LIBRARY, num_bytes), (LIBRARY, -1), *others[place:])


def profile_role(profile: OperatorProfile, workload: Workload, index: int) -> str:
    """Return the role under which a profile has an operator: its own, else the mean's of all that share its role."""
    own = workload.profile_roles[index]
    return own if own in profile.roles else workload.operators[index].role


def modelled_row(
    problem: Problem, index: int, cost: OperatorCost, samples: int, measured_as: tuple[int, SplitWord], source: str
) -> ProfileRow:
    """Return a row with what the model says of an operator; its times are those of the device.

    Args:
        problem: Whose operator it is.
        index: Operator.
        cost: Of it, so split and with so many samples.
        samples: Samples that one rank works on.
        measured_as: Tensor-parallel ranks and split of the row (see `profiled_as`).
        source: Of the row, in words.
    """
    return ProfileRow(
        role=problem.workload.profile_roles[index],
        samples=samples,
        tensor_size=measured_as[0],
        split=measured_as[1],
        forward_s=cost.forward.device_s,
        backward_s=cost.backward.device_s,
        saved_bytes=float(sum(size for _, size in cost.saved)),
        forward_workspace_bytes=cost.workspace_forward_bytes,
        backward_workspace_bytes=cost.workspace_backward_bytes,
        input_bytes=float(sum(cost.input_bytes)),
        output_bytes=float(sum(cost.output_bytes)),
        parameter_bytes=float(cost.num_parameter_elements * problem.runtime.parameter_bytes),
        includes_collectives=cost.includes_collectives,
        num_groups=1,
        source=source,
    )


def _nearest(
    profile: OperatorProfile, role: str, samples: int, tensor_size: int, split: SplitWord
) -> ProfileRow | None:
    """Return the row that one the profile does not have is grown from; None where none can be.

    Of its degree and split, at the nearest number of samples; else of the nearest degree that was measured without its
    collectives, interpolated between its samples: a collective takes other times over other groups.
    """
    nearest = profile.nearest(role, samples, tensor_size, split)
    if nearest is not None:
        return nearest
    place = profile.nearest_degree(role, tensor_size, split)
    if place is None:
        return None
    found = profile.lookup(role, samples, *place)
    return found.row if found is not None else profile.nearest(role, samples, *place)


def _grown(row: ProfileRow, there: OperatorCost, here: OperatorCost, *, kernels_only: bool) -> ProfileRow:
    """Return a row with what the model says of its operator here over what it says where the row was measured.

    The model's own time where it says nothing there. What is taken grows as the operator's outputs do.
    """

    def alone_s(segment: Segment) -> float:
        return segment.device_s if kernels_only else max(segment.device_s, segment.host_s)

    def grown(seconds: float, there: Segment, here: Segment) -> float:
        return seconds / alone_s(there) * alone_s(here) if alone_s(there) > 0 else alone_s(here)

    larger = sum(here.output_bytes) / max(1.0, sum(there.output_bytes))
    return replace(
        row,
        forward_s=grown(row.forward_s, there.forward, here.forward),
        backward_s=grown(row.backward_s, there.backward_alone, here.backward_alone),
        **{name: larger * getattr(row, name) for name in TAKEN if getattr(row, name) is not None},
    )


def _split_as(op: Operator, sharding: Sharding, tensor_size: int, split: SplitWord) -> Sharding:
    """Return a canonical sharding with tensor parallelism of another row of a profile (see `profiled_as`)."""
    if profiled_as(op, sharding) == (tensor_size, split):
        return sharding
    word = op.tensor_split if split == "default" else op.alternative_split
    batch = tuple(axis for axis in sharding if axis.split == "batch")
    return resolve((*batch, Axis(word, tensor_size)), op)


def profiled_as(op: Operator, sharding: Sharding) -> tuple[int, SplitWord] | None:
    """Return tensor-parallel ranks and split of the profile row that an operator under a canonical sharding has.

    Returns:
        None where no row describes it: split along two axes, or along one that profiles have no word for.
    """
    own = op.tensor_split
    # What all ranks repeat, though it could be cut, is as on one rank.
    repeated = () if own == "replicate" else ("replicate",)
    tensor_axes = [axis for axis in sharding if axis.split not in ("batch", *repeated)]
    if not tensor_axes:
        return 1, "default"
    axis, *others = tensor_axes
    split = "row" if axis.split == "row_sequence" else axis.split
    if others or split not in (own, op.alternative_split):
        return None
    return axis.size, "default" if split == own else "alternative"


def _measured(
    modelled: Segment, seconds: float, profiled_host_s: float | None, source: str, kernels_only: bool
) -> Segment:
    """Return a segment with a measured duration, and the host's where that was measured too.

    Its kernels are then launched as evenly as the model has them. Where the duration contains the host's, it is at most
    that; else the modelled launch time is kept.
    """
    recorded = {"measured": (seconds, 0.0, 0.0), "interpolated": (0.0, seconds, 0.0), "modelled": (0.0, 0.0, seconds)}
    host_s = modelled.host_s if profiled_host_s is None else profiled_host_s
    if not kernels_only:
        return Segment(seconds, min(host_s, seconds), seconds, 0.0, recorded[source])
    if profiled_host_s is None:
        return Segment(seconds, host_s, seconds, 0.0, recorded[source])
    first = modelled.lead_s / modelled.host_s if modelled.host_s > 0 else 1.0
    bound_s = max(first * host_s + seconds, host_s + first * seconds)
    return Segment(seconds, host_s, bound_s, first * host_s, recorded[source])
