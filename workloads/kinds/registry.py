"""Kinds by name."""

from __future__ import annotations

from difflib import get_close_matches

from workloads.kinds.base import Kind

_KINDS: dict[str, Kind] = {}


def register(kind: type[Kind]) -> type[Kind]:
    """Class decorator: make a kind known under its ``name``."""
    if kind.name in _KINDS:
        raise ValueError(f"operator kind {kind.name!r} is registered twice")
    _KINDS[kind.name] = kind()
    return kind


def kind_named(name: str) -> Kind:
    """Return the kind called ``name``.

    Raises:
        ValueError: If there is none; the message lists the nearest names.
    """
    try:
        return _KINDS[name]
    except KeyError:
        near = get_close_matches(name, _KINDS, n=3) or sorted(_KINDS)
        raise ValueError(f"unknown operator kind {name!r}; did you mean one of {', '.join(near)}?") from None


def all_kinds() -> dict[str, Kind]:
    """Return every registered kind by name."""
    return dict(_KINDS)
