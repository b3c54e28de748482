"""Infer a profile from a tenth of vTrain's rows: constants of the host, then a factor for each part.

Rows: `experiments.cases.vtrain_inferred.drawn`, at most a tenth of the table; no other row's time is looked at. First
the host's constants are fitted (`experiments.fit_host`), then the factors, under the prior of
`experiments.calibrate.inferred_ridge.priors` that predicts rows left out best. What is written is what the cases of
``vtrain-calibrated`` have; ``calibration_rows.yaml`` lists the rows for the gate.

Run: ``python -m experiments.fit_vtrain_profile --data DIR``. With ``--tenth K`` nothing is written: factors are
inferred from the tenth that begins at the K-th row, with the committed host constants, and the error on all others is
printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from datafiles.schema import validated
from datafiles.writer import dump_yaml, write_text_atomically
from experiments.calibrate.inferred_parts import BLOCKS, Part
from experiments.calibrate.inferred_profile import Inferred, LayersRun, infer
from experiments.calibrate.inferred_ridge import priors
from experiments.cases import vtrain
from experiments.cases.vtrain_host import TIMED
from experiments.cases.vtrain_inferred import FILE, ONE_IN, ProfileFile, drawn, problem_under, profile_file, shape_of
from experiments.fit_host import fit

DIGITS = 4


def run_of(row: dict[str, Any], host: Mapping[str, float]) -> LayersRun:
    """Return a row as a run under constants of the host."""
    case, problem = vtrain.case_of(row), problem_under(row, host)
    return LayersRun(case.row_id, problem, case.plan(problem), row["value"] / 1e3, shape_of(row["hidden"]))


def file_of(
    rows: list[dict[str, Any]], host: Mapping[str, float], host_error: float, found: Inferred
) -> dict[str, Any]:
    """Return what the file holds, as plain data."""
    hidden = {shape_of(row["hidden"]): row["hidden"] for row in rows}
    kinds = sorted({(part.shape, part.tensor_size, part.samples) for part in found.factors})
    return {
        "format": "windtunnel-vtrain-profile-1",
        "made_by": "python -m experiments.fit_vtrain_profile --data DIR",
        "source": "vtrain/ground_truth_single.csv",
        "rows": sorted(vtrain.row_number(row["notes"]) for row in rows),
        "host": dict(host),
        "prior": {"widths": dict(found.prior.widths), "noise": found.prior.noise},
        "errors": {
            "host": round(host_error, DIGITS),
            "left_out": round(float(np.abs(found.left_out_errors).mean()), DIGITS),
            "fit": round(float(np.abs(found.errors).mean()), DIGITS),
        },
        "factors": [
            {"hidden": hidden[shape], "tp": tp, "microbatch": samples}
            | {block: round(found.factors[Part(shape, block, tp, samples)], DIGITS) for block in BLOCKS}
            for shape, tp, samples in kinds
        ],
    }


def look(table: list[dict[str, Any]], tenth: int) -> None:
    """Print the error on all rows but another tenth, with factors from that."""
    host = {str(name): value for name, value in profile_file().host.items()}
    rows = drawn(table, first=tenth)
    own = {vtrain.row_number(row["notes"]) for row in rows}
    others = [run_of(row, host) for row in table if vtrain.row_number(row["notes"]) not in own]
    found = infer([run_of(row, host) for row in rows], priors(), {part for run in others for part in run.parts()})
    errors = np.array([run.predicted_s(found.factors) / run.seconds - 1 for run in others])
    print(f"tenth {tenth}: mean absolute error {np.abs(errors).mean():.2%} on {len(others)} other rows")


def main() -> None:
    """Fit, print the errors, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/dev.csv")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--tenth", type=int, choices=range(1, ONE_IN + 1), help="look at another draw, write nothing")
    arguments = parser.parse_args()
    table = vtrain.rows(arguments.data)
    if arguments.tenth is not None:
        look(table, arguments.tenth)
        return
    rows = drawn(table)
    fitted, errors = fit(rows, TIMED)
    host = {name: float(f"{value:.{DIGITS}g}") for name, value in fitted.items()}
    wanted = {part for row in table for part in run_of(row, host).parts()}
    found = infer([run_of(row, host) for row in rows], priors(), wanted)
    written = file_of(rows, host, float(np.abs(errors).mean()), found)
    validated(ProfileFile, written, str(arguments.output))
    write_text_atomically(arguments.output, dump_yaml(written))
    print(f"{len(rows)} of {len(table)} rows; mean absolute errors {written['errors']}")
    print(f"prior {written['prior']}")


if __name__ == "__main__":
    main()
