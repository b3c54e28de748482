"""The native file format of operator profiles: one YAML or JSON file, rows as lists below named columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.writer import write_mapping
from hardware_models.profile import OPTIONAL, OperatorProfile, ProfileRow
from hardware_models.schema import Text

COLUMNS = tuple(item.name for item in fields(ProfileRow))
_INTEGERS = ("samples", "tensor_size", "num_groups")
_TEXTS = ("role", "split", "source")

Cell = Annotated[str | bool | int | float | None, Field()]


class ProfileFile(FileModel):
    """``columns`` are the fields of ``ProfileRow``, of which those that not every profile knows may be missing; each
    entry of ``rows`` has one cell for each."""

    format: Literal["windtunnel-operator-profile-1"]
    model: Text
    gpu_type: Text
    dtype: Text
    source: Text
    kernels_only: bool = False
    columns: tuple[Text, ...]
    rows: tuple[tuple[Cell, ...], ...]


def profile_mapping(profile: OperatorProfile) -> dict[str, Any]:
    """Return what a profile file holds, as plain data."""
    known = {name for name in OPTIONAL if any(getattr(row, name) is not None for row in profile.rows)}
    columns = [name for name in COLUMNS if name in known or name not in OPTIONAL]
    return {
        "format": "windtunnel-operator-profile-1",
        "model": profile.model,
        "gpu_type": profile.gpu_type,
        "dtype": profile.dtype,
        "source": profile.source,
        "kernels_only": profile.kernels_only,
        "columns": columns,
        "rows": [[getattr(row, name) for name in columns] for row in profile.rows],
    }


def save_profile(profile: OperatorProfile, path: str | Path) -> None:
    """Write a profile; the name ends in ``.yaml`` or ``.json``."""
    write_mapping(path, profile_mapping(profile))


def load_profile(path: str | Path) -> OperatorProfile:
    """Read a profile.

    Raises:
        DataFileError: If the file breaks a rule; rows are counted from 1.
    """
    return profile_from_mapping(load_mapping(path), str(path))


def profile_from_mapping(mapping: Mapping[str, Any], source: str) -> OperatorProfile:
    """Return the profile that plain data describe.

    Args:
        mapping: As in a profile file.
        source: Name for messages.

    Raises:
        DataFileError: If the data break a rule; rows are counted from 1.
    """
    file = validated(ProfileFile, mapping, source)
    wanted = [name for name in COLUMNS if name in file.columns or name not in OPTIONAL]
    if sorted(file.columns) != sorted(wanted):
        needed = [name for name in COLUMNS if name not in OPTIONAL]
        raise DataFileError(
            source,
            f"columns must be {', '.join(needed)}, and may be {', '.join(OPTIONAL)}, got {', '.join(file.columns)}",
        )
    rows = []
    for number, cells in enumerate(file.rows, start=1):
        if len(cells) != len(wanted):
            raise DataFileError(source, f"row {number} must have {len(wanted)} cells, got {len(cells)}")
        values = {name: _typed(name, cell, number, source)
                  for name, cell in zip(file.columns, cells, strict=True)}  # fmt: skip
        rows.append(_row(values, source, number))
    try:
        return OperatorProfile(
            model=file.model,
            gpu_type=file.gpu_type,
            dtype=file.dtype,
            rows=tuple(rows),
            source=file.source,
            kernels_only=file.kernels_only,
        )
    except ValueError as error:  # a row that is there twice
        raise DataFileError(source, str(error)) from None


def _row(values: dict[str, Any], source: str, number: int) -> ProfileRow:
    try:
        return ProfileRow(**values)
    except ValueError as error:
        raise DataFileError(source, f"row {number}: {error}") from None


def _typed(name: str, cell: Cell, number: int, source: str) -> Cell:
    if cell is None and name in OPTIONAL:
        return None
    if name in _TEXTS:
        good = isinstance(cell, str)
    elif name == "includes_collectives":
        good = isinstance(cell, bool)
    elif name in _INTEGERS:
        good = isinstance(cell, int) and not isinstance(cell, bool)
    else:
        good = isinstance(cell, (int, float)) and not isinstance(cell, bool)
    if not good or cell is None:
        raise DataFileError(source, f"row {number}: {name} has the wrong type, got {cell!r:.60}")
    return float(cell) if name not in (*_TEXTS, *_INTEGERS, "includes_collectives") else cell
