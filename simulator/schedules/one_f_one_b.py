"""1F1B: after a warm-up of forwards, one backward and one forward in turn.

Four stages, six microbatches, a backward twice as long as a forward, warm-up P_A (digits:
microbatch)::

    stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- .  B3 -- .  B4 -- .  B5 --
    stage 1  .  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- .  B4 -- .  B5 -- .  .
    stage 2  .  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- .  B5 -- .  .  .  .
    stage 3  .  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- .  .  .  .  .  .

Equal stages end after (m + p - 1)(t_f + t_b), as in GPipe, but stage i keeps the activations of its
warm-up depth K_i only. DAPPLE has two rules for K_i (its stages i = 0..S-1, M microbatches):

- P_A: K_i = min(S - i, M). Megatron-LM's 1F1B. Enough where transfers are free.
- P_B: K_i = min(2(S - i) - 1, M). Hides transfers at about twice the activations: it is P_A on the
  2S - 1 stages one has when the links between stages count as stages.

Two stages with transfers as long as a forward (not drawn), first with P_A, then with P_B::

    stage 0  F0 F1 .  .  .  .  B0 -- F2 B1 -- F3 .  .  B2 -- .  B3 --
    stage 1  .  .  F0 B0 -- F1 B1 -- .  .  F2 B2 -- F3 B3 -- .  .  .

    stage 0  F0 F1 F2 .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
    stage 1  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .

Sources:
    Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
    Section 5.3; Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", SC 2021, Section 2.2.1.
"""

from __future__ import annotations

from datafiles.words import counted
from simulator.schedules.actions import BACKWARD, FORWARD, Action, PipelineShape
from simulator.schedules.orders import check_one_stage_per_rank


def warmup_p_a(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return DAPPLE's P_A, the forwards of each stage before its first backward: min(S - i, M).

    >>> warmup_p_a(num_stages=4, num_microbatches=8)
    (4, 3, 2, 1)
    """
    return tuple(min(num_stages - i, num_microbatches) for i in range(num_stages))


def warmup_p_b(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """Return DAPPLE's P_B, the forwards of each stage before its first backward: min(2(S - i) - 1, M).

    >>> warmup_p_b(num_stages=4, num_microbatches=8)
    (7, 5, 3, 1)
    """
    return tuple(min(2 * (num_stages - i) - 1, num_microbatches) for i in range(num_stages))


def check(shape: PipelineShape) -> None:
    """Raise ValueError for a shape that the schedule cannot run: also if a warm-up would wait for ever."""
    check_one_stage_per_rank(shape, "1f1b")
    if shape.warmup is not None:
        _check_warmup(shape, shape.warmup)


def actions(shape: PipelineShape) -> list[list[Action]]:
    """Return the order of each rank.

    Args:
        shape: Stage i on rank i. ``warmup`` gives K_i; None means P_A.

    Raises:
        ValueError: If the shape is malformed or a warm-up would wait for ever.
    """
    check(shape)
    warmup = shape.warmup
    if warmup is None:
        warmup = warmup_p_a(shape.num_stages, shape.num_microbatches)
    orders = []
    for stage, depth in enumerate(warmup):
        order = [Action(FORWARD, stage, microbatch) for microbatch in range(depth)]
        for microbatch in range(shape.num_microbatches):
            order.append(Action(BACKWARD, stage, microbatch))
            if microbatch + depth < shape.num_microbatches:
                order.append(Action(FORWARD, stage, microbatch + depth))
        orders.append(order)
    return orders


def _check_warmup(shape: PipelineShape, warmup: tuple[int, ...]) -> None:
    if len(warmup) != shape.num_stages:
        raise ValueError(
            f"warmup must have one depth for each of {counted(shape.num_stages, 'stage')}, got {len(warmup)}; "
            "warmup_p_a and warmup_p_b make such a tuple"
        )
    for stage, depth in enumerate(warmup):
        if not 1 <= depth <= shape.num_microbatches:
            raise ValueError(
                f"warmup of stage {stage} must be between 1 and the "
                f"{counted(shape.num_microbatches, 'microbatch', 'microbatches')}, got {depth}; clip it"
            )
        if stage > 0 and depth > warmup[stage - 1]:
            raise ValueError(
                f"warmup must not grow from stage to stage, or stage {stage} waits for forwards that stage "
                f"{stage - 1} runs only after stage {stage}'s first backward; got {warmup[stage - 1]} then "
                f"{depth}; raise the former or lower the latter"
            )
