"""ZB-H1: 1F1B with the backward split in two, the second half of which fills the bubble.

The gradient of a stage's input (I) is what the stage before waits for; the gradient of its weights (W)
can wait. Four stages, six microbatches, F, I and W equally long (digits: microbatch)::

    stage 0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    stage 1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    stage 2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    stage 3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

Stage i runs min(p - i, m) forwards and then I, W, F in turn, but its first W comes i turns late, and
the i weight gradients so kept back fill its end. So every stage holds p microbatches until their W, as
many as the first stage of 1F1B: the largest memory stays the same. With m >= p equal stages
an iteration ends after m(t_f + t_i + t_w) + (p - 1) max(t_f + t_i - t_w, t_f, t_i): with three equal
parts a third of the bubble of 1F1B.

Source:
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, Section 2.2 (ZB-H1); its T_B is the time of
    the input gradient, t_i here.
"""

from __future__ import annotations

from simulator.schedules.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, PipelineShape
from simulator.schedules.orders import check_no_warmup, check_one_stage_per_rank


def check(shape: PipelineShape) -> None:
    """Raise ValueError for a shape that the schedule cannot run."""
    check_one_stage_per_rank(shape, "zb-h1")
    check_no_warmup(shape, "zb-h1")


def actions(shape: PipelineShape) -> list[list[Action]]:
    """Return the order of each rank.

    Args:
        shape: Stage i on rank i; ``warmup`` must be None.

    Raises:
        ValueError: If the shape is malformed.
    """
    check(shape)
    num_microbatches = shape.num_microbatches
    orders = []
    for stage in range(shape.num_stages):
        depth = min(shape.num_stages - stage, num_microbatches)
        order = [Action(FORWARD, stage, microbatch) for microbatch in range(depth)]
        for microbatch in range(num_microbatches):
            order.append(Action(BACKWARD_INPUT, stage, microbatch))
            if microbatch >= stage:
                order.append(Action(BACKWARD_WEIGHT, stage, microbatch - stage))
            if microbatch + depth < num_microbatches:
                order.append(Action(FORWARD, stage, microbatch + depth))
        kept_back = range(max(0, num_microbatches - stage), num_microbatches)
        order += [Action(BACKWARD_WEIGHT, stage, microbatch) for microbatch in kept_back]
        orders.append(order)
    return orders
