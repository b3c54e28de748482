"""Galvatron-BMW's Figure 5: how search time grows with layers, memory, strategies and devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from experiments.cases.galvatron_table2 import Run
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.figures import new_figure
from experiments.reproduce.legends import legend_beside
from searchers.galvatron.layer_profiles import LayerProfiles
from searchers.galvatron.options import Options
from searchers.galvatron.planner import Planner
from searchers.galvatron.searcher import variant_options
from simulator.costs import CostTables
from simulator.problem import Problem
from workloads.registry import build_workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = "bert-huge-48"
BATCHES = (32, 64)
LAYERS, MEMORIES = (16, 32, 48, 64, 96), (8, 12, 16, 20)
VARIANTS = ("galvatron-dp-tp", "galvatron-dp-pp", "galvatron", "galvatron-bmw")
PAPER_GROWTH = {16: 2.2, 64: 9.2}
STATED_S = 5.0


def run(context: Context) -> Report:
    """Return CPU seconds of searches: the least of several."""
    layers = LAYERS if not context.quick else LAYERS[:3]
    repeats = 3 if not context.quick else 1
    rows = []
    for count in layers:
        profiles = LayerProfiles(CostTables(_problem(count, 16, 8)))
        for memory in MEMORIES:
            # One stage and no fused layers: the dynamic programming itself.
            options = Options(pipeline=False, partition="base")
            rows.append(_row("layers and memory", count, memory, 8, "one stage", options, profiles, repeats))
        for variant in VARIANTS:
            rows.append(_row("strategies", count, 16, 8, variant, variant_options(variant), profiles, repeats))
    for devices in (8, 16, 64):
        profiles = LayerProfiles(CostTables(_problem(48, 16, devices)))
        rows.append(_row("devices", 48, 16, devices, "galvatron-bmw", Options(), profiles, repeats))
    rows.append(_all_batches(repeats))
    frame = pd.DataFrame(rows)
    return Report({"search-time": frame}, {"search-time": draw(frame)}, _verdicts(frame), [
        "CPU seconds of one process, the least of several runs; cost tables are made before the clock starts, but for "
        "'all batches'.",
    ])  # fmt: skip


def _problem(layers: int, memory_gb: int, devices: int) -> Problem:
    cluster = "titan-rtx-pcie:1x8" if devices == 8 else f"a100-40g-dgx-100g:{devices // 8}x8"
    problem = Run(model=MODEL, cluster=cluster, memory_gb=memory_gb).problem(8)
    workload = build_workload(MODEL, overrides={"layers": layers})
    fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    return Problem(**{**fields, "workload": workload})


def _row(
    about: str, layers: int, memory_gb: int, devices: int, what: str, options: Options, profiles: LayerProfiles,
    repeats: int,
) -> dict[str, object]:  # fmt: skip
    problem = _problem(layers, memory_gb, devices)
    batches = [batch * devices // 8 for batch in BATCHES]
    Planner(problem, options, profiles=profiles).explore(batches)  # fills the cost tables
    seconds, states = [], 0
    for _ in range(repeats):
        planner = Planner(problem, options, profiles=profiles)
        began = time.process_time()
        planner.explore(batches)
        seconds.append(time.process_time() - began)
        states = sum(len(search.strategies) for search in planner.searches.values())
    return {
        "about": about, "search": what, "layers": layers, "memory_gb": memory_gb, "devices": devices,
        "strategies": states, "cpu_s": min(seconds),
    }  # fmt: skip


def _all_batches(repeats: int) -> dict[str, object]:
    seconds, states = [], 0
    for _ in range(repeats):
        problem = _problem(48, 16, 8)
        options = Options(partition="base", schedule="gpipe", microbatches="table")
        began = time.process_time()
        planner = Planner(problem, options)
        planner.explore()
        seconds.append(time.process_time() - began)
        states = sum(len(search.strategies) for search in planner.searches.values())
    return {
        "about": "all batches", "search": "galvatron-base", "layers": 48, "memory_gb": 16, "devices": 8,
        "strategies": states, "cpu_s": min(seconds),
    }  # fmt: skip


def draw(frame: pd.DataFrame) -> Figure:
    """Draw search time over layers, by memory and by strategies."""
    figure, (left, right) = new_figure(1, 2, width=5.5)
    part = frame[frame["about"] == "layers and memory"]
    for memory, own in part.groupby("memory_gb"):
        left.plot(own["layers"], own["cpu_s"], marker="o", label=f"{memory} GB")
    part = frame[frame["about"] == "strategies"]
    for name, own in part.groupby("search"):
        right.plot(own["layers"], own["cpu_s"], marker="o", label=f"{name} ({own['strategies'].iloc[0]})")
    for place in (left, right):
        place.set_xlabel("layers")
        place.set_ylabel("CPU seconds")
        place.set_ylim(bottom=0)
        legend_beside(place, size=7)
    return figure


def straightness(x: Sequence[float], y: Sequence[float]) -> float:
    """Return R squared of a straight line.

    >>> straightness([1, 2, 3], [2, 4, 6])
    1.0
    """
    return round(float(np.corrcoef(x, y)[0, 1] ** 2), 6)


def _verdicts(frame: pd.DataFrame) -> list[Verdict]:
    part = frame[frame["about"] == "layers and memory"]
    by_layers = [straightness(own["layers"].tolist(), own["cpu_s"].tolist()) for _, own in part.groupby("memory_gb")]
    most = part[part["layers"] == part["layers"].max()]
    by_memory = straightness(most["memory_gb"].tolist(), most["cpu_s"].tolist())
    growth = frame[frame["about"] == "devices"].set_index("devices")["cpu_s"]
    ratios = {devices: float(growth[devices] / growth[8]) for devices in PAPER_GROWTH}
    stated = float(frame[frame["about"] == "all batches"]["cpu_s"].iloc[0])
    return [
        Verdict("search time is linear in layers", "R squared of a line at least 0.95 at every budget",
                ", ".join(f"{value:.3f}" for value in by_layers), min(by_layers) >= 0.95),
        Verdict("search time is linear in memory", "R squared of a line at least 0.95 at the most layers",
                f"{by_memory:.3f}", by_memory >= 0.95),
        Verdict("search time grows 2.2 and 9.2 times on 16 and 64 devices", "at most twice the printed growth",
                ", ".join(f"{devices}: {ratio:.1f} times" for devices, ratio in ratios.items()),
                all(ratio <= 2 * PAPER_GROWTH[devices] for devices, ratio in ratios.items())),
        Verdict("BERT-Huge-48 on 8 GPUs at 16 GB, all batch sizes", f"under {STATED_S:g} CPU seconds",
                f"{stated:.2f} s, cost tables included", stated < STATED_S),
    ]  # fmt: skip
