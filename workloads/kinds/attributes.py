"""Typed access to an operator's attributes, and the few sizes many kinds derive from local shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from workloads.kinds.base import Attributes, Local, Shape


def integer(attributes: Attributes, name: str, default: int | None = None) -> int:
    """Return attribute ``name`` as an integer.

    Raises:
        ValueError: If it is absent and has no default, or is not an integer.
    """
    value = attributes.get(name, default)
    if type(value) is not int:
        raise ValueError(f"attribute {name!r} must be an integer, got {value!r}")
    return value


def real(attributes: Attributes, name: str, default: float | None = None) -> float:
    """Return attribute ``name`` as a float.

    Raises:
        ValueError: If it is absent and has no default, or is not a number.
    """
    value = attributes.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"attribute {name!r} must be a number, got {value!r}")
    return float(value)


def flag(attributes: Attributes, name: str, default: bool = False) -> bool:
    """Return attribute ``name`` as a boolean.

    Raises:
        ValueError: If it is not a boolean.
    """
    value = attributes.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"attribute {name!r} must be true or false, got {value!r}")
    return value


def require_rank(kind: str, shape: Shape, rank: int, words: str) -> None:
    """Raise ValueError unless ``shape`` has ``rank`` dimensions; ``words`` names them."""
    if len(shape) != rank:
        raise ValueError(f"{kind} needs an input of shape {words}, got {shape}")


def size_bytes(local: Local, shapes: Sequence[Shape]) -> float:
    """Return bytes of activation-typed tensors of these shapes."""
    return float(local.element_bytes * sum(prod(shape) for shape in shapes))
