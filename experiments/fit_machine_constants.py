"""Fit constants of machines to every fifth of their published runs (groups of `experiments.cases.machine_fitted`).

Run: ``python -m experiments.fit_machine_constants --data DIR``. With ``--draw K`` nothing is written: constants are
fitted on the fifth that begins at the K-th run, and the errors of all others are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from datafiles.schema import validated
from datafiles.writer import dump_yaml, write_text_atomically
from experiments.calibrate.fitted_constants import FittedConstants, fit_constants, log_error
from experiments.cases.case import Case
from experiments.cases.machine_fitted import (
    FILE,
    ONE_IN,
    SOURCES,
    MachineFitsFile,
    drawn,
    measured,
)
from hardware_models.machine_factors import FACTORS

DIGITS = 4


def entry_of(rows: list[Case], found: FittedConstants) -> dict[str, object]:
    """Return what the file holds of one group, as plain data."""
    errors = {"before": found.before, "after": found.after, "left_out": found.left_out}
    return {
        "rows": [case.row_id for case in rows],
        "factors": {name: round(factor, DIGITS) for name, factor in found.factors.items()},
        "width": found.width,
        "errors": {name: round(float(np.abs(values).mean()), DIGITS) for name, values in errors.items()},
    }


def look(group: str, cases: list[Case], draw: int) -> None:
    """Print the errors of all runs but another fifth, with constants fitted on that."""
    runs = [measured(case) for case in cases if case.measured.iteration_time_s is not None]
    found = fit_constants(runs[draw - 1 :: ONE_IN], tuple(FACTORS))
    others = [run for number, run in enumerate(runs) if number % ONE_IN != draw - 1]
    before, after = (
        float(np.abs(np.expm1([log_error(run, factors) for run in others])).mean())
        for factors in ({}, found.factors)
    )
    words = ", ".join(f"{name} {factor:.2f}" for name, factor in found.factors.items())
    print(f"{group}, draw {draw}: {before:.1%} -> {after:.1%} on {len(others)} other runs; {words}", flush=True)


def main() -> None:
    """Fit, print the errors, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--draw", type=int, choices=range(1, ONE_IN + 1), help="look at another draw, write nothing")
    arguments = parser.parse_args()
    fits = {}
    for group, source in SOURCES.items():
        cases = [entry for entry in source(arguments.data) if isinstance(entry, Case)]
        if arguments.draw is not None:
            look(group, cases, arguments.draw)
            continue
        rows = drawn(cases)
        fits[group] = entry_of(rows, fit_constants([measured(case) for case in rows], tuple(FACTORS)))
        print(f"{group}: {len(rows)} of {len(cases)} runs; {fits[group]}")
    if fits:
        written = {
            "format": "windtunnel-machine-constants-1",
            "made_by": "python -m experiments.fit_machine_constants --data DIR",
            "fits": fits,
        }
        validated(MachineFitsFile, written, str(arguments.output))
        write_text_atomically(arguments.output, dump_yaml(written))


if __name__ == "__main__":
    main()
