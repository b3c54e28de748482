"""Operator kinds. Importing this package registers all of them."""

from workloads.kinds import activations, attention, embeddings, linear, losses, norms, opaque, windows
from workloads.kinds.registry import all_kinds, kind_named, register

__all__ = [
    "activations",
    "all_kinds",
    "attention",
    "embeddings",
    "kind_named",
    "linear",
    "losses",
    "norms",
    "opaque",
    "register",
    "windows",
]
