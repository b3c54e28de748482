"""A dictionary that forgets its oldest entries: what a problem's plans have in common, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")

MAX_STAGES = 512
"""Stages of plans that are kept, for the next plan that has the same."""
MAX_PLANS = 8
"""Plans whose programs are kept bound to devices, for the next simulation of the same plan."""


class Kept:
    """Values by key, the oldest dropped when there are too many.

    Args:
        max_entries: Most entries held.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._values: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        """Forget everything."""
        self._values.clear()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the value of a key, made if it is not there."""
        if key in self._values:
            found: Value = self._values[key]
            return found
        made = make()
        if len(self._values) >= self.max_entries:
            for oldest in list(self._values)[: self.max_entries // 2]:
                del self._values[oldest]
        self._values[key] = made
        return made
