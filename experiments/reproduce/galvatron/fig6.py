"""Galvatron-BMW's Figure 6: optimal plans of three cases, one rectangle per run of equally planned layers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import pandas as pd

from datafiles.words import counted
from experiments.cases.galvatron_table2 import Run
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.cells import searched_cell
from experiments.reproduce.galvatron.figures import new_figure
from experiments.reproduce.galvatron.machines import A100_RUNTIME, A100S_16, TITANS_16
from experiments.reproduce.legends import legend_beside
from searchers.galvatron.layer_profiles import Layer, LayerProfiles
from searchers.galvatron.pipeline_plan import PipelinePlan
from searchers.galvatron.strategies import Strategy
from simulator.reports.figures import CYCLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASES = {
    "A: BERT-Huge-32, 8 TITAN": Run(model="bert-huge-32", cluster="titan-rtx-pcie:1x8", memory_gb=8),
    "B: Swin-Huge-32, 8 TITAN": Run(model="swin-huge-32", cluster="titan-rtx-pcie:1x8", memory_gb=8),
    "C: T5-512/4-32, 16 TITAN": Run(model="t5-512-4-32", cluster=TITANS_16, memory_gb=8),
    "C: T5-512/4-32, 16 A100": Run(model="t5-512-4-32", cluster=A100S_16, memory_gb=8, runtime=A100_RUNTIME),
}
MIB = 2**20
HATCHES = ("", "//", "..")
NARROW = 0.03
"""Above rectangles of less than this share of the width, words stand upright, no higher than these are wide."""
POINTS = 600
"""Of the axes' width."""


def run(context: Context) -> Report:
    """Return the plans, run by run."""
    cases = dict(list(CASES.items())[:2]) if context.quick else CASES
    rows, plans = [], {}
    for title, own in cases.items():
        context.say(title)
        _, judged = searched_cell(own, "galvatron-bmw")
        if judged is None:
            continue
        plans[title] = (judged.found, own.profiles)
        for stage, layers, strategy in runs_of(judged.found, own.profiles):
            rows.append(
                {
                    "case": title,
                    "samples_per_s": judged.throughput,
                    "batch": judged.found.batch,
                    "microbatches": judged.found.num_microbatches,
                    "stage": stage,
                    "layers": len(layers),
                    "first_layer": layers[0].number,
                    "strategy": str(strategy),
                }
            )
    frame = pd.DataFrame(rows)
    mixed = {title: frame[frame["case"] == title]["strategy"].nunique() for title in plans}
    swin = next((count for title, count in mixed.items() if title.startswith("B")), 0)
    verdict = Verdict(
        "optimal plans mix strategies between layers",
        "every case within 8 GB uses at least two",
        ", ".join(f"{title}: {count}" for title, count in mixed.items()),
        min(mixed.values(), default=0) >= 2 and swin >= 2,
    )
    return Report({"plans": frame}, {"plans": draw(plans)}, [verdict])


def size_of(layer: Layer, profiles: LayerProfiles) -> tuple[float, float]:
    """Return the MiB of a layer's parameters, and of its activations for a sample."""
    parameters = sum(profiles.parameters(layer.kind, 1).values())
    return parameters * 4 / MIB, profiles.profile(layer.kind, 1, 1).memory.saved_bytes / MIB


def runs_of(plan: PipelinePlan, profiles: LayerProfiles) -> Iterator[tuple[int, list[Layer], Strategy]]:
    """Yield stage, layers and strategy of each run of layers that are as large and planned alike.

    Swin shifts the windows of every second layer, which its size does not show.
    """
    for number, stage in enumerate(plan.stages):
        pairs = zip(stage.layers, stage.chosen, strict=True)
        for (_, strategy), members in groupby(pairs, key=lambda pair: (size_of(pair[0], profiles), pair[1])):
            yield number + 1, [layer for layer, _ in members], strategy


def draw(plans: dict[str, tuple[PipelinePlan, LayerProfiles]]) -> Figure:
    """Draw a rectangle per run: height is the layer's parameters, width its activations; xN counts layers.

    A strategy has one colour in all cases.
    """
    from matplotlib.patches import Rectangle

    figure, axes = new_figure(len(plans), 1, width=11.0, height=2.6)
    words = dict.fromkeys(str(strategy) for each in plans.values() for _, _, strategy in runs_of(*each))
    looks = {
        word: (CYCLE[number % len(CYCLE)], HATCHES[number // len(CYCLE) % len(HATCHES)])
        for number, word in enumerate(words)
    }
    for place, (title, (plan, profiles)) in zip(axes, plans.items(), strict=True):
        runs = list(runs_of(plan, profiles))
        sizes = [size_of(layers[0], profiles) for _, layers, _ in runs]
        tallest, total = max(height for height, _ in sizes), sum(width for _, width in sizes)
        x, began = 0.0, {0: 0.0}
        for (stage, layers, strategy), (height, width) in zip(runs, sizes, strict=True):
            began.setdefault(stage, x)
            colour, hatch = looks[str(strategy)]
            place.add_patch(Rectangle((x, 0), width, height, facecolor=colour, edgecolor="black", hatch=hatch))
            if len(layers) > 1:
                place.text(
                    x + width / 2, height + 0.02 * tallest, f"x{len(layers)}", ha="center", va="bottom",
                    fontsize=min(8.0, POINTS * width / total) if width < NARROW * total else 8.0,
                    rotation=90 if width < NARROW * total else 0,
                )  # fmt: skip
            x += width
        borders = [*list(began.values())[1:], x]
        for stage, (left, right) in enumerate(pairwise(borders), start=1):
            place.axvline(right, color="black", linestyle="--", linewidth=0.8)
            place.text((left + right) / 2, 1.45 * tallest, f"stage {stage}", ha="center", va="top", fontsize=8)
        place.set_xlim(0, x)
        place.set_ylim(0, 1.5 * tallest)
        place.set_title(
            f"{title}: batch {plan.batch}, {counted(plan.num_microbatches, 'microbatch', 'microbatches')}, "
            f"{counted(len(plan.stages), 'stage')}",
            fontsize=9,
        )
        place.set_xlabel("width: activations of a layer, MiB a sample; xN: so many such layers", fontsize=8)
        place.set_ylabel("parameters, MiB", fontsize=8)
        for word in dict.fromkeys(str(strategy) for _, _, strategy in runs):
            place.add_patch(
                Rectangle((0, 0), 0, 0, facecolor=looks[word][0], edgecolor="black", hatch=looks[word][1], label=word)
            )
        legend_beside(place)
    return figure
