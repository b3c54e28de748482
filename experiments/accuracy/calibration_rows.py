"""Which measured rows constants were fitted on: such a row is never reported.

Two places say so: ``accuracy_data/calibration_rows.yaml`` lists rows by fit, and any text in the hardware
constants or runtimes may name rows as ``file.csv#3`` or ``file.csv#1,5,9-20``.

Constants count for every case, with two exceptions that the list states: those that the cases of some groups alone
have (``used_in``), and those that the cases of some groups have others in place of (``replaced_in``). So a row may be
reported where nothing saw it, though other cases of its table were calibrated on it, and never where something did.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import hardware_models
from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated

FILE = Path(__file__).parent.parent / "accuracy_data" / "calibration_rows.yaml"
CONSTANTS = Path(hardware_models.__file__).parent
_NAMED = re.compile(r"([\w./-]+\.(?:csv|json|yaml))#(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")
MAX_RANGE = 100_000


class Fit(FileModel):
    """One fit.

    Attributes:
        constants: What was fitted.
        source: File that the rows are in, as case ids spell it.
        rows: Row numbers.
        used_in: Groups whose cases alone have the constants; none: all have them.
        replaced_in: Groups whose cases have others in place of all of them.
        files: Files of the hardware constants whose texts name these rows for these constants.
    """

    constants: Annotated[str, Field(min_length=1, max_length=400)]
    source: Annotated[str, Field(min_length=1, max_length=200)]
    rows: tuple[int, ...]
    used_in: tuple[str, ...] = ()
    replaced_in: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def row_ids(self) -> frozenset[str]:
        """The rows as case ids name them."""
        return frozenset(f"{self.source}#{row}" for row in self.rows)

    def is_behind(self, groups: Collection[str]) -> bool:
        """Return whether a case in all of these groups has the constants."""
        if self.used_in and not set(self.used_in) & set(groups):
            return False
        return not groups or not set(groups) <= set(self.replaced_in)


class FitsFile(FileModel):
    """The file's top level."""

    fits: tuple[Fit, ...]


@cache
def calibration_rows(groups: tuple[str, ...] = ()) -> frozenset[str]:
    """Return the ids of all rows that constants of a case in these groups were fitted on.

    Args:
        groups: All groups of the case; none for a case that has what is shipped.
    """
    fits = _fits()
    found = {row_id for fit in fits if fit.is_behind(groups) for row_id in fit.row_ids}
    replaced = [fit for fit in fits if not fit.is_behind(groups)]
    for path in sorted([*CONSTANTS.glob("*.yaml"), *CONSTANTS.glob("*/*.yaml")]):
        named = set(named_rows(_texts(load_mapping(path))))
        for fit in replaced:
            if str(path.relative_to(CONSTANTS)) in fit.files:
                named -= fit.row_ids
        found |= named
    return frozenset(found)


def saw(row_id: str, groups: tuple[str, ...]) -> bool:
    """Return whether constants of a case were fitted on its row; what follows a space in its id is not the row's."""
    return not calibration_rows(groups).isdisjoint({row_id, row_id.partition(" ")[0]})


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
                if stop - int(first) >= MAX_RANGE:
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
