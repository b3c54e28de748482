"""Alpa's profiling database (``prof_database.pkl``): collectives by mesh and group, and square matmuls.

The file is a pickle, so it is read by ``alpa_worker`` in a process of its own: no name but a few stand-ins resolves,
memory, time, files and processes are limited, and only JSON comes back.

Layout: ``{(cluster, (nodes, GPUs a node)): MeshProfilingResult}`` whose ``..._cost_dict`` map ``(groups, dtype)`` to
``[(size, seconds), ...]``. All groups run at once. Sizes are elements of the full tensor; here they become bytes as
``HardwareModel.collective`` counts them. Times hold 14-18 us of the measuring loop each, which stay in.

Source:
    alpa-projects/alpa, ``alpa/mesh_profiling.py`` (checked in 0.2.3); Zheng et al., OSDI 2022.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.tables import load_table
from hardware_models.collective_table import Row
from hardware_models.group_shapes import GroupShape, shape_from_slots

MAX_PICKLE_BYTES = 64 * 2**20
MAX_ANSWER_BYTES = 256 * 2**20
MEMORY_BYTES = 2**30
"""Of the process that reads; the largest database known needs a tenth."""

TIMEOUT_S = 30.0
CPU_S = 20
MAX_MESSAGE_BYTES, MAX_SECONDS = 2.0**50, 3600.0
"""Of one measured message or product: no database comes near."""
DTYPES = {"f16": 2, "f32": 4, "bf16": 2, "f64": 8}
COLLECTIVES = {
    "all_reduce_cost_dict": "all_reduce",
    "all_gather_cost_dict": "all_gather",
    "reduce_scatter_cost_dict": "reduce_scatter",
    "all_to_all_cost_dict": "all_to_all",
}


@dataclass(frozen=True)
class SquareMatmul:
    """A measured product of two square matrices."""

    n: int
    dtype: str
    seconds: float


@dataclass(frozen=True)
class AlpaDatabase:
    """What a database holds.

    Attributes:
        meshes: Shapes measured, e.g. ``2x8``.
        rows: Collectives; values of several dtypes or meshes with equal shape and size are one row, their median.
        matmuls: Square products.
    """

    meshes: tuple[str, ...]
    rows: tuple[Row, ...]
    matmuls: tuple[SquareMatmul, ...]


def read_alpa_pickle(path: str | Path) -> AlpaDatabase:
    """Read a database.

    Raises:
        DataFileError: If the file is too large, is no such pickle, or names anything else than a database holds.
    """
    source = str(path)
    meshes = _unpickled(path)["meshes"]
    samples: list[Row] = []
    matmuls: dict[tuple[int, str], list[float]] = {}
    for mesh in meshes:
        if len(mesh["mesh"]) != 2 or min(mesh["mesh"]) < 1:
            raise DataFileError(source, f"a mesh must be (nodes, GPUs a node), got {mesh['mesh']}")
        for name, kind in COLLECTIVES.items():
            for groups, dtype, points in mesh[name]:
                samples += _samples(kind, mesh["mesh"], groups, dtype, points, source)
        for _, dtype, points in mesh["dot_cost_dict"]:
            for flop, seconds in points:
                if seconds > MAX_SECONDS:
                    raise DataFileError(source, f"a product must take at most {MAX_SECONDS:g} s, got {seconds:.3g}")
                n = round((flop / 2) ** (1 / 3))
                if n >= 1 and seconds > 0 and abs(2 * n**3 - flop) <= 1e-3 * flop:
                    matmuls.setdefault((n, _dtype(dtype, source)), []).append(seconds)
    if not samples and not matmuls:
        raise DataFileError(source, "the database must hold at least one measured collective or matmul, got none")
    return AlpaDatabase(
        meshes=tuple(dict.fromkeys("x".join(map(str, mesh["mesh"])) for mesh in meshes)),
        rows=tuple(merged(samples)),
        matmuls=tuple(SquareMatmul(n, dtype, statistics.median(all_s)) for (n, dtype), all_s in matmuls.items()),
    )


def read_alpa_table(path: str | Path) -> list[Row]:
    """Read the same collectives from a table: columns mesh, collective, group_size, stride, num_groups,
    nodes_per_group, gpus_per_node_in_group, dtype, bytes, seconds; sizes in bytes.

    Raises:
        DataFileError: If a column is missing or a cell is not what it must be.
    """
    integers = ("group_size", "stride", "num_groups", "nodes_per_group", "gpus_per_node_in_group")
    rows: list[Row] = []
    columns = (*integers, "bytes", "seconds")
    table = load_table(path, floats=("bytes", "seconds"), integers=integers, required=columns)
    for number, row in enumerate(table, start=1):
        mesh = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", row["mesh"].strip())
        nodes, gpus_per_node = (int(mesh[1]), int(mesh[2])) if mesh else (0, 0)
        of_node = row["gpus_per_node_in_group"]
        if not (
            1 <= row["nodes_per_group"] <= nodes
            and 1 <= of_node <= gpus_per_node
            and row["group_size"] == row["nodes_per_group"] * of_node
            and 1 <= row["num_groups"] <= nodes * gpus_per_node // row["group_size"]
            and 0 <= row["bytes"] <= MAX_MESSAGE_BYTES
            and row["seconds"] <= MAX_SECONDS
        ):
            raise DataFileError(
                path,
                f"row {number} must have a mesh like 2x8 that holds its groups, nodes and GPUs of a node that make up "
                f"a group, 0 to {MAX_MESSAGE_BYTES:.3g} bytes and at most {MAX_SECONDS:g} s, got "
                f"{str(dict(row))[:240]}",
            )
        kind = row["collective"].replace("-", "_")
        if kind not in COLLECTIVES.values():
            known = ", ".join(COLLECTIVES.values())
            raise DataFileError(path, f"row {number}: collective must be one of {known}, got {row['collective']!r:.60}")
        size = row["bytes"] / (row["group_size"] if kind == "all_to_all" else 1)
        if size > 0:
            if row["seconds"] <= 0:
                raise DataFileError(path, f"row {number}: seconds must be above 0, got {row['seconds']:g}")
            at_once = max(1, row["num_groups"] * row["nodes_per_group"] // nodes)
            stride = None if row["gpus_per_node_in_group"] == 1 else row["stride"]
            try:
                shape = GroupShape(row["group_size"], row["nodes_per_group"], stride, at_once)
            except ValueError as error:
                raise DataFileError(path, f"row {number}: {error}") from None
            rows.append((kind, shape, size, row["seconds"]))
    if not rows:
        raise DataFileError(path, "the table must hold at least one collective of a size above 0, got none")
    return merged(rows)


def merged(samples: Iterable[Row]) -> list[Row]:
    """Return one row per collective, shape and size: the median of its samples."""
    found: dict[tuple[str, GroupShape | int, float], list[float]] = {}
    for kind, shape, size, seconds in samples:
        found.setdefault((kind, shape, size), []).append(seconds)
    return [(kind, shape, size, statistics.median(times)) for (kind, shape, size), times in found.items()]


def _samples(
    kind: str, mesh: Sequence[int], groups: Sequence[Sequence[int]], dtype: str, points: Sequence[Sequence[float]],
    source: str,
) -> list[Row]:  # fmt: skip
    element = DTYPES[_dtype(dtype, source)]
    if not groups or len({len(group) for group in groups}) != 1:
        raise DataFileError(source, f"{kind}: groups must be of equal size, got {len(groups)}")
    size = len(groups[0])
    if size < 2:
        return []
    per_node = mesh[1]
    slots: dict[int, list[int]] = {}
    for rank in groups[0]:
        slots.setdefault(rank // per_node, []).append(rank % per_node)
    first = next(iter(slots))
    at_once = sum(any(rank // per_node == first for rank in group) for group in groups)
    try:
        shape = shape_from_slots(slots.values(), at_once)
    except ValueError as error:
        raise DataFileError(source, str(error)) from None
    scale = element / (size if kind == "all_to_all" else 1)
    for count, seconds in points:
        if count * scale > MAX_MESSAGE_BYTES or seconds > MAX_SECONDS:
            raise DataFileError(
                source,
                f"{kind}: a point must have at most {MAX_MESSAGE_BYTES:.3g} bytes and {MAX_SECONDS:g} s, got "
                f"{count * scale:.3g} and {seconds:.3g}",
            )
    return [(kind, shape, count * scale, seconds) for count, seconds in points if count > 0 and seconds > 0]


def _dtype(word: str, source: str) -> str:
    if word not in DTYPES:
        raise DataFileError(source, f"a dtype must be one of {', '.join(DTYPES)}, got {word!r}")
    return word


def _unpickled(path: str | Path) -> Mapping[str, Any]:
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_PICKLE_BYTES + 1)
    except OSError as error:
        raise DataFileError(source, f"cannot be read: {error.strerror}") from None
    if len(data) > MAX_PICKLE_BYTES:
        raise DataFileError(source, f"a database must have at most {MAX_PICKLE_BYTES} bytes")
    worker = Path(__file__).with_name("alpa_worker.py")
    command = [sys.executable, "-I", "-S", str(worker), str(MEMORY_BYTES), str(CPU_S)]
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=TIMEOUT_S, env={}, check=False)
    except subprocess.TimeoutExpired:
        raise DataFileError(source, f"refused: it was not read within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        limits = f"limits: {MEMORY_BYTES >> 20} MiB, {CPU_S} s"
        raise DataFileError(source, f"refused: the process that read it ended with {done.returncode} ({limits})")
    if len(done.stdout) > MAX_ANSWER_BYTES:
        raise DataFileError(source, "refused: it holds more than a database may")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "refused" in answer:
        raise DataFileError(source, f"refused: {answer['refused']}")
    return answer
