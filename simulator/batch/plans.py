"""Many plans of one form as arrays: what the batch evaluation reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class PlanBatch:
    """P plans with S stages in all, as arrays.

    Attributes:
        stage_offsets: int64[P + 1]. Stages of plan i are the rows ``stage_offsets[i:i + 2]`` bound.
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
        found: Ints = before[:-1] - before[self.stage_offsets[:-1]][self.plan_of_stage]
        return found

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
            f"a plan must fit on {counted(problem.num_devices, 'device')}": self.first_devices + self.tp * self.dp
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
            if plan.last_microbatch_size is not None:
                raise ValueError(
                    f"plan {number} must have microbatches that are alike, got a smaller last one "
                    "(last_microbatch_size); simulate it"
                )
            for stage in plan.stages:
                axes = stage.shardings[0][1]
                dp = prod(axis.size for axis in axes if axis.split == "batch")
                tp = prod(axis.size for axis in axes) // dp
                rows.append((stage.operators[-1][1], tp, dp, bool(stage.recompute)))
            offsets.append(len(rows))
        stops, tps, dps, recompute = (np.array(column) for column in zip(*rows, strict=True))
        batch = PlanBatch(
            stage_offsets=np.array(offsets, dtype=np.int64),
            stops=stops.astype(np.int64),
            tp=tps.astype(np.int64),
            dp=dps.astype(np.int64),
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
                    f"plan {number} must have consecutive operator ranges, each with one (batch, tensor) mesh "
                    "on consecutive devices and full recomputation or none, under gpipe or 1f1b"
                )
        return batch
