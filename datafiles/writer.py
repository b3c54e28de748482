"""Writing data files: whole or not at all, and so that our own loader reads back the same values."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from datafiles.values import MAX_DEPTH, MAX_INTEGER, resolve_scalar

LINE_WIDTH = 100
"""Lists and mappings of plain values go on one line up to this many characters."""

DATA_ENDINGS = (".yaml", ".yml", ".json")
"""Of names of files that our own loader reads back as what they are."""

_MAX_FLOW_LEVELS = 3  # {devices: [0, 1], mesh: [[batch, 2], [column, 4]]}

# YAML parsers only look this far for the colon after a key (YAML 1.2.2, section 7.4.2: 1024 characters).
_MAX_KEY_CHARACTERS = 1000

# A subset of what YAML allows unquoted, the same inside and outside flow collections.
_PLAIN = re.compile(r"[A-Za-z0-9_/][A-Za-z0-9_./+()=*@%-]*( [A-Za-z0-9_./+()=*@%-]+)*", re.ASCII)
# Plain for us, but numbers, dates or booleans to readers of YAML 1.1.
_AMBIGUOUS = re.compile(r"[0-9_][0-9a-fA-F_.oOxXeE+-]*|(?i:y|n|yes|no|on|off)|.*\.(?i:inf|nan)", re.ASCII)

_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\0": "\\0"}


def check_ending(path: str | Path, endings: str | tuple[str, ...], what: str) -> None:
    """Refuse a name that says something else than is written.

    Args:
        path: The file.
        endings: Any of them, in small letters, such as ``.json.gz``; the first is proposed.
        what: Is written.

    Raises:
        ValueError: If the name does not end so.
    """
    file = Path(path)
    known = (endings,) if isinstance(endings, str) else endings
    if not file.name.lower().endswith(known):
        better = file.with_name(file.name.removesuffix(".gz")).with_suffix(known[0])
        raise ValueError(f"a {what} must be a file that ends in {' or '.join(known)}, got {path}; name it {better}")


def check_file(path: str | Path) -> None:
    """Refuse what no file may stand in the place of: a folder, or a device or pipe (``/dev/null``).

    Raises:
        ValueError: If the path is one.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        what = "the folder" if file.is_dir() else "the device or pipe"
        raise ValueError(f"output must be a file, got {what} {path}; name a file")


def write_text_atomically(path: str | Path, text: str) -> None:
    """Write a UTF-8 text file; whoever reads the path sees the old file or the new one."""
    write_bytes_atomically(path, text.encode())


def write_mapping(path: str | Path, mapping: Mapping[str, Any]) -> None:
    """Write a data file as its name says: JSON or YAML; whoever reads the path sees the old file or the new one.

    Raises:
        ValueError: If the name ends in none of DATA_ENDINGS, or a value could not be read back.
        OSError: If the file cannot be written.
    """
    check_ending(path, DATA_ENDINGS, "data file")
    is_json = Path(path).name.lower().endswith(".json")
    write_text_atomically(path, dump_json(mapping) if is_json else dump_yaml(mapping))


def write_bytes_atomically(path: str | Path, data: bytes) -> None:
    """Write a file; whoever reads the path sees the old file or the new one, never a part.

    Args:
        path: The file; its folder must exist. Of a link, the file that it points to is written.
        data: The content.

    Raises:
        OSError: If the file cannot be written (the error names it); the old one is then untouched.
        ValueError: If the path is a folder, a device or a pipe.
    """
    with replacing(path) as file:
        file.write(data)


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file to write into, which stands in the path's place once the block has ended; raises as above."""
    check_file(path)
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with suppress(OSError):  # where nothing can be written there is nothing to remove
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            words = f"cannot be written ({error.strerror}); choose another place"
            raise type(error)(error.errno, words, str(path)) from error
        raise


def dump_json(mapping: Mapping[str, Any]) -> str:
    """Return the mapping as indented JSON, keys in the order given.

    Raises:
        ValueError: If a number is not finite.
    """
    return json.dumps(mapping, indent=2, allow_nan=False) + "\n"


def dump_yaml(mapping: Mapping[str, Any]) -> str:
    """Return the mapping as YAML, keys in the order given.

    Short lists and mappings go on one line; `datafiles.loader.parse_mapping` reads back equal
    values of equal types, to the last bit of every number.

    Args:
        mapping: Mappings with string keys, lists or tuples, strings, finite numbers, booleans, None.

    Raises:
        ValueError: If a value could not be read back.

    >>> print(dump_yaml({"version": 1, "latency_s": 4e-6, "stages": [{"tp": 8, "devices": [0, 1]}]}), end="")
    version: 1
    latency_s: 4e-06
    stages:
      - {tp: 8, devices: [0, 1]}
    """
    if not mapping:
        return "{}\n"
    lines: list[str] = []
    _write_mapping(mapping, 0, 1, lines)
    return "\n".join(lines) + "\n"


