"""Why a prediction misses: predicted and measured time of one device by operator class and by cause.

Both sides add up to the iteration time, so the differences add up to its error. Operators count with what they take
alone; what a pass takes beyond them (autograd hooks, accumulation of gradients, posting of transfers, launches) is
*host and other*. Waiting is a pipeline's bubble and its exposed transfers, which a process cannot tell apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Any

from hardware_models.profile_scaling import ProfileScaling
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.epilogue import tied_groups
from simulator.lowering.items import GRADIENTS
from simulator.lowering.lower import stage_views
from simulator.lowering.program import ProgramBuilder, StageView
from simulator.operator_cost import RECOMPUTED, OperatorCost
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.profiled_costs import profile_role, profiled_as
from simulator.result import SimulationResult
from validation.campaigns.fit import EXPOSED_COLLECTIVES, Calibration
from validation.measurement import Measurement
from workloads.kinds.base import FORWARD

CLASS_OF_KIND = {
    "linear": "matmul",
    "cross_projection": "matmul",
    "pooler": "matmul",
    "patch_merge": "matmul",
    "conv2d": "convolution",
    "shortcut": "convolution",
    "lstm": "recurrent",
    "attention_score": "attention",
    "softmax": "attention",
    "attention_context": "attention",
    "flash_attention": "attention",
    "rotary": "attention",
    "additive_attention": "attention",
    "relative_score": "attention",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "batch_norm": "norm",
    "gelu": "elementwise",
    "relu": "elementwise",
    "swiglu": "elementwise",
    "dropout": "elementwise",
    "add": "elementwise",
    "dropout_add": "elementwise",
    "concat": "elementwise",
    "flatten": "elementwise",
    "max_pool": "elementwise",
    "global_average_pool": "elementwise",
    "token_mean": "elementwise",
    "window_order": "elementwise",
    "embedding": "embedding and loss",
    "patch_embedding": "embedding and loss",
    "lm_loss": "embedding and loss",
    "classifier_loss": "embedding and loss",
    "loss_sum": "embedding and loss",
}
COLLECTIVES, WAITING, OPTIMIZER, OTHER = "collectives", "waiting for stages", "optimizer", "host and other"
CLASSES = (*dict.fromkeys(CLASS_OF_KIND.values()), COLLECTIVES, WAITING, OPTIMIZER, OTHER)
CAUSES = ("forward", "backward", "recompute", COLLECTIVES, WAITING, OPTIMIZER, OTHER)

_PHASES_OF_ACTION = {"F": (), "B": GRADIENTS, "I": GRADIENTS[:1], "W": GRADIENTS[1:]}
_ACTION_OF_PHASE = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
Cell = tuple[str, str]
"""Operator class and cause; outside operators both are the same word."""


@dataclass(frozen=True)
class DeviceSplit:
    """One device's iteration.

    Attributes:
        device: Device id.
        predicted_s, measured_s: Seconds by class and cause; each adds up to its iteration time.
    """

    device: int
    predicted_s: Mapping[Cell, float]
    measured_s: Mapping[Cell, float]

    def by_class(self) -> list[tuple[str, float, float]]:
        """Return ``(class, predicted, measured)`` for all classes."""
        return [(word, *self._total(0, word)) for word in CLASSES]

    def by_cause(self) -> list[tuple[str, float, float]]:
        """Return ``(cause, predicted, measured)`` for all causes."""
        return [(word, *self._total(1, word)) for word in CAUSES]

    def _total(self, place: int, word: str) -> tuple[float, float]:
        predicted, measured = (
            sum(seconds for cell, seconds in side.items() if cell[place] == word)
            for side in (self.predicted_s, self.measured_s)
        )
        return predicted, measured

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "device": self.device,
            "by_class": [{"class": word, "predicted_s": a, "measured_s": b} for word, a, b in self.by_class()],
            "by_cause": [{"cause": word, "predicted_s": a, "measured_s": b} for word, a, b in self.by_cause()],
        }


def split_errors(
    plan: Plan,
    modelled: Problem,
    problem: Problem,
    result: SimulationResult,
    calibration: Calibration,
    measured: Sequence[Measurement],
) -> list[DeviceSplit]:
    """Return one split per device, the busiest (as measured) first.

    Operators are timed in microbatches of one size; those of a last one that is smaller are *host and other*.

    Args:
        plan: Canonical plan.
        modelled, problem: Without, and with, the calibration applied.
        result: Its simulation.
        calibration: What was applied.
        measured: One per round; the first has a traced iteration.
    """
    devices = sorted(plan.devices)
    scaling = calibration.scaling(modelled, plan)
    views = stage_views(plan, CostTables(problem))
    actions = Counter(
        (action.rank, action.kind, action.stage)
        for action in measured[0].traced[0]
        if not plan.is_smaller(action.microbatch)
    )
    busy = {
        each.device: median(turn.devices[position].passes_s for turn in measured)
        for position, each in enumerate(measured[0].devices)
    }
    stages = [set(view.stage.devices) for view in views]
    sums = [set(group) for _, group, _ in tied_groups(views)]
    sums_over_stages = [group for group in sums if not any(group <= stage for stage in stages)]
    found = []
    for rank, device in enumerate(devices):
        own = [view for view in views if device in view.stage.devices]
        partners = set().union(*(group for group in sums_over_stages if device in group))
        counts = {(kind, stage): count for (of, kind, stage), count in actions.items() if of == rank}
        found.append(
            DeviceSplit(
                device,
                _predicted(device, own, counts, result, calibration, scaling),
                _measured(device, own, counts, measured, partners),
            )
        )
    return sorted(found, key=lambda split: -busy.get(split.device, 0.0))


def _predicted(
    device: int,
    views: Sequence[StageView],
    counts: Mapping[tuple[str, int], int],
    result: SimulationResult,
    calibration: Calibration,
    scaling: ProfileScaling,
) -> dict[Cell, float]:
    cells: dict[Cell, float] = {}
    for view in views:
        for kind, phases in _PHASES_OF_ACTION.items():
            count = counts.get((kind, view.position), 0)
            if not count:
                continue
            for index, phase, cause in _parts(view, phases):
                kind_class = CLASS_OF_KIND[view.costs.problem.workload.operators[index].kind]
                seconds = count * _operator_s(view, index, phase, calibration, scaling)
                cells[kind_class, cause] = cells.get((kind_class, cause), 0.0) + seconds
    table = result.breakdown()
    members = [position for position, own in enumerate(result.graph.device_members) if device in own]
    row = table.iloc[members[0]]
    cells[COLLECTIVES, COLLECTIVES] = float(sum(row[name] for name in EXPOSED_COLLECTIVES))
    cells[WAITING, WAITING] = float(row["exposed_transfer_s"] + row["bubble_s"])
    cells[OPTIMIZER, OPTIMIZER] = float(row["optimizer_s"])
    cells[OTHER, OTHER] = result.iteration_time_s - sum(cells.values())
    return cells


def _parts(view: StageView, phases: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    """Yield operator, phase and cause of everything computed in a pass; no phases stands for forward."""
    builder = ProgramBuilder(view, Fidelity())
    items = builder.backward(phases, gather=False, sync=False) if phases else builder.forward(gather=False)
    for item in items:
        for index, phase in item.parts:
            yield index, phase, "backward" if item.cause.startswith("backward") else item.cause


def _operator_s(view: StageView, index: int, phase: str, calibration: Calibration, scaling: ProfileScaling) -> float:
    """Return seconds of an operator's phase without what profile rows add to make up a whole pass."""
    sharding = view.shardings[index]
    workload = view.costs.problem.workload
    role = profile_role(calibration.profile.operators, workload, index)
    samples = view.samples(index)
    cost: OperatorCost = view.costs.operator(index, sharding, samples, view.gpu_type)
    seconds = float(getattr(cost, phase).device_s)
    measured_as = profiled_as(workload.operators[index], sharding)
    # Only the usual split of an operator was run alone.
    raw = calibration.raw(role, samples, measured_as[0]) if measured_as and measured_as[1] == "default" else None
    is_forward = phase in (FORWARD, RECOMPUTED)
    whole = cost.forward.device_s if is_forward else cost.backward.device_s
    if raw is None or whole <= 0:
        return seconds
    alone = raw[not is_forward] * scaling.factor
    if not is_forward:
        alone *= scaling.backward_factors.get(role, 1.0)
    return seconds * min(1.0, alone / whole)


