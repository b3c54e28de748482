"""How long a search may take, and the clock that watches it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from simulator.compiled_cache import moment_s

_DURATION = re.compile(r"(?P<number>[0-9]{1,12}(?:\.[0-9]{1,12})?)(?P<unit>ms|s|min|m|h)")
_EVALUATIONS = re.compile(r"(?P<number>[0-9]{1,18})(?:e|evals?|evaluations?)?")
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """What a search may spend; whatever ends first. None is no limit.

    "Same seed, same plan" holds for budgets in evaluations: seconds depend on the machine.

    Attributes:
        seconds: Wall time in seconds.
        evaluations: Plans scored by the objective.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"a budget in seconds must be positive, got {self.seconds}")
        if self.evaluations is not None and self.evaluations < 1:
            raise ValueError(f"a budget in evaluations must be at least 1, got {self.evaluations}")

    @staticmethod
    def parse(text: str) -> Budget:
        """Read a budget as the command line spells it: ``20s``, ``5min``, ``1h`` or ``500`` (evaluations).

        Raises:
            ValueError: If the text is neither a duration nor a count.

        >>> Budget.parse("1.5min")
        Budget(seconds=90.0, evaluations=None)
        >>> Budget.parse("500")
        Budget(seconds=None, evaluations=500)
        """
        word = text.strip().lower().replace(" ", "")
        if found := _DURATION.fullmatch(word):
            return Budget(seconds=float(found["number"]) * _SECONDS[found["unit"]])
        if found := _EVALUATIONS.fullmatch(word):
            return Budget(evaluations=int(found["number"]))
        raise ValueError(
            f"a budget must be a time like 20s, 5min or 1h, or a number of evaluations like 500, got {text!r:.60}"
        )

    def __str__(self) -> str:
        limits = []
        if self.seconds is not None:
            limits.append(f"{self.seconds:g} s")
        if self.evaluations is not None:
            limits.append(f"{self.evaluations} evaluation{'' if self.evaluations == 1 else 's'}")  # as `parse` has it
        return " or ".join(limits) or "no limit"

    def start(self) -> BudgetClock:
        """Return a running clock."""
        return BudgetClock(self)


class BudgetClock:
    """A budget being spent.

    Attributes:
        budget: What may be spent.
        evaluations: Evaluations so far; the searcher's ledger counts them.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.evaluations = 0
        self._started_s = moment_s()

    @property
    def wall_s(self) -> float:
        """Seconds since the start, but for those that this machine took to compile."""
        return moment_s() - self._started_s

    @property
    def all_evaluated(self) -> bool:
        """Whether the evaluations are used up, whatever the time."""
        return self.budget.evaluations is not None and self.evaluations >= self.budget.evaluations

    @property
    def spent(self) -> bool:
        """Whether no further evaluation may begin."""
        return self.all_evaluated or (self.budget.seconds is not None and self.wall_s >= self.budget.seconds)
