"""What a stage sends beside its passes and copies for that, for ``overlap_time``.

Of a stage's gathers and gradients by their sums: its parameters count as spread evenly over its units that gather, or
over the others, copies as one pass over all of them and a kernel for each unit or tensor, calls by parameter (DeepSpeed
2021) in the same shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hardware_models.runtime import Runtime
from simulator.closed_forms.overlap_time import NEXT_TO_NOTHING_BYTES, SendingRules, Sent
from simulator.closed_forms.passes_time import SentHost
from simulator.closed_forms.stage_prices import collective_s, items_s, launch_collective_s, slowdowns
from simulator.closed_forms.stage_units import (
    NO_UNITS,
    ReductionShares,
    StageUnits,
    bucket_shares,
    calls_of_unit,
    filled_buckets,
    level_shares,
    mixed_shares,
    num_whole_reduced,
    unit_level_shares,
    unit_shares,
    with_unit,
)
from simulator.lowering.copies import copying_s
from simulator.lowering.items import Item
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import (
    GradientBucket,
    gradient_buckets,
    is_copied,
    is_gathered,
    parameter_groups,
    reductions,
    reshards,
    times_reduced,
    travels_before_use,
)


class _Gathers(NamedTuple):
    """Gathers of the root and of other units: what travels, what is copied, hosts, latency."""

    root_s: float
    others_s: float
    root_copied_s: float
    others_copied_s: float
    root_host_s: float
    others_host_s: float
    others_latency_s: float = 0.0


def bucket_elements(runtime: Runtime) -> float:
    """Return how many gradients are reduced at once."""
    num_bytes = runtime.gradient_bucket_bytes
    return float("inf") if num_bytes is None else num_bytes / runtime.travelling_gradient_bytes


def num_gradient_copies(runtime: Runtime, *, scattered: bool) -> tuple[int, int]:
    """Return how often gradients that are copied are gone over before they are reduced, and afterwards."""
    return (runtime.sharded_gradient_copies, 0) if scattered else (1, 1)


def copied_bytes(runtime: Runtime, *, scattered: bool) -> float:
    """Return the bytes that are read and written for each gradient that is copied once."""
    sums = runtime.travelling_gradient_bytes
    return sums + (min(runtime.implementation.activation_bytes, sums) if scattered else sums)


def is_large(runtime: Runtime, num_elements: int) -> bool:
    """Return whether a parameter is gathered by a call of its own."""
    return runtime.parameter_calls_above is not None and num_elements > runtime.parameter_calls_above


def sending_rules(view: StageView) -> SendingRules:
    """Return how a stage sends."""
    plan, runtime = view.plan, view.costs.problem.runtime
    return SendingRules(
        prefetches=runtime.prefetches_gathers,
        reshards=reshards(view),
        overlaps=plan.overlap_gradient_sync and not plan.rotates,
        every=plan.gradient_reduction == "every",
        waits=runtime.copies_gradients
        and any(group.reduced_axes and not group.scattered for group in parameter_groups(view)),
        in_turn=runtime.one_communicator,
    )


def stage_units(view: StageView) -> StageUnits:
    """Return the units of a stage. One without parameters counts as one that gathers."""
    costs, gathers = view.costs, dict[int, bool]()
    for group in parameter_groups(view):
        for user in group.users:
            unit = costs.units[user]
            gathers[unit] = gathers.get(unit, False) or travels_before_use(view, group)
    found = NO_UNITS
    for unit in dict.fromkeys(costs.units[index] for index in view.operators):
        found = with_unit(found, unit in costs.root_units, gathers.get(unit, True))
    return found


def sent_beside(view: StageView, gathering: Sequence[Item]) -> tuple[Sent, SentHost]:
    """Return what a stage sends beside its passes, and what that takes its host.

    Args:
        view, gathering: The stage, and items of its first forward pass.
    """
    plan, units = view.plan, stage_units(view)
    gathers = _gathers(view, gathering, units)
    in_parts = plan.gradient_reduction == "every" or (plan.overlap_gradient_sync and not plan.rotates)
    sums = _reductions(view, in_parts=in_parts)
    parts, shares = [1.0] * len(sums), ReductionShares(1.0, 1.0)
    if sums and in_parts:
        parts, shares = _shares(view, units, gathers, sums)
    copied_s, copied_back_s, copied_host_s = _gradient_copies(view)
    computation_slowdown, communication_slowdown = slowdowns(view)
    sent = Sent(
        gathers.root_s,
        gathers.others_s,
        gathers.root_copied_s,
        gathers.others_copied_s,
        sum(_reduction_s(view, each, count) for (each, _), count in zip(sums, parts, strict=True)),
        copied_s,
        copied_back_s,
        1.0 / max(1, units.num_others) if gathers.others_s > 0 else 1.0,
        shares.first_share,
        shares.last_share,
        computation_slowdown,
        communication_slowdown,
        *_latencies_s(view, gathers, sums, parts),
        units.gathered_others / units.num_others if gathers.others_s > 0 else 1.0,
        units.others_before > 0,
        units.others_behind > 0,
        shares.late_share,
        shares.late_left,
    )
    host_s = sum(
        count * launch_collective_s(view, item, listed=in_parts and each.listed)
        for (each, _), count in zip(sums, parts, strict=True)
        for item in each.collectives
    )
    others_host_s = gathers.others_host_s
    return sent, SentHost(gathers.root_host_s + others_host_s, others_host_s, host_s + copied_host_s)


def _latencies_s(
    view: StageView, gathers: _Gathers, sums: Sequence[tuple[GradientBucket, bool]], parts: Sequence[float]
) -> tuple[float, float]:
    """Return what gathers and reductions take before bytes move; nothing where the others do not move meanwhile."""
    if view.costs.problem.runtime.one_communicator:
        return 0.0, 0.0
    reduced_s = (_reduction_s(view, each, count, latency=True) for (each, _), count in zip(sums, parts, strict=True))
    return gathers.others_latency_s, sum(reduced_s)


def _reductions(view: StageView, *, in_parts: bool) -> list[tuple[GradientBucket, bool]]:
    """Return the reductions of a stage's gradients, and whether they are of what ZeRO-3 shards.

    Args:
        view: The stage.
        in_parts: Gradients are reduced as they are made, so that those are apart.
    """
    runtime, groups = view.costs.problem.runtime, list(parameter_groups(view))
    found = []
    for bucket in gradient_buckets(view, merged=True):
        if not in_parts:
            found.append((bucket, False))
            continue
        for sharded in (True, False):
            members = tuple(member for member in bucket.members if is_gathered(groups[member]) == sharded)
            if len(members) == len(bucket.members):
                found.append((bucket, sharded))
            elif members:
                sizes = (times_reduced(view, groups[member]) * groups[member].num_elements for member in members)
                collectives = reductions(groups[members[-1]], runtime, sum(sizes) * runtime.travelling_gradient_bytes)
                listed = sharded and runtime.parameter_calls_above is not None
                found.append((replace(bucket, members=members, collectives=collectives, listed=listed), sharded))
    return found


def _shares(
    view: StageView, units: StageUnits, gathers: _Gathers, sums: Sequence[tuple[GradientBucket, bool]]
) -> tuple[list[float], ReductionShares]:
    """Return in how many parts gradients are reduced as they are made, and how these lie in a backward pass.

    Args:
        view: The stage, which reduces some.
        units, gathers, sums: Its units, gathers and reductions.
    """
    costs = view.costs
    num_bytes = [each.collectives[0].num_bytes for each, _ in sums]
    whole_bytes = sum(own for own, (_, sharded) in zip(num_bytes, sums, strict=True) if not sharded)
    root_share = gathers.root_s / (gathers.root_s + gathers.others_s) if gathers.root_s > 0 else 0.0
    begins_in_root = costs.units[view.operators[0]] in costs.root_units
    by_unit, first_share, last_share = unit_shares(
        units.gathered_others, units.gathered_root, begins_in_root, root_share
    )
    is_mixed = any(sharded for _, sharded in sums)
    by_itself = num_whole_reduced(units, is_mixed) if costs.problem.runtime.reduces_by_unit else None
    buckets, first_of_whole, last_of_whole = _bucket_shares(view, by_itself) if whole_bytes else (1.0, 1.0, 1.0)
    parts = [
        by_unit if sharded else max(1.0, buckets * own / whole_bytes)
        for own, (_, sharded) in zip(num_bytes, sums, strict=True)
    ]
    if costs.problem.runtime.parameter_calls_above is not None:
        shares = [_num_untied(view) * own / sum(num_bytes) for own in num_bytes]
        parts = [
            max(own, more) if each.listed else own
            for (each, _), own, more in zip(sums, parts, shares, strict=True)
        ]
    found = ReductionShares(first_share, last_share)
    seconds = [_reduction_s(view, each, count) for (each, _), count in zip(sums, parts, strict=True)]
    if not is_mixed:
        found, starts = ReductionShares(first_of_whole, last_of_whole), _level_starts(view, sums)
        if (buckets <= 1.0 or by_itself is not None) and min(starts) < max(starts):
            front = [number for number, start in enumerate(starts) if start == min(starts)]
            share = sum(seconds[number] for number in front) / sum(seconds)
            before, count = max(starts) - view.operators[0], len(view.operators)
            if by_itself is None:
                found = level_shares(before, count, share)
            else:
                elements = sum(num_bytes[number] for number in front) / sum(num_bytes)
                found = unit_level_shares(found, buckets, before / count, share, elements)
    elif units.num_whole:
        whole_s = sum(own_s for own_s, (_, sharded) in zip(seconds, sums, strict=True) if not sharded)
        found = mixed_shares(units, last_share, first_of_whole, last_of_whole, whole_s / sum(seconds))
    return parts, found


def _level_starts(view: StageView, sums: Sequence[tuple[GradientBucket, bool]]) -> list[int]:
    """Return of each reduction of a stage the first operator that ZeRO treats alike on the same mesh."""
    groups = list(parameter_groups(view))
    firsts = [groups[each.members[-1]] for each, _ in sums]
    levels = [(group.sizes, group.sharded_axes, group.scattered) for group in firsts]
    return [
        min(group.operator for group, other in zip(firsts, levels, strict=True) if other == level) for level in levels
    ]


def gathered_again_s(view: StageView, forward: Sequence[Item], backward: Sequence[Item]) -> float:
    """Return the seconds of what recomputed units gather once more.

    Args:
        view, forward, backward: The stage, and items of its passes.
    """
    found_s = _gathers_s(view, forward, in_root=False)
    return _gathers_s(view, backward, in_root=False) - found_s if found_s > 0 else 0.0


def _gathers(view: StageView, gathering: Sequence[Item], units: StageUnits) -> _Gathers:
    """Return the gathers of a forward pass.

    Args:
        view, gathering, units: The stage, items of the pass, and its units.
    """
    root_s, others_s = (_gathers_s(view, gathering, in_root=in_root) for in_root in (True, False))
    if root_s + others_s <= 0:
        return _Gathers(*[0.0] * 6)
    runtime, num_root, num_others = view.costs.problem.runtime, units.gathered_root, units.gathered_others
    num_units = num_root + num_others
    elements = _gathered_elements(view)
    total = sum(elements.values())
    large = sum(
        is_gathered(group) and group.tie is None and is_large(runtime, group.num_elements)
        for group in parameter_groups(view)
    )
    host_s, more_s, copied_s, latency_s = 0.0, 0.0, 0.0, 0.0  # Of a unit.
    for (sizes, axes), own in elements.items():
        item = MeshCollective("all_gather", sizes, axes, NEXT_TO_NOTHING_BYTES)
        calls = calls_of_unit(num_units, large, own / total)
        more_s += (calls - 1.0) * collective_s(view, item)
        latency_s += calls * collective_s(view, item)
        host_s += calls * launch_collective_s(view, item, listed=runtime.parameter_calls_above is not None)
    root_share = root_s / (root_s + others_s)
    if runtime.copies_gathered:
        start_s, s_per_byte = _copying_s(view)
        copied_s = num_units * start_s + 2.0 * total * runtime.gathered_parameter_bytes * s_per_byte
        host_s += max(map(view.costs.launch_s, view.gpu_types))
    return _Gathers(
        root_s + num_root * more_s,
        others_s + num_others * more_s,
        root_share * copied_s,
        (1.0 - root_share) * copied_s,
        num_root * host_s,
        num_others * host_s,
        num_others * latency_s,
    )


def _gathered_elements(view: StageView) -> Mapping[tuple[tuple[int, ...], tuple[int, ...]], int]:
    """Return the parameters of a stage that are gathered, by mesh and axes."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    for group in parameter_groups(view):
        if travels_before_use(view, group):
            key = group.sizes, group.sharded_axes
            found[key] = found.get(key, 0) + group.num_elements
    return found


