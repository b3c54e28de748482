"""JSON without duplicate keys, NaN and infinities."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from datafiles.errors import DataFileError
from datafiles.values import MAX_INTEGER, MAX_VALUES, check_integer, short

_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s"{}\[\]:,]+', re.DOTALL)


class _DuplicateKeyError(Exception):
    """A JSON object names a key twice; the decoder's hook does not know on which line."""


def parse_json(text: str, source: str, max_depth: int) -> Any:
    def refuse_constant(name: str) -> NoReturn:
        line = _line_of_json_token(text, name)
        raise DataFileError(source, f"a number must be finite, got {name}; leave the key out", line=line)

    try:
        value = json.loads(text, object_pairs_hook=_unique_pairs, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise DataFileError(source, f"malformed JSON: {error.msg}", line=error.lineno) from None
    except _DuplicateKeyError as error:
        key = str(error.args[0])
        message = f"duplicate key {short(key)!r}; keep one of them"
        raise DataFileError(source, message, line=_line_of_duplicate_key(text, key)) from None
    except RecursionError:
        raise DataFileError(source, f"nesting must be at most {max_depth} deep") from None
    except DataFileError:
        raise
    except ValueError:  # Python's limit on the digits of an integer
        raise DataFileError(source, f"an integer must lie within +-{MAX_INTEGER}") from None
    _check_json_values(value, source, max_depth)
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return mapping


def _check_json_values(root: Any, source: str, max_depth: int) -> None:
    # Each entry: value, depth, and its place as a linked list (parent's place, key), which is cheap to build.
    todo: list[tuple[Any, int, tuple[Any, Any] | None]] = [(root, 0, None)]
    num_values = 0
    while todo:
        value, depth, place = todo.pop()
        num_values += 1
        if num_values > MAX_VALUES:
            raise DataFileError(source, f"a file must hold at most {MAX_VALUES} values")
        if isinstance(value, str):
            _check_json_string(value, source, place)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise DataFileError(
                    source, f"{_place(place)}: a number must be finite, got one beyond 1.8e308"
                )
        elif isinstance(value, int):
            try:
                check_integer(value)
            except ValueError as error:
                raise DataFileError(source, f"{_place(place)}: {error}") from None
        elif isinstance(value, (dict, list)):
            if depth >= max_depth:
                raise DataFileError(source, f"nesting must be at most {max_depth} deep")
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in pairs:
                if isinstance(key, str):
                    _check_json_string(key, source, place)
                todo.append((item, depth + 1, (place, key)))


def _check_json_string(text: str, source: str, place: tuple[Any, Any] | None) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataFileError(source, f"{_place(place)}: half a surrogate pair is not text") from None


def _place(place: tuple[Any, Any] | None) -> str:
    keys: list[str] = []
    while place is not None:
        place, key = place
        keys.append(short(str(key)))
    return ascii(".".join(reversed(keys)))[1:-1] or "top level"


def _line_of_json_token(text: str, wanted: str) -> int | None:
    for token in _JSON_TOKEN.finditer(text):
        if token.group() == wanted:
            return text.count("\n", 0, token.start()) + 1
    return None


def _line_of_duplicate_key(text: str, key: str) -> int | None:
    """Return the line where an object names ``key`` for the second time."""
    num_seen = [0]
    last: re.Match[str] | None = None
    for token in _JSON_TOKEN.finditer(text):
        mark = token.group()
        if mark == "{":
            num_seen.append(0)
        elif mark == "}" and len(num_seen) > 1:
            num_seen.pop()
        elif mark == ":" and last is not None and json.loads(last.group()) == key:
            num_seen[-1] += 1
            if num_seen[-1] > 1:
                return text.count("\n", 0, last.start()) + 1
        last = token
    return None
