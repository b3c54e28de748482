"""What an operator saves for its backward pass, by the names of tensors."""

from __future__ import annotations

from simulator.operator_cost import OperatorCost
from workloads.operators import Workload


def saved_tensors(workload: Workload, index: int, cost: OperatorCost) -> list[tuple[str, float]]:
    """Return ``(tensor name, bytes)`` of what operator ``index`` saves; equal names are one tensor."""
    op = workload.operators[index]
    named = []
    for ref, size in cost.saved:
        if ref.startswith("input:"):
            named.append((op.inputs[int(ref[6:])], size))
        elif ref.startswith("output:"):
            named.append((op.outputs[int(ref[7:])], size))
        else:
            named.append((f"{op.name}/{ref}", size))
    return named