def _gathers_s(view: StageView, items: Sequence[Item], *, in_root: bool) -> float:
    """Return the seconds of a pass's gathers of parameters, of the root or of other units."""
    units, root = view.costs.units, view.costs.root_units
    found = [item for item in items if item.role == "gather" and item.cause == "parameter gather"]
    return items_s(view, [item for item in found if (units[item.operator] in root) == in_root])


def _bucket_shares(view: StageView, by_itself: float | None) -> tuple[float, float, float]:
    """Return what ``bucket_shares`` does, of what ZeRO-3 does not shard of a stage: what is tied fills no bucket.

    Args:
        view: The stage.
        by_itself: How many units of it are reduced by themselves; None where buckets are.
    """
    limit = bucket_elements(view.costs.problem.runtime)
    reduced = [group for group in parameter_groups(view) if group.reduced_axes and not is_gathered(group)]
    sizes = [(group, times_reduced(view, group) * group.num_elements) for group in reduced]
    costs = view.costs
    if by_itself is not None and costs.units[view.operators[0]] in costs.root_units:  # The root goes at once, at last.
        begun = sum(size for group, size in sizes if costs.units[group.operator] in costs.root_units)
    else:
        begun = sum(size for group, size in sizes if group.operator == reduced[0].operator)
    filled = (filled_buckets(group.num_elements, limit) for group in reduced if group.tie is None)
    num_buckets = sum(filled) if by_itself is None else by_itself
    return bucket_shares(num_buckets, begun / sum(size for _, size in sizes))


