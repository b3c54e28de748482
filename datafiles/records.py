"""Results that are kept to go on from: read as they were written, or not at all.

A record states the SHA-256 of its content, whatever its layout. One that was cut off, changed by hand or written by
another program is as good as none: what it held is made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.writer import dump_json, write_text_atomically

DIGEST = "sha256"


def write_record(path: str | Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Write a record whole or not at all, in JSON.

    Args:
        path: The file.
        content: Plain data, no number infinite.

    Returns:
        The content as it will be read: lists for tuples.
    """
    plain: dict[str, Any] = json.loads(dump_json(content))
    write_text_atomically(path, dump_json({**plain, DIGEST: _digest(plain)}))
    return plain


def read_record(path: str | Path) -> dict[str, Any] | None:
    """Return the content of a record, or None if there is none, or another than was written."""
    try:
        content = load_mapping(path)
    except DataFileError:
        return None
    return content if content.pop(DIGEST, None) == _digest(content) else None


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
