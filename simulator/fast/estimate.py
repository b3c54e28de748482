"""``estimate`` for searchers that ask for hundreds of thousands of plans: the same numbers, from arrays.

>>> from simulator.problem import ProblemSpec
>>> from simulator.plan import Axis
>>> problem = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x4", "megatron-lm-2021", 16).load()
>>> fast = FastEstimator(problem)
>>> both = fast.strategy((Axis("batch", 2), Axis("tensor", 2)))     # mesh axes -> a number
>>> devices = fast.placement(range(4))                              # devices -> a number
>>> stage = StageColumns(placement=devices, stops=[len(problem.workload)], strategies=[both])
>>> plan = PlanArrays.of([stage], microbatch_size=4, num_microbatches=4)
>>> found = fast.evaluate(plan)                                     # or many, joined: arrays of results
>>> bool(found.fits[0]), len(found.iteration_time_s)
(True, 1)

What a strategy costs is worked out once, by the lowering itself, when a plan first asks for it (milliseconds);
so are operators between unlike neighbours and boundaries between stages. After that a plan is sums: its cost
grows with runs of equal strategy and recomputed segments. Everything that ``estimate`` knows is there (data and
tensor parallelism of any axes per operator, ZeRO, sequence parallelism, recomputed segments, resharding, transfers
whole or in parts, schedules, tied weights), equal to rounding; ``round_robin`` replicas and stages that are not
consecutive operators are not. Plans are taken to be legal, as in ``estimate``: what does not fit a strategy is
refused, but devices that two stages share unequally, or a schedule's own rules, are not looked at.

Keys are 64-bit hashes: two that are meant to differ are equal with probability n^2 / 4e19 for n rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hardware_models.runtime import Runtime
from simulator.closed_forms.estimate import Estimate
from simulator.closed_forms.stage_prices import pass_host_s, passes_s
from simulator.compiled_cache import is_cached
from simulator.costs import CostTables, cost_tables
from simulator.fast.arrays import (
    BAD_ROUNDS,
    BAD_RUNS,
    BAD_SEGMENTS,
    BAD_STRATEGY,
    INCOMPLETE,
    MIXED_GATHERS,
    PassRules,
    PlanColumns,
)
from simulator.fast.channels import Channels, Interner
from simulator.fast.memory import MemoryRules
from simulator.fast.misses import MissingRows, first_operator
from simulator.fast.overlap import beside_rules
from simulator.fast.peaks import estimate_peaks
from simulator.fast.plans import SCHEDULES, PlanArrays, StageColumns, why_not
from simulator.fast.step import step_rules
from simulator.fast.store import Store
from simulator.fast.structure import structure
from simulator.fast.tables import TableBuilder
from simulator.fast.time import estimate_times
from simulator.lowering.whole_gradients import flattened_at_once
from simulator.plan import Plan, Sharding, Stage, run_lengths
from simulator.problem import Problem
from simulator.uniform import uniform_plan

__all__ = ["FastEstimates", "FastEstimator", "PlanArrays", "StageColumns"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FastEstimates:
    """What the closed form says of plans; see ``Estimate``.

    Attributes:
        iteration_time_s: float64[P].
        stage_time_s, peak_bytes, capacity_bytes: float64[S].
        fits: bool[P].
    """

    iteration_time_s: Floats
    stage_time_s: Floats
    peak_bytes: Floats
    capacity_bytes: Floats
    fits: NDArray[np.bool_]


def pass_rules(costs: CostTables) -> PassRules:
    """Return what holds for the passes of any plan."""
    runtime, gpu_type = costs.problem.runtime, costs.problem.gpu_types[0]
    return PassRules(
        stops_early=runtime.recompute_stops_early,
        ties_by_use=runtime.reduces_ties_by_use,
        regathers=runtime.regathers_recomputed,
        blocking=np.array([runtime.blocks_on_transfers(schedule) for schedule in SCHEDULES]),
        parameter_bytes=float(runtime.parameter_bytes),
        passes_s=np.array([passes_s(costs, gpu_type, schedule) for schedule in SCHEDULES]),
        pass_host_s=pass_host_s(costs),
        waits_to_receive=np.array([runtime.host_waits_to_receive(schedule) for schedule in SCHEDULES]),
    )


def memory_rules(runtime: Runtime) -> MemoryRules:
    """Return what holds for the memory of any plan."""
    return MemoryRules(
        keeps_gathered=runtime.keeps_gathered_inputs,
        keeps_outputs=runtime.keeps_stage_outputs,
        keeps_shards=runtime.keeps_gathered_shards,
        prefetches=runtime.holds_next("backward"),
        prefetches_forward=runtime.holds_next("forward"),
        apart=runtime.waiting_gradient_share is not None and not runtime.flattens_sharded,
        holds_ends=runtime.recompute_holds_ends,
        bucket_bytes=flattened_at_once(float("inf"), runtime),
        waits=runtime.waiting_gradient_share is not None,
        waiting=runtime.waiting_gradient_share or 1.0,
    )


def compile_ahead(problem: Problem) -> None:
    """Compile the estimate where this machine has not yet, before a search begins (up to a minute)."""
    if not (is_cached(estimate_times) and is_cached(estimate_peaks)):
        with suppress(ValueError):  # No array form, so nothing to compile for.
            FastEstimator(problem).estimate(uniform_plan(problem))


class FastEstimator:
    """Evaluates plans in array form. What it has worked out is kept between calls.

    Args:
        problem: The problem.
        costs: Cost tables; None for those that all calls on the same problem share.

    Raises:
        ValueError: If a pass of a microbatch costs some hosts more than others and nothing hides it.
    """

    def __init__(self, problem: Problem, costs: CostTables | None = None) -> None:
        if not is_cached(estimate_times):
            log = logging.getLogger("windtunnel")
            log.warning("compiling the estimate, once on this machine (a minute, or some on a slow one) ...")
        self.problem = problem
        self.costs = costs or cost_tables(problem)
        passes_of = {passes_s(self.costs, gpu_type, "1f1b") for gpu_type in problem.gpu_types}
        if len(passes_of) > 1:
            raise ValueError(
                f"the fast estimate needs hosts that take equally long for a pass, got {len(passes_of)} kinds on "
                f"{problem.hardware.cluster.name}; use estimate"
            )
        self._structure, self._savings, names = structure(problem, self.costs)
        builder = TableBuilder(self.costs, self._structure, self._savings, names, Channels(self.costs))
        self._store = Store(builder)
        self._pass_rules, self._step_rules = pass_rules(self.costs), step_rules(self.costs)
        self._beside, self._memory_rules = beside_rules(problem.runtime), memory_rules(problem.runtime)
        self._strategies: dict[Sharding, int] = {}
        self._strategy_list: list[Sharding] = []
        self._placements: dict[tuple[int, ...], int] = {}
        self._placement_list: list[tuple[int, ...]] = []
        self._shapes, self._forms = Interner(), Interner()
        self._missing = MissingRows(
            self._structure, builder, self._store, self._strategy_list, self._placement_list, Interner()
        )
        nodes = problem.hardware.cluster.nodes
        alike = all(replace(node, first_device=0) == nodes[0] for node in nodes)
        self._node_size = nodes[0].num_devices if alike else problem.num_devices
        self._alike = alike
        self._any_slot = alike and nodes[0].links.kind != "mesh"

    # Numbers for words

    def strategy(self, sharding: Iterable) -> int:  # type: ignore[type-arg]
        """Return the number of a strategy: mesh axes, outermost first, as in plans; split words are allowed."""
        key = tuple(sharding)
        if key not in self._strategies:
            self._strategies[key] = len(self._strategy_list)
            self._strategy_list.append(key)
        return self._strategies[key]

    def placement(self, devices: Iterable[int]) -> int:
        """Return the number of a tuple of devices, in mesh order.

        Raises:
            ValueError: If a device is not in the cluster, or named twice.
        """
        key = tuple(devices)
        if key in self._placements:
            return self._placements[key]
        if not key or len(set(key)) < len(key) or not 0 <= min(key) <= max(key) < self.problem.num_devices:
            raise ValueError(
                f"a placement must name different devices of 0..{self.problem.num_devices - 1}, got {key[:16]}"
            )
        size = self._node_size
        node = min(key) // size
        form = tuple(device - node * size for device in key)
        one_node = max(form) < size
        shape: object = form
        if one_node and self._any_slot and form == tuple(range(form[0], form[0] + len(form))):
            shape = len(form)  # Behind a switch or a host bridge, neighbours are alike wherever they are.
        capacity = min(self.problem.capacity_bytes(device) for device in key)
        number = self._placements[key] = len(self._placement_list)
        self._placement_list.append(key)
        gpu_types = {self.problem.gpu_types[device] for device in key}
        self._store.add_placement(self._shapes(shape), self._forms(form), node, gpu_types, float(capacity))
        return number

    def arrays(self, plans: Sequence[Plan]) -> PlanArrays:
        """Return plans in array form.

        Raises:
            ValueError: If a plan has none; says which and why.
        """
        found = []
        for number, plan in enumerate(plans):
            reason = why_not(plan)
            if reason is not None:
                raise ValueError(f"plan {number}: {reason}; use estimate for such plans")
            warmups = plan.warmup_in_force() or (0,) * len(plan.stages)
            stages = []
            for stage, warmup in zip(plan.stages, warmups, strict=True):
                first = min(start for start, _ in stage.operators)
                stops, strategies = [], []
                runs = stage.shardings if len(stage.operators) == 1 else _in_order(stage)
                for count, sharding in runs:
                    first += count
                    stops.append(first)
                    strategies.append(self.strategy(sharding))
                stages.append(
                    StageColumns(self.placement(stage.devices), stops, strategies, sorted(stage.recompute), warmup)
                )
            found.append(
                PlanArrays.of(
                    stages,
                    plan.microbatch_size,
                    plan.num_microbatches,
                    plan.schedule,
                    reduces_every=plan.gradient_reduction == "every",
                    reshards=plan.reshard_after_forward,
                    overlaps=plan.overlap_gradient_sync,
                )
            )
        return PlanArrays.joined(found)

    def plan(self, plans: PlanArrays, index: int) -> Plan:
        """Return one plan of the arrays in full."""
        columns = plans.columns()
        stages, warmups = [], []
        rows = range(columns.stage_offsets[index], columns.stage_offsets[index + 1])
        for row in rows:
            stages.append(self._stage(columns, row, rows.start))
            warmups.append(int(columns.warmups[row]))
        word = {number: name for name, number in SCHEDULES.items()}[int(columns.schedule[index])]
        return Plan(
            stages=tuple(stages),
            microbatch_size=int(columns.microbatch_size[index]),
            num_microbatches=int(columns.num_microbatches[index]),
            schedule=word,
            warmup=tuple(warmups) if any(warmups) else None,
            gradient_reduction="every" if columns.reduces_every[index] else "last",
            reshard_after_forward=bool(columns.reshards[index]),
            overlap_gradient_sync=bool(columns.overlaps[index]),
        )

    # Evaluation

    def evaluate(self, plans: PlanArrays) -> FastEstimates:
        """Return time and memory of every plan.

        Raises:
            ValueError: If runs or segments of a plan are not in order, or a strategy does not fit its stage.
        """
        return self.evaluate_columns(plans.columns())

    def evaluate_columns(self, columns: PlanColumns) -> FastEstimates:
        """Return the same for arrays that are int64 and contiguous; nothing is converted."""
        count, num_stages = len(columns.microbatch_size), len(columns.placements)
        iteration_s, stage_s = np.empty(count), np.zeros(num_stages)
        run_tables = np.empty(len(columns.strategies), dtype=np.int64)
        states = np.empty(count, dtype=np.int64)
        chosen = np.arange(count)
        store = self._store
        while True:
            misses, counts = store.misses, store.counts
            counts[0] = 0
            estimate_times(
                self._structure,
                store.time,
                columns,
                chosen,
                self._pass_rules,
                self._step_rules,
                self._beside,
                iteration_s,
                stage_s,
                run_tables,
                states,
                misses,
                counts,
            )
            if counts[0]:
                self._missing.work_out(columns, misses[: counts[0]])
            elif states.any():
                self._refuse(states)
            else:
                break
            self._refuse(states)
            chosen = np.flatnonzero(states == INCOMPLETE)
        peak_bytes, capacity_bytes, fits = self.peaks(columns, states, run_tables)
        return FastEstimates(iteration_s, stage_s, peak_bytes, capacity_bytes, fits)

    def peaks(self, columns: PlanColumns, states: Ints, run_tables: Ints) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Return peaks and capacities of all stages, and which plans fit, as far as a plan's state is DONE.

        Args:
            columns: The plans.
            states, run_tables: From ``estimate_times``.
        """
        count, num_stages = len(columns.microbatch_size), len(columns.placements)
        peak_bytes, capacity_bytes, fits = np.empty(num_stages), np.empty(num_stages), np.empty(count, dtype=np.bool_)
        estimate_peaks(
            self._structure,
            self._savings,
            self._store.memory,
            columns,
            np.arange(count),
            states,
            run_tables,
            self._memory_rules,
            peak_bytes,
            capacity_bytes,
            fits,
        )
        return peak_bytes, capacity_bytes, fits

    def estimate(self, plan: Plan) -> Estimate:
        """Return the estimate of one plan object, conversion included."""
        found = self.evaluate(self.arrays([plan]))
        return Estimate(
            float(found.iteration_time_s[0]),
            tuple(found.stage_time_s.tolist()),
            tuple(found.peak_bytes.tolist()),
            tuple(found.capacity_bytes.tolist()),
        )

    # What is missing

    def _refuse(self, states: Ints) -> None:
        if (states >= 0).all():
            return
        plan = int(np.argmax(states < 0))
        count = len(self.problem.workload)
        words = {
            BAD_RUNS: f"runs of a plan must hold operators 0 to {count - 1} one after the other",
            BAD_STRATEGY: "every operator must be one that its strategy can split (validate says which is not)",
            BAD_ROUNDS: "interleaved stages and microbatches must be multiples of the ranks",
            MIXED_GATHERS: "a stage that gathers beside its first forward pass must have no parameters of ZeRO-3",
            BAD_SEGMENTS: "recomputed segments must lie inside their stage, ascending, and not overlap",
        }
        raise ValueError(f"{words.get(int(states[plan]), 'too many ways to gather parameters')}; broken in plan {plan}")

    def _stage(self, columns: PlanColumns, row: int, first_row: int) -> Stage:
        first = first_operator(columns, row, first_row)
        runs, start = [], first
        for run in range(columns.run_offsets[row], columns.run_offsets[row + 1]):
            stop = int(columns.run_stops[run])
            runs.append((stop - start, self._strategy_list[columns.strategies[run]]))
            start = stop
        segments = range(columns.segment_offsets[row], columns.segment_offsets[row + 1])
        return Stage(
            operators=((first, start),),
            devices=self._placement_list[columns.placements[row]],
            shardings=tuple(runs),
            recompute=tuple((int(columns.segment_firsts[g]), int(columns.segment_stops[g])) for g in segments),
        )


def _in_order(stage: Stage) -> tuple[tuple[int, Sharding], ...]:
    """Return the runs of a stage whose ranges are not written in order."""
    pairs = sorted(zip(stage.indices(), stage.sharding_per_operator(), strict=True))
    return run_lengths(sharding for _, sharding in pairs)
