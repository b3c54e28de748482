"""The one reader of data files: YAML, JSON and CSV, each also as ``.gz``.

What is accepted is the common part of YAML 1.2 (core schema) and JSON: mappings with string
keys, lists, strings, finite numbers, booleans, null. Aliases, anchors, tags, duplicate keys,
several documents, NaN and infinities are refused, and size, decompressed size, depth and number
of values are capped. Any byte string ends in success or a `DataFileError`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from datafiles.content import read_text
from datafiles.errors import DataFileError
from datafiles.json_reader import parse_json
from datafiles.tables import load_table
from datafiles.values import MAX_BYTES, MAX_DEPTH, described
from datafiles.yaml_reader import parse_yaml

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Format", "load_mapping", "load_table", "parse_mapping"]

Format = Literal["yaml", "json"]


def load_mapping(
    path: str | Path, *, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """Read a YAML file, or a JSON file if its name ends in ``.json`` (or ``.json.gz``).

    Args:
        path: The file; ``.gz`` at the end of its name means gzip.
        max_bytes: Cap on the size in bytes, before and after decompression.
        max_depth: Cap on nesting.

    Returns:
        The top-level mapping, keys in file order.

    Raises:
        DataFileError: If the file cannot be read or breaks a rule.
    """
    text = read_text(path, max_bytes)
    stem = Path(path).name.lower().removesuffix(".gz")
    file_format: Format = "json" if stem.endswith(".json") else "yaml"
    return parse_mapping(text, source=str(path), format=file_format, max_depth=max_depth)


def parse_mapping(
    text: str, *, source: str, format: Format = "yaml", max_depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """Parse a YAML or JSON document whose top level is a mapping.

    Args:
        text: The document.
        source: Name for messages, usually the path.
        format: ``yaml`` or ``json``.
        max_depth: Cap on nesting.

    Returns:
        The mapping, keys in document order.

    Raises:
        DataFileError: If the document breaks a rule.

    >>> parse_mapping("bandwidth_bytes_per_s: 12.5e9", source="x")
    {'bandwidth_bytes_per_s': 12500000000.0}
    """
    text = text.removeprefix("\ufeff")
    value = parse_json(text, source, max_depth) if format == "json" else parse_yaml(text, source, max_depth)
    if not isinstance(value, dict):
        raise DataFileError(
            source, f"the top level must be a mapping (key: value), got {described(value)}", line=1
        )
    return value
