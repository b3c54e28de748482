"""Which scalars and sizes a data file may hold; shared by all readers and the writer."""

from __future__ import annotations

import math
import re

MAX_BYTES = 16 * 2**20
"""Cap on a file's size, before and after decompression, in bytes: far above any preset or plan."""

MAX_DEPTH = 64
"""Cap on nesting: a plan needs 8."""

MAX_VALUES = 2_000_000
"""Cap on values in a file (about 400 MB as Python objects), and on cells in a table."""

MAX_INTEGER = 2**63 - 1
"""Largest magnitude of an integer: what an int64 array holds."""

# YAML 1.2.2, section 10.3.2 (core schema). PyYAML's own resolver follows YAML 1.1, which reads `yes`
# as true and `1e9` as a string.
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_NON_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII)
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip


def resolve_scalar(text: str) -> str | int | float | bool | None:
    """Return the value that a plain (unquoted) YAML scalar stands for.

    Raises:
        ValueError: If it stands for a number that is not finite or outside the int64 range.

    Source:
        YAML 1.2.2, section 10.3.2, core schema.

    >>> [resolve_scalar(text) for text in ("4e-6", "0x10", "1_000", "yes", "null")]
    [4e-06, 16, '1_000', 'yes', None]
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 30:  # before int(): conversion is quadratic, and Python refuses 4,300 digits
            raise ValueError(f"an integer must lie within +-{MAX_INTEGER}, got one of {len(text)} digits")
        integer = int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
        check_integer(integer)
        return integer
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError(f"a number must be finite, got {short(text)}")
        return number
    if _NON_FINITE.fullmatch(text):
        raise ValueError(f"a number must be finite, got {text}; leave the key out or give its value")
    return text


def check_integer(integer: int) -> None:
    if abs(integer) > MAX_INTEGER:
        raise ValueError(f"an integer must lie within +-{MAX_INTEGER}; write larger numbers as floats (1e20)")


def described(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return "a number"
    return "a string" if isinstance(value, str) else "a list" if isinstance(value, list) else "a mapping"


def short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
