"""Rows of an experiment are made once, and again where what they depend on has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.reproduce import kept
from experiments.reproduce.experiment import Context
from experiments.reproduce.kept import kept_rows


class Maker:
    """Makes rows, notes which, and fails where it is told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.made: list[int] = []
        self.fails_at = fails_at

    def __call__(self, context: Context, items: Sequence[int]) -> Iterator[dict[str, Any]]:
        for item in items:
            if item == self.fails_at:
                raise KeyboardInterrupt
            self.made.append(item)
            yield {"item": item, "third": item / 3, "curve": [(1, item / 7)], "missing": None}


def context_in(folder: Path, **changes: Any) -> Context:
    return replace(Context(data=folder, scratch=folder / "partial", say=lambda line: None), **changes)


def test_an_interrupted_experiment_goes_on_where_it_was(tmp_path: Path) -> None:
    first = Maker(fails_at=3)
    with pytest.raises(KeyboardInterrupt):
        kept_rows(context_in(tmp_path), [1, 2, 3, 4], first)
    second = Maker()
    rows = kept_rows(context_in(tmp_path), [1, 2, 3, 4], second)
    assert (first.made, second.made) == ([1, 2], [3, 4])
    assert rows == kept_rows(context_in(tmp_path), [1, 2, 3, 4], Maker(fails_at=1))
    assert rows[0] == {"item": 1, "third": 1 / 3, "curve": [[1, 1 / 7]], "missing": None}


def test_other_code_seed_or_data_is_another_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "figures.csv").write_text("1")

    def made(context: Context) -> list[int]:
        maker = Maker()
        kept_rows(context, [1], maker, files=["figures.csv"])
        return maker.made

    assert made(context_in(tmp_path)) == [1]
    assert made(context_in(tmp_path)) == []
    assert made(context_in(tmp_path, seed=1)) == [1]
    assert made(context_in(tmp_path, quick=True)) == [1]
    (tmp_path / "figures.csv").write_text("2")
    assert made(context_in(tmp_path)) == [1]
    monkeypatch.setattr(kept, "code_fingerprint", lambda searcher: "other code")
    assert made(context_in(tmp_path)) == [1]


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs figures\.csv"):
        kept_rows(context_in(tmp_path), [1], Maker(), files=["figures.csv"])


def test_seconds_of_other_workers_are_another_row(tmp_path: Path) -> None:
    def made(workers: int, *, timed: bool) -> list[int]:
        maker = Maker()
        kept_rows(context_in(tmp_path, workers=workers), [1], maker, timed=timed)
        return maker.made

    assert made(1, timed=True) == [1]
    assert made(2, timed=True) == [1]
    assert made(1, timed=True) == made(2, timed=True) == []
    assert made(1, timed=False) == [1]
    assert made(2, timed=False) == []


def test_a_row_that_was_changed_is_made_again(tmp_path: Path) -> None:
    kept_rows(context_in(tmp_path), [1, 2], Maker())
    file = next(path for path in (tmp_path / "partial" / "rows" / "runs").iterdir() if '"item": 2' in path.read_text())
    file.write_text(file.read_text().replace('"item": 2', '"item": null'))
    maker = Maker()
    assert [row["item"] for row in kept_rows(context_in(tmp_path), [1, 2], maker)] == [1, 2]
    assert maker.made == [2]
