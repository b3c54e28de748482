"""From a path to text: size caps, gzip, UTF-8."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from datafiles.errors import DataFileError


def read_text(path: str | Path, max_bytes: int) -> str:
    source = str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        looked = "" if Path(path).is_absolute() else f"; looked in {Path.cwd()}"
        raise DataFileError(source, f"no such file{looked}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DataFileError(source, f"cannot be read: {reason}") from None
    _check_size(source, len(data), max_bytes, "the file")
    if source.lower().endswith(".gz"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
                data = unpacked.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataFileError(source, f"is not a valid gzip file: {error}") from None
        _check_size(source, len(data), max_bytes, "the decompressed content")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"must be UTF-8 text, got byte 0x{data[error.start]:02x} at offset {error.start}"
        raise DataFileError(source, message, line=line) from None


def _check_size(source: str, size: int, max_bytes: int, what: str) -> None:
    if size > max_bytes:
        raise DataFileError(
            source, f"{what} must have at most {max_bytes} bytes; split it or drop what is not read"
        )
