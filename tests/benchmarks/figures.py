"""How fast the simulator is: every figure of ``docs/performance.md``, measured, written, and put on that page.

Figures, memory, errors and growth are written as CSV, the plot as PNG, and the tables into ``docs/performance.md``
beside the folder; ``--page`` only the tables, from what is there.
``pytest tests/benchmarks/test_performance.py --benchmark-only`` compares the figures with the committed baseline.

Run: ``python -m tests.benchmarks.figures -o docs/performance``
"""

from __future__ import annotations

import argparse
import csv
import platform
from importlib.metadata import version
from pathlib import Path

from tests.benchmarks.cases import figures
from tests.benchmarks.measuring import measure, peak_mebibytes
from tests.benchmarks.page import write_tables
from tests.benchmarks.studies import MEMORY, errors, growth, plot_growth


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/performance"))
    parser.add_argument("--only", default="", help="figures whose name holds this; the others stay as they are")
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--page", action="store_true", help="write the page's tables from the files that are there")
    options = parser.parse_args()
    page = options.output.parent / f"{options.output.name}.md"
    if options.page:
        write_tables(page, options.output)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    table = options.output / "figures.csv"
    known: dict[str, dict[str, str]] = {}
    if options.only and table.exists():
        with table.open(newline="") as file:
            known = {row["figure"]: row for row in csv.DictReader(file)}
    rows = []
    for figure in figures():
        if options.only not in figure.name:
            rows += [known[figure.name]] if figure.name in known else []
            continue
        found = measure(figure)
        rows.append(
            {
                "figure": figure.name,
                "per_s": f"{figure.units / found.least_s:.4g}",
                "unit": figure.unit,
                "least_s": f"{found.least_s:.4g}",
                "median_s": f"{found.median_s:.4g}",
                "most_s": f"{found.most_s:.4g}",
                "yardstick_s": f"{found.yardstick_s:.4g}",
                "ratio": f"{found.ratio:.4g}",
            }
        )
        print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    _write(table, rows)
    if options.only:
        if page.exists():
            write_tables(page, options.output)
        return
    memory = [{"what": what, "peak_mib": f"{peak_mebibytes(statement):.0f}"} for what, statement in MEMORY.items()]
    _write(options.output / "memory.csv", memory)
    _write(options.output / "errors.csv", list(errors()))
    names = ("numpy", "numba", "simpy", "pandas", "pydantic", "typer")
    versions = [{"package": "python", "version": platform.python_version()}]
    versions += [{"package": name, "version": version(name)} for name in names]
    _write(options.output / "versions.csv", versions)
    if not options.no_growth:
        grown = list(growth())
        columns = ("axis", "value", "tasks", "new_plan_s", "same_plan_s", "periods_left_out_s")
        rounded = [(*row[:3], *(f"{seconds:.4g}" for seconds in row[3:])) for row in grown]
        _write(options.output / "growth.csv", [dict(zip(columns, row, strict=True)) for row in rounded])
        plot_growth(grown, options.output / "growth.png")
    if page.exists():
        write_tables(page, options.output)


def _write(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
