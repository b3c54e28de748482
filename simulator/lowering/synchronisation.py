"""Gradients to reduce and parameters to gather, per stage: what data parallelism and ZeRO communicate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hardware_models.links import OWNER_REDUCE
from hardware_models.runtime import Runtime
from simulator.lowering.mesh import MeshCollective, mesh_sizes, parameter_layout
from workloads.placements import PARTIAL

if TYPE_CHECKING:
    from simulator.lowering.program import StageView
    from simulator.plan import Sharding


ROOT = -2
"""The unit of what does not repeat, where the runtime has one of it all, beside the others by number."""


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are reduced together.

    Attributes:
        members: Its parameters, as positions among `parameter_groups`.
        last_operator: The operator whose backward completes the bucket.
        collectives: What reduces it, in order.
        copied: Operators whose gradients the runtime copies into the bucket.
        passes: How often it goes over them before they are reduced.
        copied_back: They are copied back afterwards.
        listed: The runtime scatters each member by a call that is given a tensor of each rank.
    """

    members: tuple[int, ...]
    last_operator: int
    collectives: tuple[MeshCollective, ...]
    copied: tuple[int, ...] = ()
    passes: int = 0
    copied_back: bool = False
    listed: bool = False

    @property
    def num_calls(self) -> int:
        """Calls of each of its collectives."""
        return len(self.members) if self.listed else 1


class ParameterGroup(NamedTuple):
    """Parameters of one operator that are synchronised alike.

    Attributes:
        operator: Index.
        sizes: Mesh of the operator.
        reduced_axes: Axes over which gradients are partial sums.
        is_replicated: Replicas are among them.
        zero: Largest ZeRO level of those axes.
        sharded_axes: Axes over which ZeRO shards.
        scattered: The gradient is summed to a shard each; else whole, as without ZeRO.
        num_elements: Local elements before ZeRO.
        tie: Tie key or None.
        users: Operators of the stage that hold the parameter in this layout; more than one only where it is tied.
        leads_unit: It is the first parameter of its unit (``CostTables.units``).
    """

    operator: int
    sizes: tuple[int, ...]
    reduced_axes: tuple[int, ...]
    is_replicated: bool
    zero: int
    sharded_axes: tuple[int, ...]
    scattered: bool
    num_elements: int
    tie: str | None
    users: tuple[int, ...]
    leads_unit: bool

    @property
    def num_shards(self) -> int:
        """Ranks that ZeRO shares the states among."""
        return prod(self.sizes[axis] for axis in self.sharded_axes)


def scatters(sharding: Sharding, runtime: Runtime) -> bool:
    """Return whether gradients of an operator so split are summed to a shard on each rank."""
    zero = max((axis.zero for axis in sharding if axis.split == "batch"), default=0)
    return zero > 1 or (zero == 1 and runtime.scatters_under_zero1)


def handed_over(view: StageView, *, first: bool) -> frozenset[int]:
    """Return the operators whose gradients a pass adds to none.

    Args:
        view: The stage.
        first: The pass is of the first microbatch.
    """
    if not view.costs.problem.runtime.hands_over_gradients:
        return frozenset()
    key = ("handed over", first)
    if key not in view.kept:
        each = view.plan.gradient_reduction == "every"
        view.kept[key] = frozenset(
            user for group in parameter_groups(view) if first or (each and group.scattered) for user in group.users
        )
    found: frozenset[int] = view.kept[key]
    return found


def parameter_groups(view: StageView) -> Iterator[ParameterGroup]:
    """Yield every parameter of a stage; a tensor tied within the stage comes once for each of its layouts."""
    if "parameter groups" not in view.kept:
        view.kept["parameter groups"] = _shifted_groups(view)
    yield from view.kept["parameter groups"]


