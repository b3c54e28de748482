"""Operator kinds. Importing this package registers all of them."""

from workloads.kinds import (
    activations,
    attention,
    convolution,
    embeddings,
    flash_attention,
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
    "flash_attention",
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
