"""How long devices stand still around a collective between operators, beyond what it takes alone."""

from __future__ import annotations

from simulator.fidelity import Fidelity
from simulator.lowering.items import Item
from simulator.lowering.view import StageView
from simulator.segments import Segment


def handover_s(view: StageView, item: Item, fidelity: Fidelity, shift: int = 0) -> float:
    """Return the seconds of a collective (``Runtime.handover_s``); 0 for what no operator stands still for.

    A host that runs ahead has launched long since what comes behind: the device waits for its likes alone. Ranks that
    have met part by no more than what they have done since, and between a reduction of sequence parallelism and the
    gather behind it there are an addition and a norm, without a product: what is gathered of shards of the sequence
    waits no longer than the operator takes that has just made them. (What is computed again is bound as at first.) For
    what travels beside gradients of its operator no device stands still: it has none.

    One that never does launches it meanwhile: the operator that waits takes the longer of its kernels and its host
    time, and its kernels begin so much later. Measured apart, it has waited in its own time, and so has one whose time
    is grown from such.

    Args:
        view: The stage.
        item: What it does.
        fidelity: What is simulated.
        shift: Of the stage's operators against those that the item names.
    """
    problem = view.costs.problem
    idle_s = problem.runtime.handover_s if fidelity.handover and item.hands_over else 0.0
    if idle_s and item.made_by is not None and problem.runtime.host_runs_ahead:
        index, phase = item.made_by
        parts: list[Segment] = [getattr(view.cost_on(index + shift, gpu_type), phase) for gpu_type in view.gpu_types]
        return min(idle_s, max(part.device_s for part in parts))
    if not idle_s or item.held < 0 or problem.runtime.host_runs_ahead:
        return idle_s
    return max(_excess_s(view, item, idle_s, gpu_type, fidelity, shift) for gpu_type in view.gpu_types)


def _excess_s(view: StageView, item: Item, idle_s: float, gpu_type: str, fidelity: Fidelity, shift: int) -> float:
    """Return by how much longer the operator that waits takes on one type of device."""
    cost = view.cost_on(item.held + shift, gpu_type)
    if cost.has_waited:
        return 0.0
    waiting = cost.backward if item.holds_backward else cost.forward
    host_s = waiting.host_s if fidelity.host else 0.0
    return max(waiting.device_s + idle_s, host_s) - max(waiting.device_s, host_s)
