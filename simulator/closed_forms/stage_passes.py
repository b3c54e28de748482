"""What the passes of a stage take, for ``passes_time``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from simulator.closed_forms.host_time import left_s
from simulator.closed_forms.overlap_time import after_head_start_s
from simulator.closed_forms.passes_time import HostRules, PassWork, StagePasses, stage_passes_s
from simulator.closed_forms.stage_overlap import gathered_again_s, sending_rules, sent_beside
from simulator.closed_forms.stage_prices import beyond_host_s, items_s, launches_s, num_passes, pass_host_s
from simulator.lowering.items import Item
from simulator.lowering.program import StageView
from simulator.lowering.synchronisation import refreshes_in_forward, reshards


def stage_passes(
    view: StageView, forward: Sequence[Item], backward: Sequence[Item], gathering: Sequence[Item]
) -> StagePasses:
    """Return what the passes of a stage take, without what arrives in parts.

    Args:
        view: The stage.
        forward, backward: Items of its passes.
        gathering: Items of its first forward pass.
    """
    plan, runtime = view.plan, view.costs.problem.runtime
    own = [[item for item in items if _is_own(item)] for items in (forward, backward)]
    pass_s = pass_host_s(view.costs)
    forward_s, backward_s = (items_s(view, items) for items in own)
    forward_host_s, backward_host_s = (launches_s(view, items) for items in own)
    backward_host_s += (num_passes(plan.schedule) - 1) * pass_s
    waits_for_gathers = "gather" in runtime.host_waits
    left_s = _left_s(view) if waits_for_gathers else (0.0, 0.0)
    work = PassWork(forward_s, backward_s, forward_host_s + pass_s, backward_host_s, pass_s, *left_s)
    rules = HostRules(
        runs_ahead=runtime.host_runs_ahead,
        waits_to_receive=runtime.host_waits_to_receive(plan.schedule),
        waits_for_gathers=waits_for_gathers,
        apart=plan.schedule == "gpipe",
        is_alone=len(plan.stages) == 1,
        is_first=view.position == 0,
        num_microbatches=plan.num_microbatches,
    )
    sent, sent_host = sent_beside(view, gathering)
    sending = sending_rules(view)
    found = stage_passes_s(work, sent, sent_host, sending, rules)
    if refreshes_in_forward(view) and view.position > 0:
        first_s = after_head_start_s(found.passes.first, sent, forward_s, sending.prefetches)
        found = found._replace(passes=found.passes._replace(first=first_s))
    if not reshards(view):
        return found
    backward_s = found.passes.backward + gathered_again_s(view, forward, backward)
    return found._replace(passes=found.passes._replace(backward=backward_s))


def _left_s(view: StageView) -> tuple[float, float]:
    """Return what the device has left of each unit when it was launched, forward and backward, all together."""
    found = [0.0, 0.0]
    for _, unit in groupby(view.operators, key=lambda index: view.costs.units[index]):
        beyond = [beyond_host_s(view, index) for index in unit]
        for way, ordered in enumerate((beyond, reversed(beyond))):
            unit_s = 0.0
            for each in ordered:
                unit_s = left_s(unit_s, *each[2 * way : 2 * way + 2])
            found[way] += unit_s
    return found[0], found[1]


def _is_own(item: Item) -> bool:
    """Return whether an item is of the operators: no gather of sharded parameters or of what arrives in parts."""
    return item.role != "gather" and item.cause != "transfer"
