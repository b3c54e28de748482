"""What Galvatron is asked in tests: the paper's models on RTX TITANs."""

from __future__ import annotations

from functools import cache

from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.options import Options
from searchers.galvatron.planner import Planner
from simulator.costs import CostTables
from simulator.problem import Problem, ProblemSpec


def titan(model: str, batch: int, memory_gb: int = 24, num_gpus: int = 8) -> Problem:
    return ProblemSpec(
        model=model,
        cluster=f"titan-rtx-pcie:1x{num_gpus}",
        runtime="galvatron-v1",
        global_batch=batch,
        memory_limit_bytes=memory_gb << 30,
    ).load()


@cache
def bert(memory_gb: int, batch: int = 64) -> Problem:
    return titan("bert-huge-32", batch, memory_gb)


@cache
def profiles(model: str) -> LayerProfiles:
    return LayerProfiles(CostTables(titan(model, 8)))


def planner(model: str, memory_gb: int, options: Options, batch: int = 8) -> Planner:
    return Planner(titan(model, batch, memory_gb), options, profiles=profiles(model))
