"""vTrain's single-node runs on a profile inferred from a tenth of them.

The rows are sums of parts that were timed one by one (``docs/residuals.md``), single timings that scatter by up to a
fifth. No constant of a host follows them, but whoever has logs of some of the runs has them in there. So a tenth of the
rows gives these cases a factor for each part, and the host's constants and the rate of unaligned products in place of
the shipped ones, which other rows were fitted on (`experiments.fit_vtrain_profile`). All others are predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from experiments.calibrate.inferred_parts import AFTER, BEFORE, LAYER, Part, corrected
from experiments.cases import vtrain
from experiments.cases.case import PRINTED, Case, Skipped, data_file
from experiments.cases.vtrain_host import TIMED, hardware_with, runtime_with
from simulator.problem import Problem

GROUP = "vtrain-calibrated"
SUFFIX = " on an inferred profile"
FILE = PRINTED / "vtrain_profile.yaml"
ONE_IN = 10
SOURCE = "inferred from a tenth of vTrain's rows (experiments/accuracy_data/vtrain_profile.yaml)"
Positive = Annotated[float, Field(gt=0, le=100)]
HostConstant = Literal["forward_s", "backward_s", "kernel_s", "pass_s", "collective_s", "misaligned"]
Text = Annotated[str, Field(min_length=1, max_length=400)]


class _Prior(FileModel):
    widths: Mapping[str, float]
    noise: Positive


class _Part(FileModel):
    hidden: int
    tp: int
    microbatch: int
    before: Positive
    layer: Positive
    after: Positive


class ProfileFile(FileModel):
    """What ``python -m experiments.fit_vtrain_profile`` writes.

    Attributes:
        made_by: The command.
        source, rows: What it was fitted on.
        host: Constants in place of the shipped ones, as `experiments.cases.vtrain_host` names them.
        prior: Chosen by leaving rows out.
        errors: Mean absolute, on the rows themselves: of the host alone, of rows left out of the factors, of the fit.
        factors: On the times of operators before, in and after the layers.
    """

    format: Literal["windtunnel-vtrain-profile-1"]
    made_by: Text
    source: Text
    rows: tuple[int, ...]
    host: Mapping[HostConstant, Positive]
    prior: _Prior
    errors: Mapping[Literal["host", "left_out", "fit"], float]
    factors: tuple[_Part, ...]


@cache
def profile_file() -> ProfileFile:
    """Return the committed fit."""
    return validated(ProfileFile, load_mapping(FILE), FILE.name)


def factors() -> dict[Part, float]:
    """Return the committed factors."""
    return {
        Part(shape_of(row.hidden), block, row.tp, row.microbatch): factor
        for row in profile_file().factors
        for block, factor in ((BEFORE, row.before), (LAYER, row.layer), (AFTER, row.after))
    }


def shape_of(hidden: int) -> str:
    """Return the word for layers of one width; heads and tokens are the same in all rows.

    >>> shape_of(1024)
    'hidden 1024'
    """
    return f"hidden {hidden}"


def drawn(rows: Sequence[dict[str, Any]], one_in: int = ONE_IN, first: int | None = None) -> list[dict[str, Any]]:
    """Return every tenth row, in order of width, tensor-parallel degree, microbatch, and number in the file.

    So each kind of part is drawn as often as it occurs. Times are not looked at.

    Args:
        rows: The table.
        one_in: One row in so many.
        first: Place of the first, from 1 to ``one_in``, which None stands for.
    """
    ordered = sorted(
        rows, key=lambda row: (row["hidden"], row["tp"], row["microbatch"], vtrain.row_number(row["notes"]))
    )
    return ordered[(first or one_in) - 1 :: one_in]


def problem_under(row: Mapping[str, Any], host: Mapping[str, float]) -> Problem:
    """Return the problem of a row under constants of the host, without factors."""
    shipped = vtrain.case_of(dict(row)).problem()
    return replace(shipped, runtime=runtime_with(TIMED, host), hardware=hardware_with(host["misaligned"]), spec=None)


def problem_of_row(row: Mapping[str, Any]) -> Problem:
    """Return the problem of a row on the inferred profile."""
    problem = problem_under(row, {str(name): value for name, value in profile_file().host.items()})
    plan = vtrain.case_of(dict(row)).plan(problem)
    return corrected(problem, plan, shape_of(row["hidden"]), factors(), SOURCE)


def cases(data: Path | None) -> Iterator[Case | Skipped]:
    """Yield every row that the profile was not inferred from."""
    path = data_file(data, vtrain.TABLE, (GROUP,))
    if isinstance(path, Skipped):
        yield path
        return
    assert data is not None
    held_out, fitted = 0, set(profile_file().rows)
    for row in vtrain.rows(data):
        if vtrain.row_number(row["notes"]) in fitted:
            held_out += 1
            continue
        case = vtrain.case_of(row)
        yield replace(case, row_id=case.row_id + SUFFIX, groups=(GROUP,), problem=partial(problem_of_row, row))
    yield Skipped((GROUP,), held_out, "rows that the profile was inferred from")
