"""The output folder of a comparison: everything needed to repeat it, and to continue it.

inputs.yaml            problem, budget, seed, engine, versions
table.csv, table.json  one row per searcher, those that finished in earlier calls of the same code too
history.csv            best objective over time
plans/NAME.yaml        the plan of each searcher, ready for ``windtunnel simulate``
rows/NAME.json         row, history and counters of a finished searcher
throughput.png, convergence.png, timelines/NAME.png
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.loader import load_mapping
from datafiles.records import read_record, write_record
from datafiles.writer import dump_yaml, write_text_atomically
from experiments.console import writable_folder

if TYPE_CHECKING:
    import pandas as pd

    from simulator.plan import Plan
    from simulator.problem import Problem, ProblemSpec
    from simulator.result import SimulationResult

FILES = ("table.csv", "table.json", "history.csv", "throughput.png", "convergence.png")
_PACKAGES = ("windtunnel", "numpy", "pandas", "scipy", "simpy", "pydantic", "matplotlib")


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def code_fingerprint(searcher: str) -> str:
    """Return a hash of all code and data files a row depends on, a plug-in's file and what it imports included."""
    from searchers.registry import files_of

    digest = hashlib.sha256(_own_files_hash().encode())
    for contents in sorted(path.read_bytes() for path in files_of(searcher)):
        digest.update(contents)
    return digest.hexdigest()[:16]


