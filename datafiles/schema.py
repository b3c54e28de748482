"""Checking a mapping against a pydantic model, with messages for the file's author."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from datafiles.errors import DataFileError
from datafiles.names import nearest

MAX_REPORTED = 20
"""Errors listed in one message; further ones are counted."""

Model = TypeVar("Model", bound=BaseModel)


class FileModel(BaseModel):
    """Base class of everything that is written in a data file.

    Frozen; unknown keys and non-finite numbers are refused; nothing is coerced: ``"8"`` is not a
    number, ``1`` not a boolean. From a file (`validated`), lists become tuples, strings become
    enum members and ``32e9`` is a valid integer. In Python, construct with the field's own types.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        populate_by_name=True,
    )


def file_model(
    of: type, *, without: Collection[str] = (), required: Collection[str] = (), **fields: Any
) -> type[FileModel]:
    """Return the file format of a dataclass: its fields, with their types and defaults.

    Args:
        of: The dataclass; bounds of numbers are in its annotations.
        without: Fields that no file has.
        required: Fields that a file must have though the dataclass has a default.
        fields: Types of other fields, or in place of the dataclass's own; a tuple is a type and a default.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Card:
    ...     bytes_per_s: float
    ...     ports: int = 1
    >>> validated(file_model(Card), {"bytes_per_s": 1e9}, "card.yaml").model_dump()
    {'bytes_per_s': 1000000000.0, 'ports': 1}
    """
    hints = get_type_hints(of, include_extras=True)
    own: dict[str, Any] = {
        field.name: (hints[field.name], ... if field.name in required or field.default is MISSING else field.default)
        for field in dataclasses.fields(of)
        if field.name not in without
    }
    others = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()}
    return create_model(f"{of.__name__}File", __base__=FileModel, **{**own, **others})


def validated(
    model_class: type[Model], mapping: Mapping[str, Any], source: str, *, names: Mapping[str, str] | None = None
) -> Model:
    """Return the model that a mapping read from a file describes.

    Args:
        model_class: What the file must hold, usually a `FileModel`.
        mapping: Mappings with string keys, lists, strings, numbers, booleans, None.
        source: Name for messages, usually the path.
        names: What the file calls a field, where that is not the field's own name; for messages.

    Returns:
        The model.

    Raises:
        DataFileError: Listing every error with its place, what must hold and what came.

    >>> class Link(FileModel):
    ...     bytes_per_s: float
    >>> validated(Link, {"bytes_per_sec": 1e9}, "link.yaml")
    Traceback (most recent call last):
    datafiles.errors.DataFileError: link.yaml: 2 errors
      bytes_per_s: is required, but missing
      bytes_per_sec: unknown key, did you mean 'bytes_per_s'? known: bytes_per_s
    """
    # pydantic's JSON mode is the one that is strict about numbers yet lets a list be a tuple.
    try:
        return model_class.model_validate_json(json.dumps(mapping))
    except ValidationError as error:
        first = error
    repaired, num_repaired = _with_whole_floats_as_integers(mapping, first)
    if num_repaired:
        try:
            return model_class.model_validate_json(json.dumps(repaired))
        except ValidationError as error:
            first = error
    raise DataFileError(source, _message(model_class, first, names or {})) from None


def _with_whole_floats_as_integers(mapping: Mapping[str, Any], error: ValidationError) -> tuple[Any, int]:
    """Copy the mapping with ``32e9`` replaced by an integer wherever the model wanted one."""
    repaired = json.loads(json.dumps(mapping))
    num_repaired = 0
    for detail in error.errors(include_url=False, include_context=False):
        value = detail["input"]
        if detail["type"] != "int_type" or not isinstance(value, float) or value != value // 1:
            continue
        target = repaired
        location = detail["loc"]
        try:
            for part in location[:-1]:
                target = target[part]
            if type(target[location[-1]]) is float:
                target[location[-1]] = int(value)
                num_repaired += 1
        except (KeyError, IndexError, TypeError):
            continue  # a union: pydantic's place then names members of the union too
    return repaired, num_repaired


