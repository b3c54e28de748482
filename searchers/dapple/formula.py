"""DAPPLE's pipeline latency: formulas 1 to 3 and Algorithm 1, as printed and corrected.

A pipeline is a list of *expanded* stages: computation stages with the transfers between them as stages of
their own (``F`` and ``B`` are the times of a transfer forward and backward, without all-reduce). One iteration
is warm-up, steady phase of the pivot stage Q, and ending:

    L = sum_{s<=Q} F_s  +  (M - 1)(F_Q + B_Q)  +  max_s (AR_s + sum_{a=s..Q} B_a, or for s > Q minus backwards)

Two rules of the paper are not what its own derivation gives, so both forms can be chosen by name:

- ``pivot``: Algorithm 1 compares a stage s with the pivot Q by sums over the stages *between* them
  (``printed``). L(s) > L(Q), without all-reduce, is the same comparison with Q itself in the sum
  (``corrected``): with it Algorithm 1 returns the stage that maximises L.
- ``ending``: for s after Q formula 1 subtracts B_Q..B_s (``printed``). Stage s ends its last backward when the
  stages between Q and s begin theirs, so B of those between is to be subtracted only (``corrected``).

Source:
    Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021, Sections
    4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RULES = ("printed", "corrected")


@dataclass(frozen=True)
class ExpandedStage:
    """A computation stage, or the transfer between two.

    Attributes:
        forward_s, backward_s: Seconds for one microbatch.
        all_reduce_s: Seconds of gradient synchronisation; 0 for transfers.
    """

    forward_s: float
    backward_s: float
    all_reduce_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def pivot_stage(stages: Sequence[ExpandedStage], num_microbatches: int, rule: str = "corrected") -> int:
    """Return the pivot stage Q by Algorithm 1.

    Args:
        stages: Expanded stages, at least one.
        num_microbatches: M >= 1.
        rule: ``printed`` or ``corrected``.

    Raises:
        ValueError: If the rule is unknown.
    """
    check_rule("pivot", rule)
    pivot = len(stages) - 1
    for candidate in range(len(stages) - 2, -1, -1):
        own = (num_microbatches - 1) * stages[candidate].total_s
        last = pivot + 1 if rule == "corrected" else pivot
        between = sum(stages[index].total_s for index in range(candidate + 1, last))
        if own > (num_microbatches - 1) * stages[pivot].total_s + between:
            pivot = candidate
    return pivot


def latency_s(stages: Sequence[ExpandedStage], num_microbatches: int, pivot: int, ending: str = "corrected") -> float:
    """Return L of formula 2 for a given pivot stage.

    Args:
        stages: Expanded stages.
        num_microbatches: M.
        pivot: Q.
        ending: ``printed`` or ``corrected``.

    Raises:
        ValueError: If the rule is unknown.

    >>> latency_s([ExpandedStage(1.0, 2.0)] * 4, num_microbatches=8, pivot=3)
    33.0
    """
    check_rule("ending", ending)
    warm_up = sum(stage.forward_s for stage in stages[: pivot + 1])
    steady = (num_microbatches - 1) * stages[pivot].total_s
    end = 0.0
    for index, stage in enumerate(stages):
        if index <= pivot:
            shift = sum(other.backward_s for other in stages[index : pivot + 1])
        elif ending == "printed":
            shift = -sum(other.backward_s for other in stages[pivot : index + 1])
        else:
            shift = -sum(other.backward_s for other in stages[pivot + 1 : index])
        end = max(end, stage.all_reduce_s + shift)
    return warm_up + steady + end


def pipeline_latency_s(
    stages: Sequence[ExpandedStage], num_microbatches: int, pivot: str = "corrected", ending: str = "corrected"
) -> float:
    """Return L with the pivot stage that Algorithm 1 chooses."""
    return latency_s(stages, num_microbatches, pivot_stage(stages, num_microbatches, pivot), ending)


def check_rule(name: str, rule: str) -> None:
    """Raise ValueError unless ``rule`` is one of RULES."""
    if rule not in RULES:
        raise ValueError(f"{name} must be one of {', '.join(RULES)}, got {rule!r}")
