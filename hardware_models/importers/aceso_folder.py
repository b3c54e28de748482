"""What a folder of Aceso's published profile holds: models, and collectives in their own files.

``prim_{model}_{size}_{collective}_{N}gpus.csv`` maps MiB to ms (1e9 ms: not measured), inside one node; a message is
the buffer of each rank, of an all-gather each rank's contribution. ``p2p_{intra|inter}_node.csv`` maps MiB to GiB/s.
Both have a header row and two columns. Sizes are cut to whole MiB, so equal sizes differ by up to 1.6 times; the
quickest counts.

Source:
    microsoft/SuperScaler, branch Aceso, ``profiler/profiled-time-*``; Liu et al., EuroSys 2024.
"""

from __future__ import annotations

import re
from pathlib import Path

from datafiles.content import read_text
from datafiles.errors import DataFileError
from datafiles.values import MAX_BYTES, resolve_scalar, short
from hardware_models.collective_table import Row
from hardware_models.import_aceso import MIB

GIB = float(2**30)
NOT_MEASURED_MS = 1e8
_OPERATORS = re.compile(r"([A-Za-z0-9]+)_(\w+?)_mbs\d+_tp\d+_algo\d+\.csv")
_PRIMITIVE = re.compile(r"prim_\w+?_(all_reduce|all_gather|reduce_scatter|all_to_all)_(\d{1,4})gpus\.csv")
_TRANSFER = re.compile(r"p2p_(intra|inter)_node\.csv")


def models_in(folder: str | Path) -> list[tuple[str, str]]:
    """Return ``(model, size)`` of every model with operator files.

    Raises:
        DataFileError: If there is no such folder.
    """
    return sorted({(match[1], match[2]) for name in _names(folder) if (match := _OPERATORS.fullmatch(name))})


def collectives_in(folder: str | Path) -> list[Row]:
    """Return measured collectives and transfers; empty where the folder has none.

    Raises:
        DataFileError: If a file is malformed.
    """
    rows: list[Row] = []
    for name in _names(folder):
        path = Path(folder) / name
        if match := _PRIMITIVE.fullmatch(name):
            kind, size = match[1], int(match[2])
            if size < 2:
                raise DataFileError(path, f"a group must have at least 2 GPUs, got {size}")
            scale = MIB * (size if kind == "all_gather" else 1)
            rows += [(kind, size, mib * scale, ms * 1e-3) for mib, ms in _pairs(path) if ms < NOT_MEASURED_MS]
        elif match := _TRANSFER.fullmatch(name):
            kind = f"transfer_{match[1]}_node"
            rows += [(kind, 2, mib * MIB, mib * MIB / (rate * GIB)) for mib, rate in _pairs(path)]
    return rows


def _names(folder: str | Path) -> list[str]:
    if not Path(folder).is_dir():
        raise DataFileError(folder, "must be a folder of Aceso's profile CSVs")
    return sorted(file.name for file in Path(folder).iterdir())


def _pairs(path: Path) -> list[tuple[float, float]]:
    """Return the two columns below the header; messages below one MiB are left out, their size is not known."""
    found = []
    for number, line in enumerate(read_text(path, MAX_BYTES).splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if number == 1 or not line.strip():
            continue
        if len(cells) < 2:
            raise DataFileError(path, "a row must have two cells", line=number)
        size, value = (_number(cell, path, number) for cell in cells[:2])
        if value <= 0:
            raise DataFileError(path, f"the second cell must be positive, got {value}", line=number)
        if size > 0:
            found.append((size, value))
    return found


def _number(cell: str, path: Path, line: int) -> float:
    try:
        value = resolve_scalar(cell)
    except ValueError as error:
        raise DataFileError(path, str(error), line=line) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise DataFileError(path, f"must be a number of 0 or more, got {short(cell)!r}", line=line)
    return float(value)
