"""Layer times of a profiler as operator rows of a model, and layer memory against what the model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from datafiles.words import counted
from experiments.calibrate.layer_kinds import layers_by_kind, outside_kinds
from hardware_models.calibrated import FitRecord
from hardware_models.calibration.outcome import Point, fit_record
from hardware_models.calibration.series_fit import fit_series
from hardware_models.importers.galvatron import GalvatronFile, LayerTime
from hardware_models.profile import OperatorProfile, ProfileRow
from simulator.costs import CostTables
from simulator.plan import Axis
from simulator.problem import Problem, ProblemSpec
from simulator.profiled_costs import modelled_row

IMPLAUSIBLE = 3.0
"""By what factor layer times may differ from the shipped model's before that is said."""

ALIKE = 0.01
"""By what part an operator may take longer in one kind of layer than in another before that is said."""


@dataclass(frozen=True)
class LayerCalibration:
    """Operators from layers.

    Attributes:
        operators: Rows, or None where there are only memory files.
        fits, points: For the summary.
        notes: What was left out, and why.
    """

    operators: OperatorProfile | None
    fits: tuple[FitRecord, ...]
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()


def calibrate_layers(
    files: Sequence[GalvatronFile], model: str, cluster: str, runtime: str, source: str
) -> LayerCalibration:
    """Return operators whose forward sums are the measured layers, in the proportions of the model.

    Backward keeps its proportion too: it is twice forward only where matrix products are all there is (Aceso's layers
    of GPT on V100 take 1.4 to 1.8 times forward).

    Raises:
        ValueError: If the model has another number of kinds of layers than the files.
    """
    problem = ProblemSpec(model, cluster, runtime, 1).load()
    by_kind = layers_by_kind(problem.workload)
    kinds = [layers[0] for layers in by_kind]
    times = [time for file in files for time in file.layers]
    _check_length(times, problem, kinds)
    times = [time for time in times if not _is_other_length(time.seq_len, problem, kinds)]
    points: list[Point] = []
    fits: list[FitRecord] = []
    rows: dict[tuple[str, int], list[tuple[int, int, ProfileRow]]] = {}
    costs = CostTables(problem)
    impossible: list[str] = []
    tables = {}
    for time in times:
        if time.layer_type >= len(kinds):
            raise ValueError(
                f"the files have layers of kind {time.layer_type}, {model} has {counted(len(kinds), 'kind')}; name "
                "another model"
            )
        if time.samples not in tables:
            tables[time.samples] = costs.table((), time.samples, problem.gpu_types[0])
        layers = by_kind[time.layer_type] if time.layer_type >= 0 else [outside_kinds(problem.workload, by_kind)]
        members = [index for layer in layers for index in layer]
        modelled = sum(float(tables[time.samples].forward_s[index]) for index in members) / len(layers)
        what = f"layer kind {time.layer_type}" if time.layer_type >= 0 else "outside layers"
        if time.seconds <= 0:
            impossible.append(f"{what} at {counted(time.samples, 'sample')}")
        if time.seconds <= 0 or modelled <= 0:
            continue
        points.append(Point(what, time.seconds, modelled))
        for count, row in _rows(problem, costs, members, time, time.seconds / modelled, source):
            rows.setdefault((row.role, row.samples), []).append((time.layer_type, count, row))
    for group in dict.fromkeys(point.group for point in points):
        members_of = [point for point in points if point.group == group]
        fits.append(fit_record(f"{group}: forward, shipped model against measured", "checked", members_of))
    fits += _across_batches(times)
    memory = _memory_points(files, problem, costs, kinds)
    for group in dict.fromkeys(point.group for point in memory):
        fits.append(fit_record(group, "checked", [point for point in memory if point.group == group]))
    operators = OperatorProfile(
        model=problem.workload.name,
        gpu_type=problem.gpu_types[0],
        dtype=problem.runtime.implementation.dtype,
        rows=tuple(_mean([(count, row) for _, count, row in same]) for same in rows.values()),
        source=source,
    )
    if rows:
        fits.append(FitRecord(f"operators of {operators.model}", "fitted", len(times)))
    notes = []
    ratio = float(np.median([point.measured / point.predicted for point in points])) if points else 1.0
    if not 1 / IMPLAUSIBLE < ratio < IMPLAUSIBLE:
        notes.append(
            f"layer times are {ratio:.3g} times those of the shipped model of {model}: they must be in milliseconds, "
            "of this model, on this GPU"
        )
    if impossible:
        notes.append(
            f"layer times must be above 0 and below the whole model's, got others for {', '.join(impossible)}, which "
            "are left out: runs of more layers must take longer, by as much for each"
        )
    spread = max(map(_spread_over_kinds, rows.values()), default=1.0)
    if spread > 1 + ALIKE:
        notes.append(
            f"operators that do the same work were measured in layers of several kinds, up to {spread:.3g} times as "
            "long in one as in another; each has their mean over the model's layers"
        )
    return LayerCalibration(
        operators if rows else None, tuple(fits), (*points, *memory), tuple(notes)
    )


