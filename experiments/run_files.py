"""The files that a table of runs needs: what a command that reads it must not write over."""

from __future__ import annotations

from pathlib import Path

from datafiles.tables import load_table
from experiments.run_table import PLAN, Common
from simulator.plan_file import load_plan
from simulator.problem_files import files_of


def files_of_runs(table: Path, common: Common) -> list[Path]:
    """Return the table, and where its rows, their plans and what is common to them may name files.

    Not all need be there.

    Raises:
        DataFileError: If the table cannot be read.
    """
    found = [table, *files_of(common.model, common.cluster, common.runtime, common.profile)]
    rows = list(load_table(table))
    named = [Path(cell) for cell in _cells(rows, PLAN)]
    for plan in [table.parent / cell for cell in named]:
        try:
            found += load_plan(plan)[0].files
        except (OSError, ValueError):
            continue  # told with the row that names it
    for model in _cells(rows, "model"):
        named += files_of(model=model)
    for cluster in _cells(rows, "cluster"):
        named += files_of(cluster=cluster)
    for runtime in _cells(rows, "runtime"):
        named += files_of(runtime=runtime)
    return [*found, *(place for file in named for place in (file, table.parent / file))]


def _cells(rows: list[dict[str, str]], column: str) -> list[str]:
    return sorted({cell for row in rows if (cell := row.get(column, "").strip())})
