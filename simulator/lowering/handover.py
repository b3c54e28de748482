"""How long devices stand still around a collective between operators, beyond what it takes alone."""

from __future__ import annotations

from simulator.fidelity import Fidelity
from simulator.lowering.items import Item
from simulator.lowering.view import StageView


def handover_s(view: StageView, item: Item, fidelity: Fidelity, shift: int = 0) -> float:
    """Return the seconds of a collective (``Runtime.handover_s``); 0 for what is no collective of operators.

    A host that runs ahead has launched long since what comes behind. One that never does launches it meanwhile: the
    operator that waits takes the longer of its kernels and its host time, and its kernels begin so much later. Measured
    apart, it has waited in its own time.

    Args:
        view: The stage.
        item: What it does.
        fidelity: What is simulated.
        shift: Of the stage's operators against those that the item names.
    """
    runtime = view.costs.problem.runtime
    idle_s = runtime.handover_s if fidelity.handover and item.hands_over else 0.0
    if not idle_s or item.held < 0 or runtime.host_runs_ahead or not fidelity.host:
        return idle_s
    cost = view.cost(item.held + shift)
    waiting = cost.backward if item.holds_backward else cost.forward
    *measured, modelled_s = waiting.recorded
    if any(measured) and not modelled_s:
        return 0.0
    return max(waiting.device_s + idle_s, waiting.host_s) - max(waiting.device_s, waiting.host_s)
