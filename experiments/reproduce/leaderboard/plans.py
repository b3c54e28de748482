"""The best plan of each problem as pictures: stages as boxes, timeline, memory."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from datafiles.words import counted
from experiments.reproduce.leaderboard.causes import loaded, simulated
from searchers.plan_words import stage_degrees
from simulator.plan import Plan
from simulator.reports.memory_plot import plot_memory
from simulator.reports.timeline import SHOWN_TURNS, plot_timeline


def best_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the row of the best plan of each problem."""
    good = frame[frame["status"] == "ok"].sort_values("iteration_time_s", kind="stable")
    return good.drop_duplicates("problem").sort_index()


def boxes(frame: pd.DataFrame, plans: Path) -> Figure:
    """Draw every best plan as a row of stages, as wide as their share of the operators."""
    rows = best_rows(frame)
    figure = Figure(figsize=(10, 0.9 + 0.5 * len(rows)))
    axes = figure.subplots()
    for number, (_, row) in enumerate(rows.iterrows()):
        plan, problem = loaded(plans / f"{row['run']}.yaml")
        left, total = 0.0, len(problem.workload)
        for stage in plan.stages:
            width = stage.num_operators() / total
            recomputed = sum(stop - start for start, stop in stage.recompute) / max(1, stage.num_operators())
            # Hatching shows recomputation without colour.
            axes.add_patch(
                Rectangle((left, -number - 0.4), width, 0.8, facecolor="#cfe3f2", edgecolor="0.2",
                          hatch="///" if recomputed > 0.5 else ("/" if recomputed > 0 else None), linewidth=0.8)
            )  # fmt: skip
            if width > 0.06:
                axes.text(left + width / 2, -number, _label(stage_degrees(stage)), ha="center", va="center", fontsize=7)
            left += width
        axes.text(1.01, -number, f"{row['searcher']}: {_pipeline(plan)}", va="center", fontsize=7)
    axes.set_yticks([-number for number in range(len(rows))], rows["problem"], fontsize=7)
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    axes.set_xticks([])
    axes.set_title("stages by share of operators; T tensor, D data parallel, Z ZeRO; hatched: recomputed", fontsize=9)
    return figure


def _label(degrees: tuple[int, int, int]) -> str:
    tp, dp, zero = degrees
    return f"T{tp} D{dp}" + (f" Z{zero}" if zero else "")


def _pipeline(plan: Plan) -> str:
    last = "" if plan.last_microbatch_size is None else f", the last {plan.last_microbatch_size}"
    return f"{counted(len(plan.stages), 'stage')}, {plan.num_microbatches} x {plan.microbatch_size}{last}"


def pictures(frame: pd.DataFrame, plans: Path) -> Mapping[str, bytes]:
    """Return timeline and memory of the best plan of each problem, as PNG files by name."""
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _, row in best_rows(frame).iterrows():
            result = simulated(plans / f"{row['run']}.yaml")
            plan, _ = loaded(plans / f"{row['run']}.yaml")
            shown = (2 * len(plan.stages) + SHOWN_TURNS) / plan.num_microbatches
            end_s = min(1.0, shown) * result.iteration_time_s
            path = Path(folder) / "picture.png"
            title = f"{row['problem']}, {row['searcher']}"
            plot_timeline(result, path, title=title, window=(0.0, end_s))
            found[f"timeline_{row['problem']}"] = path.read_bytes()
            plot_memory(result, path, title=title)
            found[f"memory_{row['problem']}"] = path.read_bytes()
    return found
