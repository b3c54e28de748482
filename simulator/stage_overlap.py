"""What a stage sends beside its passes, for ``overlap_time``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from hardware_models.runtime import Runtime
from simulator.lowering.epilogue import epilogue_collectives
from simulator.lowering.items import Item
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import parameter_groups, times_reduced
from simulator.overlap_time import Sent, bucket_shares, overlapped_s, unit_shares
from simulator.stage_prices import collective_s, items_s


def bucket_elements(runtime: Runtime) -> float:
    """Return how many gradients are reduced at once."""
    num_bytes = runtime.gradient_bucket_bytes
    return float("inf") if num_bytes is None else num_bytes / runtime.gradient_accumulation_bytes


def gathers_ahead(runtime: Runtime) -> bool:
    """Return whether a layer's parameters are gathered while the one before computes.

    Not where the host waits for each gather before it goes on: it launches the next one too late to hide any of it.
    """
    return runtime.prefetches_gathers and "gather" not in runtime.host_waits


def is_sharded(view: StageView) -> bool:
    """Return whether parameters of all operators of a stage are gathered: else nothing says which gathers hide."""
    for index in view.operators:
        shards = [axis for axis in view.shardings[index] if axis.split == "batch" and axis.zero > 0]
        if max((axis.zero for axis in shards), default=0) < 3 or prod(axis.size for axis in shards) == 1:
            return False
    return True


def stage_passes_s(
    view: StageView, forward_s: float, backward_s: float, forward: Sequence[Item], backward: Sequence[Item]
) -> tuple[float, float, float, float]:
    """Return what ``overlapped_s`` does, of a stage.

    What recomputed layers gather once more comes on top of the backward pass.

    Args:
        view: The stage.
        forward_s, backward_s: What a microbatch computes.
        forward, backward: Items of its passes.
    """
    plan, runtime = view.plan, view.costs.problem.runtime
    every, overlaps = plan.gradient_reduction == "every", plan.overlap_gradient_sync and not plan.rotates
    sent = _sent(view, forward, early=every or overlaps)
    groups = [group for group in parameter_groups(view) if group.reduced_axes]
    waits = runtime.copies_gradients and any(not group.zero for group in groups)
    again_s = _gathers_s(view, backward, in_root=False) - sent.gathered_s if sent.gathered_s > 0 else 0.0
    prefetches = gathers_ahead(runtime) and is_sharded(view)
    passed_s, returned_s, within_s, behind_s = overlapped_s(
        forward_s, backward_s, sent, prefetches, overlaps, every, waits
    )
    return passed_s, returned_s + again_s, within_s, behind_s


def _sent(view: StageView, forward: Sequence[Item], *, early: bool) -> Sent:
    """Return what a stage sends.

    Args:
        view, forward: The stage, and items of its forward pass.
        early: Gradients are reduced as they are made.
    """
    costs = view.costs
    operators, root = costs.problem.workload.operators, costs.root_layers
    layers = dict.fromkeys(operators[index].layer for index in view.operators)
    num_root = sum(layer in root for layer in layers)
    root_s, gathered_s = (_gathers_s(view, forward, in_root=in_root) for in_root in (True, False))
    reductions, _ = epilogue_collectives(view, reduces_early=False)
    parts, first_share, last_share = 1.0, 1.0, 1.0
    if early and reductions:
        reduced = [group for group in parameter_groups(view) if group.reduced_axes]
        if is_sharded(view):
            root_share = root_s / (root_s + gathered_s) if root_s > 0 else 0.0
            begins_in_root = operators[view.operators[0]].layer in root
            parts, first_share, last_share = unit_shares(len(layers) - num_root, num_root, begins_in_root, root_share)
        else:
            sizes = [(group, times_reduced(view, group) * group.num_elements) for group in reduced]
            parts, first_share, last_share = bucket_shares(
                float(sum(size for _, size in sizes)),
                bucket_elements(costs.problem.runtime),
                float(sum(size for group, size in sizes if group.operator == reduced[0].operator)),
            )
    reduced_s = sum(
        parts * collective_s(view, replace(item, num_bytes=item.num_bytes / parts)) for item in reductions
    )
    slowdowns = [costs.problem.hardware.overlap_slowdown(gpu_type) for gpu_type in view.gpu_types]
    layer_share = 1.0 / max(1, len(layers) - num_root) if gathered_s > 0 else 1.0
    return Sent(
        root_s,
        gathered_s,
        reduced_s,
        layer_share,
        first_share,
        last_share,
        *(max(factors) for factors in zip(*slowdowns, strict=True)),
    )


def _gathers_s(view: StageView, items: Sequence[Item], *, in_root: bool) -> float:
    """Return the seconds of a pass's gathers of parameters, of the root unit or of the others."""
    operators, root = view.costs.problem.workload.operators, view.costs.root_layers
    found = [item for item in items if item.role == "gather" and item.cause == "parameter gather"]
    return items_s(view, [item for item in found if (operators[item.operator].layer in root) == in_root])
