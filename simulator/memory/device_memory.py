"""Memory of every representative device: live bytes, their peak, and the allocator's reserved bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.lowering.lower import Lowered, pipeline_shape
from simulator.lowering.placement import StagePlacement
from simulator.lowering.synchronisation import parameter_groups
from simulator.memory.allocator import UNLIMITED_BYTES, AllocatorResult, replay, replay_compiled
from simulator.memory.events import CATEGORIES, GRADIENTS, OPTIMIZER_STATES, PARAMETERS, WORKSPACE
from simulator.memory.first_iterations import first_iterations
from simulator.memory.model_states import StaticBytes, reduces_in_backward, static_bytes
from simulator.memory.program import StageMemory
from simulator.memory.stream import HANDED, LATE, STEPPED, EventArrays, EventStream, PassEvents, StagePasses
from simulator.memory.usage import DeviceMemory, LiveBytes
from simulator.operator_cost import OperatorCost
from simulator.plan import Plan
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from simulator.schedules.registry import schedule_named
from simulator.taskgraph import Schedule

_WORDS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_INPUT: "backward", BACKWARD_WEIGHT: "weight gradients"}


def device_memory(
    plan: Plan,
    lowered: Lowered,
    schedule: Schedule,
    costs: CostTables,
    fidelity: Fidelity,
    *,
    compiled: bool = False,
    left_out_s: float = 0.0,
) -> tuple[DeviceMemory, ...]:
    """Return the memory of every representative, in the order of ``graph.device_members``.

    Args:
        plan, lowered, schedule, costs, fidelity: Of one simulation.
        compiled: The allocator is replayed by compiled code; the same result.
        left_out_s: By how much the iteration ends later than the schedule, which leaves out what repeats.
    """
    shape = pipeline_shape(plan, memory_microbatches(plan))
    orders = schedule_named(plan.schedule).actions(shape)
    found = {
        turns.device: _representative(turns, plan, lowered, costs, fidelity, compiled)
        for turns in _turns(plan, lowered, schedule, orders, left_out_s=left_out_s)
    }
    return tuple(found[c] for c in range(len(lowered.graph.device_members)))


def live_bytes(device: int, plan: Plan, lowered: Lowered, schedule: Schedule, costs: CostTables) -> LiveBytes:
    """Return what is live on one representative over the whole iteration, all microbatches included.

    Args:
        device: Index into ``graph.device_members``.
        plan, lowered, schedule, costs: Of one simulation.
    """
    (turns,) = _turns(plan, lowered, schedule, lowered.orders, only=device)
    events = _events(turns, plan, costs)
    return LiveBytes(np.maximum.accumulate(events.times_s), np.cumsum(_signed(events)).astype(np.float64))


@dataclass(frozen=True)
class _Turns:
    """What one representative does, in order, the start and end of each, and of the optimizer step and what follows."""

    device: int
    placements: list[StagePlacement]
    last_placements: list[StagePlacement]
    order: list[Action]
    labels: NDArray[np.float64]
    step_s: tuple[float, float, float]


def _turns(
    plan: Plan,
    lowered: Lowered,
    schedule: Schedule,
    orders: Sequence[Sequence[Action]],
    *,
    only: int | None = None,
    left_out_s: float = 0.0,
) -> Iterator[_Turns]:
    """Yield the turns of every representative, or of one."""
    placement_of = {placement.view.position: placement for placement in lowered.placements}
    for rank, order in enumerate(orders):
        placements, last_placements = (
            [p for p in each if plan.rank_of_stage[p.view.position] == rank]
            for each in (lowered.placements, lowered.last_placements)
        )
        devices = [c for c in placements[0].classes if only in (None, c)]
        labels = _action_times(order, lowered, rank, schedule) if devices else np.empty((0, 2))
        for c in devices:
            mine = [
                number
                for number, action in enumerate(order)
                if c in placement_of[action.stage].taking_turn(action.microbatch).classes
            ]
            step_s = _step_times(c, lowered, rank, schedule, left_out_s)
            yield _Turns(c, placements, last_placements, [order[number] for number in mine], labels[mine], step_s)


def memory_microbatches(plan: Plan) -> int:
    """Return how many microbatches show the peak: a pipeline that has filled repeats itself.

    All where the last is smaller: what the allocator holds then depends on where it comes.
    """
    if plan.schedule == "gpipe" or plan.last_microbatch_size is not None:
        return plan.num_microbatches
    depth = max((*(plan.warmup_in_force() or ()), len(plan.stages)))
    ranks = max(plan.rank_of_stage) + 1
    enough = 2 * depth + 2
    if plan.schedule == "interleaved":
        enough = -(-enough // ranks) * ranks
    return min(plan.num_microbatches, enough)


def _action_times(order: Sequence[Action], lowered: Lowered, rank: int, schedule: Schedule) -> NDArray[np.float64]:
    """Return start and end of every action: float64[len(order), 2]."""
    following = [int(later[0]) for later in lowered.action_start_task[rank + 1 :] if len(later)]
    stop = following[0] if following else lowered.step_start_task
    starts = np.append(lowered.action_start_task[rank], stop)
    position = {action: number for number, action in enumerate(lowered.orders[rank])}
    times = np.zeros((len(order), 2))
    for number, action in enumerate(order):
        place = position[action]
        times[number, 0] = schedule.start_s[starts[place]]
        times[number, 1] = max(times[number, 0], schedule.end_s[starts[place + 1] - 1])
    return times


def _step_times(
    c: int, lowered: Lowered, rank: int, schedule: Schedule, left_out_s: float
) -> tuple[float, float, float]:
    """Return when a representative's optimizer step starts, when it ends, and when what follows it has ended.

    Where no step is simulated, all three are when the representative's rank has ended its last pass.
    """
    graph, first = lowered.graph, lowered.step_start_task
    streams = np.flatnonzero(graph.stream_device == c)
    late = [row[row >= first] for row in (graph.streams.row(int(each))[first - graph.num_tasks :] for each in streams)]
    own = np.concatenate(late) if late and first < graph.num_tasks else np.empty(0, dtype=np.int32)
    step = own[np.array([graph.causes[cause] == "optimizer" for cause in graph.cause[own]], dtype=np.bool_)]
    if len(step) == 0:
        end_s = float(_action_times(lowered.orders[rank][-1:], lowered, rank, schedule).max()) + left_out_s
        return end_s, end_s, end_s
    times = schedule.start_s[step].min(), schedule.end_s[step].max(), schedule.end_s[own].max()
    return float(times[0]) + left_out_s, float(times[1]) + left_out_s, float(times[2]) + left_out_s


def _events(turns: _Turns, plan: Plan, costs: CostTables) -> EventArrays:
    """Return every allocation and free of a representative."""
    order = turns.order
    sharded = reduces_in_backward(plan)
    stream = EventStream()
    programs: dict[int, StagePasses] = {}
    smaller: dict[int, StagePasses] = {}
    workspace: list[int] = []
    refreshed: list[int] = []
    flattened = buffer = 0
    late = costs.problem.runtime.moments_at_first_step
    for placement, last_placement in zip(turns.placements, turns.last_placements, strict=True):
        view = placement.view
        static_key = ("static bytes", sharded)
        if static_key not in view.kept:
            view.kept[static_key] = static_bytes(list(parameter_groups(view)), costs, sharded_gradients=sharded)
        static: StaticBytes = view.kept[static_key]
        kinds = tuple(dict.fromkeys(action.kind for action in order if action.stage == view.position))
        programs[view.position] = _stage_passes(
            turns.device, placement, costs, kinds, plan.reshard_after_forward, sharded, static
        )
        if plan.last_microbatch_size is not None:
            smaller[view.position] = _stage_passes(
                turns.device, last_placement, costs, kinds, plan.reshard_after_forward, sharded, static
            )
        stream.add_static(static.parameters, PARAMETERS)
        for is_handed, mark in ((False, 0), (True, HANDED)):
            chosen = [g for g, of in zip(static.gradients, static.handed, strict=True) if (of is not None) == is_handed]
            stream.add_static(chosen, GRADIENTS, mark=mark)
        stream.add_static(static.masters, OPTIMIZER_STATES)
        stream.add_static(static.moments, OPTIMIZER_STATES, mark=LATE if late else 0)
        workspace += static.step_workspace
        refreshed = max(refreshed, static.refreshed, key=sum)
        flattened = max(flattened, static.flattened)
        buffer = max(buffer, programs[view.position].lasting_buffer)
    stream.add_static([buffer, costs.problem.matmul_workspace_bytes], WORKSPACE)
    stream.add_actions(programs, order, turns.labels, smaller, plan.num_microbatches - 1)
    begin_s, end_s, refreshed_s = turns.step_s
    stream.add_step([flattened], begin_s, begin_s)
    stream.drop_gradients(begin_s)
    # Torch's lists work in temporaries of the step itself, which makes moments first; copies of gradients come before.
    of_itself = costs.problem.runtime.optimizer_kernels == "foreach"
    stream.add_step(workspace, begin_s, end_s, marks=(STEPPED, 0) if of_itself else (0, STEPPED))
    stream.add_step(refreshed, end_s, refreshed_s)
    return stream.arrays()


def _signed(events: EventArrays) -> NDArray[np.int64]:
    return np.where(events.is_alloc, events.rounded, -events.rounded)


def _representative(
    turns: _Turns, plan: Plan, lowered: Lowered, costs: CostTables, fidelity: Fidelity, compiled: bool
) -> DeviceMemory:
    c, order = turns.device, turns.order
    events = _events(turns, plan, costs)
    signed = _signed(events)
    live = np.cumsum(signed)
    peak = int(np.argmax(live)) if len(live) else 0
    capacity = min(costs.problem.capacity_bytes(device) for device in lowered.graph.device_members[c])
    reserved, failed = int(live.max(initial=0)), None
    if fidelity.allocator:
        listed = first_iterations(events, len(order))
        text = hashlib.blake2b(b"".join(column.tobytes() for column in listed)).digest()

        def replayed(most: int) -> AllocatorResult:
            return replay_compiled(*listed, most) if compiled else replay(*listed, most)

        result = costs.replays.get((text, capacity), lambda: replayed(max(capacity, 0)))
        if result.failure is not None:
            failed = result.failure.requested_bytes
            unlimited = costs.replays.get((text, UNLIMITED_BYTES), lambda: replayed(UNLIMITED_BYTES))
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
        failed_request_bytes=failed,
    )


def _stage_passes(
    c: int,
    placement: StagePlacement,
    costs: CostTables,
    kinds: tuple[str, ...],
    reshards: bool,
    sharded: bool,
    static: StaticBytes,
) -> StagePasses:
    shared = placement.view.shared
    key = ("memory", placement.all_samples(c), placement.gpu_type[c], reshards, sharded, kinds)
    if key not in shared:
        shared[key] = _stage_passes_anew(c, placement, costs, kinds, reshards, sharded, static)
    found: StagePasses = shared[key]
    return found


def _stage_passes_anew(
    c: int,
    placement: StagePlacement,
    costs: CostTables,
    kinds: Sequence[str],
    reshards: bool,
    sharded: bool,
    static: StaticBytes,
) -> StagePasses:
    def cost_of(index: int) -> OperatorCost:
        samples = placement.samples(index, c)
        return costs.operator(index, placement.view.shardings[index], samples, placement.gpu_type[c])

    program = StageMemory(
        placement.view,
        cache(cost_of),
        reshards=reshards,
        sharded_gradients=sharded,
        gradients_anew=static.gradients_anew,
    )
    lists, begins, at_last = {}, {}, {}
    for kind in kinds:
        if kind == FORWARD:
            found = program.forward()
        else:
            found = program.backward(with_inputs=kind != BACKWARD_WEIGHT, with_weights=kind != BACKWARD_INPUT)
        lists[kind] = (np.array(found[0], dtype=np.int64), np.array(found[1], dtype=np.bool_))
        begins[kind] = dict(program.begins)
        at_last[kind] = np.isin(np.arange(len(found[0])), program.at_last)
    sizes = np.array(program.table.sizes, dtype=np.int64)
    categories = np.array(program.table.categories, dtype=np.int64)
    outliving = np.array(sorted(program.table.lasting), dtype=np.int64)
    lasting = np.isin(np.arange(len(sizes)), outliving)
    makes_weights = BACKWARD in kinds or BACKWARD_WEIGHT in kinds
    as_made = program.handed_gradients(filter(None, static.handed)) if makes_weights else {}
    rooms = {kind: np.full(len(sizes), -1) for kind in lists}
    for kind, begin in begins.items():
        rooms[kind][list(as_made)] = [begin.get(index, -1) for index in as_made.values()]
    return StagePasses(
        num_tensors=len(sizes),
        passes={
            kind: PassEvents(
                tensors,
                lasting[tensors],
                is_alloc,
                sizes[tensors],
                categories[tensors],
                np.linspace(0.0, 1.0, len(tensors)),
                rooms[kind][tensors],
                at_last[kind],
            )
            for kind, (tensors, is_alloc) in lists.items()
        },
        lasting=outliving,
        lasting_buffer=program.lasting_buffer_bytes(),
        dropped=_dropped(program, static),
    )


def _dropped(program: StageMemory, static: StaticBytes) -> NDArray[np.int64]:
    """Return the numbers and bytes of gradients that go before the optimizer step: int64[., 2]."""
    numbers = [program.table.names.get(f"unit {unit}/gradient {number}") for unit, number in static.dropped]
    made = [number for number in numbers if number is not None]
    return np.array([(number, program.table.sizes[number]) for number in made], dtype=np.int64).reshape(-1, 2)
