"""Tensors that operators of one shape share: masks, buckets, encodings; made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Made = TypeVar("_Made")
_CACHES: list[Any] = []


def shared(make: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
    """Keep what a function makes, by its arguments, until `forget_shared`."""
    cached: Any = lru_cache(maxsize=32)(make)
    _CACHES.append(cached)
    return cached  # type: ignore[no-any-return]


def forget_shared() -> None:
    """Let go of all that is kept: fake tensors must not be met by real runs, nor the other way round."""
    for cached in _CACHES:
        cached.cache_clear()