def _check_length(times: Sequence[LayerTime], problem: Problem, kinds: Sequence[Sequence[int]]) -> None:
    """Refuse times of other sequences than the model's, where both have one length."""
    lengths, own = {time.seq_len for time in times} - {""}, str(problem.workload.tokens_per_sample)
    if len(kinds) == 1 and lengths and own not in lengths:
        raise ValueError(
            f"the model must have the files' sequences of {', '.join(sorted(lengths))} tokens, "
            f"{problem.workload.name} has {own}; name a model file with that seq_len"
        )


def _is_other_length(seq_len: str, problem: Problem, kinds: Sequence[Sequence[int]]) -> bool:
    """Return whether a figure is of other sequences than the model's, where both have one length."""
    return len(kinds) == 1 and seq_len not in ("", str(problem.workload.tokens_per_sample))


def _spread_over_kinds(rows: Sequence[tuple[int, int, ProfileRow]]) -> float:
    """Return how many times as long operators of one profile role and size take in one kind of layer as in another."""
    times: dict[int, list[float]] = {}
    for kind, _, row in rows:
        if kind >= 0 and row.forward_s > 0:
            times.setdefault(kind, []).append(row.forward_s)
    means = [fmean(own) for own in times.values()]
    return max(means) / min(means) if means else 1.0


def _mean(rows: Sequence[tuple[int, ProfileRow]]) -> ProfileRow:
    """Return one row for operators of equal profile role, so many of each: with their mean times."""
    total = sum(count for count, _ in rows)
    return replace(
        rows[0][1],
        forward_s=sum(count * row.forward_s for count, row in rows) / total,
        backward_s=sum(count * row.backward_s for count, row in rows) / total,
    )


def _rows(
    problem: Problem, costs: CostTables, members: Sequence[int], time: LayerTime, factor: float, source: str
) -> list[tuple[int, ProfileRow]]:
    """Return the rows of the operators of a kind's layers, by how many each is the mean of."""
    found: dict[str, list[tuple[int, ProfileRow]]] = {}
    for index in members:
        cost = costs.operator(index, (), time.samples, problem.gpu_types[0])
        row = modelled_row(problem, index, cost, time.samples, (1, "default"), source)
        row = replace(row, forward_s=row.forward_s * factor, backward_s=row.backward_s * factor)
        found.setdefault(row.role, []).append((1, row))
    return [(len(same), _mean(same)) for same in found.values()]


def _across_batches(times: Sequence[LayerTime]) -> list[FitRecord]:
    """Return how a layer's time grows with the batch: a constant (launches) and a rate."""
    found = []
    for kind in sorted({time.layer_type for time in times if time.layer_type >= 0}):
        own_times = [time for time in times if time.layer_type == kind and time.seconds > 0]
        series = sorted({time.samples: time.seconds for time in own_times}.items())
        if len(series) < 3:
            continue
        law = fit_series([(float(samples), seconds) for samples, seconds in series])
        predicted = law.seconds(np.array([float(samples) for samples, _ in series]))
        own = [Point("", seconds, float(p)) for (_, seconds), p in zip(series, predicted, strict=True)]
        constants = {"constant_s": law.large_latency_s, "seconds_per_sample": 1 / law.large_bytes_per_s}
        found.append(fit_record(f"layer kind {kind}: time over batch", "fitted", own, constants))
    return found


def _memory_points(
    files: Sequence[GalvatronFile], problem: Problem, costs: CostTables, kinds: Sequence[Sequence[int]]
) -> list[Point]:
    points = []
    for each in (memory for file in files for memory in file.memory):
        if each.layer_type >= len(kinds):
            continue
        members = kinds[each.layer_type]
        if _is_other_length(each.seq_len, problem, kinds):
            continue
        for degree, size in each.saved_bytes.items():
            if size <= 0 or (each.sequence_parallel and degree > 1):
                continue
            sharding = (Axis("tensor", degree),) if degree > 1 else ()
            try:
                table = costs.table(sharding, 1, problem.gpu_types[0])
            except ValueError:
                continue  # a degree that the model cannot be split by
            saved = float(sum(table.saved_bytes[index] for index in members))
            points.append(Point(f"layer kind {each.layer_type}: activations of a sample", size, saved, "B"))
        table = costs.table((), 1, problem.gpu_types[0])
        parameters = 4.0 * float(sum(table.parameter_elements[index] for index in members))
        if each.parameter_bytes > 0 and parameters > 0:
            points.append(Point(f"layer kind {each.layer_type}: parameters", each.parameter_bytes, parameters, "B"))
    return points