def _write_mapping(mapping: Mapping[str, Any], indent: int, depth: int, lines: list[str]) -> None:
    for key, value in mapping.items():
        _write_entry(f"{' ' * indent}{_key(key)}:", value, indent, depth, lines)


def _write_entry(start: str, value: Any, indent: int, depth: int, lines: list[str]) -> None:
    """Write one value after ``key:``, on the same line where it fits."""
    flow = _flow(value, LINE_WIDTH - len(start) - 1)
    if flow is not None:
        lines.append(f"{start} {flow}")
        return
    _check_depth(depth)
    lines.append(start)
    if isinstance(value, Mapping):
        _write_mapping(value, indent + 2, depth + 1, lines)
    elif all(_is_scalar(item) for item in value):
        _write_wrapped(value, indent + 2, lines)
    else:
        _write_items(value, indent + 2, depth + 1, lines)


def _write_items(items: Sequence[Any], indent: int, depth: int, lines: list[str]) -> None:
    for item in items:
        start = f"{' ' * indent}-"
        flow = _flow(item, LINE_WIDTH - len(start) - 1)
        if flow is not None:
            lines.append(f"{start} {flow}")
            continue
        _check_depth(depth)
        below: list[str] = []
        if isinstance(item, Mapping):
            _write_mapping(item, indent + 2, depth + 1, below)
        elif all(_is_scalar(part) for part in item):
            _write_wrapped(item, indent + 2, below)
        else:
            _write_items(item, indent + 2, depth + 1, below)
        lines.append(f"{start} {below[0].lstrip(' ')}")
        lines.extend(below[1:])


def _write_wrapped(items: Sequence[Any], indent: int, lines: list[str]) -> None:
    """Write a long list of plain values as one flow list over several lines."""
    line = f"{' ' * indent}["
    for index, item in enumerate(items):
        text = _scalar(item) + ("]" if index == len(items) - 1 else ",")
        if len(line) + 1 + len(text) > LINE_WIDTH and len(line) > indent + 1:
            lines.append(line)
            line = f"{' ' * (indent + 1)}{text}"
        else:
            line += text if line.endswith("[") and len(line) == indent + 1 else f" {text}"
    lines.append(line)


def _flow(value: Any, width: int, max_levels: int = _MAX_FLOW_LEVELS) -> str | None:
    """Return the value on one line, or None if it is too long or too nested for that."""
    if _is_scalar(value):
        text = _scalar(value)
        return text if max_levels == _MAX_FLOW_LEVELS or len(text) <= width else None
    if not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    if max_levels == 0 or len(value) * 3 > width:
        return None
    starts = [f"{_key(key)}: " for key in value] if isinstance(value, Mapping) else [""] * len(value)
    items = value.values() if isinstance(value, Mapping) else value
    parts: list[str] = []
    left = width - 2
    for start, item in zip(starts, items, strict=True):
        # A mapping inside a line is hard to read; it gets lines of its own.
        inner = None if isinstance(item, Mapping) else _flow(item, left - len(start), max_levels - 1)
        if inner is None:
            return None
        parts.append(start + inner)
        left -= len(parts[-1]) + 2
    text = ", ".join(parts)
    if len(text) + 2 > width:
        return None
    return f"{{{text}}}" if isinstance(value, Mapping) else f"[{text}]"


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH - _MAX_FLOW_LEVELS:
        raise ValueError(f"nesting must be at most {MAX_DEPTH - _MAX_FLOW_LEVELS} deep to be read back")


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Mapping) and not _is_list(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"a key must be a string, got {key!r}")
    text = _string(key)
    if len(text) > _MAX_KEY_CHARACTERS:
        raise ValueError(
            f"a key must have at most {_MAX_KEY_CHARACTERS} characters, got {len(text)}: {key[:40]!r}..."
        )
    return text


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"an integer must lie within +-{MAX_INTEGER}, got {value:.3e}; pass a float")
        return int.__repr__(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a number must be finite to be written, got {value}")
        return float.__repr__(value)
    if isinstance(value, str):
        return _string(value)
    raise ValueError(
        f"a value must be a mapping, list, string, number, boolean or None, "
        f"got {type(value).__name__}: {value!r}"
    )


def _string(text: str) -> str:
    if _PLAIN.fullmatch(text) and not _AMBIGUOUS.fullmatch(text) and _reads_as_string(text):
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _reads_as_string(text: str) -> bool:
    try:
        return isinstance(resolve_scalar(text), str)
    except ValueError:
        return False


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("a string must be text, got half a surrogate pair")
    if character == " " or (character.isprintable() and code != 0xFEFF):
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
