"""Lists of allocations and frees of named tensors, and the words for what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SAVED = "saved activations"
SEGMENT = "segment inputs"
LOGITS = "logits"
TEMPORARY = "temporary activations"
GRADIENT = "activation gradients"
WORKSPACE = "workspace"
RECEIVED = "received tensors"
STAGE_OUTPUT = "stage outputs"
GATHERED = "gathered parameters"
GATHERED_INPUT = "gathered inputs"
UNSHARDED = "unsharded gradients"
RECOMPUTED = "recomputed activations"
PARAMETERS, GRADIENTS, OPTIMIZER_STATES = "parameters", "gradients", "optimizer states"
CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER_STATES,
    "optimizer workspace",
    SAVED,
    SEGMENT,
    LOGITS,
    TEMPORARY,
    GRADIENT,
    WORKSPACE,
    RECEIVED,
    STAGE_OUTPUT,
    GATHERED,
    GATHERED_INPUT,
    UNSHARDED,
    RECOMPUTED,
)
ACTIVATIONS = "activations"
"""All but the first three together."""


@dataclass
class Events:
    """Named tensors, their sizes and categories.

    Attributes:
        names: Number of each tensor.
        sizes: Bytes, by number.
        categories: Index into ``CATEGORIES``, by number.
        lasting: Tensors that all microbatches share.
    """

    names: dict[str, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    categories: list[int] = field(default_factory=list)
    lasting: set[int] = field(default_factory=set)

    def tensor(self, name: str, num_bytes: float, category: str, *, lasting: bool) -> int:
        """Return the number of a tensor, registering it."""
        if name not in self.names:
            self.names[name] = len(self.sizes)
            self.sizes.append(int(num_bytes))
            self.categories.append(CATEGORIES.index(category))
            if lasting:
                self.lasting.add(self.names[name])
        return self.names[name]


class Pass:
    """Events of one pass; allocating what lives and freeing what does not is ignored."""

    def __init__(self, table: Events) -> None:
        self.table = table
        self.tensors: list[int] = []
        self.is_alloc: list[bool] = []
        self.at_last: list[int] = []
        """Which events, all of them frees, happen in the last such pass of an iteration alone."""
        self._live: set[int] = set()
        self._freed: set[int] = set()

    def allocate(self, name: str, num_bytes: float, category: str, *, lasting: bool = False) -> None:
        if num_bytes <= 0:
            return
        tensor = self.table.tensor(name, num_bytes, category, lasting=lasting)
        if tensor in self._live:
            return
        self._live.add(tensor)
        self._freed.discard(tensor)
        self.tensors.append(tensor)
        self.is_alloc.append(True)

    def free(self, name: str) -> None:
        tensor = self.table.names.get(name)
        if tensor is None or tensor in self._freed:
            return
        self._live.discard(tensor)
        self._freed.add(tensor)
        self.tensors.append(tensor)
        self.is_alloc.append(False)

    def free_at_last(self, name: str) -> None:
        """Free what outlives passes of its kind but the last of an iteration."""
        count = len(self.tensors)
        self.free(name)
        self.at_last += range(count, len(self.tensors))

    def allocate_each(self, name: str, sizes: Sequence[int], category: str) -> None:
        for number, size in enumerate(sizes):
            self.allocate(f"{name} {number}", size, category)

    def free_each(self, name: str, sizes: Sequence[int]) -> None:
        for number in range(len(sizes)):
            self.free(f"{name} {number}")

    def take_or_give(self, name: str, num_bytes: int, category: str) -> None:
        """Allocate, or free where bytes are below 0."""
        if num_bytes < 0:
            self.free(name)
        else:
            self.allocate(name, num_bytes, category)
