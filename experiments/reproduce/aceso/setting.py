"""Models, machines and budgets of Aceso's evaluation, and what every experiment here does with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.reproduce.experiment import Context
from experiments.reproduce.legends import legend_beside
from experiments.reproduce.missing_bars import say_missing
from hardware_models.cluster import parse_cluster
from hardware_models.collective_table import CollectiveTable
from hardware_models.import_aceso import import_collectives, import_table
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from searchers.aceso.searcher import Aceso
from searchers.base import SearchResult
from searchers.budget import Budget
from simulator.costs import cost_tables
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.result import SimulationResult
from simulator.simulate import simulate
from workloads.registry import build_workload

MEMORY_LIMIT_BYTES = 28000 << 20
GPUS_PER_NODE = 8
PROFILE = ("aceso_v100/ops.csv.gz", "aceso_v100/comm.csv")
"""Files of the data folder that every problem here is built from."""


AS_PAPER: Mapping[str, Any] = {
    "borders": "relay", "recompute": "largest", "breadth": 1, "races": False, "exchanges": False,
    "uniform_starts": False, "iteration_evaluations": None,
}  # fmt: skip
"""Options of `Aceso` that make its search the paper's: relays, largest activations, one start, partners elsewhere."""


@dataclass(frozen=True)
class Setting:
    """One column of Figure 7.

    Attributes:
        family, size: As Aceso's profile names them.
        model: Ours.
        gpus: V100s, eight a node.
    """

    family: str
    size: str
    model: str
    gpus: int

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.model} on {self.gpus}"

    @property
    def global_batch(self) -> int:
        """Samples per iteration, Table 2."""
        return 1536 if self.family == "resnet" else 1024


def _settings(family: str, sizes: Sequence[tuple[str, str, int]]) -> tuple[Setting, ...]:
    return tuple(Setting(family, size, model, gpus) for size, model, gpus in sizes)


GPT = _settings("gpt", [
    ("350M", "gpt3-350m", 1), ("1_3B", "gpt3-1.3b", 4), ("2_6B", "gpt3-2.6b", 8), ("6_7B", "gpt3-6.7b", 16),
    ("13B", "gpt3-13b", 32),
])  # fmt: skip
WIDE_RESNET = _settings("resnet", [
    ("500M", "wide-resnet-500m", 1), ("2B", "wide-resnet-2b", 4), ("4B", "wide-resnet-4b", 8),
    ("6_8B", "wide-resnet-6.8b", 16), ("13B", "wide-resnet-13b", 32),
])  # fmt: skip
# The 22B reuses the 11B's layers in the profile.
T5 = _settings("t5", [
    ("770M", "t5-770m", 1), ("3B", "t5-3b", 4), ("6B", "t5-6b", 8), ("11B", "t5-11b", 16), ("11B", "t5-22b", 32),
])  # fmt: skip

# Tables 3 and 4: Tflop/s per GPU of Megatron-LM, Alpa, Aceso.
PAPER_TFLOPS: Mapping[str, tuple[float, float, float]] = {
    "gpt3-350m": (30.05, 27.79, 30.05), "gpt3-1.3b": (38.88, 37.64, 47.50), "gpt3-2.6b": (43.42, 43.81, 55.47),
    "gpt3-6.7b": (50.31, 53.34, 65.88), "gpt3-13b": (48.46, 53.34, 62.15),
    "wide-resnet-500m": (10.11, 11.60, 10.11), "wide-resnet-2b": (9.49, 10.58, 13.54),
    "wide-resnet-4b": (8.09, 8.86, 11.78), "wide-resnet-6.8b": (6.94, 10.51, 12.37),
    "wide-resnet-13b": (7.35, 9.88, 11.86),
}  # fmt: skip


def problem_of(setting: Setting, context: Context) -> Problem:
    """Return the problem on Aceso's profile of operators and collectives.

    Raises:
        ValueError: If the data folder has no profile.
    """
    operators = context.data_file("aceso_v100/ops.csv.gz")
    return _problem(setting, operators, context.data_file("aceso_v100/comm.csv"))


@lru_cache(maxsize=16)
def _problem(setting: Setting, operators: Path, collectives: Path) -> Problem:
    nodes = max(1, setting.gpus // GPUS_PER_NODE)
    return Problem(
        workload=build_workload(setting.model),
        hardware=HardwareModel(
            cluster=parse_cluster(f"v100-32g-ndv2:{nodes}x{min(setting.gpus, GPUS_PER_NODE)}"),
            operator_profile=import_table(operators, model=setting.family, size=setting.size),
            collective_table=_collectives(collectives),
        ),
        runtime=load_runtime("megatron-lm-2021-fp32" if setting.family == "resnet" else "megatron-lm-2021"),
        global_batch=setting.global_batch,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
    )


@lru_cache(maxsize=2)
def _collectives(path: Path) -> CollectiveTable:
    return import_collectives(path)


def searched(problem: Problem, evaluations: int, **options: object) -> tuple[Aceso, SearchResult]:
    """Return a searcher and what it found with a budget in evaluations."""
    searcher = Aceso(**{"judge": 0, **options})  # type: ignore[arg-type]
    return searcher, searcher.search(problem, Budget(evaluations=evaluations))


def paper_search(setting: Setting, **changes: Any) -> Aceso:
    """Return the paper's search of a setting; its scripts tune inside stages for Wide-ResNet only.

    Args:
        setting: What is planned.
        changes: Options of `Aceso` that differ.
    """
    fine_tunes = setting.family == "resnet"
    return Aceso(**{"judge": 0, "compat": compat_of(setting), "fine_tunes": fine_tunes, **AS_PAPER, **changes})


def compat_of(setting: Setting) -> str:
    """Return whose model suits: Wide-ResNet is profiled from 16 samples on only, which the release keeps to."""
    return "release" if setting.family == "resnet" else "paper"


def simulated(plan: Plan, problem: Problem) -> SimulationResult:
    """Return the simulator's verdict on a plan."""
    return simulate(plan, problem, costs=cost_tables(problem), engine="compiled")


def tflops_per_gpu(setting: Setting, result: SimulationResult) -> float:
    """Return effective Tflop/s per GPU: forward and backward matrix products, no recomputation."""
    return result.model_flop / result.iteration_time_s / setting.gpus / 1e12


def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, title: str, steps: bool = False
) -> Figure:
    """Return a figure of named curves."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, points in series.items():
        axes.plot(
            [point[0] for point in points], [point[1] for point in points], label=name, marker="o", markersize=3,
            drawstyle="steps-post" if steps else "default",
        )  # fmt: skip
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title)
    if series:
        legend_beside(axes)
    plt.close(figure)
    return figure


def bars(groups: Sequence[str], series: Mapping[str, Sequence[float]], *, y: str, title: str) -> Figure:
    """Return a figure of grouped bars."""
    figure, axes = plt.subplots(figsize=(max(6.0, 0.9 * len(groups)), 4))
    width = 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        words = name.removesuffix("_s").replace("_", " ")
        places = [place + number * width for place in range(len(groups))]
        axes.bar(places, values, width, label=words)
        say_missing(axes, places, values)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(groups))], groups, rotation=30, ha="right")
    axes.set_ylabel(y)
    axes.set_title(title)
    legend_beside(axes)
    plt.close(figure)
    return figure
