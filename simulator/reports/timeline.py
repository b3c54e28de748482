"""A picture of one iteration: who computes what when.

A row per device: computation as boxes with the microbatch inside, communication as thin lanes below, the paler
the less of a pixel's time it takes::

    stage 0  [0][1][2]........[0][1][2]
              -  -  -          -  -  -
    stage 1  ...[0][0][1][1][2][2].....
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from datafiles.writer import check_ending, write_bytes_atomically
from simulator.reports.breakdown import device_tasks, members_text
from simulator.reports.figures import (
    BACKGROUND,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    TEXT,
    VERMILION,
    YELLOW,
    clean_axes,
    new_figure,
    png,
    set_title,
)
from simulator.reports.timeline_boxes import NUM_COLUMNS, Boxes, strip_colors, task_boxes, thinned
from simulator.result import format_rate, format_s
from simulator.taskgraph import COMMUNICATION, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from simulator.plan import Plan
    from simulator.result import SimulationResult
    from simulator.taskgraph import TaskGraph

Color = tuple[float, float, float]

MAX_BOXES = 20_000
MAX_LABELS = 2_500
MAX_ROWS = 48
ROWS_IN, ROW_IN = 8.0, (0.16, 0.95)
"""Height of all rows together, and the least and most of one."""
LANE, LANE_GAP = 0.13, 0.02
"""Height of a lane as a share of its row's, with the gap to the next."""
DIGIT_WIDTH = 0.62
"""Of the font size, in matplotlib's default font."""
ALIKE = 1e-6
"""By what boxes of one pass may differ in width and count as alike: rounding, as times grow along an iteration."""

BUSY_STYLES = {
    "forward": ("forward", BLUE),
    "backward": ("backward", ORANGE),
    "backward input": ("backward (inputs)", ORANGE),
    "backward weight": ("backward (weights)", YELLOW),
    "recompute": ("recompute", SKY),
    "loss": ("loss", "#004B75"),
    "gradient copy": ("backward", ORANGE),
    "optimizer": ("optimizer", "#444444"),
    "gradient norm": ("optimizer", "#444444"),
}
LANE_STYLES = {
    "tensor parallel": (0, "tensor parallel", VERMILION),
    "resharding": (0, "resharding", "#A4123F"),
    "loss": (0, "tensor parallel", VERMILION),
    "transfer": (1, "transfer", GREEN),
    "parameter gather": (2, "parameter gather", "#4B3F9E"),
    "gradient sync": (2, "gradient sync", PURPLE),
    "embedding sync": (2, "gradient sync", PURPLE),
    "gradient norm": (2, "other communication", GREY),
}
"""Causes of communication: lane, name, colour. Of one lane none is a paler one of another."""

LEGEND_COLUMNS, LEGEND_COLUMNS_WIDE = 8, 5
LEGEND_WIDE = 20
"""Letters of a label from which on fewer stand side by side."""

SHOWN_TURNS = 12
"""Microbatches of a full pipeline that a picture shows, beside those that fill it."""

OTHER_BUSY, OTHER_LANE = ("other computation", GREY), (2, "other communication", GREY)

LABELLED_WITH = {"loss": "forward", "recompute": "backward", "backward input": "backward"}
"""Causes that share one microbatch number with another."""


def readable_window(plan: Plan, iteration_time_s: float) -> tuple[float, float] | None:
    """Return what to draw of a timeline: where it repeats itself, its beginning is enough; None for all of it."""
    shown = 2 * len(plan.stages) + SHOWN_TURNS
    if plan.schedule == "gpipe" or plan.num_microbatches <= 2 * shown:
        return None
    return 0.0, shown / plan.num_microbatches * iteration_time_s


def plot_timeline(
    result: SimulationResult,
    path: str | Path,
    *,
    window: tuple[float, float] | None = None,
    title: str | None = None,
    max_boxes: int = MAX_BOXES,
) -> None:
    """Write a PNG with one row per device.

    Where there would be more than ``max_boxes`` boxes, boxes narrower than a pixel column are merged,
    each column showing what takes most of it. More than MAX_ROWS devices are thinned out to one per
    stage, then evenly.

    Args:
        result: A simulated iteration.
        path: The PNG; its folder must exist.
        window: (start_s, end_s) to zoom into; None for the whole iteration.
        title: First line; None for none (a second line gives iteration time and bubble).
        max_boxes: See above.

    Raises:
        ValueError: If the window is empty, or the name does not end in ``.png``.
    """
    span = (0.0, result.iteration_time_s) if window is None else window
    if not span[0] < span[1]:
        raise ValueError(f"window must end after it starts, got {span}; give (start_s, end_s)")
    check_ending(path, ".png", "picture")
    write_bytes_atomically(path, png(_timeline_figure(result, span, title, max_boxes)))


