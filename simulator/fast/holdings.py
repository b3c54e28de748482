"""What one operator holds under one strategy: bytes of every kind, and how its parameters are synchronised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from simulator.closed_forms.estimate_memory import refreshed_bytes
from simulator.closed_forms.operator_needs import (
    ends_given_bytes,
    never_given_back_bytes,
    own_working_bytes,
    weight_pass_bytes,
)
from simulator.closed_forms.stage_overlap import bucket_elements, is_large, num_gradient_copies
from simulator.closed_forms.stage_units import filled_buckets
from simulator.costs import CostTables
from simulator.fast.arrays import (
    COPIES,
    GATHER,
    GATHER_CHANNEL,
    LEVEL,
    MAX_FAMILIES,
    REDUCTION,
    REFRESH,
    REFRESH_CHANNEL,
    REST,
    SCATTER,
    SCATTER_DEGREE,
    SHARDED,
    STEP_COLUMNS,
)
from simulator.fast.channels import Channels, Interner
from simulator.fast.memory import NUM_STATES
from simulator.fast.structure import Ints, saved_by, saved_names
from simulator.lowering.mesh import parameter_layout
from simulator.lowering.program import StageView
from simulator.lowering.step import StepWork, work_of
from simulator.lowering.synchronisation import (
    ParameterGroup,
    is_copied,
    is_gathered,
    is_refreshed,
    parameter_groups,
    scattering_collective,
    split_reduction,
    tied_shards,
)
from simulator.lowering.whole_gradients import bucket_buffer_bytes, flattened_bytes, whole_gradients_begin
from simulator.memory.model_states import static_bytes
from simulator.memory.tied_gradients import waiting_bytes
from simulator.plan import Plan, Sharding, Stage, resolve, run_lengths
from simulator.saved import is_private, needed_for_weights

Floats = NDArray[np.float64]


def view_of(
    costs: CostTables,
    strategies: Mapping[int, Sharding],
    devices: Sequence[int],
    microbatch_size: int,
    entering: Iterable[str] = (),
    schedule: str = "1f1b",
) -> StageView:
    """Return a stage of these operators only; see ``StageView.entering``."""
    operators = costs.problem.workload.operators
    indices = sorted(strategies)
    resolved = [resolve(strategies[index], operators[index]) for index in indices]
    stage = Stage(
        operators=tuple((index, index + 1) for index in indices),
        devices=tuple(devices),
        shardings=run_lengths(resolved),
    )
    plan = Plan(stages=(stage,), microbatch_size=microbatch_size, num_microbatches=1, schedule=schedule)
    return StageView(0, stage, plan, costs, costs.problem.gpu_types[devices[0]], tuple(entering))


@dataclass(frozen=True)
class Holding:
    """What one operator holds: bytes and elements as in ``Table``, and what stands in ``TimeTables.sums``."""

    saved: list[float]
    made: list[float]
    read: list[float]
    private: float
    weighted: float
    to_multiply: float
    own_working: tuple[float, float]
    product: float
    given: tuple[float, float]
    gathered: float
    unsharded: float
    states: Floats
    largest: float
    buffer: float
    bucket: float
    elements: Floats
    work: Floats
    buckets: float
    num_large: int
    tied_bytes: list[list[float]]
    tied: list[tuple[int, int, int, int]]
    tied_work: list[StepWork]
    unsuited: bool = False


class Holdings:
    """Works out what operators hold.

    Args:
        costs: Cost tables.
        channels: Prices of collectives.
        layouts: Numbers of layouts, shared with whoever compares them.
    """

    def __init__(self, costs: CostTables, channels: Channels, layouts: Interner) -> None:
        self.costs = costs
        self.problem = costs.problem
        self.channels = channels
        self._layouts = layouts
        self._keys = Interner()

    def of(
        self,
        index: int,
        sharding: Sharding,
        devices: Sequence[int],
        microbatch_size: int,
        family_of: dict[object, int],
        families: Ints,
    ) -> Holding:
        """Return what an operator holds, whatever stands around it."""
        problem = self.problem
        view = view_of(self.costs, {index: sharding}, devices, microbatch_size)
        cost = self.costs.operator(index, sharding, view.samples(index), view.gpu_type)
        saved = saved_by(self.costs, index, sharding, view.samples(index), view.gpu_type)
        names = saved_names(self.costs, index, view.gpu_type)
        op = problem.workload.operators[index]
        assert all(is_private(name) or name in names for name in saved), "all that a strategy saves has a place"
        assert all(name in saved for name in names if name in op.inputs), "all strategies save these inputs, or none"
        private = sum(size for name, size in saved.items() if is_private(name))
        has_parameters = bool(problem.workload.parameters(index))
        weighted, to_multiply = needed_for_weights(problem.workload, index, cost) if has_parameters else (0.0, 0.0)
        gathered = unsharded = 0.0
        elements = np.zeros(MAX_FAMILIES)
        states = np.zeros(NUM_STATES)
        largest = 0.0
        work, buckets, num_large = np.zeros(STEP_COLUMNS), 0.0, 0
        tied_bytes, tied, tied_work = [], [], []
        splits = self.costs.splits(index, sharding)
        number = -1
        for group in parameter_groups(view):
            number += 1
            family = self._family(view, group, family_of, families)
            own_states = _states(view, group)
            largest = max(largest, own_states.pop())
            to_gather, to_scatter = _zero_bytes(view, group)
            gathered, unsharded = gathered + to_gather, unsharded + to_scatter
            waits = [waiting_bytes(group, problem.runtime, scatters=scatters) for scatters in (False, True)]
            own_states += (to_gather, to_scatter, *waits) if group.tie is not None else (0.0,) * 4
            own_work = work_of([group], problem.runtime)
            if group.tie is None:
                states += own_states
                work += own_work
                elements[family] += group.num_elements
                if group.reduced_axes:
                    buckets += filled_buckets(group.num_elements, bucket_elements(problem.runtime))
                num_large += is_gathered(group) and is_large(problem.runtime, group.num_elements)
                continue
            place = [p.tie for p in problem.workload.parameters(index)].index(group.tie)
            layout = self._layouts((group.tie, parameter_layout(sharding, splits, place)))
            tied_bytes.append(own_states)
            tied.append((family, group.num_elements, layout, tied_shards(view, group)))
            tied_work.append(own_work)
        return Holding(
            saved=[saved.get(name, 0.0) for name in names],
            made=list(cost.output_bytes),
            read=list(cost.input_bytes),
            private=private,
            weighted=weighted,
            to_multiply=to_multiply,
            own_working=own_working_bytes(index, cost, problem),
            product=weight_pass_bytes(index, cost, problem),
            given=(cost.given_back_bytes, ends_given_bytes(index, cost, problem, made_here=True)),
            gathered=gathered,
            unsharded=unsharded,
            states=states,
            largest=largest,
            buffer=never_given_back_bytes(cost, problem),
            bucket=bucket_buffer_bytes(parameter_groups(view), problem.runtime),
            elements=elements,
            work=work,
            buckets=buckets,
            num_large=num_large,
            tied_bytes=tied_bytes,
            tied=tied,
            tied_work=tied_work,
        )

    def nothing(self, index: int) -> Holding:
        """Return what stands in a table for an operator that its strategy does not suit."""
        op = self.problem.workload.operators[index]
        num_saved = len(saved_names(self.costs, index, self.problem.gpu_types[0]))
        num_tied = sum(parameter.tie is not None for parameter in self.problem.workload.parameters(index))
        return Holding(
            saved=[0.0] * num_saved,
            made=[0.0] * len(op.outputs),
            read=[0.0] * len(op.inputs),
            private=0.0,
            weighted=0.0,
            to_multiply=0.0,
            own_working=(0.0, 0.0),
            product=0.0,
            given=(0.0, 0.0),
            gathered=0.0,
            unsharded=0.0,
            states=np.zeros(NUM_STATES),
            largest=0.0,
            buffer=0.0,
            bucket=0.0,
            elements=np.zeros(MAX_FAMILIES),
            work=np.zeros(STEP_COLUMNS),
            buckets=0.0,
            num_large=0,
            tied_bytes=[[0.0] * NUM_STATES] * num_tied,
            tied=[(0, 0, -1, 1)] * num_tied,
            tied_work=[StepWork(0.0, 0.0, 0, 0, 0)] * num_tied,
            unsuited=True,
        )

    def _family(
        self, view: StageView, group: ParameterGroup, family_of: dict[object, int], families: Ints
    ) -> int:
        key = (group.sizes, group.reduced_axes, group.sharded_axes, group.zero)
        if key in family_of:
            return family_of[key]
        number = family_of[key] = len(family_of)
        if number >= MAX_FAMILIES:
            raise ValueError(f"a strategy must synchronise parameters in at most {MAX_FAMILIES} ways")
        row = families[number]

        def channel(collective: str, axes: tuple[int, ...]) -> int:
            unlike = self.costs.unlike_groups(view.stage.devices, group.sizes, axes)
            return self.channels.number(collective, unlike) if len(unlike[0].members) > 1 else -1

        scattered, rest = split_reduction(group)
        row[REDUCTION] = self._keys((group.sizes, group.reduced_axes, group.sharded_axes, group.scattered))
        row[LEVEL] = self._keys((group.sizes, group.sharded_axes, group.scattered))
        row[SCATTER_DEGREE] = prod(group.sizes[axis] for axis in scattered)
        row[SCATTER] = channel(scattering_collective(group, self.problem.runtime), scattered) if scattered else -1
        row[REST] = channel("all_reduce", rest) if rest else -1
        copies = is_copied(view, group)
        row[COPIES] = num_gradient_copies(self.problem.runtime, scattered=group.scattered)[0] if copies else 0
        if group.num_shards > 1:
            gathered = channel("all_gather", group.sharded_axes)
            key_number = self._keys((group.sizes, group.sharded_axes))
            if is_gathered(group) or (is_refreshed(group) and self.problem.runtime.refreshes_in_forward):
                row[GATHER], row[GATHER_CHANNEL], row[SHARDED] = key_number, gathered, is_gathered(group)
            elif is_refreshed(group):
                row[REFRESH], row[REFRESH_CHANNEL] = key_number, gathered
        return number


def _zero_bytes(view: StageView, group: ParameterGroup) -> tuple[float, float]:
    """Return what ZeRO-3 gathers of a parameter, and the whole gradient that ZeRO-2 or 3 scatters."""
    runtime = view.costs.problem.runtime
    to_gather = group.num_elements * runtime.gathered_parameter_bytes if is_gathered(group) else 0.0
    begins = whole_gradients_begin(view, group)
    return float(to_gather), float(len(begins) * group.num_elements * runtime.travelling_gradient_bytes)


def _states(view: StageView, group: ParameterGroup) -> list[float]:
    """Return model states as ``memory`` has them, and the largest tensor that is refreshed."""
    lasting, anew = [], []
    for sharded in (False, True):
        held = static_bytes([group], view.costs, sharded_gradients=sharded)
        lasting.append(float(held.total_bytes))
        anew.append(float(held.anew_bytes))
    stays, _ = _zero_bytes(view, group)
    chunks, largest = refreshed_bytes(group, view.costs)
    late = anew[True] if whole_gradients_begin(view, group) else 0.0
    flattened = flattened_bytes(group, view.costs.problem.runtime)
    return [*lasting, stays, *anew, float(held.step_bytes), chunks, late, flattened, largest]
