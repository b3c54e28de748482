"""The figures on ``docs/performance.md`` are those of the measured files beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.page import with_tables

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def test_the_page_shows_what_was_measured() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, PAGE.with_suffix("")) == text, "run: python -m tests.benchmarks.figures --page"


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="one place for figures"):
        with_tables("no marks\n", PAGE.with_suffix(""))
