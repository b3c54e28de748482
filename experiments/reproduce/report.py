"""Writing what an experiment found: tables as CSV, figures as PNG, all of it as one page (HTML, Markdown) and JSON."""

from __future__ import annotations

import io
import json
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.writer import dump_json, write_bytes_atomically, write_text_atomically
from experiments.compare_files import versions
from experiments.reproduce.experiment import Experiment, Report
from experiments.reproduce.page import page

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


PARTIAL = "partial"
"""Folder in a report's own for what is kept of a long run."""


def write_report(folder: Path, experiment: Experiment, report: Report) -> list[Path]:
    """Write a report.

    Args:
        folder: Gets ``NAME.csv`` per table, ``NAME.png`` per figure, ``report.html`` (one self-contained file),
            ``report.md`` and ``report.json``.
        experiment: What was run.
        report: What it found.

    Returns:
        The files, the page first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "report.html", folder / "report.md", folder / "report.json"]
    for name, frame in report.tables.items():
        files.append(folder / f"{name}.csv")
        write_text_atomically(files[-1], frame.to_csv(index=False))
    pictures = {name: _png(figure) for name, figure in report.figures.items()}
    for name, picture in pictures.items():
        files.append(folder / f"{name}.png")
        write_bytes_atomically(files[-1], picture)
    write_text_atomically(files[0], page(experiment, report, pictures, text_cell))
    write_text_atomically(files[1], markdown(experiment, report))
    write_text_atomically(files[2], dump_json(to_mapping(experiment, report)))
    return files


def refuse_other_files(folder: Path) -> None:
    """Refuse a folder with files, but without `PARTIAL`, which reports have from their beginning, or a report of ours.

    Raises:
        ValueError: If the folder is such, since a report's tables and figures might be written over its files.
    """
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if others and PARTIAL not in others and not {"report.html", "report.md", "report.json"} <= set(others):
        raise ValueError(
            f"a report must have a folder of its own, got {folder} with {', '.join(others[:3])}"
            f"{' and more' if len(others) > 3 else ''}; name another folder, or move them away"
        )


def _png(figure: Figure | bytes) -> bytes:
    if isinstance(figure, bytes):
        return figure
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    return buffer.getvalue()


def to_mapping(experiment: Experiment, report: Report) -> dict[str, Any]:
    """Return plain data: what ``--json`` prints."""
    return {
        "experiment": experiment.name,
        "shows": experiment.shows,
        "source": experiment.source,
        "versions": versions(),
        "verdicts": [
            {"claim": each.claim, "criterion": each.criterion, "found": each.found, "verdict": each.word}
            for each in report.verdicts
        ],
        "notes": list(report.notes),
        "tables": {
            name: json.loads(frame.to_json(orient="records", double_precision=12))
            for name, frame in report.tables.items()
        },
    }


def markdown(experiment: Experiment, report: Report) -> str:
    """Return the page."""
    lines = [f"# {experiment.name}", "", f"{experiment.shows} Source: {experiment.source}.", ""]
    if report.verdicts:
        lines += ["| claim | holds when | found | verdict |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(each.claim)} | {_cell(each.criterion)} | {_cell(each.found)} | **{each.word}** |"
            for each in report.verdicts
        ]
        lines.append("")
    lines += [f"- {note}" for note in report.notes]
    for name in report.figures:
        lines += ["", f"![{name}]({name}.png)"]
    for name, frame in report.tables.items():
        lines += ["", f"## {name}", "", _markdown_table(frame)]
    return "\n".join(lines).rstrip() + "\n"


def text_cell(value: Any) -> str:
    """Return a table cell as text: four significant digits, nothing for what is missing (None, NaN, pandas' NA).

    >>> text_cell(1.23456), text_cell(float("nan")), text_cell(None), text_cell(17850), text_cell(17850.0)
    ('1.235', '', '', '17,850', '17,850')
    """
    from pandas import isna

    if not isinstance(value, str | list | tuple | dict) and isna(value):
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, Integral) and abs(int(value)) >= 10_000:
        return f"{value:,}"
    return str(value)


def _markdown_table(frame: pd.DataFrame) -> str:
    header = f"| {' | '.join(_cell(str(column)) for column in frame.columns)} |"
    cells = ([_cell(text_cell(value)) for value in row] for row in frame.itertuples(index=False, name=None))
    rows = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([header, "|" + "---|" * len(frame.columns), *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