def _shifted_groups(view: StageView) -> tuple[ParameterGroup, ...]:
    """Return the parameters of a stage, from those of any other of its form."""
    own_first = view.operators[0]
    if "parameter groups" not in view.shared:
        view.shared["parameter groups"] = own_first, tuple(_parameter_groups(view))
    first, groups = view.shared["parameter groups"]
    if first == own_first:
        return groups  # type: ignore[no-any-return]
    shift = own_first - first
    return tuple(
        group._replace(operator=group.operator + shift, users=tuple(user + shift for user in group.users))
        for group in groups
    )


def _parameter_groups(view: StageView) -> list[ParameterGroup]:
    found: list[ParameterGroup] = []
    places: dict[object, int] = {}
    alike: dict[object, list[ParameterGroup]] = {}
    signatures, leading = view.costs.problem.workload.signatures, view.costs.leading_operators
    for index in view.operators:
        sharding = view.shardings[index]
        key = signatures[index], sharding
        if key not in alike:
            alike[key] = _operator_groups(view, index)
        for number, group in enumerate(alike[key]):
            if group.tie is not None:
                layout = (group.tie, parameter_layout(sharding, view.costs.splits(index, sharding), number))
                if layout in places:
                    place = places[layout]
                    found[place] = found[place]._replace(users=(*found[place].users, index))
                    continue
                places[layout] = len(found)
            leads_unit = number == 0 and index in leading
            found.append(group._replace(operator=index, users=(index,), leads_unit=leads_unit))
    return found


def _operator_groups(view: StageView, index: int) -> list[ParameterGroup]:
    """Return the parameters of an operator, as if it stood alone."""
    sharding = view.shardings[index]
    splits = view.costs.splits(index, sharding)
    batch_axes = tuple(axis for axis, item in enumerate(sharding) if item.split == "batch")
    found = []
    for number, (parameter, elements) in enumerate(view.cost(index).parameters):
        reduced_axes = tuple(
            axis for axis, split in enumerate(splits) if sharding and split.parameter_gradient(number) == PARTIAL
        )
        group = ParameterGroup(
            operator=index,
            sizes=mesh_sizes(sharding),
            reduced_axes=reduced_axes,
            is_replicated=any(axis in batch_axes for axis in reduced_axes),
            zero=max((sharding[axis].zero for axis in batch_axes), default=0),
            sharded_axes=tuple(axis for axis in batch_axes if sharding[axis].zero > 0),
            scattered=scatters(sharding, view.costs.problem.runtime),
            num_elements=elements,
            tie=parameter.tie,
            users=(index,),
            leads_unit=False,
        )
        found.append(group)
    return found


