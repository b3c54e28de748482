"""The text that nccl-tests print: one collective over one set of ranks, by message size.

Every row is checked against itself: ``algbw = size / time``, and ``busbw / algbw`` is the factor of the collective
over that many ranks, which also tells collectives apart where the log does not name its program.

Source:
    NVIDIA/nccl-tests, ``doc/PERFORMANCE.md`` (columns, bus bandwidth) and the header its programs print.
    It is in no package registry, so that nothing here was compared with its code; a log that differs is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datafiles.content import read_text
from datafiles.errors import DataFileError
from datafiles.values import MAX_BYTES, resolve_scalar, short
from hardware_models.collective_table import TRANSFERS, Row
from hardware_models.collectives import bus_factor
from hardware_models.group_shapes import GroupShape, shape_from_slots

PROGRAMS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "sendrecv": "transfer",
}  # fmt: skip
"""Program names (``..._perf``) and the collectives they measure."""

TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16", "f8e4m3",
         "f8e5m2")  # fmt: skip
MICROSECONDS = 1e-6
FACTOR_TOLERANCE = 0.02
"""Rates are printed with two decimals, so only large ones say their factor."""

_RANK = re.compile(r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s+\[\S*\]\s*(.*)")
_PROGRAM = re.compile(r"([a-z_]+)_perf")


@dataclass(frozen=True)
class NcclLog:
    """One log.

    Attributes:
        collective: As in ``HardwareModel.collective``, or a transfer.
        shape: The group; ``groups_per_node`` where the program split its ranks.
        device: What the log calls its GPUs, empty where it does not say.
        rows: ``(bytes, seconds)``, the quicker of out of place and in place.
    """

    collective: str
    shape: GroupShape
    device: str
    rows: tuple[tuple[float, float], ...]

    def table_rows(self) -> list[Row]:
        """Return rows of a collective table."""
        return [(self.collective, self.shape, size, seconds) for size, seconds in self.rows]


@dataclass(frozen=True)
class _Line:
    number: int
    size: float
    redop: str
    times: tuple[tuple[float, float, float], ...]  # seconds, algbw, busbw in bytes/s


def read_nccl_log(path: str | Path, *, collective: str | None = None, num_ranks: int | None = None) -> NcclLog:
    """Read a log.

    Args:
        path: Text file (also ``.gz``).
        collective: A name of ``PROGRAMS``, where neither log nor file name says it.
        num_ranks: Where the log does not list its ranks.

    Raises:
        DataFileError: If the text is not such a log, its columns contradict each other, a result was wrong, or the
            collective or the number of ranks cannot be told.
    """
    source = str(path)
    lines = read_text(path, MAX_BYTES).splitlines()
    rows = _table(lines, source)
    ranks = [(match[2] or "0", match[3], int(match[4]), match[5].strip())
             for line in lines if (match := _RANK.match(line))]  # fmt: skip
    groups: dict[str, list[tuple[str, int]]] = {}
    for group, host, device, _ in ranks:
        groups.setdefault(group, []).append((host, device))
    size = len(next(iter(groups.values()))) if groups else num_ranks
    if num_ranks is not None and size != num_ranks:
        raise DataFileError(source, f"the log lists {size} ranks in a group, got --ranks {num_ranks}; leave it out")
    if size is None:
        raise DataFileError(source, "the log lists no ranks (lines '# Rank 0 ... on HOST device 0'); give --ranks")
    program = _program(collective, lines, source, rows, size)
    _check_factor(program, size, rows, source)
    shape = _shape(list(groups.values()), size, source)
    kind = PROGRAMS[program]
    if kind == "transfer":
        if shape.num_nodes not in (1, size):
            raise DataFileError(source, "a ring of transfers over several nodes must have one rank on each")
        kind = TRANSFERS[shape.num_nodes > 1]
        shape = GroupShape(2, 2 if shape.num_nodes > 1 else 1)
    return NcclLog(
        collective=kind,
        shape=shape,
        device=ranks[0][3] if ranks else "",
        rows=tuple((row.size, min(time for time, _, _ in row.times)) for row in rows if row.size > 0),
    )


def _table(lines: Sequence[str], source: str) -> list[_Line]:
    header: list[str] = []
    found = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if line.startswith("#"):
            names = line.lstrip("#").split()
            if names[:2] == ["size", "count"] and "time" in names:
                header = names
            continue
        if not words or not words[0].isdecimal():
            continue
        if not header:
            raise DataFileError(source, "rows must follow the header '# size count type ...'", line=number)
        found.append(_row(words, header, source, number))
    if not found:
        raise DataFileError(source, "must hold rows of an nccl-tests program (size count type redop root time ...)")
    return found


def _row(words: list[str], header: list[str], source: str, number: int) -> _Line:
    names = header
    if len(words) == len(header) - 1 and "redop" in header:  # printed blank by programs that do not reduce
        names = [name for name in header if name != "redop"]
    if len(words) != len(names):
        raise DataFileError(source, f"a row must have {len(header)} cells, got {len(words)}", line=number)
    if "type" in names and words[names.index("type")] not in TYPES:
        raise DataFileError(source, f"type must be one of {', '.join(TYPES)}, got {short(words[2])!r}", line=number)
    cells: dict[str, list[str]] = {}
    for name, word in zip(names, words, strict=True):
        cells.setdefault(name, []).append(word)
    for wrong in (*cells.get("#wrong", []), *cells.get("error", [])):
        if wrong not in ("N/A", "0") and _number(wrong, source, number) >= 0.01:
            raise DataFileError(source, f"results must be right for times to mean anything, got {wrong}", line=number)
    if not (len(cells.get("time", [])) == len(cells.get("algbw", [])) == len(cells.get("busbw", [])) > 0):
        raise DataFileError(source, "the header must name time, algbw and busbw equally often", line=number)
    size = _number(words[0], source, number)
    times = []
    for time, algbw, busbw in zip(cells["time"], cells["algbw"], cells["busbw"], strict=True):
        if time == "N/A":
            continue
        seconds = _number(time, source, number) * MICROSECONDS
        rates = _number(algbw, source, number) * 1e9, _number(busbw, source, number) * 1e9
        if size > 0:
            if seconds <= 0:
                raise DataFileError(source, f"a time must be positive, got {time}", line=number)
            if abs(size / seconds - rates[0]) > 0.0051e9 + 0.02 * rates[0]:
                raise DataFileError(
                    source,
                    f"algbw must be size / time: {size:.0f} B in {time} us are {size / seconds / 1e9:.2f} GB/s, got "
                    f"{algbw}; times must be in us",
                    line=number,
                )
        times.append((seconds, *rates))
    if not times:
        raise DataFileError(source, "a row must have a time out of place or in place, got neither", line=number)
    return _Line(number, size, (cells.get("redop") or [""])[0], tuple(times))


def _number(word: str, source: str, number: int) -> float:
    try:
        value = resolve_scalar(word)
    except ValueError as error:
        raise DataFileError(source, str(error), line=number) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise DataFileError(source, f"must be a number of 0 or more, got {short(word)!r}", line=number)
    return float(value)


def _program(given: str | None, lines: Sequence[str], source: str, rows: Sequence[_Line], size: int) -> str:
    known = ", ".join(PROGRAMS)
    name = given.removesuffix("_perf") if given is not None else None
    if name is not None and name not in PROGRAMS:
        raise ValueError(f"collective must be one of {known}, got {given!r}")
    texts = [line for line in lines if not line[:1].isdecimal()]
    for text in (*texts, Path(source).name):
        for word in _PROGRAM.findall(text):
            if word not in PROGRAMS:
                raise DataFileError(source, f"the program must be one of {known}, got {word}_perf")
            if name not in (None, word):
                raise DataFileError(source, f"the log is of {word}_perf, got --collective {given}; leave it out")
            return str(word)
    if name is not None:
        return name
    for name in PROGRAMS:
        if re.search(rf"(^|[^a-z]){name}([^a-z]|$)", Path(source).name.lower()):
            return name
    if any(row.redop not in ("", "none") for row in rows):
        for name in ("all_reduce", "reduce_scatter"):
            if size > 2 and _factor_fits(name, size, rows):
                return name
    raise DataFileError(source, f"neither the log nor its name says which collective it is; say it with --collective, "
                        f"one of {known}")  # fmt: skip


def _factor(name: str, size: int) -> float:
    return 1.0 if name == "sendrecv" else bus_factor(PROGRAMS[name], size)


def _factor_fits(name: str, size: int, rows: Sequence[_Line]) -> bool:
    large = [busbw / algbw for row in rows for _, algbw, busbw in row.times if algbw >= 1e9]
    return bool(large) and all(abs(ratio - _factor(name, size)) <= FACTOR_TOLERANCE for ratio in large)


def _check_factor(name: str, size: int, rows: Sequence[_Line], source: str) -> None:
    for row in rows:
        for _, algbw, busbw in row.times:
            wanted = _factor(name, size)
            if algbw >= 1e9 and abs(busbw / algbw - wanted) > FACTOR_TOLERANCE:
                raise DataFileError(
                    source,
                    f"busbw / algbw of {name} over {size} ranks must be {wanted:.3f}, got {busbw / algbw:.3f}: another "
                    "collective or number of ranks",
                    line=row.number,
                )


def _shape(groups: list[list[tuple[str, int]]], size: int, source: str) -> GroupShape:
    if not groups:
        return GroupShape(size)
    by_host: dict[str, list[int]] = {}
    for host, device in groups[0]:
        by_host.setdefault(host, []).append(device)
    first = groups[0][0][0]
    at_once = sum(any(host == first for host, _ in group) for group in groups)
    try:
        return shape_from_slots(by_host.values(), at_once)
    except ValueError as error:
        raise DataFileError(source, str(error)) from None
