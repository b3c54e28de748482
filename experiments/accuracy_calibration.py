"""Which measured rows constants were fitted on: such a row is never reported.

Two places say so: ``accuracy_data/calibration_rows.yaml`` lists rows by fit, and any text in the hardware
constants or runtimes may name rows as ``file.csv#3`` or ``file.csv#1,5,9-20``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import hardware_models
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated

FILE = Path(__file__).parent / "accuracy_data" / "calibration_rows.yaml"
CONSTANTS = Path(hardware_models.__file__).parent
_NAMED = re.compile(r"([\w./-]+\.(?:csv|json|yaml))#(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")
MAX_RANGE = 100_000


class Fit(FileModel):
    """One fit.

    Attributes:
        constants: What was fitted.
        source: File that the rows are in, as case ids spell it.
        rows: Row numbers.
    """

    constants: Annotated[str, Field(min_length=1, max_length=400)]
    source: Annotated[str, Field(min_length=1, max_length=200)]
    rows: tuple[int, ...]


class FitsFile(FileModel):
    """The file's top level."""

    fits: tuple[Fit, ...]


@cache
def calibration_rows() -> frozenset[str]:
    """Return the ids of all rows that constants were fitted on."""
    found = {f"{fit.source}#{row}" for fit in _fits() for row in fit.rows}
    for path in sorted([*CONSTANTS.glob("*.yaml"), *CONSTANTS.glob("*/*.yaml")]):
        found |= set(named_rows(_texts(load_mapping(path))))
    return frozenset(found)


def _fits() -> tuple[Fit, ...]:
    return validated(FitsFile, load_mapping(FILE), "calibration_rows.yaml").fits


def named_rows(texts: Iterable[str]) -> Iterator[str]:
    """Yield the row ids that texts name.

    >>> list(named_rows(["fitted on a/b.csv#1,3-4 by hand"]))
    ['a/b.csv#1', 'a/b.csv#3', 'a/b.csv#4']
    """
    for text in texts:
        for file, numbers in _NAMED.findall(text):
            for part in numbers.split(","):
                first, _, last = part.partition("-")
                stop = int(last or first)
                if stop - int(first) > MAX_RANGE:
                    raise ValueError(f"a range of rows must have at most {MAX_RANGE}, got {file}#{part}")
                yield from (f"{file}#{row}" for row in range(int(first), stop + 1))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