def _timeline_figure(result: SimulationResult, span: tuple[float, float], title: str | None, max_boxes: int) -> Figure:
    from matplotlib.patches import Patch

    graph = result.graph
    devices = _rows_to_draw(graph)
    lanes = sorted({_lane(graph.causes[index])[0] for index in _causes_of(graph, COMMUNICATION)})
    row_in = float(np.clip(ROWS_IN / len(devices), *ROW_IN))
    figure = new_figure(13.0, 1.5 + row_in * len(devices))
    axes = figure.add_subplot()
    busy_share = 1.0 - 0.1 - LANE * len(lanes)
    column_s = (span[1] - span[0]) / NUM_COLUMNS
    boxes_per_row = max(16, max_boxes // (len(devices) * (1 + len(lanes))))
    styles: dict[tuple[str, Color], int] = {}
    strips: list[tuple[float, Boxes]] = []
    drawn: list[tuple[float, float, Boxes]] = []
    labels: list[tuple[float, float, float, int, str]] = []
    for row, device in enumerate(devices):
        tasks = device_tasks(graph, device)
        inside = (result.schedule.end_s[tasks] > span[0]) & (result.schedule.start_s[tasks] < span[1])
        tasks = tasks[inside & (result.schedule.end_s[tasks] > result.schedule.start_s[tasks])]
        tasks = tasks[np.argsort(result.schedule.start_s[tasks], kind="stable")]
        communicates = graph.kind[tasks] == COMMUNICATION
        axes.barh(row + busy_share / 2, span[1] - span[0], busy_share, span[0], color=BACKGROUND, zorder=0)
        busy = tasks[~communicates]
        boxes = task_boxes(result, busy, _busy_styles(result, device, busy, styles), column_s)
        drawn.append((row, busy_share, thinned(boxes, span, boxes_per_row)))
        labels += [(row + busy_share / 2, *label) for label in _labels(result, busy, span)]
        lane_styles, lane_of = _lane_styles(graph, tasks[communicates], styles)
        for number, lane in enumerate(lanes):
            chosen = lane_of == lane
            moves = tasks[communicates][chosen]
            boxes = Boxes(result.schedule.start_s[moves], result.schedule.end_s[moves], lane_styles[chosen])
            strips.append((row + busy_share + LANE_GAP + LANE * number, boxes))
    _draw_boxes(axes, drawn, styles)
    _draw_strips(axes, strips, styles, span)
    points_per_s = 13.0 * 0.86 * 72 / (span[1] - span[0])
    _draw_labels(axes, labels, points_per_s, row_in * busy_share * 72)
    axes.set_xlim(*span)
    axes.set_ylim(len(devices) - 0.04, -0.06)
    axes.set_yticks(np.arange(len(devices)) + busy_share / 2, _row_labels(graph, devices))
    axes.tick_params(axis="y", length=0)
    clean_axes(axes)
    axes.tick_params(axis="y", length=0)
    pale = ";  communication is the paler the less of a pixel's time it takes" if lanes else ""
    axes.set_xlabel(f"time (s){pale}", color=TEXT)
    line = (
        f"iteration {format_s(result.iteration_time_s)},  bubble {100 * result.bubble_share:.1f} %,  "
        f"{format_rate(result.samples_per_s)} samples/s"
    )
    if result.mfu is not None:
        line += f",  MFU {100 * result.mfu:.1f} %"
    if not result.fits:
        line += ",  OUT OF MEMORY"
    if len(devices) < graph.num_devices:
        line += f"   ({len(devices)} of {counted(graph.num_devices, 'row')})"
    if span != (0.0, result.iteration_time_s):
        line += f"   (shown: {format_s(span[0])} to {format_s(span[1])})"
    set_title(axes, title, line)
    handles = [Patch(facecolor=color, label=words) for words, color in _legend(styles)]
    if handles:
        widest = max(len(str(handle.get_label())) for handle in handles)
        most = LEGEND_COLUMNS if widest < LEGEND_WIDE else LEGEND_COLUMNS_WIDE
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), most), frameon=False,
            fontsize=9, labelcolor=TEXT, handlelength=1.2, handleheight=0.9, columnspacing=1.6,
        )  # fmt: skip
    return figure


