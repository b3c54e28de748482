"""One problem, many searchers: each finds its plan, one simulator judges them all.

    problem -> every searcher -> its plan -> simulator -> one table, plots, plans on disk

With an output folder, every finished row is written at once, so an interrupted comparison continues where
it stopped when it is called again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.words import counted
from experiments.compare_files import ComparisonFolder
from experiments.interrupts import one_interrupt
from experiments.judged import first_that_fits
from experiments.late import told_when_late
from experiments.progress import LATE
from experiments.statuses import STATUSES
from searchers.base import NoFeasiblePlan, UnfitResultError, check_objective, is_refusal
from searchers.budget import Budget
from searchers.checked_search import checked_search
from searchers.registry import raised, searcher_class, searcher_named
from simulator.compiled_cache import load_compiler, moment_s
from simulator.fidelity import Fidelity
from simulator.plan import Plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import check_engine

if TYPE_CHECKING:
    import pandas as pd

    from simulator.result import SimulationResult

DEFAULT_BUDGET = Budget(seconds=20.0)

COLUMNS = (
    "searcher",
    "status",
    "iteration_time_s",
    "samples_per_s",
    "tokens_per_s_per_device",
    "mfu",
    "peak_reserved_bytes",
    "capacity_bytes",
    "objective_s",
    "search_s",
    "evaluations",
    "budget_ended",
    "simulate_s",
    "plan",
    "reason",
)
"""Columns of the table. ``objective_s`` is what the searcher predicted, ``iteration_time_s`` what the
simulator says. ``budget_ended``: the search was not through when its budget was. ``status`` is one of
`experiments.statuses`; where it is not ``ok``, see ``reason``."""

_INTEGERS = ("peak_reserved_bytes", "capacity_bytes", "evaluations")

Listener = Callable[[str, str, int | None], None]
"""Called with searcher, state (``searching``, ``late``, ``simulating``, ``done``, ``kept``) and tasks done or None;
with ``late`` from another thread."""


@dataclass(frozen=True)
class Comparison:
    """The inputs of a comparison.

    Attributes:
        spec: The problem, in names.
        searchers: Names or ``path.py:Class``.
        budget: For each searcher.
        seed: For each searcher.
        engine: Engine of the simulator.
        without: Effects switched off in the simulator.
        objective: What searchers minimise: ``paper`` or ``simulator``.
    """

    spec: ProblemSpec
    searchers: tuple[str, ...]
    budget: Budget = DEFAULT_BUDGET
    seed: int = 0
    engine: str = "auto"
    without: tuple[str, ...] = ()
    objective: str = "paper"

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data, without the list of searchers (one may be added later); files with their content."""
        there = [file for file in self.spec.files if file.is_file()]
        contents = {str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in there}
        return {
            **({"file content": contents} if contents else {}),
            "problem": self.spec.to_mapping(),
            "budget": {"seconds": self.budget.seconds, "evaluations": self.budget.evaluations},
            "seed": self.seed,
            "engine": self.engine,
            "without": list(self.without),
            "objective": self.objective,
        }


