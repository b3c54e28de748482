"""What an experiment is, what it is given and what it returns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simulator.reports.figures import CYCLE

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Context:
    """What an experiment may use.

    Attributes:
        data: Folder with a user's own copies of public measurement sets; None if there is none.
        scratch: Folder for partial results of long runs; the same folder when the experiment is run again.
        quick: Run a subset that takes seconds to two minutes, with the same code.
        workers: Processes that may run at once.
        seed: For whatever is random.
        searchers: A user's own searchers, ``path.py:Class``, for experiments that compare searchers.
        say: Takes a line of progress.
    """

    data: Path | None
    scratch: Path
    quick: bool = False
    workers: int = 1
    seed: int = 0
    searchers: tuple[str, ...] = ()
    say: Callable[[str], None] = print

    def data_file(self, relative: str) -> Path:
        """Return a file of the data folder.

        Raises:
            ValueError: If it is not there.
        """
        if self.data is None or not (self.data / relative).exists():
            raise ValueError(f"this experiment needs {relative}; give the folder that has it with --data DIR")
        return self.data / relative


QUICK = (
    "This is a quick run (--quick), of a part of the whole: criteria and what is said to be shown are the whole's; run "
    "without it for figures to compare or to publish."
)


@dataclass(frozen=True)
class Verdict:
    """A claim and whether it holds, computed from the experiment's tables.

    Attributes:
        claim: What the paper says.
        criterion: When we say that it holds.
        found: What we found, in figures.
        holds: None where it cannot be decided (``found`` says why).
    """

    claim: str
    criterion: str
    found: str
    holds: bool | None

    @property
    def word(self) -> str:
        """The verdict in words."""
        return {True: "holds", False: "does not hold", None: "not decided"}[self.holds]


@dataclass(frozen=True)
class Report:
    """What an experiment found.

    Attributes:
        tables: By name; ours beside the paper's, units in the column names.
        figures: By name; matplotlib's, or the bytes of a PNG file.
        verdicts: On the paper's claims.
        notes: What a reader must know to read the tables.
    """

    tables: Mapping[str, pd.DataFrame]
    figures: Mapping[str, Figure | bytes] = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    Attributes:
        name: As in ``windtunnel reproduce NAME``.
        shows: One line.
        source: Paper and number of the figure or table.
        run: ``module:function``; the function takes a `Context` and returns a `Report`.
        shares: Name of the experiment whose partial results this one takes over and adds to; empty: none's.
    """

    name: str
    shows: str
    source: str
    run: str
    shares: str = ""

    def __call__(self, context: Context) -> Report:
        """Run it; what it draws has the colours of all figures."""
        from cycler import cycler
        from matplotlib import rc_context

        module, _, function = self.run.partition(":")
        with rc_context({"axes.prop_cycle": cycler(color=CYCLE)}):
            report: Report = getattr(importlib.import_module(module), function)(context)
        return replace(report, notes=(QUICK, *report.notes)) if context.quick else report
