"""One torch builder per operator kind: the same definition that yields costs is executed.

Importing this module makes all builders known. ``NOT_EXECUTABLE`` names the kinds that simulate only.
"""

from __future__ import annotations

from validation.kinds import attention, dense, elementwise, images, losses, recurrent, windows
from validation.kinds.operator_context import BUILDERS, Forward, OperatorContext

__all__ = [
    "BUILDERS",
    "NOT_EXECUTABLE",
    "attention",
    "build",
    "dense",
    "elementwise",
    "images",
    "losses",
    "recurrent",
    "why_not",
    "windows",
]

NOT_EXECUTABLE = {"opaque": "it is a row of somebody's profile: times and sizes without a definition"}


def build(context: OperatorContext) -> Forward:
    """Return what runs an operator on this rank.

    Raises:
        ValueError: If the kind has no builder, or the builder refuses the operator.
    """
    kind = context.operator.kind
    if kind not in BUILDERS:
        raise ValueError(f"operator {context.operator.name!r} of kind {kind} cannot be executed: {why_not(kind)}")
    return BUILDERS[kind](context)


def why_not(kind: str) -> str:
    """Return why a kind without a builder cannot be executed."""
    return NOT_EXECUTABLE.get(kind, "it has no torch builder")
