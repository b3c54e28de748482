"""Pipeline schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from datafiles.names import nearest
from simulator.schedules import gpipe, interleaved, one_f_one_b, zero_bubble
from simulator.schedules.actions import Action, PipelineShape


@dataclass(frozen=True)
class PipelineSchedule:
    """One schedule.

    Attributes:
        name: As in plans and on the command line.
        check: Raises ValueError for a shape it cannot run.
        actions: Gives the order of each rank for a shape, which it checks.
        splits_backward: Whether backwards come as input and weight gradients (I and W).
        exchanges_pairs: Whether a forward pass and the backward pass right after it exchange with the neighbours at
            once, after both, where passes wait for what they send. Megatron-LM's interleaved schedule does
            (core/pipeline_parallel/schedules.py: ``send_forward_backward_recv_forward_backward``).
        takes_warmup: Whether a shape may give the warm-up of each stage.
        takes_turns: Whether replicas may take whole microbatches in turn: the order of a rank leaves each of them
            enough in flight.
    """

    name: str
    check: Callable[[PipelineShape], None]
    actions: Callable[[PipelineShape], list[list[Action]]]
    splits_backward: bool = False
    exchanges_pairs: bool = False
    takes_warmup: bool = False
    takes_turns: bool = False


SCHEDULES: dict[str, PipelineSchedule] = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", gpipe.check, gpipe.actions, takes_turns=True),
        PipelineSchedule("1f1b", one_f_one_b.check, one_f_one_b.actions, takes_warmup=True, takes_turns=True),
        PipelineSchedule("interleaved", interleaved.check, interleaved.actions, exchanges_pairs=True),
        PipelineSchedule("zb-h1", zero_bubble.check, zero_bubble.actions, splits_backward=True),
    )
}


def schedule_named(name: str) -> PipelineSchedule:
    """Return a schedule by name: gpipe, 1f1b, interleaved or zb-h1.

    Raises:
        ValueError: If there is none of that name; says which are near.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be a known one, got {name!r}; {nearest(name, SCHEDULES)}")
    return SCHEDULES[name]
