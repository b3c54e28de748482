"""Whole gradients between backward pass and reduction: where each begins, and the buffers that they are written to."""

from __future__ import annotations

from collections.abc import Iterable

from hardware_models.runtime import Runtime
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import ParameterGroup
from simulator.plan import Plan


def bucket_buffer_bytes(groups: Iterable[ParameterGroup], runtime: Runtime) -> float:
    """Return the bytes of the buffer that a backward pass fills with gradients of these parameters; 0 for none."""
    fills = any(group.num_shards > 1 and group.zero in runtime.fills_bucket for group in groups)
    return float(runtime.gradient_bucket_bytes or 0) if fills else 0.0


def num_buffers(plan: Plan) -> int:
    """Return how many such buffers a backward pass makes: one is reduced while another is filled."""
    return 2 if plan.overlap_gradient_sync else 1


def flattened_bytes(group: ParameterGroup, runtime: Runtime) -> float:
    """Return the bytes of a whole gradient that is copied to be reduced (``Runtime.flattens_gradients``)."""
    joins = runtime.flattens_gradients and group.zero == 1 and group.num_shards > 1
    return float(group.num_elements * runtime.travelling_gradient_bytes) if joins else 0.0


def flattened_at_once(num_bytes: float, runtime: Runtime) -> float:
    """Return how much of so many bytes of flattened gradients is there at once."""
    return num_bytes if runtime.gradient_bucket_bytes is None else min(num_bytes, float(runtime.gradient_bucket_bytes))


def _goes_into_buffer(group: ParameterGroup, runtime: Runtime) -> bool:
    return 0 < group.num_elements * runtime.travelling_gradient_bytes <= bucket_buffer_bytes([group], runtime)


def whole_gradients_begin(view: StageView, group: ParameterGroup) -> list[int]:
    """Return the operators whose backward pass begins a whole gradient of a parameter that ZeRO-2 or 3 scatters.

    All that use it, but the last alone of those in the root unit, which is reduced once all its gradients are summed.
    None where it goes into a buffer (``bucket_buffer_bytes``) that holds it.
    """
    if group.zero < 2 or group.num_shards == 1 or _goes_into_buffer(group, view.costs.problem.runtime):
        return []
    units, root = view.costs.units, view.costs.root_units
    later = [user for user in group.users if units[user] in root]
    return [user for user in group.users if user not in later[:-1]]