def _measured(
    device: int,
    views: Sequence[StageView],
    counts: Mapping[tuple[str, int], int],
    measured: Sequence[Measurement],
    partners: Set[int],
) -> dict[Cell, float]:
    cells: dict[Cell, float] = {}
    for view in views:
        for index in view.operators:
            kind_class = CLASS_OF_KIND[view.costs.problem.workload.operators[index].kind]
            for phase in {phase for turn in measured for phase, number in turn.operator_s if number == index}:
                if phase == "recompute":
                    count = counts.get(("B", view.position), 0) + counts.get(("I", view.position), 0)
                    cause = phase
                else:
                    count = counts.get((_ACTION_OF_PHASE[phase], view.position), 0)
                    cause = "backward" if phase.startswith("backward") else phase
                samples = [turn.operator_s[phase, index] for turn in measured if (phase, index) in turn.operator_s]
                cells[kind_class, cause] = cells.get((kind_class, cause), 0.0) + count * median(samples)
    times = [each for turn in measured for each in turn.devices if each.device == device]
    late = median(_late_partners_s(turn, device, partners) for turn in measured)
    cells[COLLECTIVES, COLLECTIVES] = median(each.collectives_s + each.collectives_after_s for each in times) - late
    cells[WAITING, WAITING] = median(each.waiting_s for each in times) + late
    cells[OPTIMIZER, OPTIMIZER] = median(each.optimizer_s for each in times)
    total = median(turn.iteration_time_s for turn in measured)
    # A rank that has nothing left to do waits for the slowest one, which the iteration time is that of.
    idle = median(turn.iteration_time_s - _end_s(turn, device) for turn in measured)
    if len(views[0].plan.stages) > 1:
        cells[WAITING, WAITING] += max(0.0, idle)
    cells[OTHER, OTHER] = total - sum(cells.values())
    return cells


def _late_partners_s(measured: Measurement, device: int, partners: Set[int]) -> float:
    """Return what a device waits in sums over stages for those that come later: the last one only sums."""
    after_s = {each.device: each.collectives_after_s for each in measured.devices}
    return after_s[device] - min((after_s[each] for each in partners), default=after_s[device])


def _end_s(measured: Measurement, device: int) -> float:
    """Return when a device was done: its passes, waits and tail have no gaps but the executor's own steps."""
    own = next(each for each in measured.devices if each.device == device)
    return min(measured.iteration_time_s, own.passes_s + own.waiting_s + own.tail_s)
