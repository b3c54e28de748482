"""A picture of how full the devices' memories are over one iteration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from datafiles.writer import check_ending, write_bytes_atomically
from simulator.memory.usage import DeviceMemory, LiveBytes
from simulator.reports.breakdown import members_text
from simulator.reports.figures import (
    CYCLE,
    GRID,
    TEXT,
    VERMILION,
    clean_axes,
    new_figure,
    png,
    set_title,
)
from simulator.result import BYTES_PER_GIB, format_bytes, format_s
from simulator.taskgraph import Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from simulator.result import SimulationResult

MEMORY_COLORS = tuple(color for color in CYCLE if color != VERMILION)  # the capacity's

WIDEST = 2.4
"""Points."""

MEMORY_COLUMNS = 800
"""Where there are more steps, each of so many columns shows the range of what lies in it."""


def plot_memory(result: SimulationResult, path: str | Path, *, title: str | None = None) -> None:
    """Write a PNG of live bytes over time, a line per device (or stage), and the capacity.

    Args:
        result: A simulated iteration.
        path: The PNG; its folder must exist.
        title: First line; None for none.

    Raises:
        ValueError: If the name does not end in ``.png``.
    """
    check_ending(path, ".png", "picture")
    write_bytes_atomically(path, png(_memory_figure(result, title)))


def _memory_figure(result: SimulationResult, title: str | None) -> Figure:
    from matplotlib.patheffects import withStroke

    figure = new_figure(11.0, 5.0)
    axes = figure.add_subplot()
    drawn = _memories_to_draw(result)
    stages = [int(result.graph.device_stage[memory.device]) for memory in drawn]
    # The first is widest, so that it can be seen beside later ones that hold the same.
    widths = np.linspace(WIDEST, 1.2, len(drawn)) if len(drawn) > 1 else [1.2]
    for memory, stage, color, width in zip(drawn, stages, MEMORY_COLORS, widths, strict=False):
        members = members_text(result.graph.device_members[memory.device])
        label = f"stage {stage}" if stages.count(stage) == 1 else f"stage {stage}, GPU {members}"
        times, low, high = _envelope(result.live_bytes(memory.device), result.iteration_time_s)
        high, low = high / BYTES_PER_GIB, low / BYTES_PER_GIB
        axes.plot(times, high, drawstyle="steps-post", linewidth=width, color=color, label=label)
        if (low < high).any():
            axes.fill_between(times, low, high, step="post", color=color, alpha=0.18, linewidth=0)
    capacities = sorted({memory.capacity_bytes for memory in result.memory})
    for capacity in capacities:
        whose = "" if len(capacities) == 1 else f" of {_stages_of(capacity, result)}:"
        axes.axhline(capacity / BYTES_PER_GIB, color=VERMILION, linestyle=(0, (6, 3)), linewidth=1.3)
        axes.annotate(
            f"capacity{whose} {format_bytes(capacity)}", (1.0, capacity / BYTES_PER_GIB), (-4, 4),
            xycoords=("axes fraction", "data"), textcoords="offset points", ha="right", va="bottom",
            fontsize=9, color=VERMILION, path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip
    line = f"iteration {format_s(result.iteration_time_s)}"
    peak = result.peak_device if not result.fits else result.largest_device
    if peak is not None:
        height = peak.peak_allocated_bytes / BYTES_PER_GIB
        axes.plot([peak.peak_time_s], [height], "o", color=TEXT, markersize=5, zorder=5)
        line += f",  highest live peak {format_bytes(peak.peak_allocated_bytes)} at {format_s(peak.peak_time_s)}" + (
            f" ({peak.peak_where})" if peak.peak_where else ""
        )
        line += "" if result.fits else ",  OUT OF MEMORY"
    axes.set_xlim(0, result.iteration_time_s)
    top = max([memory.peak_allocated_bytes for memory in result.memory] or [0])
    top = max([top, *(memory.capacity_bytes for memory in result.memory)])
    axes.set_ylim(0, 1.1 * top / BYTES_PER_GIB if top > 0 else 1.0)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    clean_axes(axes)
    axes.set_xlabel("time (s)", color=TEXT)
    axes.set_ylabel("live tensors (GiB)", color=TEXT)
    set_title(axes, title, line)
    if result.memory:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9, labelcolor=TEXT)
    return figure


def _stages_of(capacity: int, result: SimulationResult) -> str:
    """Return the stages that have devices of a capacity."""
    stages = result.graph.device_stage
    own = sorted({int(stages[memory.device]) for memory in result.memory if memory.capacity_bytes == capacity})
    if len(own) == len({int(stage) for stage in stages}):
        return "some GPUs"
    return f"{'stage' if len(own) == 1 else 'stages'} {', '.join(map(str, own))}"


def _memories_to_draw(result: SimulationResult) -> list[DeviceMemory]:
    """Return the devices in pipeline order; of many, those with the peaks that are told of, and some evenly spaced."""
    stages = result.graph.device_stage
    order = sorted(result.memory, key=lambda memory: (int(stages[memory.device]), memory.device))
    if len(order) <= len(MEMORY_COLORS):
        return order
    chosen = {int(i) for i in np.linspace(0, len(order) - 1, len(MEMORY_COLORS) - 1).round()}
    peaks = (result.peak_device, result.largest_device)
    return [
        memory
        for number, memory in enumerate(order)
        if number in chosen or any(memory is peak for peak in peaks)
    ]


def _envelope(history: LiveBytes, end_s: float) -> tuple[Floats, Floats, Floats]:
    """Return times, smallest and largest live bytes: every step, or where they are too many, per column."""
    begin = max(0, int(np.searchsorted(history.times_s, 0.0, side="right")) - 1)  # what is there before is no step
    times, live = history.times_s[begin:], history.live_bytes[begin:]
    last = live[-1:]
    if len(times) <= MEMORY_COLUMNS:
        steps = np.append(live, last)
        return np.append(times, np.full(len(last), end_s)), steps, steps
    column = np.minimum((times / end_s * MEMORY_COLUMNS).astype(np.int64), MEMORY_COLUMNS - 1)
    edges = np.arange(MEMORY_COLUMNS) * end_s / MEMORY_COLUMNS
    before = live[np.maximum(0, np.searchsorted(column, np.arange(MEMORY_COLUMNS)) - 1)]
    low, high = before.copy(), before.copy()
    begins = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1])))
    low[column[begins]] = np.minimum(before[column[begins]], np.minimum.reduceat(live, begins))
    high[column[begins]] = np.maximum(before[column[begins]], np.maximum.reduceat(live, begins))
    return np.append(edges, end_s), np.append(low, last), np.append(high, last)
