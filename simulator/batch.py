"""Evaluate thousands of different plans at once, in closed form: for searchers.

The space: pipelines of consecutive operator ranges under GPipe or 1F1B, each stage with its own tensor and data
degree and with or without full recomputation, on consecutive devices, tensor ranks next to each other.

Times are exact, not ``(m - 1) max + sum``: the longest path through every pass of every stage and every transfer
in the schedule's static order. What only an engine knows is left out: the host, overlap slowdown, contention, and
what happens once per iteration (gradient synchronisation, optimizer). With these off by name in ``Fidelity`` the
engines give the same times to rounding; ``error_by_cause`` says what each of them adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled_pipeline import NUM_FIRST, NUM_LATER, boundary_codes, measure_passes, run_pipelines
from simulator.compiled_stages import (
    REPLICATED,
    Floats,
    Ints,
    StageRows,
    StageRowsBuilder,
    model_shape,
    priced,
)
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments

MODELLED_ELSEWHERE = ("host", "overlap-slowdown", "contention", "gradient-sync", "optimizer")
"""Effects that engines have and the closed form leaves out."""


@dataclass(frozen=True)
class PlanBatch:
    """P plans with S stages in all, as arrays.

    Attributes:
        stage_offsets: int64[P + 1]. Stages of plan i are rows ``stage_offsets[i]`` to ``stage_offsets[i + 1]``.
        stops: int64[S]. A stage holds the operators from where the stage before it stops (0 for the first).
        tp, dp: int64[S]. Tensor- and data-parallel degree.
        recompute: bool[S]. Every repeated layer is recomputed.
        microbatch_size: int64[P]. Samples over all replicas; a multiple of every dp.
        num_microbatches: int64[P].
        gpipe: bool[P]. GPipe; else 1F1B with the usual warm-up.
    """

    stage_offsets: Ints
    stops: Ints
    tp: Ints
    dp: Ints
    recompute: NDArray[np.bool_]
    microbatch_size: Ints
    num_microbatches: Ints
    gpipe: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.microbatch_size)

    @property
    def num_stages(self) -> int:
        """Stages of all plans together."""
        return len(self.stops)

    @cached_property
    def plan_of_stage(self) -> Ints:
        """int64[S]."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.stage_offsets))

    @cached_property
    def is_first(self) -> NDArray[np.bool_]:
        """bool[S]: the first stage of a plan."""
        found = np.zeros(self.num_stages, dtype=np.bool_)
        found[self.stage_offsets[:-1]] = True
        return found

    @cached_property
    def firsts(self) -> Ints:
        """int64[S]: first operator of each stage."""
        found = np.zeros(self.num_stages, dtype=np.int64)
        found[1:] = self.stops[:-1]
        found[self.is_first] = 0
        return found

    @cached_property
    def first_devices(self) -> Ints:
        """int64[S]: first device of each stage."""
        before = np.concatenate([[0], np.cumsum(self.tp * self.dp)])
        return before[:-1] - before[self.stage_offsets[:-1]][self.plan_of_stage]

    @cached_property
    def warmups(self) -> Ints:
        """int64[S]: forwards of each stage before its first backward."""
        m = self.num_microbatches[self.plan_of_stage]
        behind = self.stage_offsets[1:][self.plan_of_stage] - np.arange(self.num_stages)
        return np.where(self.gpipe[self.plan_of_stage], m, np.minimum(m, behind))

    def check(self, problem: Problem) -> None:
        """Raise ValueError where a plan breaks a rule; says which plan and which rule."""
        count = len(problem.workload)
        rules = {
            f"stages must hold 1 to {count} operators one after the other": self.stops > self.firsts,
            "tp and dp must be at least 1": (self.tp >= 1) & (self.dp >= 1),
            "dp must divide the microbatch": self.microbatch_size[self.plan_of_stage] % self.dp == 0,
            f"a plan must fit on {problem.num_devices} devices": self.first_devices + self.tp * self.dp
            <= problem.num_devices,
        }
        for rule, holds in rules.items():
            if not holds.all():
                stage = int(np.argmin(holds))
                raise ValueError(f"{rule}; broken in plan {self.plan_of_stage[stage]}, row {stage}")
        last = self.stops[self.stage_offsets[1:] - 1]
        if not (last == count).all():
            plan = int(np.argmin(last == count))
            raise ValueError(f"the last stage must stop at operator {count}, got {last[plan]} in plan {plan}")
        if not ((self.microbatch_size >= 1) & (self.num_microbatches >= 1)).all():
            raise ValueError("microbatches must hold at least one sample, and there must be at least one")

    def plan(self, index: int, problem: Problem) -> Plan:
        """Return one plan of the batch in full."""
        stages = []
        for row in range(self.stage_offsets[index], self.stage_offsets[index + 1]):
            first, stop = int(self.firsts[row]), int(self.stops[row])
            tp, dp, device = int(self.tp[row]), int(self.dp[row]), int(self.first_devices[row])
            words = "full" if self.recompute[row] else "none"
            stages.append(
                Stage(
                    operators=((first, stop),),
                    devices=tuple(range(device, device + tp * dp)),
                    shardings=((stop - first, (Axis("batch", dp), Axis("tensor", tp))),),
                    recompute=recompute_segments(problem.workload, first, stop, words),
                )
            )
        return Plan(
            stages=tuple(stages),
            microbatch_size=int(self.microbatch_size[index]),
            num_microbatches=int(self.num_microbatches[index]),
            schedule="gpipe" if self.gpipe[index] else "1f1b",
        )

    @staticmethod
    def from_plans(plans: Sequence[Plan], problem: Problem) -> PlanBatch:
        """Return plans as a batch.

        Raises:
            ValueError: If one is not of the batch's space; says which.
        """
        offsets, rows = [0], []
        for number, plan in enumerate(plans):
            for stage in plan.stages:
                axes = stage.shardings[0][1]
                sizes = {word: 1 for word in ("batch", "tensor")} | {axis.split: axis.size for axis in axes}
                rows.append(
                    (stage.operators[-1][1], sizes["tensor"], sizes["batch"], bool(stage.recompute))
                )
            offsets.append(len(rows))
            del number
        stops, tp, dp, recompute = (np.array(column) for column in zip(*rows, strict=True))
        batch = PlanBatch(
            stage_offsets=np.array(offsets, dtype=np.int64),
            stops=stops.astype(np.int64),
            tp=tp.astype(np.int64),
            dp=dp.astype(np.int64),
            recompute=recompute.astype(np.bool_),
            microbatch_size=np.array([plan.microbatch_size for plan in plans], dtype=np.int64),
            num_microbatches=np.array([plan.num_microbatches for plan in plans], dtype=np.int64),
            gpipe=np.array([plan.schedule == "gpipe" for plan in plans], dtype=np.bool_),
        )
        for number, plan in enumerate(plans):
            again = replace(
                batch.plan(number, problem),
                gradient_reduction=plan.gradient_reduction,
                overlap_gradient_sync=plan.overlap_gradient_sync,
                reshard_after_forward=plan.reshard_after_forward,
            )
            if again.canonical(problem.workload) != plan.canonical(problem.workload):
                raise ValueError(
                    f"plan {number} is not one of consecutive operator ranges, each with one (batch, tensor) mesh on "
                    "consecutive devices and full recomputation or none, under gpipe or 1f1b"
                )
        return batch


