"""GPipe: all forwards, then all backwards.

Four stages, four microbatches, a backward twice as long as a forward (digits: microbatch)::

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 --
    stage 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- B1 -- B2 -- B3 -- .  .
    stage 2  .  .  F0 F1 F2 F3 .  .  .  B0 -- B1 -- B2 -- B3 -- .  .  .  .
    stage 3  .  .  .  F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .  .  .  .  .  .

Every stage keeps the activations of all m microbatches. Equal stages end after (m + p - 1)(t_f + t_b).
Backwards run in the order of the forwards, as torch's ``ScheduleGPipe`` runs them. A rank with several
stages runs them breadth first: all microbatches through one stage, then through the next.

Source:
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    NeurIPS 2019, Section 2.2; breadth first: Lamy-Poirier, "Breadth-First Pipeline
    Parallelism", MLSys 2023.
"""

from __future__ import annotations

from simulator.schedules.actions import BACKWARD, FORWARD, Action, PipelineShape
from simulator.schedules.orders import check_no_warmup, check_shape


def check(shape: PipelineShape) -> None:
    """Raise ValueError for a shape that the schedule cannot run."""
    check_shape(shape)
    check_no_warmup(shape, "gpipe")


def actions(shape: PipelineShape) -> list[list[Action]]:
    """Return the order of each rank.

    Args:
        shape: Any placement of stages on ranks; ``warmup`` must be None.

    Raises:
        ValueError: If the shape is malformed.
    """
    check(shape)
    microbatches = range(shape.num_microbatches)
    orders = []
    for rank in range(max(shape.rank_of_stage) + 1):
        stages = [stage for stage, its_rank in enumerate(shape.rank_of_stage) if its_rank == rank]
        forwards = [Action(FORWARD, stage, i) for stage in stages for i in microbatches]
        backwards = [Action(BACKWARD, stage, i) for stage in reversed(stages) for i in microbatches]
        orders.append(forwards + backwards)
    return orders
