"""CSV tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from datafiles.content import read_text
from datafiles.errors import DataFileError
from datafiles.values import MAX_BYTES, MAX_VALUES, resolve_scalar, short
from datafiles.words import counted


class _Row(dict[str, Any]):
    """One row; a column that the table does not have is named when it is asked for."""

    __slots__ = ("_source",)

    def __init__(self, cells: Iterable[tuple[str, Any]], source: str) -> None:
        super().__init__(cells)
        self._source = source

    def __missing__(self, column: str) -> Any:
        raise DataFileError(self._source, _missing(column, list(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Row, (list(self.items()), self._source)


def load_table(
    path: str | Path,
    *,
    max_bytes: int = MAX_BYTES,
    floats: Collection[str] = (),
    integers: Collection[str] = (),
    required: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Read a CSV file with a header row; ``.gz`` at the end of its name means gzip.

    Empty lines and lines before the header that start with ``#`` are skipped.

    Args:
        path: The file.
        max_bytes: Cap on the size in bytes, before and after decompression.
        floats: Columns to convert to finite floats; an empty cell becomes None.
        integers: Columns to convert to integers; an empty cell becomes None.
        required: Of the former two, columns that no row may leave empty.

    Returns:
        One dict per row, strings unless converted, keys in header order. Asked for a column that the table does not
        have, a row raises DataFileError.

    Raises:
        DataFileError: If the file cannot be read, a row has more or fewer cells than the header,
            a named column is missing or a cell is not the number it must be.
    """
    source = str(path)
    text = read_text(path, max_bytes)
    num_skipped = 0
    lines = io.StringIO(text, newline="")
    position = 0
    while (line := lines.readline()) and (not line.strip() or line.startswith("#")):
        num_skipped += line.count("\n")
        position = lines.tell()
    lines.seek(position)
    reader = csv.reader(lines, strict=True)
    rows: list[dict[str, Any]] = []
    header: list[str] = []
    num_cells = 0
    try:
        for cells in reader:
            line_number = num_skipped + reader.line_num
            if not cells:
                continue
            num_cells += len(cells)
            if num_cells > MAX_VALUES:
                raise DataFileError(source, f"a table must have at most {MAX_VALUES} cells", line=line_number)
            if not header:
                header = [cell.strip() for cell in cells]
                _check_header(header, source, line_number, [*floats, *integers])
                continue
            if len(cells) != len(header):
                raise DataFileError(
                    source,
                    f"a row must have the header's {counted(len(header), 'cell')}, got {len(cells)}",
                    line=line_number,
                )
            row = _Row(zip(header, cells, strict=True), source)
            for column in floats:
                row[column] = _cell_number(row[column], column, source, line_number, whole=False)
            for column in integers:
                row[column] = _cell_number(row[column], column, source, line_number, whole=True)
            for column in required:
                if row[column] is None:
                    raise DataFileError(source, f"{column} must be a number, got an empty cell", line=line_number)
            rows.append(row)
    except csv.Error as error:
        line_number = num_skipped + reader.line_num
        raise DataFileError(source, f"malformed CSV: {error}", line=line_number) from None
    if not header:
        raise DataFileError(source, "a table must begin with a header row, got an empty file")
    return rows


def _check_header(header: list[str], source: str, line: int, wanted: list[str]) -> None:
    for index, name in enumerate(header):
        if not name:
            raise DataFileError(
                source, f"every column must have a name, column {index + 1} has none", line=line
            )
        if name in header[:index]:
            raise DataFileError(source, f"duplicate column {short(name)!r}; keep one of them", line=line)
    for name in wanted:
        if name not in header:
            raise DataFileError(source, _missing(name, header), line=line)


def _missing(column: str, header: list[str]) -> str:
    columns = ", ".join(short(each) for each in header[:40])
    lone = len(header) == 1 and any(mark in header[0] for mark in ";\t|")
    advice = "; cells must be separated by commas" if lone else ""
    return f"column {column!r} is missing; the header has {columns}{advice}"


_resolved = lru_cache(2**16)(resolve_scalar)
"""The same, kept: cells of a table repeat (sizes, degrees)."""


def _cell_number(cell: str, column: str, source: str, line: int, *, whole: bool) -> int | float | None:
    text = cell.strip()
    if not text:
        return None
    try:
        number = _resolved(text)
    except ValueError as error:
        raise DataFileError(source, f"{column}: {error}", line=line) from None
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        if not whole:
            return float(number)
        if number == int(number):
            return int(number)
    kind = "an integer" if whole else "a number"
    raise DataFileError(source, f"{column} must be {kind}, got {short(text)!r}", line=line)
