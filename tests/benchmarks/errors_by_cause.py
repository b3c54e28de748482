"""How far a closed form is from the engine, effect by effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.costs import CostTables
from simulator.engines.engine_compiled import run_compiled
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.validate import validate


@dataclass(frozen=True)
class CauseError:
    """How far the closed form is from the engine that adds one effect, over some plans.

    Attributes:
        cause: The effect, ``nothing`` or ``everything``.
        num_plans: Plans looked at.
        bias, mean_absolute, worst: Of ``(closed form - engine) / engine``, the last with its sign.
    """

    cause: str
    num_plans: int
    bias: float
    mean_absolute: float
    worst: float


def errors_of(
    predicted_s: NDArray[np.float64],
    plans: Sequence[Plan],
    problem: Problem,
    costs: CostTables,
    effects: Sequence[str],
) -> tuple[CauseError, ...]:
    """Return the errors of any prediction against the engine without ``effects``, with each of them, and with all.

    Args:
        predicted_s: float64[P]. Iteration times.
        plans, problem, costs: What they are of.
        effects: Names as ``Fidelity.without`` takes them.
    """
    settings = {"nothing": Fidelity().without(*effects)}
    for effect in effects:
        settings[effect] = Fidelity().without(*(name for name in effects if name != effect))
    settings["everything"] = Fidelity()
    found = []
    for cause, fidelity in settings.items():
        engine_s = np.array(
            [
                run_compiled(lower(validate(plan, problem), costs, fidelity).graph).end_s.max()
                for plan in plans
            ]
        )
        errors = (predicted_s - engine_s) / engine_s
        worst = float(errors[np.argmax(np.abs(errors))])
        found.append(CauseError(cause, len(plans), float(errors.mean()), float(np.abs(errors).mean()), worst))
    return tuple(found)