def _reduction_s(view: StageView, reduction: GradientBucket, parts: float, *, latency: bool = False) -> float:
    """Return the seconds of a reduction in equal parts, or of their latency alone."""
    items = (
        replace(item, num_bytes=NEXT_TO_NOTHING_BYTES if latency else item.num_bytes / parts)
        for item in reduction.collectives
    )
    return parts * sum(collective_s(view, item) for item in items)


def _gradient_copies(view: StageView) -> tuple[float, float, float]:
    """Return the seconds of copying a stage's gradients before they are reduced, and back, and its host's for both."""
    runtime = view.costs.problem.runtime
    before_bytes, back_bytes, before, back = 0.0, 0.0, 0, 0
    for group in parameter_groups(view):
        if is_copied(view, group):
            own = times_reduced(view, group) * group.num_elements * copied_bytes(runtime, scattered=group.scattered)
            times, times_back = num_gradient_copies(runtime, scattered=group.scattered)
            before_bytes, back_bytes = before_bytes + times * own, back_bytes + times_back * own
            before, back = max(before, times), max(back, times_back)
    if not before:
        return 0.0, 0.0, 0.0
    start_s, s_per_byte = _copying_s(view)
    num_tensors = _num_untied(view)
    host_s = (before + back) * num_tensors * max(map(view.costs.launch_s, view.gpu_types))
    before_s = before * num_tensors * start_s + before_bytes * s_per_byte
    return before_s, back * num_tensors * start_s + back_bytes * s_per_byte, host_s


def _copying_s(view: StageView) -> tuple[float, float]:
    """Return what ``copying_s`` does, of the slowest types of a stage."""
    starts_s, s_per_byte = zip(*(copying_s(view.costs, gpu_type) for gpu_type in view.gpu_types), strict=True)
    return max(starts_s), max(s_per_byte)


def _num_untied(view: StageView) -> int:
    return sum(group.tie is None for group in parameter_groups(view))
