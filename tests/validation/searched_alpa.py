"""Plans that Alpa's search returns for tiny models: operators of a stage cut along different axes."""

from __future__ import annotations

from searchers.alpa.searcher import Alpa
from simulator.plan import Plan
from simulator.problem import Problem
from tests.validation.tiny import Case, problem


def searched(of: Problem, microbatch: int, **options: object) -> Plan:
    """Return the best plan with a microbatch too small to be split over every device."""
    found = Alpa(
        free_axes=True,
        min_microbatch=microbatch,
        max_microbatch=microbatch,
        zero=(0,),
        **options,  # type: ignore[arg-type]
    ).search(of)
    return found.best


def four_processes() -> list[Case]:
    """Return three cases for four processes."""
    gpt, llama, vit = problem("gpt"), problem("llama"), problem("vit")
    return [
        Case("gpt, found by alpa, one stage", gpt, searched(gpt, 2, num_layers=1, recompute=(True,))),
        Case("llama, found by alpa, two stages", llama, searched(llama, 1, num_layers=2, recompute=(False,))),
        Case("vit, found by alpa, one stage", vit, searched(vit, 2, num_layers=1, recompute=(False,))),
    ]
