"""What an operator saves for its backward pass, by the names of tensors."""

from __future__ import annotations

from simulator.operator_cost import OperatorCost
from workloads.local import CAST_WEIGHTS
from workloads.operators import Workload

PART = "part"
"""How the name of a part begins that an operator copies of an input, behind the input's and a slash."""


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


def needed_for_weights(workload: Workload, index: int, cost: OperatorCost) -> tuple[float, float]:
    """Return bytes of what the second half of a split backward pass needs of an operator with parameters.

    Returns:
        Of what it saved, and of gradients: those of its outputs, and where backward parts late the one at its product.
    """
    late = workload.operators[index].definition.parts_late
    named = dict(saved_tensors(workload, index, cost))
    saved = sum(size for name, size in named.items() if not ends_at_parting(workload, index, name))
    return saved, sum(cost.output_bytes) + (cost.workspace_weight_bytes if late else 0.0)


def ends_at_parting(workload: Workload, index: int, name: str) -> bool:
    """Return whether the second half of a split backward pass has a gradient instead of what an operator saved.

    So it is with what backward parts late needs before its product; copies of weights, and of parts of inputs, are the
    product's own.
    """
    late = workload.operators[index].definition.parts_late
    return late and is_private(name) and not name.endswith(f"/{CAST_WEIGHTS}") and f"/{PART} " not in name


def parted_bytes(workload: Workload, index: int, cost: OperatorCost) -> float:
    """Return the bytes of what an operator saved that its backward pass has given back before its product."""
    saved = dict(saved_tensors(workload, index, cost)).items()
    return sum(size for name, size in saved if ends_at_parting(workload, index, name))


def is_private(name: str) -> bool:
    """Return whether a saved tensor is neither input nor output of its operator, by the slash in its name."""
    return "/" in name