@cache
def _own_files_hash() -> str:
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("datafiles", "workloads", "hardware_models", "simulator", "searchers", "experiments"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".py", ".yaml", ".json", ".csv"):
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class ComparisonFolder:
    """Reads and writes the folder. Every file appears whole or not at all.

    Args:
        path: The folder; made if it is not there.
        inputs: What all rows share.

    Raises:
        ValueError: If the folder holds a comparison with other inputs or files of these names that none wrote, is a
            file or cannot be written.
    """

    def __init__(self, path: str | Path, inputs: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._inputs = dict(inputs)
        refuse_foreign(self.path, "inputs.yaml", FILES)
        self._check_same_inputs()
        for folder in (self.path, self.path / "plans", self.path / "rows", self.path / "timelines"):
            writable_folder(folder)
        mapping = {**self._inputs, "versions": versions()}
        write_text_atomically(self.path / "inputs.yaml", dump_yaml(mapping))

    def _check_same_inputs(self) -> None:
        file = self.path / "inputs.yaml"
        if not file.is_file():
            return
        before = load_mapping(file)
        mine = json.loads(json.dumps(self._inputs))
        for key in mine:
            if before.get(key) != mine[key]:
                raise ValueError(
                    f"{self.path} holds a comparison with another {key}: {_other(before.get(key), mine[key])}; "
                    "choose another output folder or delete this one"
                )

    def finished_row(self, searcher: str) -> dict[str, Any] | None:
        """Return the row of a searcher that finished in an earlier call of the same code, or None.

        Where it failed, or its plan or timeline is gone, it has not finished.
        """
        saved = read_record(self._record(searcher))
        if saved is None or saved.get("searcher") != searcher or saved.get("code") != code_fingerprint(searcher):
            return None
        if saved["row"]["status"] == "failed":
            return None
        if saved["summary"] is not None and not all(map(has_content, (self._plan(searcher), self._timeline(searcher)))):
            return None
        return dict(saved["row"])

    def rows_of_others(self, searchers: Collection[str]) -> list[dict[str, Any]]:
        """Return the rows of searchers but these that finished in earlier calls of the same code."""
        saved = map(read_record, (self.path / "rows").glob("*.json"))
        names = {str(each["searcher"]) for each in saved if each is not None and "searcher" in each}
        rows = map(self.finished_row, sorted(names - set(searchers)))
        return [row for row in rows if row is not None]

    def add(
        self,
        searcher: str,
        row: Mapping[str, Any],
        history: list[tuple[float, int, float]],
        counters: Mapping[str, int | float],
        spec: ProblemSpec,
        problem: Problem,
        plan: Plan | None,
        result: SimulationResult | None,
    ) -> None:
        """Write what a searcher found; its row last, since that marks it as finished."""
        from simulator.plan_file import save_plan
        from simulator.reports.timeline import readable_window

        if plan is not None:
            save_plan(self._plan(searcher), spec, plan, fingerprint=problem.workload.fingerprint)
        if result is not None:
            assert plan is not None, "a result has a plan"
            window = readable_window(plan, result.iteration_time_s)
            result.plot_timeline(self._timeline(searcher), window=window, title=f"{searcher}: {row['plan']}")
        saved = {
            "searcher": searcher,
            "code": code_fingerprint(searcher),
            "row": dict(row),
            "counters": dict(counters),
            "history": [list(entry) for entry in history],
            "summary": result.summary() if result is not None else None,
        }
        write_record(self._record(searcher), saved)

    def write_table(self, table: pd.DataFrame) -> None:
        """Write the table as CSV and JSON."""
        write_text_atomically(self.path / "table.csv", table.to_csv(index=False))
        write_text_atomically(self.path / "table.json", json_of(table) + "\n")

    def write_plots(self, table: pd.DataFrame, *, title: str) -> None:
        """Write the history and the plots over all searchers."""
        from experiments.compare_plots import plot_convergence, plot_throughput

        histories = {searcher: self._history(searcher) for searcher in table["searcher"]}
        lines = ["searcher,wall_s,evaluations,best_objective_s"]
        lines += [
            f"{searcher},{wall_s!r},{evaluations},{best!r}"
            for searcher, entries in histories.items()
            for wall_s, evaluations, best in entries
        ]
        write_text_atomically(self.path / "history.csv", "\n".join(lines) + "\n")
        plot_throughput(table, self.path / "throughput.png", title=title)
        objective = str(self._inputs.get("objective", "paper"))
        misfits = set(table["searcher"][table["status"] == "out of memory"])
        plot_convergence(
            histories, self.path / "convergence.png", title=title, objective=objective, misfits=misfits
        )

    def _record(self, searcher: str) -> Path:
        return self.path / "rows" / f"{file_name(searcher)}.json"

    def _plan(self, searcher: str) -> Path:
        return self.path / "plans" / f"{file_name(searcher)}.yaml"

    def _timeline(self, searcher: str) -> Path:
        return self.path / "timelines" / f"{file_name(searcher)}.png"

    def _history(self, searcher: str) -> list[tuple[float, int, float]]:
        saved = read_record(self._record(searcher))
        if saved is None:
            raise ValueError(f"{self._record(searcher)} changed while this ran; call again to make it again")
        return [(float(wall_s), int(count), float(best)) for wall_s, count, best in saved["history"]]


def json_of(table: pd.DataFrame) -> str:
    """Return the rows as JSON, every number to its last bit (`pandas.DataFrame.to_json` keeps 10 digits)."""
    rows = table.astype(object).where(table.notna(), None).to_dict("records")
    return json.dumps(rows, indent=2, allow_nan=False)


def refuse_foreign(folder: Path, mark: str, names: Sequence[str]) -> None:
    """Refuse to write over files that were there before.

    Args:
        folder: Where results go.
        mark: What an earlier call of ours would have left in it.
        names: What this one writes.

    Raises:
        ValueError: If one of them is there without the mark.
    """
    there = [name for name in names if (folder / name).exists()]
    if there and not (folder / mark).exists():
        raise ValueError(
            f"output must be a folder of its own, got {folder}, whose {', '.join(there)} would be written over; "
            "name another folder"
        )


def has_content(file: Path) -> bool:
    """Return whether there is a file with anything in it."""
    return file.is_file() and file.stat().st_size > 0


def file_name(searcher: str) -> str:
    """Return a file name for a searcher; a path to a plug-in becomes its class and a short hash.

    >>> file_name("megatron-grid")
    'megatron-grid'
    >>> file_name("../mine.py:Mine")
    'Mine-18e4dc54'
    """
    if re.fullmatch(r"[A-Za-z0-9_-]+", searcher):
        return searcher
    stem = re.sub(r"[^A-Za-z0-9_-]", "", searcher.rpartition(":")[2]) or "searcher"
    return f"{stem}-{hashlib.sha256(searcher.encode()).hexdigest()[:8]}"


def _other(before: Any, mine: Any) -> str:
    """Return what was another, in words; of mappings the keys alone that differ.

    >>> _other({"model": "gpt3-1.3b", "global_batch": 8}, {"model": "gpt3-1.3b", "global_batch": 16})
    'global_batch 8 instead of 16'
    """
    if not isinstance(before, dict) or not isinstance(mine, dict):
        return f"{before} instead of {mine}"
    keys = [key for key in {**before, **mine} if before.get(key) != mine.get(key)]
    return ", ".join(f"{key} {before.get(key)} instead of {mine.get(key)}" for key in keys)
