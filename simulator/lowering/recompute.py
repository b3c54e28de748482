"""Which operators of a recompute segment run again, and which units lie whole in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from simulator.saved import is_private, saved_tensors

if TYPE_CHECKING:
    from simulator.lowering.program import StageView


def whole_units(units: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the units that lie whole in ``[start, stop)``, of those by operator; a unit's operators are neighbours.

    >>> whole_units((0, 1, 1, 2, 2), 1, 4)
    [1]
    """
    cut = {units[index] for index in (start - 1, stop) if 0 <= index < len(units)}
    return [unit for unit in dict.fromkeys(units[start:stop]) if unit not in cut]


def recomputed_operators(view: StageView, start: int, stop: int) -> list[int]:
    """Return the operators of segment ``[start, stop)`` that run again; the tail that nothing saved needs may not.

    Args:
        view: The stage; its runtime says whether recomputation stops early.
        start, stop: The segment.
    """
    operators = list(range(start, stop))  # a segment lies inside its stage
    if not view.costs.problem.runtime.recompute_stops_early:
        return operators
    workload = view.costs.problem.workload
    inside = {tensor for index in operators for tensor in workload.operators[index].outputs}
    needed: set[str] = set()
    for index in operators:
        cost = view.cost(index)
        needed |= {name for name, _ in saved_tensors(workload, index, cost) if name in inside or is_private(name)}
    while operators:
        op = workload.operators[operators[-1]]
        if copies_saved_part(view, operators[-1]):
            break  # Nothing else makes it.
        if any(name in needed for name in op.outputs) or any(name.startswith(f"{op.name}/") for name in needed):
            break
        operators.pop()
    return operators


def copies_saved_part(view: StageView, index: int) -> bool:
    """Return whether an operator saves a part that it copies of an input."""
    saved = {ref for ref, _ in view.cost(index).saved}
    return any(f"input:{position}" in saved for position in view.sliced_inputs(index))
