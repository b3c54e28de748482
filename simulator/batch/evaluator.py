"""Evaluate thousands of different plans at once, in closed form: for searchers.

The space: pipelines of consecutive operator ranges under GPipe or 1F1B, each stage with its own tensor and
data degree and with or without full recomputation, on consecutive devices, tensor ranks next to each other.

Times are exact, not ``(m - 1) max + sum``: the longest path through every pass of every stage and every
transfer in the schedule's static order. What only an engine knows is left out: the host, overlap slowdown,
contention, and what happens once per iteration (gradient synchronisation, optimizer). With these off by name
in ``Fidelity`` the engines give the same times to rounding; ``batch.errors`` says what each of them adds.
Peaks of memory are those of live tensors, to the byte; the allocator's fragmentation is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.batch.boundaries import Boundaries, Way
from simulator.batch.memory import (
    BACKWARD_PEAK,
    FIRST_BACKWARD_PEAK,
    FORWARD_PEAK,
    GRADIENTS_ANEW,
    KEPT,
    MODEL_STATES,
    STEP_WORKSPACE,
    StageBytes,
    measure_memory,
    stage_bytes,
    tensor_use,
)
from simulator.batch.pipeline import NUM_FIRST, NUM_LATER, measure_passes, run_pipelines
from simulator.batch.plans import PlanBatch
from simulator.batch.stages import Floats, Ints, StageRows, StageRowsBuilder, model_shape, priced
from simulator.costs import CostTables, cost_tables
from simulator.fidelity import Fidelity
from simulator.problem import Problem

__all__ = ["BatchEvaluator", "BatchResult", "PlanBatch"]

@dataclass(frozen=True)
class BatchResult:
    """What the closed form says of a batch.

    Attributes:
        iteration_time_s: float64[P].
        forward_s, backward_s: float64[S]. One microbatch on the first devices of the stage, collectives
            included, transfers not.
        peak_bytes: float64[S]. Largest sum of live tensors on a device, in the allocator's blocks.
        fits: bool[P]. Every stage is within its capacity; fragmentation is not looked at.
        num_apart: Plans whose devices had to be followed one by one, because those of a stage differ.
    """

    iteration_time_s: Floats
    forward_s: Floats
    backward_s: Floats
    peak_bytes: Floats
    fits: NDArray[np.bool_]
    num_apart: int


class BatchEvaluator:
    """Evaluates batches of plans of one problem. Rows and prices are kept between calls.

    Args:
        problem: The problem.
        costs: Cost tables; None for those that all calls on the same problem share.
        fidelity: ``tensor_parallel``, ``handover``, ``transfers`` and ``recompute`` are respected; None for all on.
    """

    def __init__(self, problem: Problem, costs: CostTables | None = None, fidelity: Fidelity | None = None) -> None:
        for name in ("scatters_transfers", "sends_attention_mask"):
            if getattr(problem.runtime, name):
                raise ValueError(
                    "batch evaluation knows whole transfers of the model's tensors only, but the runtime "
                    f"{problem.runtime.name} has {name}: true; use a runtime without, or simulate"
                )
        if problem.runtime.overlaps_input_reductions:
            raise ValueError(
                "batch evaluation adds up the collectives of a pass, but the runtime "
                f"{problem.runtime.name} has overlaps_input_reductions: true; use a runtime without, or simulate"
            )
        if problem.runtime.implementation.sequence_first and problem.runtime.attention == "flash":
            raise ValueError(
                "batch evaluation takes operators to save the same tensors whatever their samples, but flash attention "
                f"copies what it makes of several in runtime {problem.runtime.name}; use FastEstimator, or simulate"
            )
        if not problem.runtime.host_runs_ahead:
            raise ValueError(
                "batch evaluation leaves host time out, but nothing hides it where the host never runs ahead, as in "
                f"runtime {problem.runtime.name}; use a runtime whose host does, FastEstimator, or simulate"
            )
        self.problem = problem
        self.costs = costs or cost_tables(problem)
        self.fidelity = fidelity or Fidelity()
        self.shape = model_shape(problem, self.costs)
        self._blocking = self.fidelity.transfers and problem.runtime.blocks_on_transfers("1f1b")
        self._boundaries = Boundaries(problem, self.shape, transfers=self.fidelity.transfers, blocking=self._blocking)
        self._period = self._boundaries.period
        self._rows: dict[tuple[int, int, str], StageRows] = {}
        self._layouts: dict[bool, tuple[Ints, Ints]] = {}
        self._table_of_group: dict[tuple[int, int, int, bool], int] = {}
        self._table_of_price: dict[object, int] = {}
        self._tables: list[tuple[Floats, Ints, Floats, Ints]] = []
        self._packed: tuple[Floats, Ints, Floats, Ints] | None = None
        self.use = tensor_use(self.costs, self.shape)
        self._bytes: dict[tuple[int, int, str, bool], StageBytes] = {}
        self._bytes_of_table: list[tuple[int, int, str, bool]] = []
        self._packed_bytes: tuple[Floats, Floats, Floats, Floats, Ints] | None = None
        self._tables_of_stage: dict[int, Ints] = {}

    def evaluate(self, batch: PlanBatch) -> BatchResult:
        """Return the iteration time of every plan.

        Raises:
            ValueError: If a plan breaks a rule (``PlanBatch.check``), or an operator cannot be split so.
        """
        batch.check(self.problem)
        tables, equal_stage = self._stage_tables(batch)
        passes = self._passes(batch, np.arange(batch.num_stages), tables)
        # Ranks that meet in a collective in either pass end it together, and so are one.
        tied = (passes[:, :2, [NUM_FIRST, NUM_LATER]].sum(axis=2) > 0).all(axis=1)
        unit_sizes = np.where(tied, batch.tp, 1)
        layouts = self._layouts.get(True) or self._layouts[False]
        forward_s, backward_s, keys = self._boundaries.times(batch, unit_sizes, layouts)
        together = np.ones(len(batch), dtype=np.bool_)
        alike = equal_stage & np.isfinite(forward_s) & np.isfinite(backward_s)
        np.logical_and.at(together, batch.plan_of_stage, alike)
        times = np.zeros(len(batch))
        if together.any():
            times[together] = self._run_together(batch, together, passes, forward_s, backward_s)
        if not together.all():
            times[~together] = self._run_apart(batch, ~together, passes, equal_stage, unit_sizes, keys)
        peak_bytes = self._peaks(batch, tables)
        fits = np.ones(len(batch), dtype=np.bool_)
        np.logical_and.at(fits, batch.plan_of_stage, peak_bytes <= self._capacities(batch))
        return BatchResult(
            iteration_time_s=times,
            forward_s=passes[:, 0, 0],
            backward_s=passes[:, 1, 0],
            peak_bytes=peak_bytes,
            fits=fits,
            num_apart=int((~together).sum()),
        )

    # Passes of stages

    def _stage_tables(self, batch: PlanBatch) -> tuple[Ints, NDArray[np.bool_]]:
        """Return each stage's table (that of its first group), and whether all its groups share it."""
        samples = batch.microbatch_size[batch.plan_of_stage] // batch.dp
        place = batch.first_devices % self._period
        keys = ((samples * (1 << 14) + batch.tp) * (1 << 14) + batch.dp) * (1 << 16) + place
        _, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        first = np.empty(len(example), dtype=np.int64)
        equal = np.empty(len(example), dtype=np.bool_)
        for number, stage in enumerate(example.tolist()):
            key = int(keys[stage])
            if key not in self._tables_of_stage:
                self._tables_of_stage[key] = self._tables_of_groups(batch, stage, int(samples[stage]))
            found = self._tables_of_stage[key]
            first[number], equal[number] = found[0], bool((found == found[0]).all())
        return first[inverse], equal[inverse]

    def _tables_of_groups(self, batch: PlanBatch, stage: int, samples: int) -> Ints:
        tp, dp, start = int(batch.tp[stage]), int(batch.dp[stage]), int(batch.first_devices[stage])
        tables = [self._table(tp, samples, start + group * tp, dp > 1) for group in range(dp)]
        return np.array(tables, dtype=np.int64)

    def _table(self, tp: int, samples: int, start: int, replicated: bool) -> int:
        """Return the number of the table for a group of ``tp`` devices from ``start`` on, of several or alone."""
        key = (tp, samples, start % self._period, replicated)
        if key in self._table_of_group:
            return self._table_of_group[key]
        devices = tuple(range(start, start + tp))
        types = {self.problem.gpu_types[device] for device in devices}
        if len(types) > 1:
            raise ValueError(f"a tensor-parallel group must be of one GPU type, got {', '.join(sorted(types))}")
        gpu_type = types.pop()
        if (tp, samples, gpu_type) not in self._rows:
            builder = StageRowsBuilder(self.costs, self.shape, tp, samples, gpu_type)
            self._rows[tp, samples, gpu_type] = builder.build()
            self._layouts.setdefault(tp > 1, builder.layouts)
        rows = self._rows[tp, samples, gpu_type]
        idle_s = self.problem.runtime.handover_s if self.fidelity.handover else 0.0

        def price_s(collective: str, num_bytes: float) -> float:
            return self.problem.hardware.collective(collective, num_bytes, devices).alone_s + idle_s

        prices = tuple(price_s(*found) for found in rows.collectives)
        sized = (tp, samples, gpu_type, replicated)
        if sized not in self._bytes:
            self._bytes[sized] = stage_bytes(
                self.costs, self.shape, rows, tp, samples, gpu_type, replicated=replicated
            )
        price_key = (sized, prices)
        if price_key not in self._table_of_price:
            self._table_of_price[price_key] = len(self._tables)
            self._tables.append(self._filled(rows, dict(zip(rows.collectives, prices, strict=True))))
            self._bytes_of_table.append(sized)
            self._packed = self._packed_bytes = None
        self._table_of_group[key] = self._table_of_price[price_key]
        return self._table_of_group[key]

    def _filled(self, rows: StageRows, prices: dict[tuple[str, float], float]) -> tuple[Floats, Ints, Floats, Ints]:
        own, around = priced(rows, lambda *found: prices[found])
        on = int(self.fidelity.tensor_parallel)
        nothing = np.zeros(len(rows.forward_s), dtype=np.int64)
        op_counts = [nothing, nothing, rows.after_forward.sum(axis=1), rows.settling.sum(axis=1)]
        row_counts = [rows.before_forward, rows.before_again, rows.after_backward]
        return (
            np.concatenate([rows.forward_s[:, None], rows.backward_s[:, None], own, rows.added_s[:, None]], axis=1),
            np.stack(op_counts, axis=1) * on,
            around,
            np.stack([found.sum(axis=1) for found in row_counts], axis=1) * on,
        )

    def _passes(self, batch: PlanBatch, stages: Ints, tables: Ints) -> Floats:
        """Return forward and backward of stages under given tables: float64[len(stages), 2, PASS]."""
        if self._packed is None:
            columns = zip(*self._tables, strict=True)
            self._packed = tuple(np.stack(column) for column in columns)  # type: ignore[assignment]
        assert self._packed is not None
        shape = self.shape
        return measure_passes(
            batch.firsts[stages],
            batch.stops[stages],
            tables,
            batch.recompute[stages] & self.fidelity.recompute,
            self.problem.runtime.recompute_stops_early,
            *self._packed,
            shape.row_offsets,
            shape.row_limits,
            shape.segment_first,
            shape.segment_stop,
            shape.first_saver,
            shape.first_reader,
        )

    # Memory

    def _peaks(self, batch: PlanBatch, tables: Ints) -> Floats:
        """Return the peak of every stage in bytes, optimizer step included."""
        if self._packed_bytes is None:
            sizes = [self._bytes[key] for key in self._bytes_of_table]
            self._packed_bytes = (
                np.stack([one.op_bytes for one in sizes]),
                np.stack([one.made_bytes for one in sizes]),
                np.stack([one.read_bytes for one in sizes]),
                np.stack([one.gathered_bytes for one in sizes]),
                np.stack([one.previous_tied for one in sizes]),
            )
        shape, use = self.shape, self.use
        found = measure_memory(
            batch.firsts,
            batch.stops,
            tables,
            batch.recompute,
            self.problem.runtime.recompute_stops_early,
            self.problem.runtime.recompute_holds_ends,
            self.problem.runtime.keeps_stage_outputs,
            *self._packed_bytes,
            shape.producers,
            shape.reader_offsets,
            shape.readers,
            shape.crossing_offsets,
            shape.crossing,
            shape.row_offsets,
            shape.row_limits,
            shape.layer_first,
            shape.segment_first,
            shape.segment_stop,
            use.output_offsets,
            use.outputs,
            use.input_offsets,
            use.inputs,
            use.readings,
            use.saved_offsets,
            use.saved,
            use.saver_offsets,
            use.savers,
            use.saver_readings,
            use.user_offsets,
            use.users,
            use.user_readings,
        )
        count = batch.num_microbatches[batch.plan_of_stage]
        in_flight, anew = np.minimum(batch.warmups, count), found[:, GRADIENTS_ANEW]
        goes_on = count > in_flight  # Forward passes come after backward ones, which leave gradients.
        forward = (in_flight - 1) * found[:, KEPT] + found[:, FORWARD_PEAK] + goes_on * anew
        first_backward = in_flight * found[:, KEPT] + found[:, FIRST_BACKWARD_PEAK]
        left = np.where(goes_on, in_flight, in_flight - 1)
        later_backward = np.where(left > 0, left * found[:, KEPT] + found[:, BACKWARD_PEAK] + anew, 0.0)
        step = found[:, STEP_WORKSPACE] + anew
        peaks: Floats = found[:, MODEL_STATES] + np.max([forward, first_backward, later_backward, step], axis=0)
        return peaks

    def _capacities(self, batch: PlanBatch) -> Floats:
        """Return the capacity of the smallest device of every stage, in bytes."""
        capacity = np.array([self.problem.capacity_bytes(d) for d in range(self.problem.num_devices)], dtype=np.float64)
        if (capacity == capacity[0]).all():
            return np.full(batch.num_stages, capacity[0])
        last = batch.first_devices + batch.tp * batch.dp
        return np.array([capacity[a:b].min() for a, b in zip(batch.first_devices, last, strict=True)])

    # Pipelines

    def _run_together(
        self,
        batch: PlanBatch,
        chosen: NDArray[np.bool_],
        passes: Floats,
        forward_s: Floats,
        backward_s: Floats,
    ) -> Floats:
        """Return times of plans each of whose stages is one device many times over."""
        stages = np.flatnonzero(chosen[batch.plan_of_stage])
        count = len(stages)
        counts = np.diff(batch.stage_offsets)[chosen]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        has_next = np.ones(count, dtype=np.bool_)
        has_next[offsets[1:] - 1] = False
        has_previous = np.ones(count, dtype=np.bool_)
        has_previous[offsets[:-1]] = False
        present = np.stack([has_next, has_previous], axis=1).ravel()
        seconds = np.stack([forward_s[stages], np.concatenate([[0.0], backward_s[stages][:-1]])], axis=1).ravel()
        units = np.zeros(int(present.sum()), dtype=np.int64)
        return run_pipelines(
            offsets,
            batch.num_microbatches[chosen],
            batch.warmups[stages],
            self._blocking,
            np.arange(count + 1, dtype=np.int64),
            np.ones(count, dtype=np.int64),
            passes[stages],
            np.concatenate([[0], np.cumsum(present)]),
            units,
            units,
            seconds[present],
        )

    def _run_apart(
        self,
        batch: PlanBatch,
        chosen: NDArray[np.bool_],
        passes: Floats,
        equal_stage: NDArray[np.bool_],
        unit_sizes: Ints,
        keys: NDArray[np.uint64],
    ) -> Floats:
        """Return times of plans in which units of a stage differ, unit by unit."""
        stages = np.flatnonzero(chosen[batch.plan_of_stage])
        samples = batch.microbatch_size[batch.plan_of_stage] // batch.dp
        units = batch.tp[stages] * batch.dp[stages] // unit_sizes[stages]
        own = np.repeat(passes[stages], units, axis=0)
        first_unit = np.concatenate([[0], np.cumsum(units)])
        known = self._boundaries.known
        nothing = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
        ways: list[Way] = []
        for number, stage in enumerate(stages.tolist()):
            last = stage + 1 == batch.num_stages or batch.is_first[stage + 1]
            ways.append(nothing if last else known[int(keys[stage])].forward)
            ways.append(nothing if batch.is_first[stage] else known[int(keys[stage - 1])].backward)
            if not equal_stage[stage]:
                groups = self._tables_of_groups(batch, stage, int(samples[stage]))
                found = self._passes(batch, np.full(len(groups), stage), groups)
                repeats = int(batch.tp[stage]) // int(unit_sizes[stage])
                own[first_unit[number] : first_unit[number + 1]] = np.repeat(found, repeats, axis=0)
        counts = np.diff(batch.stage_offsets)[chosen]
        return run_pipelines(
            np.concatenate([[0], np.cumsum(counts)]),
            batch.num_microbatches[chosen],
            batch.warmups[stages],
            self._blocking,
            first_unit,
            batch.tp[stages] // unit_sizes[stages],
            own,
            np.concatenate([[0], np.cumsum([len(way[0]) for way in ways])]),
            np.concatenate([way[0] for way in ways]),
            np.concatenate([way[1] for way in ways]),
            np.concatenate([way[2] for way in ways]),
        )