def _legend(styles: Iterable[tuple[str, Color]]) -> list[tuple[str, Color]]:
    """Return words and colour of every kind of box; of paler ones, which are later chunks of a device, the palest."""
    order = [name for name, _ in (*BUSY_STYLES.values(), OTHER_BUSY)]
    order += [name for _, name, _ in (*LANE_STYLES.values(), OTHER_LANE)]
    shades: dict[str, set[Color]] = {}
    for name, color in styles:
        shades.setdefault(name, {_lighten(_base_color(name), 0.0)}).add(color)
    entries = []
    for name in sorted(shades, key=order.index):
        ordered = sorted(shades[name], key=sum)
        entries.append((name, ordered[0]))
        if len(ordered) > 1:
            later = "second chunk" if len(ordered) == 2 else f"chunks 2 to {len(ordered)}"
            entries.append((f"{name}, {later}", ordered[-1]))
    return entries


def _rows_to_draw(graph: TaskGraph) -> list[int]:
    devices = list(range(graph.num_devices))
    if len(devices) > MAX_ROWS:
        _, first = np.unique(graph.device_stage, return_index=True)
        devices = [int(device) for device in first]
    if len(devices) > MAX_ROWS:
        devices = [devices[int(i)] for i in np.linspace(0, len(devices) - 1, MAX_ROWS).round()]
    return sorted(devices, key=lambda device: (int(graph.device_stage[device]), device))


def _row_labels(graph: TaskGraph, devices: Sequence[int]) -> list[str]:
    labels = []
    for device in devices:
        members = members_text(graph.device_members[device])
        members = members if len(members) <= 14 else f"{len(graph.device_members[device])} GPUs"
        who = members if members.endswith("GPUs") else f"GPU {members}"
        stage = f"stage {graph.device_stage[device]}"
        labels.append(f"{stage}\n{who}" if len(devices) <= 12 else f"{stage}, {who}")
    return labels


def _causes_of(graph: TaskGraph, kind: int) -> list[int]:
    return [int(index) for index in np.unique(graph.cause[graph.kind == kind])]


def _lane(cause: str) -> tuple[int, str, str]:
    return LANE_STYLES.get(cause, OTHER_LANE)


def _base_color(name: str) -> str:
    for known, color in (*BUSY_STYLES.values(), OTHER_BUSY):
        if known == name:
            return color
    return next(color for _, known, color in (*LANE_STYLES.values(), OTHER_LANE) if known == name)


def _lighten(color: str, amount: float) -> Color:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (channel + (1 - channel) * amount for channel in channels)
    return red, green, blue


def _busy_styles(result: SimulationResult, device: int, tasks: Ints, styles: dict[tuple[str, Color], int]) -> Ints:
    """Return each task's style; later virtual stages of a device are lighter."""
    graph = result.graph
    chunks = np.unique(graph.stage[tasks][graph.stage[tasks] >= 0])
    chunk = np.maximum(0, np.searchsorted(chunks, graph.stage[tasks]))
    chunk = np.where(graph.stage[tasks] >= 0, chunk, 0)
    keys = graph.cause[tasks].astype(np.int64) * (len(chunks) + 1) + chunk
    unique, inverse = np.unique(keys, return_inverse=True)
    table = []
    for key in unique:
        cause, part = divmod(int(key), len(chunks) + 1)
        name, color = BUSY_STYLES.get(graph.causes[cause], OTHER_BUSY)
        amount = 0.55 * part / max(1, len(chunks) - 1)
        table.append(styles.setdefault((name, _lighten(color, amount)), len(styles)))
    return np.array(table, dtype=np.int32)[inverse]


def _lane_styles(graph: TaskGraph, tasks: Ints, styles: dict[tuple[str, Color], int]) -> tuple[Ints, NDArray[np.int64]]:
    """Return each communication's style and lane."""
    style = np.zeros(len(graph.causes), dtype=np.int32)
    lane = np.zeros(len(graph.causes), dtype=np.int64)
    for cause in np.unique(graph.cause[tasks]):
        lane[cause], name, color = _lane(graph.causes[cause])
        style[cause] = styles.setdefault((name, _lighten(color, 0.0)), len(styles))
    return style[graph.cause[tasks]], lane[graph.cause[tasks]]


