"""Every figure of ``docs/performance.md`` against the committed ones, in yardsticks timed in the same process.

``pytest tests/benchmarks/test_performance.py --benchmark-only``
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.benchmarks.cases import figures
from tests.benchmarks.measuring import Figure, measure

FIGURES = Path(__file__).parents[2] / "docs" / "performance" / "figures.csv"
TOLERANCE = 2.0
"""How many times the committed ratio a figure may reach: noise that the yardstick does not cancel stays below."""


def baseline() -> dict[str, float]:
    with FIGURES.open() as file:
        return {row["figure"]: float(row["ratio"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("figure", list(figures()), ids=lambda figure: figure.name)
def test_figure_is_no_slower_than_the_committed_one(benchmark, figure: Figure) -> None:
    found = benchmark.pedantic(measure, args=(figure,), rounds=1)
    benchmark.extra_info[f"{figure.unit}_per_s"] = round(figure.units / found.least_s, 1)
    benchmark.extra_info["ratio"] = round(found.ratio, 4)
    assert found.ratio < TOLERANCE * baseline()[figure.name]
