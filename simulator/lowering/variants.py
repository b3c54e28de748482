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
        gather: Parameters are gathered.
        sync: Gradients are reduced in it.
        hands_over: It makes the stage's first gradients of an iteration, which are handed over.
        turn: Microbatch modulo the number of turns, where replicas take whole microbatches.
        smaller: It is the last microbatch, which has fewer samples.
    """

    kind: str
    gather: bool
    sync: bool
    hands_over: bool = False
    turn: int = 0
    smaller: bool = False


@dataclass(frozen=True)
class VariantChoice:
    """Chooses the variants of one plan.

    Attributes:
        plan: The plan.
        gathers, reshards: Per stage, whether it gathers parameters for passes, and for each.
        reduces_early: Gradients are reduced within backward passes.
        hands_over: The runtime hands over the first microbatch's gradients.
        num_turns: Microbatches after which the same replicas have their turn.
    """

    plan: Plan
    gathers: Sequence[bool]
    reshards: Sequence[bool]
    reduces_early: bool
    hands_over: bool
    num_turns: int

    def of_order(self, order: Sequence[Action]) -> list[Variant]:
        """Return the variant of every action of a rank."""
        gradient_kind = BACKWARD_WEIGHT if any(action.kind == BACKWARD_WEIGHT for action in order) else BACKWARD
        first: dict[tuple[int, str, int], int] = {}
        last: dict[int, int] = {}
        for position, action in enumerate(order):
            first.setdefault(self._pass(action), position)
            if action.kind == gradient_kind:
                last[action.stage] = position
        return [
            self._of(action, first[self._pass(action)] == position, last.get(action.stage) == position)
            for position, action in enumerate(order)
        ]

    def _pass(self, action: Action) -> tuple[int, str, int]:
        """Return what an action is the first of: such passes of its stage, of gradients on the same replicas."""
        return action.stage, action.kind, 0 if action.kind == FORWARD else action.microbatch % self.num_turns

    def _of(self, action: Action, first: bool, last: bool) -> Variant:
        """Return the variant of an action, which may be the first of its kind or its stage's last gradient pass."""
        reshards = self.reshards[action.stage]
        gather = self.gathers[action.stage] and (
            (action.kind == FORWARD and (reshards or first))
            or (action.kind in (BACKWARD, BACKWARD_INPUT) and reshards)
        )
        makes_gradients = action.kind in (BACKWARD, BACKWARD_WEIGHT)
        sync = self.reduces_early and makes_gradients and (last or self.plan.gradient_reduction == "every")
        hands_over = self.hands_over and makes_gradients and first
        turn = action.microbatch % self.num_turns
        return Variant(action.kind, gather, sync, hands_over, turn, self.plan.is_smaller(action.microbatch))
