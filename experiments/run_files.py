"""The files that a table of runs needs: what a command that reads it must not write over."""

from __future__ import annotations

from pathlib import Path

from datafiles.tables import load_table
from experiments.run_table import PLAN, Common
from simulator.problem_files import files_of


def files_of_runs(table: Path, common: Common) -> list[Path]:
    """Return the table, and where its rows and what is common to them may name files; not all need be there.

    Raises:
        DataFileError: If the table cannot be read.
    """
    columns = (PLAN, "model", "cluster", "runtime")
    cells = {row.get(name, "").strip().partition(":")[0] for row in load_table(table) for name in columns}
    named = [place for cell in sorted(cells) if cell for place in (Path(cell), table.parent / cell)]
    return [table, *files_of(common.model, common.cluster, common.runtime, common.profile), *named]
