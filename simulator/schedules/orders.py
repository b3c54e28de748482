"""Checks on schedules: what goes in (a shape) and what comes out (one order per rank)."""

from __future__ import annotations

from collections.abc import Container, Iterator

from datafiles.words import counted
from simulator.schedules.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    PipelineShape,
)


def check_shape(shape: PipelineShape) -> None:
    """Refuse a shape that no schedule can run.

    Raises:
        ValueError: If counts are below 1, or ranks are not 0..r-1, one per stage.
    """
    if shape.num_stages < 1:
        raise ValueError(f"num_stages must be >= 1, got {shape.num_stages}; use 1 for no pipeline")
    if shape.num_microbatches < 1:
        raise ValueError(f"num_microbatches must be >= 1, got {shape.num_microbatches}; use at least 1")
    if len(shape.rank_of_stage) != shape.num_stages:
        raise ValueError(
            f"rank_of_stage must have one rank for each of {counted(shape.num_stages, 'stage')}, got "
            f"{len(shape.rank_of_stage)}; give stage i's rank at position i"
        )
    ranks = sorted(set(shape.rank_of_stage))
    if ranks != list(range(len(ranks))):
        raise ValueError(f"rank_of_stage must use ranks 0..r-1 without gaps, got {ranks}; number them anew")


def check_one_stage_per_rank(shape: PipelineShape, schedule: str) -> None:
    """Refuse a shape in which stage i is not on rank i.

    Raises:
        ValueError: Also for what ``check_shape`` refuses.
    """
    check_shape(shape)
    if shape.rank_of_stage != tuple(range(shape.num_stages)):
        raise ValueError(
            f"{schedule} must have stage i on rank i, got rank_of_stage={_short(shape.rank_of_stage)}; "
            "use the interleaved schedule for several stages per rank"
        )


def check_no_warmup(shape: PipelineShape, schedule: str) -> None:
    """Refuse a warm-up depth where the schedule fixes its own.

    Raises:
        ValueError: If ``shape.warmup`` is given.
    """
    if shape.warmup is not None:
        raise ValueError(
            f"{schedule} fixes its own warm-up, so warmup must be None, got {_short(shape.warmup)}; "
            "leave it out or use 1f1b"
        )


def check_order(shape: PipelineShape, orders: list[list[Action]]) -> None:
    """Refuse orders that are incomplete, contradictory or that would wait for ever.

    Each microbatch must pass each stage forward once and backward once, the backward whole or as input
    and weight gradients, on the stage's rank, in that order; and all ranks together must come to an end
    when a forward waits for the stage before and a backward for the stage after.

    Args:
        shape: What the orders are for.
        orders: For each rank its actions in order.

    Raises:
        ValueError: Names the first action that is wrong, or the actions that wait for each other.
    """
    check_shape(shape)
    num_ranks = len(set(shape.rank_of_stage))
    if len(orders) != num_ranks:
        raise ValueError(f"orders must hold one list for each of {counted(num_ranks, 'rank')}, got {len(orders)}")
    for rank, order in enumerate(orders):
        _check_rank(shape, rank, order)
    num_actions = sum(len(order) for order in orders)
    expected = shape.num_stages * shape.num_microbatches
    for what, kinds in (("forward", (FORWARD,)), ("backward", (BACKWARD, BACKWARD_INPUT))):
        count = sum(action.kind in kinds for order in orders for action in order)
        if count != expected:
            raise ValueError(
                f"orders must hold {expected} {what}s, one per stage and microbatch, got {count}; "
                f"{expected - count} are missing"
            )
    if sum(1 for _ in executable(shape, orders)) < num_actions:
        done = set(executable(shape, orders))
        stuck = [next((action for action in order if action not in done), None) for order in orders]
        waiting = "; ".join(
            f"rank {rank} at {describe(action)} for "
            + " and ".join(describe(a) for a in needs(shape, action, done) if a not in done)
            for rank, action in enumerate(stuck)
            if action is not None
        )
        raise ValueError(f"orders must come to an end, but these wait for each other: {waiting}; reorder one")


def executable(shape: PipelineShape, orders: list[list[Action]]) -> Iterator[Action]:
    """Yield actions in an order in which they can be executed, until none can be."""
    done: set[Action] = set()
    position = [0] * len(orders)
    ready = list(range(len(orders)))[::-1]
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            if any(needed not in done for needed in needs(shape, action, done)):
                break
            done.add(action)
            position[rank] += 1
            yield action
            for stage in (action.stage - 1, action.stage + 1):
                if 0 <= stage < shape.num_stages and shape.rank_of_stage[stage] != rank:
                    ready.append(shape.rank_of_stage[stage])


def needs(shape: PipelineShape, action: Action, done: Container[Action]) -> list[Action]:
    """Return the actions whose results an action uses.

    Args:
        shape: The pipeline.
        action: The action.
        done: Actions executed so far, or all of them: tells whether the next stage splits its backward.
    """
    kind, stage, microbatch = action
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, microbatch)] if stage > 0 else []
    if kind == BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, stage, microbatch)]
    needed = [Action(FORWARD, stage, microbatch)]
    if stage < shape.num_stages - 1:
        whole = Action(BACKWARD, stage + 1, microbatch)
        needed.append(whole if whole in done else Action(BACKWARD_INPUT, stage + 1, microbatch))
    return needed


def describe(action: Action) -> str:
    """Return, for example, ``F(stage 2, microbatch 0)``."""
    return f"{action.kind}(stage {action.stage}, microbatch {action.microbatch})"


def _check_rank(shape: PipelineShape, rank: int, order: list[Action]) -> None:
    seen: set[Action] = set()
    for action in order:
        kind, stage, microbatch = action
        where = f"rank {rank}, {describe(action)}:"
        if kind not in (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
            raise ValueError(f"{where} kind must be one of F, B, I, W")
        if not (0 <= stage < shape.num_stages and 0 <= microbatch < shape.num_microbatches):
            raise ValueError(
                f"{where} must be one of {counted(shape.num_stages, 'stage')} and "
                f"{counted(shape.num_microbatches, 'microbatch', 'microbatches')}"
            )
        if shape.rank_of_stage[stage] != rank:
            raise ValueError(f"{where} stage {stage} is on rank {shape.rank_of_stage[stage]}; move it there")
        if action in seen:
            raise ValueError(f"{where} must come once, came twice; remove one")
        same = {other for other in (FORWARD, BACKWARD, BACKWARD_INPUT) if (other, stage, microbatch) in seen}
        if kind in (BACKWARD, BACKWARD_INPUT):
            if FORWARD not in same:
                raise ValueError(f"{where} must come after its forward; move the forward before it")
            if same & {BACKWARD, BACKWARD_INPUT}:
                raise ValueError(f"{where} the backward must be whole (B) or split (I and W), not both")
        if kind == BACKWARD_WEIGHT and BACKWARD_INPUT not in same:
            raise ValueError(f"{where} must come after its input gradient I; move I before it")
        seen.add(action)
    for kind, stage, microbatch in order:
        if kind == BACKWARD_INPUT and Action(BACKWARD_WEIGHT, stage, microbatch) not in seen:
            raise ValueError(
                f"rank {rank}, stage {stage}, microbatch {microbatch}: "
                "input gradient I must be followed by weight gradient W, which is missing; add it"
            )


def _short(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 12 else f"({', '.join(map(str, values[:12]))}, ...)"
