"""Forward and backward times per stage, as simulated, in the executor's terms."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from simulator.result import SimulationResult


def stage_times(result: SimulationResult, num_stages: int) -> tuple[list[float], list[float]]:
    """Return simulated seconds of forward and backward of one microbatch per stage, medians over microbatches.

    A pass lasts from the start of its first computation to the end of its last, collectives in between included,
    as in the executor; halves of a split backward are passes of their own, so there computation is summed.
    """
    backward = [word for word in result.graph.causes if word.startswith("backward") or word == "recompute"]
    return _passes(result, num_stages, ["forward"]), _passes(result, num_stages, backward)


def _passes(result: SimulationResult, num_stages: int, causes: Sequence[str]) -> list[float]:
    graph, schedule = result.graph, result.schedule
    wanted = np.isin(graph.cause, [number for number, word in enumerate(graph.causes) if word in causes])
    is_split = len([word for word in causes if word.startswith("backward")]) > 1
    found = []
    for stage in range(num_stages):
        own = wanted & (graph.stage == stage)
        spans = [
            float((schedule.end_s - schedule.start_s)[tasks].sum())
            if is_split
            else float(schedule.end_s[tasks].max() - schedule.start_s[tasks].min())
            for microbatch in np.unique(graph.microbatch[own])
            for tasks in [own & (graph.microbatch == microbatch)]
        ]
        found.append(statistics.median(spans) if spans else 0.0)
    return found
