"""The words of a pipeline schedule: which device does what, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One step of one pipeline rank.

    Attributes:
        kind: FORWARD, BACKWARD (input and weight gradients together), BACKWARD_INPUT or BACKWARD_WEIGHT.
        stage: Global stage index, 0 is the first of the model.
        microbatch: Microbatch index from 0.
    """

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class PipelineShape:
    """What a schedule needs to know.

    Attributes:
        num_stages: Stages p >= 1 (virtual stages counted).
        num_microbatches: Microbatches m >= 1.
        rank_of_stage: For each stage the pipeline rank that runs it; ranks are 0..r-1. Plain pipelines
            have ``rank_of_stage[i] == i``; interleaved ones give several stages to a rank.
        warmup: Optional per-stage number of forwards before the first backward (in-flight limit).
    """

    num_stages: int
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    warmup: tuple[int, ...] | None = None
