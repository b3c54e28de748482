"""From Galvatron's profile files to a calibration: links from bandwidths, operators from layer times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from experiments.calibrate.layers import calibrate_layers
from experiments.calibrate.sources import with_communication
from hardware_models.calibrated import Calibration, FitRecord, GpuConstants
from hardware_models.calibration.communication_fit import LINKS, communication_parts, far_rates
from hardware_models.calibration.link_fit import Sample, fit_links
from hardware_models.calibration.outcome import Outcome, Point, fit_record
from hardware_models.cluster import cluster_gpus_per_node, measured_name, parse_cluster
from hardware_models.collective_table import Row
from hardware_models.group_shapes import GroupShape, shape_from_slots
from hardware_models.importers.galvatron import MIB, Bandwidth, GalvatronFile, read_galvatron

AVERAGE_BYTES = 64 * MIB
"""Bandwidths are averages over large messages (16 to 256 MiB in the later releases); they are fitted at this size."""


LAYERS_NOTE = (
    "a layer's time is shared out over its operators, and backward follows forward, as the model has it: the files "
    "hold forward times of whole layers only"
)


@dataclass(frozen=True)
class _Parts:
    files: tuple[tuple[Path, GalvatronFile], ...]
    preset: str

    @property
    def num_devices(self) -> int:
        """GPUs of the profiled cluster: its largest group, or as many as stages times their groups."""
        return max((each.stages * each.size for _, file in self.files for each in file.bandwidths), default=1)


def galvatron(files: Sequence[Path], *, preset: str | None, model: str | None, runtime: str) -> Outcome:
    """Calibrate from Galvatron's profile files of one machine.

    Raises:
        ValueError: If a file is no such profile, or ``--cluster`` or ``--model`` is missing for what it holds.
    """
    parts = _Parts(tuple((file, read_galvatron(file)) for file in files), preset or "")
    if preset is None:
        raise ValueError("--cluster must name the preset that the files were profiled on, such as titan-rtx-pcie")
    source = f"Galvatron profile of {preset}, {', '.join(file.name for file in files)}"[:1900]
    fits: list[FitRecord] = []
    points: list[Point] = []
    notes: list[str] = []
    calibration = Calibration(source=source)
    gpu = parse_cluster(f"{preset}:1x1").gpu_type(0)
    overlaps = [file.overlap for _, file in parts.files if file.overlap is not None]
    if overlaps:
        factor = sum(overlaps) / len(overlaps)
        constants = GpuConstants(overlap_slowdown_computation=factor, overlap_slowdown_communication=factor)
        calibration = replace(calibration, gpus={gpu: constants})
        fits.append(FitRecord("overlap slowdown of both sides", "imported", len(overlaps), {"factor": factor}))
    layers = [(file, each) for file, each in parts.files if each.layers or each.memory]
    if layers:
        if model is None:
            raise ValueError(f"--model must name the model that {layers[0][0]} is about (windtunnel list models)")
        found = calibrate_layers([each for _, each in layers], model, _room_for(layers, preset), runtime, source)
        calibration = replace(calibration, operators=found.operators)
        fits, points = [*fits, *found.fits], [*points, *found.points]
        if found.operators is not None:
            notes.append(LAYERS_NOTE)
        notes += found.notes
    return _with_links(parts, calibration, fits, points, notes, source)


def _room_for(layers: Sequence[tuple[Path, GalvatronFile]], preset: str) -> str:
    """Return a cluster with as many GPUs as the largest tensor-parallel degree that activations were measured at."""
    most = max((degree for _, file in layers for each in file.memory for degree in each.saved_bytes), default=1)
    per_node = min(most, cluster_gpus_per_node(preset))
    return f"{preset}:{ceil(most / per_node)}x{per_node}"


def _with_links(
    parts: _Parts,
    calibration: Calibration,
    fits: list[FitRecord],
    points: list[Point],
    notes: list[str],
    source: str,
) -> Outcome:
    preset = parts.preset
    table: list[Row] = [(kind, size, num_bytes, seconds) for _, file in parts.files
                        for kind, size, num_bytes, seconds in file.times]  # fmt: skip
    samples: list[Sample] = []
    for _, file in parts.files:
        for each in file.bandwidths:
            sample = _sample(each, parts.num_devices, cluster_gpus_per_node(preset))
            if sample is None:
                notes.append(f"transfers at pipeline degree {each.size} cross nodes only in part and were not used")
            else:
                samples.append(sample)
    outcome = with_communication(
        calibration, communication_parts(table, source, None if samples else preset) if table else None, preset,
        fits, points, notes,
    )  # fmt: skip
    if not samples:
        return outcome
    rows = [*samples, *((kind, GroupShape(size), b, s) for kind, size, b, s in table if isinstance(size, int))]
    found = fit_links(preset, rows, source)
    own = [Point(LINKS, row[3], predicted) for row, predicted in zip(found.used, found.predicted_s, strict=True)]
    record = fit_record(f"{LINKS} {preset}", "fitted", own, found.constants)
    of = measured_name(preset)
    done = replace(
        outcome.calibration,
        links={of: found.links} if found.links is not None else {},
        networks={of: found.network} if found.network is not None else {},
        fits=(*outcome.calibration.fits, record),
    )
    return Outcome(done, (*outcome.points, *own), (*outcome.notes, *far_rates(preset, found.constants), *found.notes))


def _sample(each: Bandwidth, num_devices: int, gpus_per_node: int) -> Sample | None:
    """Return a bandwidth as one message of AVERAGE_BYTES; None for transfers of which only some cross nodes."""
    if each.kind == "transfer":
        distance = num_devices // each.size
        if num_devices > gpus_per_node and distance < gpus_per_node:
            return None
        across = distance >= gpus_per_node
        at_once = min(distance, gpus_per_node) if each.all_at_once else 1
        shape = GroupShape(2, 2 if across else 1, None, at_once)
        return ("transfer_inter_node" if across else "transfer_intra_node", shape, AVERAGE_BYTES,
                AVERAGE_BYTES / each.bytes_per_s)  # fmt: skip
    part = num_devices // each.stages
    groups = _groups(part, each.size, each.consecutive)
    if each.all_at_once:
        every = [[rank + part * stage for rank in group] for stage in range(each.stages) for group in groups]
        at_once = sum(any(rank < gpus_per_node for rank in group) for group in every)
    else:
        at_once = 1
    slots: dict[int, list[int]] = {}
    for rank in groups[0]:
        slots.setdefault(rank // gpus_per_node, []).append(rank % gpus_per_node)
    n = each.size
    seconds = 2 * (n - 1) / n * AVERAGE_BYTES / each.bytes_per_s
    return each.kind, shape_from_slots(slots.values(), at_once), AVERAGE_BYTES, seconds


def _groups(part: int, size: int, consecutive: bool) -> list[list[int]]:
    """Return the groups of a part of the cluster: neighbours, or ranks as far apart as the part allows."""
    count = part // size
    if consecutive:
        return [list(range(size * index, size * (index + 1))) for index in range(count)]
    return [list(range(index, part, count)) for index in range(count)]
