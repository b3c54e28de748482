"""Which of a stage's programs an action of its schedule runs: with or without gathers and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.plan import Plan
from simulator.schedules.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action


@dataclass(frozen=True)
class Variant:
    """Which program an action runs.

    Attributes:
        kind: Phase letter.
        gather: ZeRO-3 parameters are gathered.
        sync: Gradients are reduced in it.
        turn: Microbatch modulo the number of turns, where replicas take whole microbatches.
        smaller: It is the last microbatch, which has fewer samples.
    """

    kind: str
    gather: bool
    sync: bool
    turn: int = 0
    smaller: bool = False


@dataclass(frozen=True)
class VariantChoice:
    """Chooses the variants of one plan.

    Attributes:
        plan: The plan.
        has_zero3: Per stage, whether it gathers parameters.
        reduces_early: Gradients are reduced within backward passes.
        num_turns: Microbatches after which the same replicas have their turn.
    """

    plan: Plan
    has_zero3: Sequence[bool]
    reduces_early: bool
    num_turns: int

    def of_order(self, order: Sequence[Action]) -> list[Variant]:
        """Return the variant of every action of a rank."""
        gradient_kind = BACKWARD_WEIGHT if any(action.kind == BACKWARD_WEIGHT for action in order) else BACKWARD
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, action in enumerate(order):
            if action.kind == FORWARD:
                first.setdefault(action.stage, position)
            if action.kind == gradient_kind:
                last[action.stage] = position
        return [
            self._of(action, first.get(action.stage) == position, last.get(action.stage) == position)
            for position, action in enumerate(order)
        ]

    def _of(self, action: Action, first: bool, last: bool) -> Variant:
        """Return the variant of an action, which may be its stage's first forward or last gradient pass."""
        gather = self.has_zero3[action.stage] and (
            (action.kind == FORWARD and (self.plan.reshard_after_forward or first))
            or (action.kind in (BACKWARD, BACKWARD_INPUT) and self.plan.reshard_after_forward)
        )
        makes_gradients = action.kind in (BACKWARD, BACKWARD_WEIGHT)
        sync = self.reduces_early and makes_gradients and (last or self.plan.gradient_reduction == "every")
        turn = action.microbatch % self.num_turns
        return Variant(action.kind, gather, sync, turn, self.plan.is_smaller(action.microbatch))
