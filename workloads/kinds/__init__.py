"""Operator kinds. Importing this package registers all of them."""

from workloads.kinds import (
    activations,
    attention,
    convolution,
    embeddings,
    linear,
    losses,
    norms,
    opaque,
    pooling,
    recurrent,
    relative,
    windows,
)
from workloads.kinds.registry import all_kinds, kind_named, register

__all__ = [
    "activations",
    "all_kinds",
    "attention",
    "convolution",
    "embeddings",
    "kind_named",
    "linear",
    "losses",
    "norms",
    "opaque",
    "pooling",
    "recurrent",
    "register",
    "relative",
    "windows",
]
