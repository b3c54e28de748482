"""Closed form of what ZeRO has whole for a while on one device: gathered parameters, unscattered gradients."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import pairwise

from simulator.closed_forms.unscattered import unscattered_bytes
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import parameter_groups, units_gathered_for, whole_gradients_begin
from simulator.memory.model_states import reduces_in_backward


@dataclass(frozen=True)
class Whole:
    """What ZeRO has whole for a while, in bytes.

    Attributes:
        root: Parameters of the root that are gathered, from a forward pass to the end of its backward pass.
        beside: All else in the backward pass, by the operator from which on it counts, never more than before: in
            units below the first to be scattered; in that one or what of the root is above it; and before any whole
            gradient is made.
        first: All else while the stage's first operator works.
        end: All else when that is through; where the root is given back before it is reduced, less that then.
    """

    root: float
    beside: dict[int, float]
    first: float
    end: float


def whole_for_a_while(view: StageView) -> Whole:
    """Return what ZeRO has whole on one device of a stage."""
    costs, plan, runtime = view.costs, view.plan, view.costs.problem.runtime
    units = {index: costs.unit_parts[index] for index in view.operators}
    gathered, scattered = dict.fromkeys(units.values(), 0.0), dict.fromkeys(units.values(), 0.0)
    made_at = dict.fromkeys(units, 0.0)
    for group in parameter_groups(view):
        for unit in units_gathered_for(view, group):
            gathered[unit] += group.num_elements
        for index in whole_gradients_begin(view, group):
            made_at[index] += group.num_elements
    for index, elements in made_at.items():
        scattered[units[index]] += elements
    roots = {unit for index, unit in units.items() if costs.units[index] in costs.root_units}
    waits, wait = runtime.waiting_gradient_share is not None, runtime.waiting_gradient_share or 1.0
    parameter_bytes = runtime.gathered_parameter_bytes if plan.reshard_after_forward else 0
    gradient_bytes = runtime.gradient_accumulation_bytes if reduces_in_backward(plan) else 0
    root, pair = _root_and_pair(gathered, roots, 1.0, 1.0 if runtime.holds_next("backward") else 0.0)
    apart = waits and not runtime.flattens_sharded  # A unit is given back before its gradients are copied.
    outer, waiting = _root_and_pair(scattered, roots, wait, wait, copied=waits and not apart)
    others = [unit for unit in sorted(scattered) if unit not in roots and scattered[unit]]
    pair_bytes, others_bytes = pair * parameter_bytes, pair * parameter_bytes + waiting * gradient_bytes
    if apart and others:
        below = [gathered[unit] for unit in sorted(gathered) if unit not in roots and gathered[unit]][:-1]
        next_one = max(below, default=0.0) if runtime.holds_next("backward") else 0.0
        copying = max(scattered[unit] for unit in others) * (1.0 + wait)
        others_bytes = max(others_bytes, next_one * parameter_bytes + copying * gradient_bytes)
    root_above = sum(made_at[index] for index in units if others and units[index] > others[-1])
    beside = {}
    if others and others_bytes > 0:
        made = max(index for index in units if made_at[index])
        bare = made if waits else made + 1  # What waits begins to when it is made.
        above = next(index for index in units if units[index] >= others[-1] + (root_above > 0))
        if root_above:
            own_bytes = root_above * wait * gradient_bytes
            beside = {view.operators[0]: own_bytes + others_bytes, above: own_bytes, bare: 0.0}
        else:
            own_bytes = scattered[others[-1]] * wait * gradient_bytes
            beside = {view.operators[0]: others_bytes, above: own_bytes + pair_bytes, bare: pair_bytes}
    root_bytes = root * parameter_bytes
    of_root, above_bytes = outer * gradient_bytes, root_above * gradient_bytes
    lowest_bytes = (scattered[others[0]] if others else 0.0) * gradient_bytes
    given_back_bytes = root_bytes if apart else 0.0
    first, end = unscattered_bytes(of_root, above_bytes, lowest_bytes, wait, waits, given_back_bytes)
    pair_bytes = 0.0 if units[view.operators[0]] in roots else pair_bytes
    return Whole(root_bytes, beside, first + pair_bytes, end + (0.0 if apart else pair_bytes))


def _root_and_pair(
    units: Mapping[int, float], roots: Container[int], alone: float, share: float, *, copied: bool = False
) -> tuple[float, float]:
    """Return the sum of the root, and the most of one other unit and of two neighbours.

    Args:
        units: Sizes by unit; those without anything are no neighbours.
        roots: Units of the root.
        alone: How much of one unit counts, as a share.
        share: Likewise of the lower neighbour of a unit that counts whole.
        copied: Or of that unit, if it is larger: what waited is there beside its copy.
    """
    others = [units[unit] for unit in sorted(units) if unit not in roots and units[unit]]
    most = max((alone * size for size in others), default=0.0)
    for lower, upper in pairwise(others):
        most = max(most, upper + share * (max(lower, upper) if copied else lower))
    return sum(size for unit, size in units.items() if unit in roots), most
