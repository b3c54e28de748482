"""Plans in array form: what the fast estimate reads, and how to get there from plans and from flags.

A plan is a list of stages, one behind the other along the operators. A stage has a placement (a number for a
tuple of devices) and runs of operators of equal strategy (a number for a tuple of mesh axes); segments of it may
be recomputed. ``FastEstimator`` gives the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from simulator.fast.arrays import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1, PlanColumns
from simulator.fast.operators import runs_of_operators

if TYPE_CHECKING:
    from simulator.plan import Plan

Ints = NDArray[np.int64]

SCHEDULES = {"1f1b": ONE_F_ONE_B, "gpipe": GPIPE, "interleaved": INTERLEAVED, "zb-h1": ZB_H1}
"""Numbers of schedules."""


@dataclass(frozen=True)
class StageColumns:
    """One stage of one plan, in numbers.

    Attributes:
        placement: Number of its devices.
        stops: Where its runs end; a run begins where the one before ends.
        strategies: Number of each run's strategy.
        segments: Recomputed operators ``(first, stop)``, ascending, inside the stage.
        warmup: Forwards before the first backward; 0 for the schedule's own.
    """

    placement: int
    stops: Sequence[int]
    strategies: Sequence[int]
    segments: Sequence[tuple[int, int]] = ()
    warmup: int = 0


@dataclass(frozen=True)
class PlanArrays:
    """P plans with S stages, R runs and G segments in all. Arrays of int64.

    Attributes:
        stage_offsets: [P + 1]. Stages of plan i are the rows ``stage_offsets[i:i + 2]`` bound.
        placements: [S]. Devices of each stage; stages on one placement are one rank's.
        warmups: [S]. Forwards of 1F1B before the first backward; 0 for the usual ones.
        run_offsets: [S + 1]. Runs of each stage.
        run_stops: [R]. A run holds the operators from where the one before it stops (0 for a plan's first).
        strategies: [R].
        segment_offsets: [S + 1]. Segments of each stage.
        segment_firsts, segment_stops: [G]. Recomputed operators, ascending.
        microbatch_size: [P]. Samples over all replicas.
        num_microbatches: [P].
        schedule: [P]. ``SCHEDULES``.
        reduces_every: [P]. Gradients are reduced every microbatch.
        reshards: [P]. ZeRO-3 parameters are freed after forward.
        overlaps: [P]. Gradients are reduced while the last backward pass still runs.
    """

    stage_offsets: Ints
    placements: Ints
    warmups: Ints
    run_offsets: Ints
    run_stops: Ints
    strategies: Ints
    segment_offsets: Ints
    segment_firsts: Ints
    segment_stops: Ints
    microbatch_size: Ints
    num_microbatches: Ints
    schedule: Ints
    reduces_every: Ints
    reshards: Ints
    overlaps: Ints

    def __len__(self) -> int:
        return len(self.microbatch_size)

    def columns(self) -> PlanColumns:
        """Return the arrays as the compiled functions take them."""
        return PlanColumns(*(np.ascontiguousarray(getattr(self, name), dtype=np.int64) for name in PlanColumns._fields))

    @staticmethod
    def of(
        stages: Sequence[StageColumns],
        microbatch_size: int,
        num_microbatches: int,
        schedule: str = "1f1b",
        *,
        reduces_every: bool = False,
        reshards: bool = True,
        overlaps: bool = True,
    ) -> PlanArrays:
        """Return one plan."""
        runs, stops, strategies, ends, firsts, lasts = [0], list[int](), list[int](), [0], list[int](), list[int]()
        for stage in stages:
            stops += stage.stops
            strategies += stage.strategies
            runs.append(len(stops))
            for first, stop in stage.segments:
                firsts.append(first)
                lasts.append(stop)
            ends.append(len(firsts))
        return PlanArrays(
            np.array([0, len(stages)]),
            np.array([stage.placement for stage in stages]),
            np.array([stage.warmup for stage in stages]),
            np.array(runs),
            np.array(stops),
            np.array(strategies),
            np.array(ends),
            np.array(firsts, dtype=np.int64),
            np.array(lasts, dtype=np.int64),
            np.array([microbatch_size]),
            np.array([num_microbatches]),
            np.array([SCHEDULES[schedule]]),
            np.array([int(reduces_every)]),
            np.array([int(reshards)]),
            np.array([int(overlaps)]),
        )

    @staticmethod
    def joined(plans: Sequence[PlanArrays]) -> PlanArrays:
        """Return all plans of several arrays as one."""

        def offsets(name: str) -> Ints:
            counts = np.concatenate([np.diff(getattr(one, name)) for one in plans])
            return np.concatenate([[0], np.cumsum(counts)])

        return PlanArrays(
            **{
                name: offsets(name)
                if name.endswith("offsets")
                else np.concatenate([getattr(one, name) for one in plans])
                for name in PlanColumns._fields
            }
        )

    @staticmethod
    def from_operators(
        stage: NDArray[np.integer],
        strategy: NDArray[np.integer],
        segment: NDArray[np.integer],
        placements: Ints,
        microbatch_size: Ints,
        num_microbatches: Ints,
        schedule: Ints | None = None,
    ) -> PlanArrays:
        """Return plans that say everything operator by operator.

        Args:
            stage: [P, N]. Stage of each operator: 0, 1, ... without gaps, ascending. Small integer types convert
                fastest.
            strategy: [P, N]. Strategy of each operator.
            segment: [P, N]. 0 where an operator is not recomputed; neighbours of a stage with the same number
                are one segment.
            placements: [S]. Of all stages of all plans, one plan after the other.
            microbatch_size, num_microbatches, schedule: [P]; 1F1B if there is no schedule.
        """
        if not stage.shape == strategy.shape == segment.shape or stage.ndim != 2 or not stage.shape[1]:
            raise ValueError(
                "stage, strategy and segment must have one column for each operator and the same shape, got "
                f"{stage.shape}, {strategy.shape} and {segment.shape}"
            )
        kind = np.result_type(stage, strategy, segment)
        columns = (np.ascontiguousarray(column, dtype=kind) for column in (stage, strategy, segment))
        stages, runs, stops, strategies, segments, firsts, lasts = runs_of_operators(*columns)
        count = len(stage)
        if len(placements) != stages[-1]:
            raise ValueError(
                f"placements must name one for each of {counted(stages[-1], 'stage')}, got {len(placements)}"
            )
        return PlanArrays(
            stage_offsets=stages,
            placements=placements,
            warmups=np.zeros(len(placements), dtype=np.int64),
            run_offsets=runs,
            run_stops=stops,
            strategies=strategies,
            segment_offsets=segments,
            segment_firsts=firsts,
            segment_stops=lasts,
            microbatch_size=microbatch_size,
            num_microbatches=num_microbatches,
            schedule=np.zeros(count, dtype=np.int64) if schedule is None else schedule,
            reduces_every=np.zeros(count, dtype=np.int64),
            reshards=np.ones(count, dtype=np.int64),
            overlaps=np.ones(count, dtype=np.int64),
        )


def why_not(plan: Plan) -> str | None:
    """Return why a plan has no array form; None if it has."""
    if plan.rotates:
        return "replica_assignment must be slice, got round_robin"
    if plan.last_microbatch_size is not None:
        return "microbatches must be alike, got a smaller last one (last_microbatch_size)"
    if plan.schedule not in SCHEDULES:
        return f"schedule must be one of {', '.join(SCHEDULES)}, got {plan.schedule}"
    first = 0
    for position, stage in enumerate(plan.stages):
        ranges = sorted(stage.operators)
        if ranges[0][0] != first or any(a[1] != b[0] for a, b in pairwise(ranges)):
            return f"stage {position} must hold consecutive operators from {first} on, got {ranges}"
        first = ranges[-1][1]
    return None
