from __future__ import annotations

from itertools import pairwise

import pytest

from simulator.reports.figures import log_ticks, new_figure

RANGES = [(0.0015, 1300.0), (0.008, 0.04), (2.6, 4.6), (3.2, 3.9), (0.9, 11.0), (1e-9, 3e9), (2e-5, 9e-5), (1.01, 1.02)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_labels_of_a_logarithmic_axis_are_several_and_apart(low: float, high: float) -> None:
    figure = new_figure(6.0, 5.6)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        log_ticks(axis, 5.0)
    figure.draw_without_rendering()
    for axis, start, end in ((axes.xaxis, "x0", "x1"), (axes.yaxis, "y0", "y1")):
        labels = [label for label in axis.get_ticklabels() if label.get_text()]
        boxes = [label.get_window_extent() for label in labels]
        assert len(labels) >= 3
        assert all(getattr(one, end) < getattr(two, start) for one, two in pairwise(boxes))
        assert [float(label.get_text()) for label in labels] == pytest.approx(list(axis.get_majorticklocs()))


def test_a_short_logarithmic_axis_has_even_steps_and_a_long_one_powers_of_ten() -> None:
    axes = new_figure(6.0, 5.6).add_subplot()
    axes.set_xscale("log")
    for low, high, wanted in ((2.7, 4.6, [3, 3.5, 4, 4.5]), (0.002, 1300, [0.01, 0.1, 1, 10, 100, 1000])):
        axes.set_xlim(low, high)
        log_ticks(axes.xaxis, 5.0)
        assert list(axes.get_xticks()) == pytest.approx(wanted)