_OF_A_UNION = re.compile(r"constrained-\w+|(tuple|list|dict|literal)\[.*\]")
"""What pydantic puts into a place for a member of a union, which is in no file."""


_WORD = re.compile(r"\w+")


def _message(model_class: type[BaseModel], error: ValidationError, names: Mapping[str, str]) -> str:
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue  # pydantic counts only the values that are right; the wrong ones are listed themselves
        named = [_short(str(part)) for part in detail["loc"] if not _OF_A_UNION.fullmatch(str(part))]
        sentence = _sentence(model_class, detail)
        if not named:  # of several fields, which the sentence names; it quotes no text of the file
            sentence = _WORD.sub(lambda word: names.get(word[0], word[0]), sentence)
        place = ".".join([names.get(named[0], named[0]), *named[1:]]) if named else "top level"
        lines[f"{place}: {sentence}"] = None
    listed = list(lines)
    if len(listed) == 1:
        return listed[0]
    more = [f"and {len(listed) - MAX_REPORTED} more"] if len(listed) > MAX_REPORTED else []
    return "\n  ".join([f"{len(listed)} errors", *listed[:MAX_REPORTED], *more])


_LENGTHS = {
    "string_too_short": ("min_length", "at least", "character"),
    "string_too_long": ("max_length", "at most", "character"),
    "too_short": ("min_length", "at least", "value"),
    "too_long": ("max_length", "at most", "value"),
}
"""pydantic's kinds of errors that are about a length: the bound's name in their context, and words for it."""


def _sentence(model_class: type[BaseModel], detail: Any) -> str:
    kind = detail["type"]
    if kind == "missing":
        return "is required, but missing"
    if kind == "extra_forbidden":
        *parents, key = detail["loc"]
        known = _known_keys(model_class, tuple(parents))
        return f"unknown key, {nearest(str(key), known)}"
    if kind in _LENGTHS:
        bound, words, unit = _LENGTHS[kind]
        limit = detail["ctx"][bound]
        return f"must have {words} {limit} {unit if limit == 1 else f'{unit}s'}, got {_shown(detail['input'])}"
    text = str(detail["msg"])
    for prefix in ("Value error, ", "Assertion failed, "):
        if text.startswith(prefix):
            text = text.removeprefix(prefix)
            return (
                text
                if isinstance(detail["input"], (dict, list))
                else f"{text}, got {_shown(detail['input'])}"
            )
    text = text.replace("Input should be", "must be").replace("a valid array", "a list")
    text = text.replace("a valid dictionary", "a mapping").replace("an object", "a mapping")
    return f"{text}, got {_shown(detail['input'])}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with keys {_short(', '.join(map(str, value)))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    if type(value) is int and abs(value) >= 2**63:  # was 1e308 in the file
        return f"{value:.6g}"
    return _short(repr(value))


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."


def _known_keys(model_class: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the keys allowed at a place, walking the types as pydantic walked the values."""
    candidates: list[Any] = [model_class]
    for part in location:
        below: list[Any] = []
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                fields = candidate.model_fields.items()
                below += [field.annotation for name, field in fields if _key(name, field) == part]
            elif get_origin(candidate) in (list, tuple, set, frozenset):
                below += [argument for argument in get_args(candidate) if argument is not Ellipsis]
            elif get_args(candidate):
                below.append(get_args(candidate)[-1])  # the values of a mapping
        # A part that leads nowhere is a tag that pydantic adds for a member of a union.
        candidates = [member for candidate in below for member in _members(candidate)] or candidates
    return [
        _key(name, field)
        for candidate in candidates
        if isinstance(candidate, type) and issubclass(candidate, BaseModel)
        for name, field in candidate.model_fields.items()
    ]


def _key(name: str, field: Any) -> str:
    return field.alias or name


def _members(annotation: Any) -> list[Any]:
    """Return the types an annotation stands for, without Annotated, None and unions."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [] if annotation is types.NoneType else [annotation]