class _Boundary(NamedTuple):
    """Transfers of one microbatch over one boundary; units counted from the first of their stage.

    ``forward_s`` and ``backward_s`` hold for every unit, where all are alike; else they are NaN.
    """

    forward_s: float
    backward_s: float
    forward: tuple[Ints, Ints, Floats]
    backward: tuple[Ints, Ints, Floats]


@dataclass(frozen=True)
class BatchResult:
    """What the closed form says of a batch.

    Attributes:
        iteration_time_s: float64[P].
        forward_s, backward_s: float64[S]. One microbatch on the slowest device of the stage, collectives
            included, transfers not.
        num_apart: Plans whose devices had to be followed one by one, because those of a stage differ.
    """

    iteration_time_s: Floats
    forward_s: Floats
    backward_s: Floats
    num_apart: int


class BatchEvaluator:
    """Evaluates batches of plans of one problem. Rows and prices are kept between calls.

    Args:
        problem: The problem.
        costs: Cost tables to share.
        fidelity: ``tensor_parallel``, ``transfers`` and ``recompute`` are respected; None for all on.
    """

    def __init__(
        self, problem: Problem, costs: CostTables | None = None, fidelity: Fidelity | None = None
    ) -> None:
        self.problem = problem
        self.costs = costs or CostTables(problem)
        self.fidelity = fidelity or Fidelity()
        self.shape = model_shape(problem, self.costs)
        self._period = _period(problem)
        self._blocking = self.fidelity.transfers and problem.runtime.transfer_mode == "blocking"
        self._rows: dict[tuple[int, int, str], StageRows] = {}
        self._layouts: dict[bool, tuple[Ints, Ints]] = {}
        self._table_of_group: dict[tuple[int, int, int], int] = {}
        self._table_of_price: dict[object, int] = {}
        self._tables: list[tuple[Floats, Ints, Floats, Ints]] = []
        self._packed: tuple[Floats, Ints, Floats, Ints] | None = None
        self._tables_of_stage: dict[int, Ints] = {}
        self._boundaries: dict[int, _Boundary] = {}
        sizes: dict[float, int] = {}
        self._tensor_ids = np.array(
            [sizes.setdefault(size, len(sizes)) for size in self.shape.tensor_bytes], dtype=np.int64
        )

    def evaluate(self, batch: PlanBatch) -> BatchResult:
        """Return the iteration time of every plan.

        Raises:
            ValueError: If a plan breaks a rule (``PlanBatch.check``), or an operator cannot be split so.
        """
        batch.check(self.problem)
        tables, equal_stage = self._stage_tables(batch)
        passes = self._passes(batch, np.arange(batch.num_stages), tables)
        # Ranks that meet in a collective in either pass end it together, and so are one.
        tied = (passes[:, :, [NUM_FIRST, NUM_LATER]].sum(axis=2) > 0).all(axis=1)
        unit_sizes = np.where(tied, batch.tp, 1)
        forward_s, backward_s, keys = self._boundary_times(batch, unit_sizes)
        together = np.ones(len(batch), dtype=np.bool_)
        alike = equal_stage & np.isfinite(forward_s) & np.isfinite(backward_s)
        np.logical_and.at(together, batch.plan_of_stage, alike)
        times = np.zeros(len(batch))
        if together.any():
            times[together] = self._run_together(batch, together, passes, forward_s, backward_s)
        if not together.all():
            times[~together] = self._run_apart(batch, ~together, passes, equal_stage, unit_sizes, keys)
        return BatchResult(
            iteration_time_s=times,
            forward_s=passes[:, 0, 0],
            backward_s=passes[:, 1, 0],
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
                tp, dp = int(batch.tp[stage]), int(batch.dp[stage])
                start = int(batch.first_devices[stage])
                self._tables_of_stage[key] = np.array(
                    [self._table(tp, int(samples[stage]), start + group * tp) for group in range(dp)],
                    dtype=np.int64,
                )
            found = self._tables_of_stage[key]
            first[number], equal[number] = found[0], bool((found == found[0]).all())
        return first[inverse], equal[inverse]

    def _table(self, tp: int, samples: int, start: int) -> int:
        """Return the number of the table for a group of ``tp`` devices from ``start`` on."""
        key = (tp, samples, start % self._period)
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

        def price_s(collective: str, num_bytes: float) -> float:
            return self.problem.hardware.collective(collective, num_bytes, devices).alone_s

        prices = tuple(price_s(*found) for found in rows.collectives)
        price_key = (tp, samples, gpu_type, prices)
        if price_key not in self._table_of_price:
            self._table_of_price[price_key] = len(self._tables)
            self._tables.append(self._filled(rows, dict(zip(rows.collectives, prices, strict=True))))
            self._packed = None
        self._table_of_group[key] = self._table_of_price[price_key]
        return self._table_of_group[key]

    def _filled(
        self, rows: StageRows, prices: dict[tuple[str, float], float]
    ) -> tuple[Floats, Ints, Floats, Ints]:
        before_forward, before_backward, after_backward, inside, settling = priced(
            rows, lambda *found: prices[found]
        )
        on = int(self.fidelity.tensor_parallel)
        nothing = np.zeros(len(rows.forward_s), dtype=np.int64)
        op_counts = [nothing, nothing, rows.after_forward.sum(axis=1), rows.settling.sum(axis=1)]
        row_counts = [rows.before_forward, rows.before_backward, rows.after_backward]
        return (
            np.stack([rows.forward_s, rows.backward_s, inside, settling], axis=1),
            np.stack(op_counts, axis=1) * on,
            np.stack([before_forward, before_backward, after_backward], axis=1),
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
            shape.last_reader,
        )

    # Boundaries

    def _boundary_times(self, batch: PlanBatch, unit_sizes: Ints) -> tuple[Floats, Floats, NDArray[np.uint64]]:
        """Return seconds forward and backward, and a key, of every stage; NaN where units of a stage differ.

        Rows belong to the boundary behind a stage; those of last stages say nothing.
        """
        count = batch.num_stages
        before = np.flatnonzero(~np.append(batch.is_first[1:], True))
        after = before + 1
        shape = self.shape
        made, read = self._layouts.get(True) or self._layouts[False]
        size = batch.microbatch_size[batch.plan_of_stage[before]]
        place = batch.first_devices[before] % self._period
        meshes = [batch.tp[before], batch.dp[before], batch.tp[after], batch.dp[after]]
        degrees = np.stack([*meshes, unit_sizes[before], unit_sizes[after], size, place], axis=1)
        cuts = batch.stops[before]
        keys, sent, received = boundary_codes(
            batch.firsts[before],
            cuts,
            batch.stops[after],
            degrees,
            self._tensor_ids,
            made,
            read,
            shape.reader_offsets,
            shape.readers,
            shape.producers,
            shape.crossing_offsets,
            shape.crossing,
        )
        starts = np.concatenate([[0], np.cumsum(shape.crossing_offsets[cuts + 1] - shape.crossing_offsets[cuts])])
        distinct, example, inverse = np.unique(keys, return_index=True, return_inverse=True)
        found = np.empty((len(distinct), 2))
        for number, row in enumerate(example.tolist()):
            key = int(distinct[number])
            if key not in self._boundaries:
                codes = slice(int(starts[row]), int(starts[row + 1]))
                self._boundaries[key] = self._boundary(
                    batch, int(before[row]), unit_sizes, sent[codes].tolist(), received[codes].tolist()
                )
            found[number] = self._boundaries[key].forward_s, self._boundaries[key].backward_s
        forward_s, backward_s = np.zeros(count), np.zeros(count)
        forward_s[before], backward_s[before] = found[inverse].T
        key_of_stage = np.zeros(count, dtype=np.uint64)
        key_of_stage[before] = keys
        return forward_s, backward_s, key_of_stage

    def _boundary(
        self, batch: PlanBatch, stage: int, unit_sizes: Ints, sent: list[int], received: list[int]
    ) -> _Boundary:
        """Work out the transfers between a stage and the next."""
        shape = self.shape
        cut = int(batch.stops[stage])
        ours = (int(batch.dp[stage]), int(batch.tp[stage]))
        theirs = (int(batch.dp[stage + 1]), int(batch.tp[stage + 1]))
        size = int(batch.microbatch_size[batch.plan_of_stage[stage]])
        tensors = shape.crossing[shape.crossing_offsets[cut] : shape.crossing_offsets[cut + 1]]
        forward: dict[tuple[int, int], float] = {}
        backward: dict[tuple[int, int], float] = {}
        for tensor, code, other in zip(tensors.tolist(), sent, received, strict=True):
            num_bytes = float(shape.tensor_bytes[tensor]) * size
            code, other = (code if ours[1] > 1 else REPLICATED), (other if theirs[1] > 1 else REPLICATED)
            for total, way in (
                (forward, _route(*ours, code, *theirs, other)),
                (backward, _route(*theirs, other, *ours, code)),
            ):
                for source, target, share in way:
                    total[source, target] = total.get((source, target), 0.0) + share * num_bytes
        first, second = int(batch.first_devices[stage]), int(batch.first_devices[stage + 1])
        own, others = int(unit_sizes[stage]), int(unit_sizes[stage + 1])
        out, back = self._way(forward, first, own, second, others), self._way(backward, second, others, first, own)
        return _Boundary(self._alike_s(out), self._alike_s(back), out, back)

    def _way(
        self, transfers: dict[tuple[int, int], float], source: int, own: int, target: int, others: int
    ) -> tuple[Ints, Ints, Floats]:
        """Return transfers between units: of those between the same two, the slowest is always the last."""
        hardware = self.problem.hardware
        slowest: dict[tuple[int, int], float] = {}
        for (a, b), num_bytes in transfers.items():
            pair = (a // own, b // others)
            seconds = hardware.transfer(num_bytes, source + a, target + b).alone_s if self.fidelity.transfers else 0.0
            slowest[pair] = max(slowest.get(pair, 0.0), seconds)
        pairs = np.array(list(slowest), dtype=np.int64)
        return pairs[:, 0].copy(), pairs[:, 1].copy(), np.array(list(slowest.values()))

    def _alike_s(self, way: tuple[Ints, Ints, Floats]) -> float:
        """Return the seconds after which every unit has received, if all start together; NaN if not alike.

        Where a stage waits for what it sends, all units must also have sent by then.
        """
        sources, targets, seconds = way
        longest = float(seconds.max())
        ends = [targets, sources] if self._blocking else [targets]
        slowest = seconds == longest
        alike = all(len(np.unique(end[slowest])) == len(np.unique(end)) for end in ends)
        # A unit that sends nothing is not held.
        return longest if alike else float("nan")

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
        nothing = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))
        ways: list[tuple[Ints, Ints, Floats]] = []
        for number, stage in enumerate(stages.tolist()):
            last = stage + 1 == batch.num_stages or batch.is_first[stage + 1]
            ways.append(nothing if last else self._boundaries[int(keys[stage])].forward)
            ways.append(nothing if batch.is_first[stage] else self._boundaries[int(keys[stage - 1])].backward)
            if not equal_stage[stage]:
                tp, start = int(batch.tp[stage]), int(batch.first_devices[stage])
                groups = [
                    self._table(tp, int(samples[stage]), start + group * tp) for group in range(int(batch.dp[stage]))
                ]
                found = self._passes(batch, np.full(len(groups), stage), np.array(groups, dtype=np.int64))
                repeats = tp // int(unit_sizes[stage])
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