def compare(
    spec: ProblemSpec,
    searchers: Sequence[str],
    *,
    budget: Budget = DEFAULT_BUDGET,
    seed: int = 0,
    engine: str = "auto",
    without: Sequence[str] = (),
    objective: str = "paper",
    output: str | Path | None = None,
    listener: Listener | None = None,
) -> pd.DataFrame:
    """Let each searcher plan, simulate what it found, and return one table, fastest first.

    Args:
        spec: The problem.
        searchers: Names, or ``path.py:Class``.
        budget: For each searcher.
        seed: For each searcher.
        engine: Engine of the simulator.
        without: Effects to switch off in the simulator.
        objective: ``paper`` or ``simulator``.
        output: Folder for inputs, plans, history, table and plots; finished rows in it are kept. Those of
            the same code stand in its table and plots, whoever is asked for.
        listener: Told of progress.

    Returns:
        One row per searcher, COLUMNS.

    Raises:
        ValueError: If an input is wrong, or the folder holds another comparison.
    """
    inputs = Comparison(spec, tuple(searchers), budget, seed, engine, tuple(without), objective)
    if not inputs.searchers:
        raise ValueError("compare needs at least one searcher, got none")
    twice = [name for name, count in Counter(inputs.searchers).items() if count > 1]
    if twice:
        raise ValueError(f"every searcher must be named once, got {', '.join(twice)} again; leave the second out")
    for name in inputs.searchers:
        searcher_class(name)
    check_engine(engine)
    check_objective(objective)
    fidelity = Fidelity().without(*without)
    problem = spec.load()
    folder = ComparisonFolder(output, inputs.to_mapping()) if output is not None else None
    tell: Listener = listener or (lambda searcher, state, num_tasks: None)
    rows: list[dict[str, Any]] = []
    others = folder.rows_of_others(inputs.searchers) if folder else []
    load_compiler()
    for name in inputs.searchers:
        row = folder.finished_row(name) if folder else None
        if row is None:
            # Loaded anew: no searcher's seconds gain from what another has priced.
            judged = _judge(name, inputs, spec.load(), fidelity, tell)
            row = judged.row
            if folder:
                folder.add(
                    name, row, judged.history, judged.counters, spec, problem, judged.plan, judged.result
                )
            tell(name, "done", None)
        else:
            tell(name, "kept", None)
        rows.append(row)
        if folder:
            folder.write_table(table_of([*rows, *others]))
    if folder:
        folder.write_plots(table_of([*rows, *others]), title=_title(problem))
    return table_of(rows)


def table_of(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a table: plans that run first, fastest first."""
    import pandas as pd

    def key(row: dict[str, Any]) -> tuple[int, float, str]:
        return STATUSES.index(row["status"]), row.get("iteration_time_s") or float("inf"), row["searcher"]

    ordered = [{column: row.get(column) for column in COLUMNS} for row in sorted(rows, key=key)]
    table = pd.DataFrame(ordered, columns=list(COLUMNS))
    return table.astype(dict.fromkeys(_INTEGERS, "Int64"))


@dataclass
class _Judged:
    """One searcher's part: the row, and what else the folder keeps."""

    row: dict[str, Any]
    history: list[tuple[float, int, float]] = field(default_factory=list)
    counters: dict[str, int | float] = field(default_factory=dict)
    plan: Plan | None = None
    result: SimulationResult | None = None


def _judge(name: str, inputs: Comparison, problem: Problem, fidelity: Fidelity, tell: Listener) -> _Judged:
    tell(name, "searching", None)
    started_s = moment_s()
    try:
        # An interrupt that is none would be kept as the searcher's mistake.
        with told_when_late(inputs.budget, lambda: tell(name, LATE, None)), one_interrupt():
            searcher = searcher_named(name, objective=inputs.objective)
            found = checked_search(searcher, problem, inputs.budget, inputs.seed)
    except NoFeasiblePlan as error:
        return _without_plan(name, "no plan", error, started_s)
    except UnfitResultError as error:
        return _without_plan(name, "failed", error, started_s)
    except Exception as error:  # a searcher's own mistake must not end the others
        if is_refusal(error):
            return _without_plan(name, "not applicable", error, started_s)
        return _without_plan(name, "failed", ValueError(f"the searcher raised {raised(error, name)}"), started_s)
    judged = first_that_fits(
        found, problem, fidelity, inputs.engine, lambda num_tasks: tell(name, "simulating", num_tasks)
    )
    row = {"searcher": name, **judged.row(found, inputs.budget)}
    history = [(entry.wall_s, entry.evaluations, entry.best_objective) for entry in found.history]
    return _Judged(row, history, dict(found.counters), judged.plan, judged.result)


def _without_plan(name: str, status: str, error: ValueError, started_s: float) -> _Judged:
    row = {
        "searcher": name,
        "status": status,
        "search_s": moment_s() - started_s,
        "reason": str(error).removeprefix(f"{name}: "),
    }
    return _Judged(row)


def _title(problem: Problem) -> str:
    cluster = problem.hardware.cluster.name
    return f"{problem.workload.name} on {cluster}, {counted(problem.global_batch, 'sample')} per iteration"
