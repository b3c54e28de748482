"""Plans for four processes that searches find anew: Galvatron's, DAPPLE's, PipeDream's and Alpa's."""

from __future__ import annotations

from collections.abc import Sequence

from searchers.base import Searcher
from searchers.dapple.searcher import Dapple
from searchers.galvatron.options import Options
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from searchers.pipedream.searcher import PipeDream
from simulator.plan import Plan
from simulator.problem import Problem
from tests.validation import searched_alpa
from tests.validation.tiny import Case, problem


def returned(searcher: Searcher, of: Problem, replicas: Sequence[int]) -> Plan:
    """Return the best plan of a searcher whose stages have so many devices."""
    plans = [ranked.plan for ranked in searcher.search(of).plans]
    return next(plan for plan in plans if [len(stage.devices) for stage in plan.stages] == list(replicas))


def searched(of: Problem, share: float, **choices: object) -> Plan:
    """Return Galvatron's plan where memory lies between what its leanest and its quickest plan need."""
    options = Options(granularity_bytes=512, **choices)  # type: ignore[arg-type]
    planner = Planner(of, options)
    quickest, leanest = planner.best(of.global_batch), planner.leanest(of.global_batch)
    assert quickest is not None and leanest is not None, "a tiny model fits"
    budget = leanest.peak_bytes + share * (quickest.peak_bytes - leanest.peak_bytes)
    found = Planner(of, options, budget_bytes=budget).best(of.global_batch)
    assert found is not None, "the leanest plan fits"
    return to_plan(found, of)


def four_processes() -> list[Case]:
    """Return what the searches find, which takes seconds."""
    gpt, t5, xlnet = problem("gpt"), problem("t5"), problem("xlnet", global_batch=12)
    within = {"kinds": ("dp", "tp"), "pipeline": False}
    dapple = Dapple(microbatch=4, warmup="p_b")
    in_turn = PipeDream(microbatch=1, replica_assignment="round_robin")
    return [
        Case("gpt, found by Galvatron: pipeline, dp, sdp, recomputation", gpt, searched(gpt, 0.7)),
        Case("t5, found by Galvatron: pipeline, dp, sdp, recomputation", t5, searched(t5, 0.7)),
        Case("gpt, found by Galvatron: dp, tp, recomputation in one stage", gpt, searched(gpt, 0.8, **within)),
        Case("xlnet, DAPPLE's straight plan with P_B", xlnet, returned(dapple, xlnet, [1, 1, 1, 1])),
        Case("xlnet, PipeDream's plan, replicas in turn", xlnet, returned(in_turn, xlnet, [2, 2])),
        *searched_alpa.four_processes(),
    ]
