from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from simulator.memory.usage import LiveBytes
from simulator.reports.figures import BLUE, GREEN
from simulator.reports.memory_plot import MEMORY_COLUMNS, _envelope, _memory_figure
from simulator.reports.timeline import (
    LANE_STYLES,
    MAX_BOXES,
    NUM_COLUMNS,
    OTHER_LANE,
    Boxes,
    _draw_labels,
    _legend,
    _lighten,
    _timeline_figure,
    readable_window,
    strip_colors,
    thinned,
)
from simulator.reports.timeline_boxes import FAINTEST
from simulator.result import SimulationResult
from simulator.uniform import uniform_plan
from tests.simulator.problems import small_problem
from tests.simulator.results import pipeline_result


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return pipeline_result()


def assert_png(path: Path, min_width: int = 1000) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20], "big") >= min_width


def test_timeline_is_a_png_and_deterministic(result: SimulationResult, tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        result.plot_timeline(tmp_path / name, title="a plan")
    assert_png(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


def test_timeline_of_a_window_and_of_too_many_boxes(result: SimulationResult, tmp_path: Path) -> None:
    result.plot_timeline(tmp_path / "window.png", window=(0.2, 0.4))
    result.plot_timeline(tmp_path / "merged.png", max_boxes=50)
    assert_png(tmp_path / "window.png")
    assert_png(tmp_path / "merged.png")


def test_an_empty_window_is_refused(result: SimulationResult, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="window must end after it starts"):
        result.plot_timeline(tmp_path / "x.png", window=(0.4, 0.2))


def test_thinned_boxes_keep_the_time_of_each_style_to_a_column() -> None:
    start = np.arange(10_000) * 1e-3
    boxes = Boxes(start, start + np.where(start < 5, 0.9e-3, 0.2e-3), np.arange(10_000) // 2500)
    thin = thinned(boxes, (0.0, 10.0), 100)
    assert len(thin) <= NUM_COLUMNS
    assert (thin.start[1:] >= thin.end[:-1] - 1e-12).all()
    assert thin.end[-1] == pytest.approx(5.0, abs=0.01)  # what fills a fifth of its columns is not drawn
    assert thin.end[thin.style == 0][-1] == pytest.approx(2.5, abs=0.01)


def test_memory_plot_with_few_and_many_steps_and_devices(tmp_path: Path) -> None:
    small = pipeline_result(fits=False)
    small.plot_memory(tmp_path / "small.png", title="a plan")
    large = pipeline_result(num_stages=12, num_microbatches=2)
    times = np.linspace(0.0, large.iteration_time_s, 5 * MEMORY_COLUMNS)
    history = LiveBytes(times, 1e9 + np.sin(times) * 1e8)
    replace(large, run=replace(large.run, live_bytes=lambda device: history)).plot_memory(tmp_path / "large.png")
    replace(large, memory=()).plot_memory(tmp_path / "none.png")
    for name in ("small.png", "large.png", "none.png"):
        assert_png(tmp_path / name)


def test_capacities_of_unlike_devices_say_whose_they_are() -> None:
    alike = pipeline_result(num_stages=3)
    first, *others = alike.memory
    unlike = replace(alike, memory=(replace(first, capacity_bytes=2 * first.capacity_bytes), *others))
    words = [
        [text.get_text() for text in _memory_figure(each, None).axes[0].texts] for each in (alike, unlike)
    ]
    assert all("stage" not in text for text in words[0])
    assert [text.partition(":")[0] for text in words[1]] == ["capacity of stages 1, 2", "capacity of stage 0"]


def test_the_envelope_keeps_the_peak() -> None:
    live = np.zeros(10_000)
    live[4321] = 7.0
    times, low, high = _envelope(LiveBytes(np.linspace(0.0, 1.0, 10_000), live), 1.0)
    assert len(times) == len(low) == len(high) <= MEMORY_COLUMNS + 1
    assert high.max() == 7.0 and low.max() == 0.0


def test_the_envelope_is_a_line_where_nothing_happens() -> None:
    busy = np.linspace(0.4, 0.5, 10_000)
    steps = np.where(np.arange(10_000) % 2, 5.0, 6.0)
    history = LiveBytes(np.concatenate(([0.0, 0.0], busy)), np.concatenate(([1.0, 4.0], steps)))
    times, low, high = _envelope(history, 1.0)
    assert (low[times < 0.39] == 4.0).all() and (high[times < 0.39] == 4.0).all()
    assert (low[times > 0.51] == steps[-1]).all() and (high[times > 0.51] == steps[-1]).all()
    assert (low[1:-1] < high[1:-1]).any()


def test_results_load_neither_matplotlib_nor_pandas_before_they_need_them() -> None:
    code = (
        "import sys, simulator.result, simulator.reports.timeline, simulator.reports.memory_plot; "
        "import simulator.reports.difference, simulator.reports.trace; "
        "print({'matplotlib', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_long_pipelines_are_drawn_where_they_begin_and_short_ones_whole() -> None:
    problem = small_problem(global_batch=512)
    long, short = (uniform_plan(problem, pp=2, dp=2, microbatch=each) for each in (1, 16))
    window = readable_window(long, 64.0)
    assert window == (0.0, 64.0 * (2 * 2 + 12) / 256)
    assert readable_window(short, 64.0) is None
    assert readable_window(uniform_plan(problem, pp=2, dp=2, microbatch=1, schedule="gpipe"), 64.0) is None


@pytest.mark.parametrize("name", ["x.svg", "x", "x.png.gz"])
def test_a_picture_is_named_as_what_it_is(result: SimulationResult, tmp_path: Path, name: str) -> None:
    for write in (result.plot_timeline, result.plot_memory):
        with pytest.raises(ValueError, match=r"a picture must be a file that ends in \.png, got .*; name it .*x\.png$"):
            write(tmp_path / name)
    assert not list(tmp_path.iterdir())


def line_of(result: SimulationResult) -> str:
    figure = _timeline_figure(result, (0.0, result.iteration_time_s), None, MAX_BOXES)
    return " ".join(title for axes in figure.axes for title in (axes.get_title(), axes.get_title(loc="left")))


def test_the_timeline_says_that_a_plan_does_not_fit_and_which_rows_are_left_out() -> None:
    assert "OUT OF MEMORY" not in line_of(pipeline_result()) and "rows" not in line_of(pipeline_result())
    assert "OUT OF MEMORY" in line_of(pipeline_result(fits=False))
    assert "(48 of 50 rows)" in line_of(pipeline_result(num_stages=50, num_microbatches=2))


def test_a_long_title_stays_inside_the_picture(result: SimulationResult) -> None:
    words = "pp 12 (tp x dp 1x2|1x2|2x1|1x2|1x2|2x1), layers 3|4|4|4|5|4, mixed by operator, microbatch 2 x 32"
    title = f"searchers/mine.py:Mine: {words}, recompute 10%-76%"
    figure = _timeline_figure(result, (0.0, result.iteration_time_s), title, MAX_BOXES)
    figure.draw_without_rendering()
    (drawn,) = [text for text in figure.texts if text.get_text().split() == title.split()]
    assert drawn.get_window_extent().x1 <= figure.bbox.x1
    assert drawn.get_window_extent().y0 >= figure.axes[0].get_window_extent().y1


def test_communication_is_as_pale_as_it_is_short() -> None:
    start = np.arange(10_000) * 1e-3
    boxes = Boxes(start, start + np.where(start < 5, 0.25e-3, 0.0), np.zeros(10_000, dtype=np.int32))
    colors = strip_colors(boxes, (0.0, 10.0), np.array([[1.0, 0.0, 0.2]]))
    strength = FAINTEST + 0.25 * (1 - FAINTEST)
    assert colors[:595].mean(axis=0) == pytest.approx([1.0, 1 - strength, 1 - 0.8 * strength], abs=0.01)
    assert (colors[605:] == 1.0).all()


def test_communication_is_seen_however_short_and_has_all_its_colour_where_nothing_else_is() -> None:
    boxes = Boxes(np.array([0.005, 5.0]), np.array([0.00501, 6.0]), np.array([0, 1], dtype=np.int32))
    red, green = np.array([1.0, 0.0, 0.2]), np.array([0.0, 1.0, 0.2])
    colors = strip_colors(boxes, (0.0, 10.0), np.array([red, green]))
    assert colors[0] == pytest.approx(1 - FAINTEST * (1 - red), abs=0.01)
    assert (colors[1:600] == 1.0).all() and (colors[721:] == 1.0).all()  # nothing is drawn longer than it takes
    assert colors[601:719] == pytest.approx(np.tile(green, (118, 1)))


def test_communication_of_one_lane_is_told_apart_however_pale() -> None:
    """Towards white, colours keep their direction: one that another has, too, would pass for a paler one of it."""
    for lane in (0, 1, 2):
        colors = {color for number, _, color in (*LANE_STYLES.values(), OTHER_LANE) if number == lane}
        directions = [1 - np.array(_lighten(color, 0.0)) for color in colors]
        for one, two in combinations(directions, 2):
            assert one @ two < 0.97 * np.linalg.norm(one) * np.linalg.norm(two)


def test_a_transfer_that_goes_on_beside_a_shorter_one_is_drawn_to_its_end() -> None:
    boxes = Boxes(np.array([0.0, 1.0, 8.0]), np.array([6.0, 2.0, 9.0]), np.zeros(3, dtype=np.int32))
    colors = strip_colors(boxes, (0.0, 10.0), np.zeros((1, 3)))
    assert colors[[60, 180, 600, 840, 1020], 0] == pytest.approx([0.0, 0.0, 0.0, 1.0, 0.0])


def test_the_legend_has_the_paler_boxes_of_later_chunks() -> None:
    names = [words for words, _ in _legend([("forward", _lighten(BLUE, 0.0)), ("forward", _lighten(BLUE, 0.55))])]
    assert names == ["forward", "forward, second chunk"]
    three = _legend([("transfer", _lighten(GREEN, 0.0)), *(("forward", _lighten(BLUE, x)) for x in (0.0, 0.3, 0.55))])
    assert [words for words, _ in three] == ["forward", "forward, chunks 2 to 3", "transfer"]
    assert three[1][1] == _lighten(BLUE, 0.55)


def test_boxes_that_rounding_alone_makes_narrower_are_numbered_too() -> None:
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    widths = [0.1 + 1e-16 * k for k in (3, 3, 2, 2, 2, 2, 2, 2, 1, 0)]
    labels = [(0.5, float(place), width, place, "forward") for place, width in enumerate(widths)]
    _draw_labels(axes, [(*label[:3], 10 + label[3], label[4]) for label in labels], 110.0, 40.0)
    assert len(axes.texts) == len(labels)
