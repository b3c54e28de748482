"""Closed form of what ZeRO has whole for a while on one device: gathered parameters, unscattered gradients."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import parameter_groups, units_gathered_for
from simulator.lowering.whole_gradients import whole_gradients_begin
from simulator.memory.model_states import reduces_in_backward


@dataclass(frozen=True)
class Whole:
    """What ZeRO has whole for a while, in bytes.

    Attributes:
        root: Parameters of the root that are gathered, from a forward pass to the end of its backward pass.
        stays: Parameters that are gathered in the first forward pass of an iteration and stay to the last backward
            pass, those of the root too, where the plan does not reshard after a forward pass.
        gathers: All others that are while the backward pass of an operator works; of what stays, less what the last
            backward pass has given back.
        forward: The same while its forward pass does: as if it were a backward pass, but for what stays.
        beside: These, and gradients.
        joining: The same when the gradients of what is whole at once (``CostTables.unit_parts``) are joined and nothing
            of it is kept any more, by its first operator.
        end: The same at the end of a backward pass; where the root is given back before it is reduced, less that then.
        gradients: The most of gradients alone.
    """

    root: float
    stays: float
    gathers: dict[int, float]
    forward: dict[int, float]
    beside: dict[int, float]
    joining: dict[int, float]
    end: float
    gradients: float


def whole_for_a_while(view: StageView, *, gives_back: bool = False) -> Whole:
    """Return what ZeRO has whole on one device of a stage.

    Args:
        view: The stage.
        gives_back: In the last backward pass of an iteration, which gives back what stays gathered.
    """
    costs, plan, runtime = view.costs, view.plan, view.costs.problem.runtime
    part_of = {index: costs.unit_parts[index] for index in view.operators}
    parts = sorted(set(part_of.values()))
    roots = {part for index, part in part_of.items() if costs.units[index] in costs.root_units}
    gathered, scattered, made_at = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0), dict.fromkeys(part_of, 0.0)
    gradient_bytes = runtime.travelling_gradient_bytes if reduces_in_backward(plan) else 0
    for group in parameter_groups(view):
        for part in units_gathered_for(view, group):
            gathered[part] += float(group.num_elements * runtime.gathered_parameter_bytes)
        for index in whole_gradients_begin(view, group):
            made_at[index] += float(group.num_elements * gradient_bytes)
    for index, num_bytes in made_at.items():
        scattered[part_of[index]] += num_bytes
    waits, wait = runtime.waiting_gradient_share is not None, runtime.waiting_gradient_share or 1.0
    apart = waits and not runtime.flattens_sharded  # A unit is given back before its gradients are copied.
    ahead = 1.0 if runtime.holds_next("backward") else 0.0
    gathers, beside, joining = {}, {}, {}
    root_above = travelling = before_bytes = most = 0.0  # Of gradients of parts above.
    stays, given_back, forward = 0.0, dict.fromkeys(parts, 0.0), {}
    if not plan.reshard_after_forward:
        stays = sum(gathered.values())
        if gives_back:
            given_back = {part: 0.0 if part in roots else gathered[part] for part in parts}
        gathered = dict.fromkeys(parts, 0.0)
    above = next_above = 0.0  # Of what stays, what parts above gave back, and the next of them.
    below = [part for part in parts if part not in roots and gathered[part]]
    in_root = sum(gathered[part] for part in roots)
    is_open = in_root > 0  # Its backward pass begins first, whatever is computed first.
    for part in reversed(parts):
        own = part not in roots and gathered[part] > 0
        if own:
            below.pop()
        is_open = is_open or own
        prefetched = ahead * gathered[below[-1]] if below and is_open else 0.0
        gathers[part] = (gathered[part] if own else 0.0) + prefetched - above
        forward[part] = gathers[part] + (next_above if runtime.holds_next("forward") else 0.0)
        above, next_above = above + given_back[part], given_back[part] or next_above
        behind = prefetched - above  # When the part's own are given back.
        is_scattered = part not in roots and scattered[part] > 0
        of_root = root_above * wait
        if waits:
            beside[part] = gathers[part] + of_root + (travelling if apart else 0.0)
            joined = of_root + scattered[part] * (1.0 + wait) if is_scattered else 0.0
            joining[part] = joined + (behind if apart else gathers[part]) if is_scattered else 0.0
            most = max(most, joined, beside[part] - gathers[part] + scattered[part] * wait)
        else:
            own_bytes = scattered[part] + travelling + (0.0 if is_scattered else before_bytes)
            beside[part], joining[part] = gathers[part] + of_root + own_bytes, 0.0
            most = max(most, of_root + own_bytes)
        if is_scattered:
            travelling, before_bytes = scattered[part], travelling
        elif part in roots:
            root_above += scattered[part]
    end = beside[parts[0]]
    if waits:  # The root is joined last.
        at_last = root_above * (1.0 + wait)
        at_end = -(stays if gives_back and stays else in_root)
        end = max(joining[parts[0]] or -inf, at_last + (at_end if apart else gathers[parts[0]]))
        most = max(most, at_last)
    waiting, beside_of = dict.fromkeys(parts, 0.0), {}
    for index in reversed(view.operators):
        part = part_of[index]
        beside_of[index] = beside[part] + waiting[part]
        waiting[part] += made_at[index] * wait if waits else 0.0
    firsts = {part_of[index]: index for index in reversed(view.operators)}
    return Whole(
        root=in_root,
        stays=stays,
        gathers={index: gathers[part] for index, part in part_of.items()},
        forward={index: forward[part] for index, part in part_of.items()},
        beside=beside_of,
        joining={firsts[part]: num_bytes for part, num_bytes in joining.items() if num_bytes},
        end=end,
        gradients=most,
    )
