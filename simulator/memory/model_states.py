"""What a stage holds all the time: parameters, gradients and optimizer states, by ZeRO level and runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.lowering.synchronisation import ParameterGroup, is_gathered
from simulator.plan import Plan

if TYPE_CHECKING:
    from simulator.costs import CostTables


@dataclass(frozen=True)
class StaticBytes:
    """What a stage holds all the time, per parameter tensor.

    Attributes:
        parameters, gradients, optimizer: Bytes of each tensor.
        gradients_anew: By unit, gradients that do not outlive an iteration: the first backward pass makes them.
        step_workspace: Bytes per parameter tensor that live only during the optimizer step.
        refreshed: Bytes that gathering updated parameters takes: all chunks, gathered, and the largest cut out; beside
            sums of gradients that are still there (``Runtime.scatters_anew``).
    """

    parameters: list[int]
    gradients: list[int]
    gradients_anew: dict[int, int]
    optimizer: list[int]
    step_workspace: list[int]
    refreshed: int


def static_bytes(
    groups: Sequence[ParameterGroup], costs: CostTables, *, sharded_gradients: bool, reshards: bool
) -> StaticBytes:
    """Return model states of a stage on one device.

    Args:
        groups: The stage's parameters.
        costs: Of the problem, whose runtime gives bytes per parameter.
        sharded_gradients: ZeRO-2 and 3 keep gradients sharded between microbatches.
        reshards: ZeRO-3 keeps parameters sharded outside their use; else they stay, gathered, beside their shards.
    """
    runtime = costs.problem.runtime
    parameters, gradients, optimizer, workspace = [], [], [], []
    anew: dict[int, int] = {}
    refreshed = largest = 0.0
    for group in groups:
        elements = float(group.num_elements)
        shards = group.num_shards
        gathered = is_gathered(group)
        kept = elements * runtime.gathered_parameter_bytes if gathered and not reshards else 0.0
        parameters.append(int(elements * runtime.parameter_bytes / (shards if gathered else 1) + kept))
        scattered = group.zero >= 2 and shards > 1 and sharded_gradients
        size = int(elements * runtime.gradient_bytes / (shards if scattered else 1))
        if runtime.frees_gradients == "all" or (scattered and runtime.frees_gradients == "scattered"):
            unit = costs.unit_parts[group.operator]
            anew[unit] = anew.get(unit, 0) + size
        else:
            gradients.append(size)
        optimizer.append(int(elements * runtime.optimizer_bytes / (shards if group.zero >= 1 else 1)))
        adds_anew = runtime.scatters_anew and shards > 1 and group.zero == 1
        sums = elements * runtime.gradient_bytes / shards if adds_anew else 0.0
        work = elements * runtime.optimizer_workspace_bytes / (shards if group.zero >= 1 else 1)
        workspace.append(int(work + sums))
        if shards > 1 and group.zero in (1, 2) and not runtime.refreshes_in_place:
            refreshed += elements * runtime.parameter_bytes * (1 + 1 / shards) + sums
            largest = max(largest, elements * runtime.parameter_bytes)
    return StaticBytes(parameters, gradients, anew, optimizer, workspace, int(refreshed + largest))


def reduces_in_backward(plan: Plan) -> bool:
    """Return whether every backward pass leaves reduced gradients: ZeRO-2 and 3 then hold shards only."""
    return plan.gradient_reduction == "every" or (plan.num_microbatches == 1 and plan.overlap_gradient_sync)