def _period(problem: Problem) -> int:
    """Return after how many devices a cluster repeats itself: its node where all are equal, else its size."""
    nodes = problem.hardware.cluster.nodes
    alike = all(replace(node, first_device=0) == nodes[0] for node in nodes)
    return nodes[0].num_devices if alike else problem.num_devices


@lru_cache(maxsize=65536)
def _route(
    dp: int, tp: int, layout: int, other_dp: int, other_tp: int, other_layout: int
) -> tuple[tuple[int, int, float], ...]:
    """Return ``(sender, receiver, share of the tensor)``, as ``lowering.transfers.route`` has them.

    Args:
        dp, tp, layout: Mesh of the sender and how the tensor lies over its tensor axis.
        other_dp, other_tp, other_layout: The same of the receiver.
    """
    found = []
    for receiver in range(other_dp * other_tp):
        batch, rank = divmod(receiver, other_tp)
        replica = rank if other_layout == REPLICATED else 0
        for part in range(batch * dp // other_dp, -(-(batch + 1) * dp // other_dp)):
            low, high = max(part * other_dp, batch * dp), min((part + 1) * other_dp, (batch + 1) * dp)
            share = (high - low) / (dp * other_dp)
            if layout == REPLICATED:
                cut = 1 if other_layout == REPLICATED else other_tp
                found.append((part * tp + replica % tp, receiver, share / cut))
            elif layout == other_layout:
                for piece in range(rank * tp // other_tp, -(-(rank + 1) * tp // other_tp)):
                    low = max(piece * other_tp, rank * tp)
                    high = min((piece + 1) * other_tp, (rank + 1) * tp)
                    found.append((part * tp + piece, receiver, share * (high - low) / (tp * other_tp)))
            else:
                cut = tp if other_layout == REPLICATED else tp * other_tp
                found += [(part * tp + piece, receiver, share / cut) for piece in range(tp)]
    return tuple(found)
