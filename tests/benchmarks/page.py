"""The tables of ``docs/performance.md``, from the measured files: numbers are written in one place only."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path


def write_tables(page: Path, folder: Path) -> None:
    """Put the tables into the page, each between its marks."""
    text = page.read_text(encoding="utf-8")
    page.write_text(with_tables(text, folder), encoding="utf-8")


def with_tables(text: str, folder: Path) -> str:
    """Return a page with its tables written anew.

    Args:
        text: The page; ``<!-- figures:begin -->`` and ``<!-- figures:end -->`` are where a table goes.
        folder: The measured files.

    Raises:
        ValueError: If a mark is missing.
    """
    tables = {"figures": _figures(folder), "memory": _memory(folder), "errors": _errors(folder)}
    for name, lines in tables.items():
        pattern = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        body = "\n".join(lines) + "\n"
        text, count = pattern.subn(lambda found, body=body: found[1] + body + found[2], text)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page must have one place for {name}, got {count}; add <!-- {name}:begin -->")
    return text


def _figures(folder: Path) -> list[str]:
    rows = []
    for row in _rows(folder / "figures.csv"):
        per_s = "" if row["unit"] == "runs" else f"{_rounded(float(row['per_s']))} {row['unit']}"
        yardsticks = f"{float(row['ratio']):.3g}"
        rows.append((row["figure"], per_s, f"{_short(row['least_s'])} to {_short(row['most_s'])}", yardsticks))
    return _table(("what", "per second", "one call, least to most, s", "yardsticks"), rows)


def _memory(folder: Path) -> list[str]:
    rows = [(row["what"], row["peak_mib"]) for row in _rows(folder / "memory.csv")]
    return _table(("a fresh process that does", "peak memory, MiB"), rows)


def _errors(folder: Path) -> list[str]:
    found: dict[str, list[str]] = {}
    groups: list[str] = []
    for row in _rows(folder / "errors.csv"):
        if row["plans"] not in groups:
            groups.append(row["plans"])
        mean, worst = 100 * float(row["mean_absolute"]), 100 * float(row["worst"])
        found.setdefault(row["engine_with"], []).append(f"{mean:.1f} % ({worst:+.1f} %)")
    header = ("the engine has", *(f"{words} plans: mean of absolute errors (worst)" for words in groups))
    return _table(header, [(words.replace("-", " "), *cells) for words, cells in found.items()])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(header)
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _short(seconds: str) -> str:
    value = float(seconds)
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def _rounded(value: float) -> str:
    """Return three digits in words: 22.1 M, 293,000, 64.6."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    digits = f"{value:.3g}"
    return f"{float(digits):,.0f}" if value >= 100 else digits
