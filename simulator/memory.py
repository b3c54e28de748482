"""Memory of every representative device: live bytes, their peak, and the allocator's reserved bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.allocator import AllocatorResult, replay, replay_compiled
from simulator.costs import CostTables, OperatorCost
from simulator.fidelity import Fidelity
from simulator.lowering.lower import Lowered, pipeline_shape
from simulator.lowering.placement import StagePlacement
from simulator.lowering.synchronisation import ParameterGroup, parameter_groups
from simulator.memory_events import CATEGORIES
from simulator.memory_program import StageMemory
from simulator.memory_usage import DeviceMemory
from simulator.plan import Plan
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import Schedule

if TYPE_CHECKING:
    from simulator.problem import Problem

BLOCK_BYTES = 512
"""The caching allocator's rounding."""

_WORDS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward", BACKWARD_WEIGHT: "weight gradients"}


@dataclass(frozen=True)
class StaticBytes:
    """What a stage holds all the time, per parameter tensor.

    Attributes:
        parameters, gradients, optimizer: Bytes of each tensor.
        gradients_anew: By layer, gradients that do not outlive an iteration: the first backward pass makes them.
        step_workspace: Bytes per parameter tensor that live only during the optimizer step.
        refreshed: Bytes that gathering updated parameters takes: all chunks, gathered, and the largest cut out.
    """

    parameters: list[int]
    gradients: list[int]
    gradients_anew: dict[int, int]
    optimizer: list[int]
    step_workspace: list[int]
    refreshed: int


def static_bytes(
    groups: Sequence[ParameterGroup], problem: Problem, *, sharded_gradients: bool, reshards: bool
) -> StaticBytes:
    """Return model states of a stage on one device.

    Args:
        groups: The stage's parameters.
        problem: Gives bytes per parameter (runtime).
        sharded_gradients: ZeRO-2 and 3 keep gradients sharded between microbatches.
        reshards: ZeRO-3 keeps parameters sharded outside their use.
    """
    runtime = problem.runtime
    parameters, gradients, optimizer, workspace = [], [], [], []
    anew: dict[int, int] = {}
    refreshed = largest = 0.0
    for group in groups:
        elements = float(group.num_elements)
        shards = group.num_shards
        parameters.append(int(elements * runtime.parameter_bytes / (shards if group.zero == 3 and reshards else 1)))
        scattered = group.zero >= 2 and shards > 1 and sharded_gradients
        size = int(elements * runtime.gradient_bytes / (shards if scattered else 1))
        if runtime.frees_gradients == "all" or (scattered and runtime.frees_gradients == "scattered"):
            layer = problem.workload.operators[group.operator].layer
            anew[layer] = anew.get(layer, 0) + size
        else:
            gradients.append(size)
        optimizer.append(int(elements * runtime.optimizer_bytes / (shards if group.zero >= 1 else 1)))
        workspace.append(int(elements * runtime.optimizer_workspace_bytes / (shards if group.zero >= 1 else 1)))
        if shards > 1 and group.zero in (1, 2) and not runtime.refreshes_in_place:
            refreshed += elements * runtime.parameter_bytes * (1 + 1 / shards)
            largest = max(largest, elements * runtime.parameter_bytes)
    return StaticBytes(parameters, gradients, anew, optimizer, workspace, int(refreshed + largest))


def reduces_in_backward(plan: Plan) -> bool:
    """Return whether every backward pass leaves reduced gradients: ZeRO-2 and 3 then hold shards only."""
    return plan.gradient_reduction == "every" or (plan.num_microbatches == 1 and plan.overlap_gradient_sync)


def device_memory(
    plan: Plan,
    lowered: Lowered,
    schedule: Schedule,
    costs: CostTables,
    fidelity: Fidelity,
    *,
    compiled: bool = False,
) -> tuple[DeviceMemory, ...]:
    """Return the memory of every representative, in the order of ``graph.device_members``.

    Args:
        plan, lowered, schedule, costs, fidelity: Of one simulation.
        compiled: The allocator is replayed by compiled code; the same result.
    """
    count = memory_microbatches(plan)
    orders = schedule_named(plan.schedule).actions(pipeline_shape(plan, count))
    found: dict[int, DeviceMemory] = {}
    placement_of = {placement.view.position: placement for placement in lowered.placements}
    for rank, order in enumerate(orders):
        placements = [p for p in lowered.placements if plan.rank_of_stage[p.view.position] == rank]
        labels = _action_times(order, lowered, rank, schedule)
        for c in placements[0].classes:
            mine = [
                number
                for number, action in enumerate(order)
                if c in placement_of[action.stage].taking_turn(action.microbatch).classes
            ]
            own = [order[number] for number in mine]
            found[c] = _representative(c, plan, placements, own, labels[mine], lowered, costs, fidelity, compiled)
    return tuple(found[c] for c in range(len(lowered.graph.device_members)))


