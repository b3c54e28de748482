"""Inputs of a stage's operators in the layouts they want: converted once, kept by segments, gathered again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from validation.execution.conversions import Converter
from validation.execution.in_flight import InFlight, Kept, Pass, Segment
from validation.execution.operator_call import Fetch
from validation.execution.wiring import StageWiring, Wire


class StageInputs:
    """Reads the inputs of one stage.

    Args:
        wiring: Edges of the stage.
        converter: Moves tensors between layouts.
        segment_of: Recompute segment of each operator that is in one.
    """

    def __init__(self, wiring: StageWiring, converter: Converter, segment_of: Mapping[int, Segment]) -> None:
        self.wiring, self.workload = wiring, wiring.workload
        self.converter, self.segment_of = converter, segment_of

    def read(self, index: int, wire: Wire, at_hand: Pass, kept: Kept | None) -> torch.Tensor:
        """Return an input in the operator's layout; ``kept`` records what its segment keeps."""
        key = wire.copy
        if key is None or wire.forward is None:
            value = at_hand.read(wire.tensor)
            if kept is not None and self._enters(index, wire):
                kept.sources[wire.tensor] = value
                at_hand.pinned.add(wire.tensor)
            return value
        if key in at_hand.copies:
            value = at_hand.copies[key]
            if (
                kept is not None
                and key not in kept.reduced
                and wire.tensor not in kept.sources
                and self._enters(index, wire)
            ):
                kept.copies[key] = value
            return at_hand.read_copy(key)
        shape, reduction, rest = self.wiring.shape(wire.tensor), wire.forward.reduction, wire.forward
        if key in at_hand.reduced:
            value, in_place = at_hand.reduced[key], False
        else:
            value = at_hand.read(wire.tensor)
            in_place = wire.tensor not in at_hand.values and wire.tensor not in at_hand.pinned
        enters = kept is not None and self._enters(index, wire)
        if key in at_hand.reduced or (enters and reduction is not None):
            if key not in at_hand.reduced:
                assert reduction is not None
                value = self.converter.run(reduction, value, shape, keep=not in_place)
            if kept is not None and enters:
                kept.reduced[key] = value
            remaining, in_place = wire.forward.after_reduction, False
        else:
            if kept is not None and enters:
                kept.sources[wire.tensor] = value
                at_hand.pinned.add(wire.tensor)
                in_place = False
            remaining = rest
        if remaining is not None:
            value = self.converter.run(remaining, value, shape, keep=not in_place)
        at_hand.copies[key] = value
        return at_hand.read_copy(key)

    def _enters(self, index: int, wire: Wire) -> bool:
        """Return whether a segment's input comes from outside it."""
        start, stop = self.segment_of[index]
        return not start <= self.workload.producer[wire.tensor] < stop

    def absent(self, index: int, at_hand: Pass, state: InFlight) -> dict[int, Fetch]:
        """Return inputs that are gathered again in backward, where the runtime does not keep them."""
        found: dict[int, Fetch] = {}
        for position, wire in enumerate(self.wiring.wires[index]):
            key = wire.copy
            if wire.gathers and key is not None:
                if key in state.gathered_from:
                    known, source, count = state.gathered_from[key]
                    state.gathered_from[key] = known, source, count + 1
                elif key in at_hand.copies:
                    continue  # made in a segment, which keeps it
                else:
                    state.gathered_from[key] = wire, at_hand.values[wire.tensor], 1
                    at_hand.pinned.add(wire.tensor)
                found[position] = partial(state.regathered.__getitem__, key)
        return found

    def regather(self, index: int, state: InFlight) -> None:
        """Gather again the inputs of an operator whose backward pass comes next."""
        for wire in self.wiring.wires[index]:
            key = wire.copy
            if key in state.gathered_from and key not in state.regathered:
                maker, source, _ = state.gathered_from[key]
                assert maker.forward is not None
                shape = self.wiring.shape(wire.tensor)
                state.regathered[key] = self.converter.run(maker.forward, source, shape, keep=True)

    def forget_gathered(self, index: int, state: InFlight) -> None:
        """Let go of what was gathered again for an operator, once no other needs it."""
        for wire in self.wiring.wires[index]:
            key = wire.copy
            if key in state.gathered_from:
                maker, source, count = state.gathered_from.pop(key)
                if count > 1:
                    state.gathered_from[key] = maker, source, count - 1
                else:
                    state.regathered.pop(key, None)
