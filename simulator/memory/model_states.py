"""What a stage holds all the time: parameters, gradients and optimizer states, by ZeRO level and runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.lowering.step import OPTIMIZER_STATE_BYTES
from simulator.lowering.synchronisation import ParameterGroup, is_gathered
from simulator.lowering.whole_gradients import flattened_at_once, flattened_bytes
from simulator.plan import Plan

if TYPE_CHECKING:
    from hardware_models.runtime import Runtime
    from simulator.costs import CostTables


@dataclass(frozen=True)
class StaticBytes:
    """What a stage holds all the time, per parameter tensor.

    Attributes:
        parameters, gradients, masters: Bytes of each tensor; gradients are also those in buckets
            (``Runtime.bucket_bytes``), masters are wider copies of parameters.
        moments: Bytes of each of the optimizer's moments.
        handed: For each of the gradients its operator and elements where it is one that a product made
            (``Runtime.hands_over_gradients``), else None; what is reduced is copied into a buffer that stays.
        gradients_anew: By unit, bytes of gradients that do not outlive an iteration: the first backward pass makes
            them. Shards of a unit are one tensor, and so is what is flat (``Runtime.flattens_sharded``).
        dropped: Of those, as unit and number, what goes before the optimizer step (``Runtime.drops_gradients``); what
            the rank steps of it is in ``step_workspace``.
        step_workspace: Bytes per parameter tensor that live only during the optimizer step, and of flat tensors of all.
        flattened: Bytes that whole gradients are copied into to be reduced, before that.
        refreshed: Bytes of each tensor that gathering updated parameters takes: all chunks, all gathered, and the
            largest cut out; beside sums of gradients that are still there (``Runtime.scatters_anew``).
    """

    parameters: list[int]
    gradients: list[int]
    handed: list[tuple[int, int] | None]
    gradients_anew: dict[int, tuple[int, ...]]
    dropped: tuple[tuple[int, int], ...]
    masters: list[int]
    moments: list[int]
    step_workspace: list[int]
    flattened: int
    refreshed: list[int]

    @property
    def total_bytes(self) -> int:
        """What is there all the time; not gradients that a backward pass makes."""
        return sum(self.parameters) + sum(self.gradients) + sum(self.masters) + sum(self.moments)

    @property
    def anew_bytes(self) -> int:
        """Gradients that a first backward pass makes."""
        return sum(size for sizes in self.gradients_anew.values() for size in sizes)

    @property
    def step_bytes(self) -> int:
        """What the optimizer step takes beyond all that, less what goes before it."""
        return sum(self.step_workspace) - sum(self.gradients_anew[unit][number] for unit, number in self.dropped)


def static_bytes(groups: Sequence[ParameterGroup], costs: CostTables, *, sharded_gradients: bool) -> StaticBytes:
    """Return model states of a stage on one device.

    Args:
        groups: The stage's parameters.
        costs: Of the problem, whose runtime gives bytes per parameter.
        sharded_gradients: ZeRO-2 and 3 keep gradients sharded between microbatches.
    """
    runtime = costs.problem.runtime
    parameters, gradients, masters, moments, workspace = [], [], [], [], []
    handed: list[tuple[int, int] | None] = []
    made_bytes = runtime.implementation.activation_bytes
    anew = dict[int, list[int]]()
    joined_anew = dict[int, int]()
    dropped, flat = list[tuple[int, int]](), dict[int, float]()
    chunks = gathered_again = largest = 0.0
    still_there: list[int] = []
    for group in groups:
        elements = float(group.num_elements)
        shards = group.num_shards
        parameters.append(int(elements * runtime.parameter_bytes / (shards if is_gathered(group) else 1)))
        scattered = group.zero >= 2 and shards > 1 and sharded_gradients
        drops = runtime.drops_gradients and group.zero == 1 and shards > 1
        gradient_bytes = runtime.gradient_bytes - runtime.bucket_bytes
        joined = runtime.flattens_sharded and is_gathered(group)
        if joined and not scattered:
            gradient_bytes = min(gradient_bytes, made_bytes)  # They stay as the products made them until they travel.
        size = int(elements * gradient_bytes / (shards if scattered else 1))
        if runtime.bucket_bytes and group.is_replicated and not group.scattered:
            gradients.append(int(elements * runtime.bucket_bytes))
            handed.append(None)
        if runtime.frees_gradients == "all" or (scattered and runtime.frees_gradients == "scattered"):
            unit = costs.unit_parts[group.operator]
            if scattered or joined:
                joined_anew[unit] = joined_anew.get(unit, 0) + size
            else:
                if drops:
                    dropped.append((unit, len(anew.get(unit, ()))))
                anew.setdefault(unit, []).append(size)
        else:
            gradients.append(size)
            is_as_made = not group.reduced_axes and size == group.num_elements * made_bytes
            stays = runtime.hands_over_gradients and is_as_made and shards == 1
            handed.append((group.users[-1], group.num_elements) if stays else None)
        stepped = elements / (shards if group.zero >= 1 else 1)
        master, *both = optimizer_parts_bytes(runtime)
        masters.append(int(stepped * master))
        moments += [int(stepped * moment) for moment in both]
        adds_anew = runtime.scatters_anew and shards > 1 and group.zero == 1
        sums = elements * gradient_bytes / shards if adds_anew or drops else 0.0
        of_each, of_all = runtime.workspace_bytes(sharded=group.zero >= 1 and shards > 1)
        workspace.append(int(stepped * of_each + sums))
        for place, each in enumerate(of_all):
            flat[place] = flat.get(place, 0.0) + stepped * each
        if shards > 1 and group.zero in (1, 2) and not runtime.refreshes_in_place:
            chunks += elements * runtime.parameter_bytes / shards
            gathered_again += elements * runtime.parameter_bytes
            largest = max(largest, elements * runtime.parameter_bytes)
            still_there.append(int(sums))
    refreshed = [*still_there, int(chunks), int(gathered_again), int(largest)]
    for unit, size in joined_anew.items():
        anew.setdefault(unit, []).append(size)
    made = {unit: tuple(sizes) for unit, sizes in anew.items()}
    flattened = int(flattened_at_once(sum(flattened_bytes(group, runtime) for group in groups), runtime))
    stepped_in = [*workspace, *map(int, flat.values())], flattened, refreshed
    return StaticBytes(parameters, gradients, handed, made, tuple(dropped), masters, moments, *stepped_in)


def optimizer_parts_bytes(runtime: Runtime) -> tuple[float, float, float]:
    """Return bytes per parameter of a master copy, if there is one, and of two moments.

    What an optimizer keeps beyond two moments in fp32 is a master copy.

    >>> from hardware_models.runtime_files import load_runtime
    >>> [optimizer_parts_bytes(load_runtime(name)) for name in ("megatron-lm-2021", "windtunnel-executor")]
    [(4.0, 4.0, 4.0), (0.0, 2.0, 2.0)]
    """
    moment = min(runtime.optimizer_bytes, 2 * OPTIMIZER_STATE_BYTES) / 2
    return runtime.optimizer_bytes - 2 * moment, moment, moment


def reduces_in_backward(plan: Plan) -> bool:
    """Return whether every backward pass leaves reduced gradients: ZeRO-2 and 3 then hold shards only."""
    return plan.gradient_reduction == "every" or (plan.num_microbatches == 1 and plan.overlap_gradient_sync)
