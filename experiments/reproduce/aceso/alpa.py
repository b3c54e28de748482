"""Alpa in Aceso's experiments: our searcher on the same problem, and what its search would have cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pandas as pd

from experiments.reproduce.aceso.setting import GPUS_PER_NODE, Setting
from experiments.reproduce.alpa_mpe.aceso_search_cost import account, price_of_a_layer
from experiments.reproduce.experiment import Verdict
from searchers.alpa.searcher import Alpa
from searchers.base import RankedPlan
from simulator.problem import Problem

PRINTED_SPEEDUP = {"gpt": 1.27, "resnet": 1.33}
"""Aceso over Alpa at most, section 5.1; T5 has no official implementation in Alpa."""
ALLOWED = 0.10
MICROBATCHES = {"gpt": (4, 64), "resnet": (16, 512)}
"""Over a whole mesh, smallest and largest tried."""
MIN_SAMPLES = {"gpt": 1, "resnet": 16}
"""On one rank: Wide-ResNet is profiled from 16 samples on."""


def alpa_plans(setting: Setting, problem: Problem, keep: int) -> tuple[RankedPlan, ...]:
    """Return Alpa's best plans: rematerialisation on or off, states whole or sharded, for the whole model.

    Raises:
        NoFeasiblePlan: If none fits.
    """
    smallest, largest = MICROBATCHES[setting.family]
    searcher = Alpa(
        min_microbatch=smallest,
        max_microbatch=largest,
        min_samples=MIN_SAMPLES[setting.family],
        recompute=(True, False),
        zero=(0, 2),
        keep=keep,
    )
    return searcher.search(problem).plans


def speedup_verdicts(table: pd.DataFrame) -> Iterator[Verdict]:
    """Yield the verdicts on Aceso over Alpa.

    Args:
        table: Columns ``family``, ``gpus`` and ``speedup_over_alpa``; nothing where either has no plan.
    """
    if "speedup_over_alpa" not in table:
        return
    several = table[(table["gpus"] > 1) & table["speedup_over_alpa"].notna()]
    for family, printed in PRINTED_SPEEDUP.items():
        found = several.loc[several["family"] == family, "speedup_over_alpa"]
        if found.empty:
            continue
        off = found.max() / printed - 1
        yield Verdict(
            f"{family}: up to {printed} times Alpa",
            f"our largest speedup with several GPUs within {ALLOWED:.0%}",
            f"{found.min():.2f} to {found.max():.2f} in {len(found)} settings ({off:+.0%})",
            bool(abs(off) <= ALLOWED),
        )


@lru_cache
def alpa_accounted_s(setting: Setting) -> float:
    """Return the accounted seconds of Alpa's search: stages compiled and profiled, a layer priced once for all.

    See ``alpa-search-cost``, which compares them with the printed seconds.
    """
    nodes = max(1, setting.gpus // GPUS_PER_NODE)
    cluster = f"v100-32g-ndv2:{nodes}x{min(setting.gpus, GPUS_PER_NODE)}"
    return account(setting.model, cluster, _layer_s(), global_batch=setting.global_batch).estimated_s


@lru_cache(maxsize=1)
def _layer_s() -> float:
    return price_of_a_layer()
