"""The plans that the gradient suite executes are those that the search returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the executor's small models need torch (extra: validation)")

from searchers.aceso.searcher import Aceso
from searchers.budget import Budget
from simulator.plan import Plan, plan_to_mapping
from tests.validation.tiny import ACESO_PLANS, problem

CHOICES: dict[str, tuple[int, Callable[[Plan], bool]]] = {
    # Bytes for tensors, and which of the returned plans; limits are where the search returns such a plan.
    "pp4, recomputation": (400_000, lambda plan: True),
    "pp3, one stage with tensor parallelism, recomputation": (
        300_000, lambda plan: any(axis.split == "tensor" or axis.split == "column" for stage in plan.stages
                                  for _, sharding in stage.shardings for axis in sharding),
    ),
    "pp2 dp2, recomputation": (600_000, lambda plan: len(plan.stages) == 2 and any(s.recompute for s in plan.stages)),
}  # fmt: skip


def returned() -> dict[str, Plan]:
    """Search the tiny GPT under each limit."""
    of = problem("gpt")
    found = {}
    for name, (limit, wanted) in CHOICES.items():
        tight = replace(of, memory_limit_bytes=limit + of.runtime.outside_allocator_bytes)
        plans = Aceso(judge=0, keep=12).search(tight, Budget(evaluations=80)).plans
        found[name] = next(each.plan for each in plans if wanted(each.plan))
    return found


@pytest.mark.slow
def test_the_executed_plans_are_returned_by_the_search() -> None:
    stored = json.loads(ACESO_PLANS.read_text())
    assert {name: plan_to_mapping(plan) for name, plan in returned().items()} == stored
