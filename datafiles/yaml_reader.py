"""YAML, built from parser events with a stack of our own.

No constructor ever runs and no input can exhaust Python's recursion.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from datafiles.errors import DataFileError
from datafiles.values import MAX_VALUES, described, resolve_scalar, short

_YamlLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Open:
    """A mapping or list whose end has not been read yet."""

    __slots__ = ("container", "key", "lines")

    def __init__(self, container: dict[str, Any] | list[Any]) -> None:
        self.container = container
        self.key: str | None = None
        self.lines: dict[str, int] = {}


def parse_yaml(text: str, source: str, max_depth: int) -> Any:
    try:
        return _built_from_events(yaml.parse(text, Loader=_YamlLoader), source, max_depth)
    except yaml.reader.ReaderError as error:
        position = error.position if isinstance(error.position, int) else 0
        found = error.character
        character = f"U+{found:04X}" if isinstance(found, int) else repr(found)
        line = text.count("\n", 0, position) + 1
        message = f"malformed YAML: character {character} is not allowed ({error.reason})"
        raise DataFileError(source, message, line=line) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        parts = [part for part in (error.context, error.problem) if part]
        line_found = None if mark is None else mark.line + 1
        raise DataFileError(source, f"malformed YAML: {', '.join(parts)}", line=line_found) from None
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise DataFileError(source, "malformed YAML: half a surrogate pair is not text", line=line) from None
    except yaml.YAMLError as error:
        raise DataFileError(source, f"malformed YAML: {error}") from None


def _built_from_events(events: Iterator[Any], source: str, max_depth: int) -> Any:
    stack: list[_Open] = []
    root: Any = None
    num_documents = num_values = 0
    for event in events:
        line = event.start_mark.line + 1
        kind = type(event)
        if kind is yaml.DocumentStartEvent:
            num_documents += 1
            if num_documents > 1:
                raise DataFileError(source, "a file must hold one document, got a second '---'", line=line)
            continue
        if kind is yaml.AliasEvent:
            message = f"aliases are not allowed, got *{short(event.anchor)}; write the value out"
            raise DataFileError(source, message, line=line)
        if kind is yaml.SequenceEndEvent or kind is yaml.MappingEndEvent:
            stack.pop()
            continue
        if not isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            continue  # ends of the stream and of documents
        if event.anchor is not None:
            message = f"anchors are not allowed, got &{short(event.anchor)}; write the value out"
            raise DataFileError(source, message, line=line)
        if event.tag is not None:
            raise DataFileError(source, f"tags are not allowed, got {short(event.tag)}; remove it", line=line)
        num_values += 1
        if num_values > MAX_VALUES:
            raise DataFileError(source, f"a file must hold at most {MAX_VALUES} values", line=line)
        parent = stack[-1] if stack else None
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            try:
                value = resolve_scalar(event.value) if event.implicit[0] else event.value
            except ValueError as error:
                what = "" if parent is None or parent.key is None else f"{short(parent.key)}: "
                raise DataFileError(source, f"{what}{error}", line=line) from None
        else:
            value = {} if kind is yaml.MappingStartEvent else []
            if len(stack) >= max_depth:
                raise DataFileError(source, f"nesting must be at most {max_depth} deep", line=line)
            if parent is not None and isinstance(parent.container, dict) and parent.key is None:
                raise DataFileError(source, "a key must be a string, got a list or mapping", line=line)
            stack.append(_Open(value))
        if parent is None:
            root = value
        elif isinstance(parent.container, list):
            parent.container.append(value)
        elif parent.key is None:
            parent.key = _checked_key(value, event, parent, source, line)
        else:
            parent.container[parent.key] = value
            parent.key = None
    return root


def _checked_key(key: object, event: Any, parent: _Open, source: str, line: int) -> str:
    if not isinstance(key, str):
        message = f"a key must be a string, got {described(key)} {short(event.value)}; quote it"
        raise DataFileError(source, message, line=line)
    if key in parent.lines:
        message = f"duplicate key {short(key)!r}, first on line {parent.lines[key]}; keep one of them"
        raise DataFileError(source, message, line=line)
    parent.lines[key] = line
    return key
