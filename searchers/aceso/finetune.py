"""Fine-tuning inside stages: degrees from an operator on, and the partition of single operators (Section 4.2)."""

from __future__ import annotations

from searchers.aceso.configuration import Configuration, StageChoice, prefix_gpus, runs_of
from searchers.aceso.model import PerformanceModel
from searchers.aceso.prices import StagePrice

MAX_STARTS = 64
"""Operators from which a change of degrees is tried; of a longer stage every n-th."""


def fine_tuned(model: PerformanceModel, configuration: Configuration) -> Configuration:
    """Return the configuration with every stage tuned by itself.

    For each stage: the tensor degree is doubled or halved (replicas the other way) from some operator to the end, or
    from the beginning to it, where that makes the stage faster with its resharding; then operators take their other
    partition where that is faster and moves no data at their borders.
    """
    stages = list(configuration.stages)
    cuts, first = configuration.cuts, prefix_gpus(configuration)
    for position, choice in enumerate(configuration.stages):

        around = model.around(stages, position, configuration.microbatch)

        def priced(option: StageChoice, position: int = position, around: int = around) -> StagePrice:
            return model.stage(
                option, cuts[position], position, len(stages), first[position], configuration.microbatch, around=around
            )

        best, found = choice, priced(choice)
        if model.space.flexible.any() or choice.gpus > 1:
            for option in _other_degrees(model, choice, configuration.microbatch):
                tried = priced(option)
                if _better(tried, found, model.limit_bytes):
                    best, found = option, tried
        if model.space.partitions > 1:
            option = _other_partitions(model, best, cuts[position], configuration.microbatch)
            tried = priced(option)
            if _better(tried, found, model.limit_bytes):
                best, found = option, tried
        stages[position] = best
    return Configuration(configuration.microbatch, tuple(stages))


def _better(tried: StagePrice, found: StagePrice, limit: float) -> bool:
    fits, fitted = tried.memory_bytes <= limit, found.memory_bytes <= limit
    if fits != fitted:
        return fits
    return tried.time_s < found.time_s * (1 - 1e-9) if fits else tried.memory_bytes < found.memory_bytes


def _other_degrees(model: PerformanceModel, choice: StageChoice, microbatch: int) -> list[StageChoice]:
    """Return the stage with the degree changed by two in a front or a back part."""
    values = [(run.tp, run.partition) for run in choice.runs for _ in range(run.count)]
    step = max(1, len(values) // MAX_STARTS)
    found = []
    for factor in (2.0, 0.5):
        changed = [(int(tp * factor), partition) for tp, partition in values]
        if any(tp < 1 or not model.allows(choice.gpus, tp, microbatch) for tp, _ in changed):
            continue
        for start in range(step, len(values), step):
            found.append(StageChoice(choice.gpus, runs_of([*values[:start], *changed[start:]])))
            found.append(StageChoice(choice.gpus, runs_of([*changed[:start], *values[start:]])))
    return found


def _other_partitions(model: PerformanceModel, choice: StageChoice, start: int, microbatch: int) -> StageChoice:
    """Return the stage with each flexible operator partitioned the way that is faster."""
    columns, flexible = model.tables.arrays.columns, model.space.flexible
    values = []
    index = start
    for run in choice.runs:
        samples = microbatch // (choice.gpus // run.tp)
        cells = [model.space.cell(run.tp, samples, partition) for partition in (0, 1)]
        for _ in range(run.count):
            partition = run.partition
            if flexible[index] and run.tp > 1:
                seconds = [columns[cell, 0, index] + columns[cell, 1, index] for cell in cells]
                partition = int(seconds[1] < seconds[0])
            values.append((run.tp, partition))
            index += 1
    return StageChoice(choice.gpus, runs_of(values))
