"""What is at hand while operators run, and what a microbatch keeps between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from validation.execution.operator_call import Call, Slots
from validation.execution.wiring import CopyKey, Uses, Wire

Values = dict[str, torch.Tensor]
Segment = tuple[int, int]


@dataclass
class Kept:
    """What a recompute segment keeps of the tensors that enter it.

    Attributes:
        sources: Tensors as they were made.
        reduced: Copies after their reductions, which are not repeated.
        copies: Copies that an operator before the segment made.
    """

    sources: Values = field(default_factory=dict)
    reduced: dict[CopyKey, torch.Tensor] = field(default_factory=dict)
    copies: dict[CopyKey, torch.Tensor] = field(default_factory=dict)


@dataclass
class Pass:
    """Tensors at hand while operators run one after the other.

    Attributes:
        values: Tensors as they were made.
        uses: Reads to come; what has none is let go.
        copies: Tensors in other layouts, while they have readers.
        reduced: Copies whose reductions are done already (recomputation).
        pinned: Tensors that must not be reduced in place.
    """

    values: Values
    uses: Uses
    copies: dict[CopyKey, torch.Tensor] = field(default_factory=dict)
    reduced: dict[CopyKey, torch.Tensor] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)

    def read(self, tensor: str) -> torch.Tensor:
        """Return a tensor as it was made; the last read lets go of it."""
        value = self.values[tensor]
        self.uses.sources[tensor] -= 1
        if not self.uses.sources[tensor]:
            del self.values[tensor]
        return value

    def read_copy(self, key: CopyKey) -> torch.Tensor:
        """Return a copy that is there; the last read lets go of it."""
        value = self.copies[key]
        self.uses.copies[key] -= 1
        if not self.uses.copies[key]:
            del self.copies[key]
        return value

    def add(self, tensor: str, value: torch.Tensor) -> None:
        """Add an output, unless nobody reads it."""
        if self.uses.sources.get(tensor):
            self.values[tensor] = value


@dataclass
class InFlight:
    """What a microbatch keeps between its forward and its backward.

    Attributes:
        calls: Operators waiting for their backward.
        kept: Of each recompute segment.
        slots: What the operators of each segment save.
        gathered_from: Sources of copies that are gathered again for backward.
        regathered: Those copies, and how many operators still need them.
    """

    calls: dict[int, Call] = field(default_factory=dict)
    kept: dict[Segment, Kept] = field(default_factory=dict)
    slots: dict[Segment, Slots] = field(default_factory=dict)
    gathered_from: dict[CopyKey, tuple[Wire, torch.Tensor, int]] = field(default_factory=dict)
    regathered: dict[CopyKey, torch.Tensor] = field(default_factory=dict)
