"""windtunnel: plans for parallel training, simulated before they cost GPU hours.

The one import that users write. Names load on first use, so importing this is instant:

>>> import windtunnel as wt
>>> wt.Axis("batch", 8)
Axis(split='batch', size=8, zero=0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.compare import compare as compare
    from searchers.base import CandidateSearcher as CandidateSearcher
    from searchers.base import Ledger as Ledger
    from searchers.base import NoFeasiblePlan as NoFeasiblePlan
    from searchers.base import Searcher as Searcher
    from searchers.base import SearchResult as SearchResult
    from searchers.budget import Budget as Budget
    from searchers.registry import searcher_named as searcher_named
    from searchers.registry import searcher_names as searcher_names
    from searchers.scores import Score as Score
    from simulator.closed_forms.estimate import estimate as estimate
    from simulator.fidelity import Fidelity as Fidelity
    from simulator.plan import Axis as Axis
    from simulator.plan import Plan as Plan
    from simulator.plan import Stage as Stage
    from simulator.plan_file import load_plan as load_plan
    from simulator.plan_file import save_plan as save_plan
    from simulator.problem import Problem as Problem
    from simulator.problem import ProblemSpec as ProblemSpec
    from simulator.reports.difference import difference as difference
    from simulator.result import SimulationResult as SimulationResult
    from simulator.simulate import simulate as simulate
    from simulator.uniform import recompute_segments as recompute_segments
    from simulator.uniform import repeated_layers as repeated_layers
    from simulator.uniform import uniform_plan as uniform_plan
    from simulator.validate import validate as validate

_HOMES = {
    "Axis": "simulator.plan",
    "Budget": "searchers.budget",
    "CandidateSearcher": "searchers.base",
    "Fidelity": "simulator.fidelity",
    "Ledger": "searchers.base",
    "NoFeasiblePlan": "searchers.base",
    "Plan": "simulator.plan",
    "Problem": "simulator.problem",
    "ProblemSpec": "simulator.problem",
    "Score": "searchers.scores",
    "SearchResult": "searchers.base",
    "Searcher": "searchers.base",
    "SimulationResult": "simulator.result",
    "Stage": "simulator.plan",
    "compare": "experiments.compare",
    "difference": "simulator.reports.difference",
    "estimate": "simulator.closed_forms.estimate",
    "load_plan": "simulator.plan_file",
    "recompute_segments": "simulator.uniform",
    "repeated_layers": "simulator.uniform",
    "save_plan": "simulator.plan_file",
    "searcher_named": "searchers.registry",
    "searcher_names": "searchers.registry",
    "simulate": "simulator.simulate",
    "uniform_plan": "simulator.uniform",
    "validate": "simulator.validate",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("windtunnel")
    if name not in _HOMES:
        raise AttributeError(f"module 'windtunnel' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
