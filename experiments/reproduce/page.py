"""A report as one self-contained HTML file: no network, readable narrow, by keyboard, and without colour."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Any

from experiments.reproduce.experiment import Experiment, Report

if TYPE_CHECKING:
    import pandas as pd

OPEN_ROWS = 40
"""Longer tables are folded until asked for."""

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #8882; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 75rem; padding: 1rem;
       overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.source { opacity: .8; margin-top: 0; }
a:focus-visible, summary:focus-visible, .wide:focus-visible { outline: 3px solid #0072b2; outline-offset: 2px; }
nav a { margin-right: 1rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead th { position: sticky; top: 0; background: Canvas; }
.verdict { border-left: 6px solid; padding: .3rem .8rem; margin: .6rem 0; background: var(--soft); }
.holds { border-color: #0072b2; } .fails { border-color: #d55e00; } .open { border-color: #8c8c8c; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
summary { cursor: pointer; padding: .4rem 0; }
"""


def page(experiment: Experiment, report: Report, pictures: dict[str, bytes], text_cell: Any) -> str:
    """Return the page.

    Args:
        experiment: What was run.
        report: What it found.
        pictures: PNG files of the report's figures, by name.
        text_cell: Turns a table's value into text.
    """
    anchors = [("verdicts", "Verdicts")] if report.verdicts else []
    anchors += [(f"figure-{name}", _words(name)) for name in pictures]
    anchors += [(f"table-{name}", _words(name)) for name in report.tables]
    body = [
        f"<h1>{escape(experiment.name)}</h1>",
        f"<p class='source'>{escape(experiment.shows)} Source: {escape(experiment.source)}.</p>",
        "<nav aria-label='Contents'>",
        *(f"<a href='#{escape(anchor, quote=True)}'>{escape(words)}</a>" for anchor, words in anchors),
        "</nav>",
    ]
    if report.verdicts:
        body.append("<h2 id='verdicts'>Verdicts</h2>")
    for verdict in report.verdicts:
        kind = {True: "holds", False: "fails", None: "open"}[verdict.holds]
        body.append(
            f"<div class='verdict {kind}'><strong>{escape(verdict.word)}</strong>: {escape(verdict.claim)}<br>"
            f"<small>Holds when: {escape(verdict.criterion)}. Found: {escape(verdict.found)}.</small></div>"
        )
    if report.notes:
        body.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in report.notes) + "</ul>")
    for name, picture in pictures.items():
        data = base64.b64encode(picture).decode()
        words = escape(_words(name), quote=True)
        body.append(
            f"<h2 id='figure-{escape(name, quote=True)}'>{words}</h2><figure><img alt='{words}; its numbers are in the "
            f"tables below' src='data:image/png;base64,{data}'></figure>"
        )
    for name, frame in report.tables.items():
        body.append(f"<h2 id='table-{escape(name, quote=True)}'>{escape(_words(name))}</h2>")
        folded = len(frame) > OPEN_ROWS
        table = _table(name, frame, text_cell)
        body.append(f"<details><summary>{len(frame):,} rows</summary>{table}</details>" if folded else table)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; img-src data:; "
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(experiment.name)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _words(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _table(name: str, frame: pd.DataFrame, text_cell: Any) -> str:
    numeric = [frame[column].dtype.kind in "fiu" for column in frame.columns]
    head = "".join(
        f"<th scope='col'{' class=number' if is_number else ''}>{escape(str(column).replace('_', ' '))}</th>"
        for column, is_number in zip(frame.columns, numeric, strict=True)
    )
    rows = []
    for row in frame.itertuples(index=False, name=None):
        cells = "".join(
            f"<td{' class=number' if is_number else ''}>{escape(text_cell(value))}</td>"
            for value, is_number in zip(row, numeric, strict=True)
        )
        rows.append(f"<tr>{cells}</tr>")
    label = escape(_words(name), quote=True)
    return (
        f"<div class='wide' tabindex='0' role='region' aria-label='{label}'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
