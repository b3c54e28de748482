"""Line numbers for errors in a spec: from a place such as ``grid.model.0`` to the line it stands on."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from datafiles.errors import DataFileError

Place = tuple[str | int, ...]

MAX_REPORTED = 20
"""Errors listed in one message; further ones are counted."""

_PLACED = re.compile(r"(?P<indent>\s*)(?P<place>[^\s:]+)(?P<rest>: .*)")


class SpecLines:
    """The lines of a document that `datafiles.loader` has accepted.

    Args:
        text: The document.
        source: Name for messages.
    """

    def __init__(self, text: str, source: str) -> None:
        self._source = source
        try:
            self._root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError:  # JSON that is no YAML (tabs): errors then come without lines
            self._root = None

    def line(self, place: Sequence[str | int]) -> int | None:
        """Return the line of a place, or of the nearest thing around it; None where unknown.

        >>> SpecLines("grid:\\n  model:\\n    - a\\n    - b", "x").line(("grid", "model", 1))
        4
        """
        node, line = self._root, None
        for part in place:
            found = _child(node, str(part))
            if found is None:
                break
            key, node = found
            line = key.start_mark.line + 1
        return line

    def error(self, errors: Sequence[tuple[Place, str]]) -> DataFileError:
        """Return one error that lists all."""
        listed = [(self.line(place), ".".join(map(str, place)), message) for place, message in errors]
        if len(listed) == 1:
            line, where, message = listed[0]
            return DataFileError(self._source, f"{where}: {message}", line=line)
        texts = [f"{_prefix(line)}{where}: {message}" for line, where, message in listed[:MAX_REPORTED]]
        more = [f"and {len(listed) - MAX_REPORTED} more"] if len(listed) > MAX_REPORTED else []
        return DataFileError(self._source, "\n  ".join([f"{len(listed)} errors", *texts, *more]))

    def numbered(self, error: DataFileError) -> DataFileError:
        """Return an error of `datafiles.schema.validated` with line numbers."""
        first, *others = error.message.split("\n")
        if not others:
            found = _PLACED.fullmatch(first)
            line = self.line(found["place"].split(".")) if found else None
            return DataFileError(self._source, first, line=line)
        return DataFileError(self._source, "\n".join([first, *map(self._numbered_line, others)]))

    def _numbered_line(self, text: str) -> str:
        found = _PLACED.fullmatch(text)
        if not found:
            return text
        return f"{found['indent']}{_prefix(self.line(found['place'].split('.')))}{found['place']}{found['rest']}"


def _prefix(line: int | None) -> str:
    return "" if line is None else f"line {line}, "


def _child(node: yaml.Node | None, part: str) -> tuple[yaml.Node, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return key, value
    if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)], node.value[int(part)]
    return None