def memory_microbatches(plan: Plan) -> int:
    """Return how many microbatches show the peak: a pipeline that has filled repeats itself."""
    if plan.schedule == "gpipe":
        return plan.num_microbatches
    depth = max((*(plan.warmup_in_force() or ()), len(plan.stages)))
    ranks = max(plan.rank_of_stage) + 1
    enough = 2 * depth + 2
    if plan.schedule == "interleaved":
        enough = -(-enough // ranks) * ranks
    return min(plan.num_microbatches, enough)


def _action_times(order: list[Action], lowered: Lowered, rank: int, schedule: Schedule) -> NDArray[np.float64]:
    """Return start and end of every action: float64[len(order), 2]."""
    starts = lowered.action_start_task[rank]
    position = {action: number for number, action in enumerate(lowered.orders[rank])}
    times = np.zeros((len(order), 2))
    for number, action in enumerate(order):
        place = position[action]
        times[number, 0] = schedule.start_s[starts[place]]
        last = starts[place + 1] - 1 if place + 1 < len(starts) else starts[place]
        times[number, 1] = max(times[number, 0], schedule.end_s[last])
    return times


def _representative(
    c: int,
    plan: Plan,
    placements: list[StagePlacement],
    order: list[Action],
    labels: NDArray[np.float64],
    lowered: Lowered,
    costs: CostTables,
    fidelity: Fidelity,
    compiled: bool,
) -> DeviceMemory:
    problem = costs.problem
    sharded = reduces_in_backward(plan)
    stream = _EventStream()
    programs: dict[int, _StagePasses] = {}
    workspace: list[int] = []
    refreshed = 0
    for placement in placements:
        view = placement.view
        static_key = ("static bytes", plan.reshard_after_forward, sharded)
        if static_key not in view.kept:
            view.kept[static_key] = static_bytes(
                list(parameter_groups(view)), problem, sharded_gradients=sharded, reshards=plan.reshard_after_forward
            )
        static: StaticBytes = view.kept[static_key]
        kinds = tuple(dict.fromkeys(action.kind for action in order if action.stage == view.position))
        key = ("memory", placement.all_samples(c), placement.gpu_type[c], plan.reshard_after_forward, sharded, kinds)
        if key not in view.kept:
            view.kept[key] = _stage_passes(
                c, placement, costs, kinds, plan.reshard_after_forward, sharded, static.gradients_anew
            )
        programs[view.position] = view.kept[key]
        stream.add_static(static.parameters, "parameters")
        stream.add_static(static.gradients, "gradients")
        stream.add_static(static.optimizer, "optimizer states")
        workspace += static.step_workspace
        refreshed = max(refreshed, static.refreshed)
    stream.add_actions(programs, order, labels)
    stream.add_step(workspace, float(schedule_end(labels)))
    stream.add_step([refreshed], float(schedule_end(labels)))
    events = stream.arrays()
    signed = np.where(events.is_alloc, events.rounded, -events.rounded)
    live = np.cumsum(signed)
    peak = int(np.argmax(live)) if len(live) else 0
    capacity = min(problem.capacity_bytes(device) for device in lowered.graph.device_members[c])
    reserved, failed = int(live.max(initial=0)), None
    if fidelity.allocator:
        listed = (events.sizes, events.tensors, events.is_alloc)
        text = hashlib.blake2b(b"".join(column.tobytes() for column in listed)).digest()

        def replayed(most: int) -> AllocatorResult:
            return replay_compiled(*listed, most) if compiled else replay(*listed, most)

        result = costs.replays.get((text, capacity), lambda: replayed(max(capacity, 0)))
        if result.failure is not None:
            failed = result.failure.requested_bytes
            unlimited = costs.replays.get((text, 1 << 60), lambda: replayed(1 << 60))
            reserved = unlimited.reserved_peak_bytes
        else:
            reserved = result.reserved_peak_bytes
        fits = result.failure is None
    else:
        fits = reserved <= capacity
    consumers = np.bincount(events.categories[: peak + 1], signed[: peak + 1], minlength=len(CATEGORIES))
    named = {name: int(size) for name, size in zip(CATEGORIES, consumers, strict=True) if size > 0}
    action = int(events.actions[peak]) if len(live) else -1
    where = "the optimizer step" if action == len(order) else "start"
    if 0 <= action < len(order):
        found = order[action]
        where = f"stage {found.stage}, {_WORDS[found.kind]} of microbatch {found.microbatch}"
    return DeviceMemory(
        device=c,
        peak_allocated_bytes=int(live.max(initial=0)),
        peak_reserved_bytes=reserved,
        capacity_bytes=capacity,
        fits=fits,
        peak_time_s=float(events.times_s[peak]) if len(live) else 0.0,
        peak_where=where,
        consumers=dict(sorted(named.items(), key=lambda item: -item[1])),
        times_s=events.times_s,
        live_bytes=live.astype(np.float64),
        failed_request_bytes=failed,
    )


@dataclass(frozen=True)
class _StagePasses:
    """Allocations and frees of a stage on a representative.

    Attributes:
        num_tensors: Of one microbatch.
        passes: By kind of action.
    """

    num_tensors: int
    passes: dict[str, _PassEvents]


@dataclass(frozen=True)
class _PassEvents:
    """Events of one pass, arrays of one length.

    Attributes:
        tensors: int64, counted within a microbatch.
        lasting: bool. Whether the tensor outlives its microbatch.
        is_alloc: bool.
        sizes, categories: int64.
        portions: float64. When, from 0 at the start of the pass to 1 at its end.
    """

    tensors: NDArray[np.int64]
    lasting: NDArray[np.bool_]
    is_alloc: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    categories: NDArray[np.int64]
    portions: NDArray[np.float64]


def _stage_passes(
    c: int,
    placement: StagePlacement,
    costs: CostTables,
    kinds: Sequence[str],
    reshards: bool,
    sharded: bool,
    gradients_anew: dict[int, int],
) -> _StagePasses:
    def cost_of(index: int) -> OperatorCost:
        samples = placement.samples(index, c)
        return costs.operator(index, placement.view.shardings[index], samples, placement.gpu_type[c])

    program = StageMemory(
        placement.view,
        cache(cost_of),
        reshards=reshards,
        sharded_gradients=sharded,
        gradients_anew=gradients_anew,
    )
    lists = {}
    for kind in kinds:
        if kind == FORWARD:
            found = program.forward()
        else:
            found = program.backward(with_inputs=kind != BACKWARD_WEIGHT, with_weights=kind != BACKWARD_INPUT)
        lists[kind] = (np.array(found[0], dtype=np.int64), np.array(found[1], dtype=np.bool_))
    sizes = np.array(program.table.sizes, dtype=np.int64)
    categories = np.array(program.table.categories, dtype=np.int64)
    lasting = np.isin(np.arange(len(sizes)), sorted(program.table.lasting))
    return _StagePasses(
        num_tensors=len(sizes),
        passes={
            kind: _PassEvents(
                tensors,
                lasting[tensors],
                is_alloc,
                sizes[tensors],
                categories[tensors],
                np.linspace(0.0, 1.0, len(tensors)),
            )
            for kind, (tensors, is_alloc) in lists.items()
        },
    )


def schedule_end(labels: NDArray[np.float64]) -> float:
    """Return the latest time among action labels."""
    return float(labels.max()) if labels.size else 0.0


@dataclass(frozen=True)
class EventArrays:
    """Allocations and frees of one device. Arrays of length E.

    Attributes:
        sizes, rounded: int64 bytes asked for, and in 512-byte blocks.
        tensors: int32 tensor ids.
        is_alloc: bool.
        categories: int64 index into CATEGORIES.
        actions: int64 position in the rank's order; -1 before, len(order) after.
        times_s: float64, non-decreasing.
    """

    sizes: NDArray[np.int64]
    rounded: NDArray[np.int64]
    tensors: NDArray[np.int32]
    is_alloc: NDArray[np.bool_]
    categories: NDArray[np.int64]
    actions: NDArray[np.int64]
    times_s: NDArray[np.float64]


class _EventStream:
    """Collects events of one device as arrays."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]] = []
        self._actions: list[NDArray[np.int64]] = []
        self._times: list[NDArray[np.float64]] = []
        self._next_id = 0

    def add_static(self, sizes: list[int], category: str) -> None:
        """Allocate tensors that are never freed."""
        kept = [size for size in sizes if size > 0]
        ids = np.arange(self._next_id, self._next_id + len(kept))
        self._next_id += len(kept)
        self._append(
            np.array(kept, dtype=np.int64), ids, np.ones(len(kept), dtype=np.bool_), CATEGORIES.index(category), -1, 0.0
        )

    def _append(
        self,
        sizes: NDArray[np.int64],
        ids: NDArray[np.int64],
        is_alloc: NDArray[np.bool_],
        category: int | NDArray[np.int64],
        action: int,
        time_s: float | NDArray[np.float64],
    ) -> None:
        self._parts.append((sizes, ids, is_alloc, np.broadcast_to(category, sizes.shape).astype(np.int64)))
        self._actions.append(np.full(len(sizes), action, dtype=np.int64))
        self._times.append(np.broadcast_to(time_s, sizes.shape).astype(np.float64))

    def add_actions(self, programs: dict[int, _StagePasses], order: list[Action], labels: NDArray[np.float64]) -> None:
        """Append the events of every action. What outlives its microbatch is one tensor, made by the first."""
        count = max((action.microbatch for action in order), default=0) + 1
        first_id = {}
        for stage, program in programs.items():
            first_id[stage] = self._next_id
            self._next_id += count * program.num_tensors
        lengths = []
        for (kind, stage, microbatch), (start, end) in zip(order, labels.tolist(), strict=True):
            program = programs[stage]
            events = program.passes[kind]
            own = np.where(events.lasting, 0, microbatch)
            ids = events.tensors + (first_id[stage] + own * program.num_tensors)
            self._parts.append((events.sizes, ids, events.is_alloc, events.categories))
            self._times.append(start + (end - start) * events.portions)
            lengths.append(len(ids))
        self._actions.append(np.repeat(np.arange(len(order)), lengths))
        self._num_actions = len(order)

    def add_step(self, sizes: list[int], time_s: float) -> None:
        """Append what lives during the optimizer step, or after it while parameters are refreshed."""
        kept = np.array([size for size in sizes if size > 0], dtype=np.int64)
        ids = np.arange(self._next_id, self._next_id + len(kept))
        self._next_id += len(kept)
        for allocates in (True, False):
            self._append(
                kept,
                ids,
                np.full(len(kept), allocates),
                CATEGORIES.index("optimizer workspace"),
                self._num_actions,
                time_s,
            )

    def arrays(self) -> EventArrays:
        """Return everything appended, pairs that do not match removed."""
        sizes = np.concatenate([part[0] for part in self._parts])
        ids = np.concatenate([part[1] for part in self._parts])
        is_alloc = np.concatenate([part[2] for part in self._parts])
        categories = np.concatenate([part[3] for part in self._parts])
        actions = np.concatenate(self._actions)
        times = np.maximum.accumulate(np.concatenate(self._times))
        keep = _consistent(ids, is_alloc)
        sizes, ids, is_alloc = sizes[keep], ids[keep], is_alloc[keep]
        return EventArrays(
            sizes=sizes,
            rounded=-(-sizes // BLOCK_BYTES) * BLOCK_BYTES,
            tensors=ids.astype(np.int32),
            is_alloc=is_alloc,
            categories=categories[keep],
            actions=actions[keep],
            times_s=times[keep],
        )


def _consistent(ids: NDArray[np.int64], is_alloc: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which events change something: a free of what is not live, or a second allocation, does not."""
    order = np.argsort(ids, kind="stable")
    sorted_ids, sorted_alloc = ids[order], is_alloc[order]
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = sorted_ids[1:] != sorted_ids[:-1]
    previous_alloc = np.zeros(len(ids), dtype=np.bool_)
    previous_alloc[1:] = sorted_alloc[:-1]
    previous_alloc[first] = False
    keep_sorted = sorted_alloc != previous_alloc
    keep = np.empty(len(ids), dtype=np.bool_)
    keep[order] = keep_sorted
    return keep
