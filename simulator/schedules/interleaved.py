"""Interleaved 1F1B (Megatron-LM): each rank has v stages, called chunks.

Stage s is on rank s mod p. Two ranks, two chunks each, four microbatches, a backward twice as long as
a forward (digits: microbatch; capitals: the rank's first chunk, small letters: its second)::

    rank 0  F0 F1 f0 f1 F2 .  b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .  b2 -- .  b3 -- B2 -- B3 --
    rank 1  .  F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .  .

Microbatches go in groups of p through all chunks of a rank. Rank r runs 2(p - r - 1) + (v - 1)p
forwards before it turns to one forward and one backward in turn. With equal stages of t_f and t_b per
rank (all chunks together) an iteration ends after m(t_f + t_b) + (p - 1)(t_f + t_b)/v: 1/v of the
bubble of 1F1B, for v times the transfers. With m = p all forwards come before the first backward.

Source:
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
    SC 2021, Section 2.2.2; order as in Megatron-LM's ``forward_backward_pipelining_with_interleaving``.
"""

from __future__ import annotations

from datafiles.words import counted
from simulator.schedules.actions import BACKWARD, FORWARD, Action, PipelineShape
from simulator.schedules.orders import check_no_warmup, check_shape


def check(shape: PipelineShape) -> None:
    """Raise ValueError for a shape that the schedule cannot run."""
    check_shape(shape)
    check_no_warmup(shape, "interleaved")
    num_ranks = max(shape.rank_of_stage) + 1
    if shape.num_stages % num_ranks:
        raise ValueError(
            f"interleaved must have the same number of stages on each rank, got {counted(shape.num_stages, 'stage')} "
            f"on {counted(num_ranks, 'rank')}; use a multiple of {num_ranks}"
        )
    for stage, rank in enumerate(shape.rank_of_stage):
        if rank != stage % num_ranks:
            raise ValueError(
                f"interleaved must have stage s on rank s mod {num_ranks}, got stage {stage} on rank {rank}; "
                f"put it on rank {stage % num_ranks}"
            )
    if shape.num_microbatches % num_ranks:
        raise ValueError(
            f"interleaved must have microbatches divisible by its {counted(num_ranks, 'rank')}, got "
            f"{shape.num_microbatches}; try {-(-shape.num_microbatches // num_ranks) * num_ranks}"
        )


def actions(shape: PipelineShape) -> list[list[Action]]:
    """Return the order of each rank.

    Args:
        shape: v * p stages, stage s on rank s mod p; microbatches divisible by p; ``warmup`` None.

    Raises:
        ValueError: If the shape is malformed.
    """
    check(shape)
    num_ranks = max(shape.rank_of_stage) + 1
    return [_actions_of_rank(shape, rank, num_ranks) for rank in range(num_ranks)]


def _actions_of_rank(shape: PipelineShape, rank: int, num_ranks: int) -> list[Action]:
    num_chunks = shape.num_stages // num_ranks
    total = shape.num_microbatches * num_chunks

    def step(kind: str, index: int) -> Action:
        group, place = divmod(index, num_ranks * num_chunks)
        chunk, member = divmod(place, num_ranks)
        if kind == BACKWARD:
            chunk = num_chunks - 1 - chunk
        return Action(kind, chunk * num_ranks + rank, group * num_ranks + member)

    if num_chunks == 1:
        warmup = num_ranks - rank - 1
    elif shape.num_microbatches == num_ranks:
        warmup = total
    else:
        warmup = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks
    warmup = min(warmup, total)
    order = [step(FORWARD, index) for index in range(warmup)]
    for index in range(total):
        if index + warmup < total:
            order.append(step(FORWARD, index + warmup))
        order.append(step(BACKWARD, index))
    return order
