"""From files of one source to a calibration; one function per source of ``windtunnel calibrate``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from datafiles.errors import DataFileError
from datafiles.words import counted
from hardware_models.calibrated import Calibration, FitRecord, GpuConstants
from hardware_models.calibration.communication_fit import CommunicationParts, communication_parts
from hardware_models.calibration.kernel_calibration import as_shipped, fit_curves, num_of_another, overlap_slowdowns
from hardware_models.calibration.outcome import Outcome, Point, fit_record
from hardware_models.calibration_file import load_calibration
from hardware_models.cluster import measured_name, parse_cluster
from hardware_models.collective_table import Row
from hardware_models.gpus import GpuType, load_curves, load_gpu
from hardware_models.group_shapes import GroupShape, shape_from_slots
from hardware_models.import_aceso import import_collectives, import_folder, import_table
from hardware_models.importers.aceso_folder import collectives_in, models_in
from hardware_models.importers.alpa_database import AlpaDatabase, merged, read_alpa_pickle, read_alpa_table
from hardware_models.importers.kineto import Collective, Trace, read_trace
from hardware_models.importers.nccl_tests import read_nccl_log
from hardware_models.profile import INTERPOLATED, OperatorProfile
from workloads.kernels import Matmul


def aceso(folder: Path, *, model: str | None, size: str | None, database: str, preset: str | None) -> Outcome:
    """Calibrate from Aceso's profile: a folder of its CSVs, or one with the converted ``ops.csv.gz``/``comm.csv``.

    Raises:
        ValueError: If the folder holds no such model (the message lists them), or a file is malformed.
    """
    source = f"Aceso profile {database}, {folder.name}"
    converted = next((folder / name for name in ("ops.csv.gz", "ops.csv") if (folder / name).is_file()), None)
    notes = []
    if converted is not None:
        if model is None or size is None:
            raise ValueError(f"--model and --size must name what to take from {converted}, such as gpt and 1_3B")
        operators = import_table(converted, model=model, size=size, database=database)
        table = folder / "comm.csv"
        rows: list[Row] = [*import_collectives(table, database=database).rows()] if table.is_file() else []
    else:
        known = [each for each in models_in(folder) if model in (None, each[0]) and size in (None, each[1])]
        if len(known) != 1:
            every = ", ".join(f"{name} {words}" for name, words in models_in(folder)) or "none"
            raise ValueError(f"--model and --size must name one model of {folder}, which has {every}")
        operators = import_folder(folder, model=known[0][0], size=known[0][1], database=database)
        rows = collectives_in(folder)
    fits, points = _operator_fits(operators)
    if not rows:
        notes.append("the folder has no collectives")
    parts = communication_parts(rows, source, preset) if rows else None
    return with_communication(Calibration(source=source, operators=operators), parts, preset, fits, points, notes)


def _operator_fits(profile: OperatorProfile) -> tuple[list[FitRecord], list[Point]]:
    """Return how far interpolation between microbatch sizes is off, each inner size left out."""
    points = []
    for row in profile.rows:
        others = tuple(each for each in profile.rows if each.role == row.role and each is not row)
        found = replace(profile, rows=others).lookup(row.role, row.samples, row.tensor_size, row.split)
        if found is None or found.source != "interpolated":
            continue
        for word in ("forward_s", "backward_s"):
            if getattr(row, word) > 0:
                points.append(Point(f"operators {word[:-2]}", getattr(row, word), getattr(found.row, word)))
    fits = [FitRecord(f"operators of {profile.model}", "imported", len(profile.rows))]
    assert "forward_s" in INTERPOLATED
    for word in ("forward", "backward"):
        own = [point for point in points if point.group == f"operators {word}"]
        if own:
            fits.append(fit_record(f"operators {word}, each microbatch size left out", "interpolated", own))
    return fits, points


def alpa(file: Path, *, preset: str | None, gpu: str | None) -> Outcome:
    """Calibrate from Alpa's database: the pickle, or its table (CSV).

    Raises:
        ValueError: If the file is no such database or refused.
    """
    own_type = load_gpu(gpu) if gpu is not None else None
    if file.name.lower().removesuffix(".gz").endswith((".csv", ".txt", ".tsv")):
        database = AlpaDatabase((), tuple(read_alpa_table(file)), ())
    else:
        database = read_alpa_pickle(file)
    source = f"Alpa profiling database, {file.name}"
    parts = communication_parts(database.rows, source, preset) if database.rows else None
    notes = ["times hold the measuring loop's 14 to 18 us each"] if database.rows else []
    calibration, fits, points = Calibration(source=source), list[FitRecord](), list[Point]()
    if database.matmuls and own_type is None:
        notes.append(
            f"{counted(len(database.matmuls), 'matmul was', 'matmuls were')} not used: --gpu says whose they are"
        )
    elif own_type is not None and not database.matmuls:
        notes.append("--gpu changed nothing: the database has no matmuls (its table as CSV holds collectives alone)")
    elif own_type is not None:
        words = {"f16": "fp16", "f32": "fp32"}
        rows = [(Matmul(each.n, each.n, each.n), words.get(each.dtype, each.dtype), each.seconds)
                for each in database.matmuls]  # fmt: skip
        notes += _of_another(own_type, num_of_another(own_type, rows), len(rows))
        found = fit_curves(own_type, rows, source)
        if found is not None:
            curves, constants, points = found
            calibration = replace(calibration, gpus={own_type.name: GpuConstants(curves=curves)})
            fits = [fit_record(f"matmuls on {gpu}", "fitted", points, constants)]
            notes += _as_shipped(own_type, constants)
    return with_communication(calibration, parts, preset, fits, points, notes)


def nccl_tests(files: Sequence[Path], *, preset: str | None, collective: str | None, ranks: int | None) -> Outcome:
    """Calibrate from logs of nccl-tests.

    Raises:
        ValueError: If a file is no such log.
    """
    logs = [read_nccl_log(file, collective=collective, num_ranks=ranks) for file in files]
    devices = sorted({log.device for log in logs if log.device})
    source = f"nccl-tests on {', '.join(devices) or 'GPUs that the logs do not name'}, " + ", ".join(
        file.name for file in files
    )
    rows = merged(row for log in logs for row in log.table_rows())
    notes = [] if len(devices) < 2 else [f"the logs are of different GPUs: {', '.join(devices)}"]
    parts = communication_parts(rows, source[:1900], preset)
    if preset is not None:
        family = parse_cluster(f"{preset}:1x1").gpu_types[0].partition("-")[0]
        if others := [device for device in devices if family.lower() not in device.lower().replace(" ", "")]:
            notes.append(f"the logs are of {', '.join(others)}, and {preset} has {family.upper()}: check --cluster")
    return with_communication(Calibration(source=source[:1900]), parts, preset, [], [], notes)


def kineto(file: Path, *, preset: str | None, gpu: str | None, gpus_per_node: int) -> Outcome:
    """Calibrate from a trace of the PyTorch profiler.

    Raises:
        ValueError: If the file is no such trace, or nothing in it can be used.
    """
    trace = read_trace(file)
    source = f"PyTorch profiler trace of {trace.gpu or 'a GPU without name'}, {file.name}"
    fits = [
        FitRecord(f"kernels: {kind}", "imported", count, {"seconds": seconds})
        for kind, (count, seconds) in trace.seconds_by_kind().items()
    ]
    notes, points = [], list[Point]()
    if trace.num_unsized:
        notes.append(
            f"{counted(trace.num_unsized, 'collective has', 'collectives have')} no recorded size and were not used"
        )
    rows, left_out = _trace_rows(trace.collectives, gpus_per_node)
    notes += left_out
    parts = communication_parts(rows, source, preset) if rows else None
    if rows:
        notes.append("a collective's time holds the wait for its slowest rank; the quickest of each size counts")
    calibration, of_another = Calibration(source=source), list[str]()
    if gpu is None:
        notes.append("kernels were not fitted: --gpu says which GPU type the constants are for")
    else:
        kernels = [(each.work, each.dtype, each.seconds) for each in trace.kernels if each.work is not None]
        of_another = _of_another(load_gpu(gpu), num_of_another(load_gpu(gpu), kernels), len(kernels))
        notes += of_another
        constants, more, points, kept = _kernel_constants(trace, gpu, source)
        fits, notes = [*fits, *more], [*notes, *kept]
        calibration = replace(calibration, gpus={gpu: constants} if constants.given() else {})
    outcome = with_communication(calibration, parts, preset, fits, points, notes)
    if parts is None and not outcome.calibration.gpus:
        if of_another:
            raise DataFileError(file, of_another[0])
        advice = "give --gpu" if gpu is None else "record with record_shapes=True"
        raise DataFileError(file, f"must hold a collective with a size or a kernel with shapes, got neither; {advice}")
    return outcome


def _of_another(gpu: GpuType, number: int, total: int) -> list[str]:
    words = (
        f"matmuls must be in number formats of {gpu.name} and no faster than their peak, {number} of {total} kernels "
        "are others and were left out: check --gpu"
    )
    return [words] if number else []


def _as_shipped(gpu: GpuType, constants: Mapping[str, float]) -> list[str]:
    kept = ", ".join(as_shipped(gpu, constants))
    return [f"no row says how quick these are, which stay as shipped: {kept}"] if kept else []


def _kernel_constants(
    trace: Trace, gpu: str, source: str
) -> tuple[GpuConstants, list[FitRecord], list[Point], list[str]]:
    own_type, notes = load_gpu(gpu), list[str]()
    kernels = [(kernel.work, kernel.dtype, kernel.seconds) for kernel in trace.kernels if kernel.work is not None]
    found = fit_curves(own_type, kernels, source)
    computing, talking = overlap_slowdowns(trace.kernels, trace.collectives)
    fits, points, constants = list[FitRecord](), list[Point](), GpuConstants()
    if found is not None:
        curves, values, points = found
        constants = replace(constants, curves=curves)
        if (share := values.get("fraction.elementwise")) is not None:
            moves = share / load_curves(own_type.curves).memory.fraction["elementwise"]
            fraction = min(1.0, own_type.optimizer_bandwidth_fraction * moves)
            constants = replace(constants, optimizer_bandwidth_fraction=fraction)
        notes = _as_shipped(own_type, values)
        for group in dict.fromkeys(point.group for point in points):
            dtype = group.rpartition(" ")[2] if " " in group else ""
            own = {name: value for name, value in values.items() if name.startswith(f"{dtype}.") == bool(dtype)}
            fits.append(fit_record(f"{group} on {gpu}", "fitted", [p for p in points if p.group == group], own))
    for name, ratios in (("computation", computing), ("communication", talking)):
        if ratios:
            factor = min(10.0, max(1.0, sorted(ratios)[len(ratios) // 2]))
            constants = replace(constants, **{f"overlap_slowdown_{name}": factor})  # type: ignore[arg-type]
            own_points = [Point(f"overlap {name}", ratio, factor, "x") for ratio in ratios]
            fits.append(fit_record(f"overlap slowdown of {name}", "fitted", own_points, {"factor": factor}))
    return constants, fits, points, notes


def _trace_rows(collectives: Sequence[Collective], gpus_per_node: int) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for each in collectives:
        by_node: dict[int, list[int]] = {}
        for rank in sorted(each.ranks):
            by_node.setdefault(rank // gpus_per_node, []).append(rank)
        if not each.ranks and each.group_size > gpus_per_node:
            skipped["groups over several nodes without their ranks"] += 1
        elif each.kind in ("send", "recv") or len({len(own) for own in by_node.values()}) > 1:
            skipped["transfers and uneven groups"] += 1
        else:
            shape = shape_from_slots(by_node.values()) if by_node else GroupShape(each.group_size)
            rows.append((each.kind, shape, each.num_bytes, each.seconds))
    notes = [f"{counted(n, 'collective was', 'collectives were')} not used: {why}" for why, n in skipped.items()]
    return rows, notes


def machine(file: Path, *, preset: str | None) -> Outcome:
    """Calibrate from a profile of ``windtunnel profile``: keep what it measured, fit the links and laws to it.

    Raises:
        ValueError: If the file is no such profile, or holds nothing.
    """
    profile = load_calibration(file)
    if not profile.machine:
        raise DataFileError(file, f"must name its machine, as windtunnel profile does; got none ({profile.source})")
    fits, points = _operator_fits(profile.operators) if profile.operators is not None else ([], [])
    parts = None
    if profile.collectives is not None:
        parts = communication_parts(profile.collectives.rows(), profile.collectives.source, preset)
    if profile.operators is None and parts is None and not profile.gpus:
        raise DataFileError(file, "holds no measurement; make one with windtunnel profile")
    kept = [fit for fit in profile.fits if fit.how != "interpolated"]
    return with_communication(profile, parts, preset, [*kept, *fits], points, [])


def with_communication(
    calibration: Calibration,
    parts: CommunicationParts | None,
    preset: str | None,
    fits: Sequence[FitRecord],
    points: Sequence[Point],
    notes: Sequence[str],
) -> Outcome:
    """Return the calibration with the parts about communication put in."""
    if parts is not None:
        of = measured_name(preset) if preset is not None else None
        calibration = replace(
            calibration,
            collectives=parts.table,
            collectives_of=of,
            links={of: parts.links} if of is not None and parts.links is not None else {},
            networks={of: parts.network} if of is not None and parts.network is not None else {},
        )
        fits, points, notes = [*fits, *parts.fits], [*points, *parts.points], [*notes, *parts.notes]
        if preset is None:
            notes = [*notes, "no --cluster: its links were not fitted, and the table holds for any cluster"]
    return Outcome(replace(calibration, fits=tuple(fits)), tuple(points), tuple(notes))