def _labels(result: SimulationResult, tasks: Ints, span: tuple[float, float]) -> list[tuple[float, float, int, str]]:
    """Return (center_s, width_s, microbatch, cause) per run of tasks of one pass, stage and microbatch."""
    graph = result.graph
    tasks = tasks[graph.microbatch[tasks] >= 0]
    if len(tasks) == 0:
        return []
    together = [LABELLED_WITH.get(cause, cause) for cause in graph.causes]
    numbers = {cause: number for number, cause in enumerate(dict.fromkeys(together))}
    passes = np.array([numbers[cause] for cause in together])
    key = np.column_stack((passes[graph.cause[tasks]], graph.stage[tasks], graph.microbatch[tasks]))
    begins = np.flatnonzero(np.concatenate(([True], (key[1:] != key[:-1]).any(axis=1))))
    start = np.maximum(result.schedule.start_s[tasks][begins], span[0])
    end = np.minimum(np.maximum.reduceat(result.schedule.end_s[tasks], begins), span[1])
    center, width = (start + end) / 2, end - start
    words = list(numbers)
    return [
        (float(center[i]), float(width[i]), int(key[begin, 2]), words[key[begin, 0]]) for i, begin in enumerate(begins)
    ]


def _draw_boxes(axes: Axes, drawn: list[tuple[float, float, Boxes]], styles: dict[tuple[str, Color], int]) -> None:
    from matplotlib.collections import PolyCollection

    corners, colors = [], []
    table = np.array([color for _, color in styles] or [(0.0, 0.0, 0.0)])
    for y, height, boxes in drawn:
        low, high = np.full(len(boxes), y), np.full(len(boxes), y + height)
        x = np.column_stack((boxes.start, boxes.end, boxes.end, boxes.start))
        corners.append(np.stack((x, np.column_stack((low, low, high, high))), axis=-1))
        colors.append(table[boxes.style])
    vertices, faces = np.concatenate(corners), np.concatenate(colors)
    edge: Any = {"edgecolors": "white", "linewidths": 0.35} if len(vertices) <= 4000 else {"linewidths": 0}
    axes.add_collection(PolyCollection(list(vertices), facecolors=faces, zorder=2, **edge), autolim=False)


def _draw_strips(
    axes: Axes, strips: list[tuple[float, Boxes]], styles: dict[tuple[str, Color], int], span: tuple[float, float]
) -> None:
    table = np.array([color for _, color in styles] or [(0.0, 0.0, 0.0)])
    for y, boxes in strips:
        if len(boxes):
            colors = strip_colors(boxes, span, table)[np.newaxis]
            extent = (*span, y + LANE - LANE_GAP, y)
            axes.imshow(colors, extent=extent, aspect="auto", interpolation="nearest", zorder=2)


def _draw_labels(
    axes: Axes, labels: list[tuple[float, float, float, int, str]], points_per_s: float, height_points: float
) -> None:
    """Write microbatch numbers into the boxes that have room for them."""
    from matplotlib.patheffects import withStroke

    for cause in dict.fromkeys(label[4] for label in labels):
        chosen = [label for label in labels if label[4] == cause]
        digits = max(len(str(label[3])) for label in chosen)
        typical = float(np.quantile([label[2] for label in chosen], 0.1)) * points_per_s
        # One size per cause, so that the numbers of a row do not stop where they get longer.
        size = min(8.5, 0.55 * height_points, (typical - 1.0) / (DIGIT_WIDTH * digits))
        if size < 4.5 or len(chosen) > MAX_LABELS:
            continue
        name, color = BUSY_STYLES.get(cause, OTHER_BUSY)
        white = name in ("forward", "optimizer")
        for y, center, width, microbatch, _ in chosen:
            if DIGIT_WIDTH * size * len(str(microbatch)) + 1.0 > width * points_per_s * (1 + ALIKE):
                continue
            text = axes.text(
                center, y, str(microbatch), ha="center", va="center_baseline", fontsize=size,
                color="white" if white else TEXT, zorder=3, clip_on=True,
            )  # fmt: skip
            if white:  # the number may stand on a gap between two boxes
                text.set_path_effects([withStroke(linewidth=1.8, foreground=color)])