def split_reduction(group: ParameterGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes over which a gradient is scattered, and those over which what is left is all-reduced."""
    scattered = tuple(axis for axis in group.reduced_axes if group.scattered and axis in group.sharded_axes)
    return scattered, tuple(axis for axis in group.reduced_axes if axis not in scattered)


def scattering_collective(group: ParameterGroup, runtime: Runtime) -> str:
    """Return the collective that sums a gradient to a shard on each rank."""
    return OWNER_REDUCE if group.zero in runtime.reduces_to_owners else "reduce_scatter"


def reductions(group: ParameterGroup, runtime: Runtime, num_bytes: float) -> tuple[MeshCollective, ...]:
    """Return what reduces ``num_bytes`` of gradients: scatter over sharded axes, then all-reduce the rest."""
    scattered, rest = split_reduction(group)
    found = []
    if scattered:
        found.append(MeshCollective(scattering_collective(group, runtime), group.sizes, scattered, num_bytes))
        num_bytes /= prod(group.sizes[axis] for axis in scattered)
    if rest:
        found.append(MeshCollective("all_reduce", group.sizes, rest, num_bytes))
    return tuple(found)


def gradient_buckets(view: StageView, *, merged: bool) -> list[GradientBucket]:
    """Return the stage's gradient reductions in the order in which backward completes them.

    Args:
        view: The stage.
        merged: One reduction for all gradients that share a group (after the whole backward pass);
            else buckets of the runtime's size.
    """
    if ("gradient buckets", merged) not in view.kept:
        view.kept["gradient buckets", merged] = _gradient_buckets(view, merged)
    return list(view.kept["gradient buckets", merged])


def _gradient_buckets(view: StageView, merged: bool) -> list[GradientBucket]:
    runtime = view.costs.problem.runtime
    bucket_bytes = runtime.gradient_bucket_bytes
    limit = float("inf") if merged or bucket_bytes is None else float(bucket_bytes)
    everything = list(parameter_groups(view))
    open_groups: dict[object, tuple[list[int], float]] = {}
    filled = []
    for position in range(len(everything) - 1, -1, -1):
        group = everything[position]
        if not group.reduced_axes:
            continue
        # Sharded parameters are reduced by the unit they are gathered in, or the root at once.
        by_unit = (group.zero == 3 or runtime.reduces_by_unit) and not merged
        unit = view.costs.units[group.operator] if by_unit else -1
        place = ROOT if unit in view.costs.root_units else unit
        key = (group.sizes, group.reduced_axes, group.sharded_axes, group.scattered, place)
        members, so_far = open_groups.get(key, ([], 0.0))
        members.append(position)
        total = so_far + times_reduced(view, group) * group.num_elements * runtime.travelling_gradient_bytes
        open_groups[key] = (members, total)
        if total >= limit:
            filled.append(open_groups.pop(key))
    filled += open_groups.values()
    filled.sort(key=lambda each: -each[0][-1])
    copied = _copied(view, [[everything[member] for member in members] for members, _ in filled])
    buckets = []
    for number, (members, total) in enumerate(filled):
        last = everything[members[-1]]
        listed = last.zero == 3 and runtime.parameter_calls_above is not None
        bucket = GradientBucket(tuple(members), last.operator, reductions(last, runtime, total), listed=listed)
        if number in copied:
            whole = not last.scattered
            passes = 1 if whole else runtime.sharded_gradient_copies
            bucket = replace(bucket, copied=tuple(copied[number]), passes=passes, copied_back=whole)
        buckets.append(bucket)
    return buckets


def times_reduced(view: StageView, group: ParameterGroup) -> int:
    """Return how often the gradient of a parameter is reduced: once, or for each use in the stage."""
    by_use = view.costs.problem.runtime.reduces_ties_by_use and not group.zero
    return len(group.users) if by_use else 1


def tied_shards(view: StageView, group: ParameterGroup) -> int:
    """Return of how many shards of a tied weight's gradient the holders of the weight add up one."""
    whole = not group.scattered or (view.costs.problem.runtime.reduces_ties_whole and group.zero == 1)
    return 1 if whole else group.num_shards


def _copied(view: StageView, buckets: Sequence[Sequence[ParameterGroup]]) -> dict[int, list[int]]:
    """Return, by bucket, the operators whose last gradient it takes in, of those that the runtime copies."""
    last = {
        group.operator: number for number, groups in enumerate(buckets) for group in groups if is_copied(view, group)
    }
    found: dict[int, list[int]] = {}
    for operator, number in last.items():
        found.setdefault(number, []).append(operator)
    return found


def is_copied(view: StageView, group: ParameterGroup) -> bool:
    """Return whether the runtime copies a parameter's gradient before data parallelism reduces it."""
    runtime = view.costs.problem.runtime
    wanted = runtime.copies_gradients and not group.scattered
    if group.zero == 3 or group.zero in runtime.fills_bucket:
        wanted = runtime.sharded_gradient_copies > 0
    return wanted and group.is_replicated


def is_gathered(group: ParameterGroup) -> bool:
    """Return whether ZeRO-3 gathers a parameter before it is used."""
    return group.zero == 3 and group.num_shards > 1


def is_refreshed(group: ParameterGroup) -> bool:
    """Return whether ZeRO-1 or 2 gathers a parameter after the optimizer step."""
    return group.zero in (1, 2) and group.num_shards > 1


def refreshes_in_forward(view: StageView) -> bool:
    """Return whether a stage gathers what was stepped beside its first forward pass, and not behind the step."""
    if not view.costs.problem.runtime.refreshes_in_forward:
        return False
    if "refreshes in forward" not in view.kept:
        view.kept["refreshes in forward"] = not any(map(is_gathered, parameter_groups(view)))
    found: bool = view.kept["refreshes in forward"]
    return found


def reshards(view: StageView) -> bool:
    """Return whether what a stage gathers before use is given back after each pass."""
    return view.plan.reshard_after_forward and not refreshes_in_forward(view)


def travels_before_use(view: StageView, group: ParameterGroup) -> bool:
    """Return whether a parameter is gathered for passes: by ZeRO-3, or beside the first forward pass."""
    return is_gathered(group) or (is_refreshed(group) and refreshes_in_forward(view))


def gathered_for(view: StageView, group: ParameterGroup) -> list[int]:
    """Return the units (``CostTables.units``) that a parameter is gathered for.

    All that use it, but the first alone of those between which it stays: of the root unit, or all where the stage does
    not reshard after the forward pass.
    """
    if not travels_before_use(view, group):
        return []
    units = dict.fromkeys(view.costs.units[user] for user in group.users)
    stays = view.costs.root_units if reshards(view) else frozenset(units)
    later = [unit for unit in units if unit in stays][1:]
    return [unit for unit in units if unit not in later]


def units_gathered_for(view: StageView, group: ParameterGroup) -> list[int]:
    """Return what ZeRO-3 has whole at once of those units (``CostTables.unit_parts``)."""
    if not is_gathered(group):
        return []
    outer, inner = view.costs.units, view.costs.unit_parts
    units = set(gathered_for(view, group))
    return list(dict.fromkeys(inner[user] for user in group.users if outer[user] in units))


def gather_collectives(view: StageView) -> dict[int, list[MeshCollective]]:
    """Return, per unit, the all-gathers of parameters before the unit can run."""
    runtime = view.costs.problem.runtime
    wanted = ((unit, group) for group in parameter_groups(view) for unit in gathered_for(view, group))
    return _gathers(
        wanted, runtime.parameter_bytes if refreshes_in_forward(view) else runtime.gathered_parameter_bytes
    )


def gather_calls(view: StageView) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], int]:
    """Return the calls of each gather, by unit, mesh and axes, where the runtime gathers parameters one by one."""
    least = view.costs.problem.runtime.parameter_calls_above
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    if least is not None:
        for group in parameter_groups(view):
            for unit in gathered_for(view, group):
                key = (unit, group.sizes, group.sharded_axes)
                found[key] = found.get(key, 0) + (group.num_elements > least)
    return found


def parameter_refresh(view: StageView) -> list[MeshCollective]:
    """Return the all-gathers that ZeRO-1 and ZeRO-2 need after the optimizer step, and before the next iteration."""
    if "parameter refresh" not in view.kept:
        groups = () if refreshes_in_forward(view) else parameter_groups(view)
        wanted = ((0, group) for group in groups if is_refreshed(group))
        found = _gathers(wanted, view.costs.problem.runtime.parameter_bytes)
        view.kept["parameter refresh"] = [one for collectives in found.values() for one in collectives]
    return list(view.kept["parameter refresh"])


def _gathers(wanted: Iterable[tuple[int, ParameterGroup]], element_bytes: float) -> dict[int, list[MeshCollective]]:
    totals: dict[tuple[int, tuple[int, ...], tuple[int, ...]], float] = {}
    for unit, group in wanted:
        key = (unit, group.sizes, group.sharded_axes)
        totals[key] = totals.get(key, 0.0) + group.num_elements * element_bytes
    found: dict[int, list[MeshCollective]] = {}
    for (unit, sizes, axes), num_bytes in totals.items():
        found.setdefault(unit, []).append(MeshCollective("all_gather", sizes, axes, num_bytes))
    return found
