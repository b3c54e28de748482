"""Published runs once more, with constants of their machine fitted on every fifth of them.

What a user has who ran a few plans and logged their iterations: `experiments.calibrate.fitted_constants` gives him
factors on a handful of constants of the machine; all other runs are predicted with these. Which runs are drawn does
not depend on their times beyond whether they ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from experiments.calibrate.fitted_constants import moved
from experiments.calibrate.measured_run import MeasuredRun
from experiments.cases import amp, llm_foundry
from experiments.cases.case import PRINTED, Case, CaseSource, Skipped
from hardware_models.schema import Text
from simulator.problem import Problem

FILE = PRINTED / "machine_constants.yaml"
SUFFIX = " on fitted constants"
ONE_IN = 5
SOURCES: Mapping[str, CaseSource] = {"amp-fitted": amp.cases, "llm-foundry-fitted": llm_foundry.cases}
"""By group, where its runs come from."""

Positive = Annotated[float, Field(gt=0, le=100)]


class MachineFit(FileModel):
    """Factors fitted on some runs of one group.

    Attributes:
        rows: Ids of the runs.
        factors: On the machine's constants (`hardware_models.machine_factors.FACTORS`).
        width: Of the prior that leaving runs out chose.
        errors: Mean absolute, on these runs: with shipped constants, with the factors, and each left out of the fit.
    """

    rows: tuple[Text, ...]
    factors: Mapping[str, Positive]
    width: float
    errors: Mapping[Literal["before", "after", "left_out"], float]


class MachineFitsFile(FileModel):
    """What ``python -m experiments.fit_machine_constants`` writes."""

    format: Literal["windtunnel-machine-constants-1"]
    made_by: Text
    fits: Mapping[str, MachineFit]


@cache
def machine_fits() -> Mapping[str, MachineFit]:
    """Return the committed fits, by group."""
    return validated(MachineFitsFile, load_mapping(FILE), FILE.name).fits


def drawn(cases: Sequence[Case]) -> list[Case]:
    """Return every fifth run that ended, in the order of the source."""
    return [case for case in cases if case.measured.iteration_time_s is not None][ONE_IN - 1 :: ONE_IN]


def measured(case: Case) -> MeasuredRun:
    """Return a case that ran as a run to fit on."""
    problem = case.problem()
    assert case.measured.iteration_time_s is not None, "only runs that ended are fitted on"
    return MeasuredRun(case.row_id, problem, case.plan(problem), case.measured.iteration_time_s)


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield every run that no factor was fitted on."""
    for group, source in SOURCES.items():
        fit, held_out = machine_fits()[group], 0
        for entry in source(data):
            if isinstance(entry, Skipped):
                yield replace(entry, groups=(group,))
            elif entry.row_id in fit.rows:
                held_out += 1
            else:
                yield replace(
                    entry,
                    row_id=entry.row_id + SUFFIX,
                    groups=(group,),
                    problem=partial(_on_factors, entry.problem, fit.factors),
                )
        if held_out:
            yield Skipped((group,), held_out, "rows that the machine's constants were fitted on")


def _on_factors(problem: Callable[[], Problem], factors: Mapping[str, float]) -> Problem:
    return replace(moved(problem(), factors), spec=None)
