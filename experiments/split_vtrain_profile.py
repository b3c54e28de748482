"""What carries over from one side of vTrain's table to the other: fitted on one, the other reported.

``tensor``: tensor-parallel 1 and 2, both widths, for 4 and 8. ``hidden``: hidden 1024 for 2048. At most a tenth of all
rows are fitted on: every eighth, or fifth, of the side, drawn as for the profile of the whole table. The prior is
chosen within them, leaving out all rows of one tensor-parallel degree at a time, or of one microbatch: what is asked of
the factors is what they say of kinds that no row has.

Run: ``python -m experiments.split_vtrain_profile --data DIR``; some minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from experiments.calibrate.inferred_profile import sums_of
from experiments.calibrate.inferred_ridge import NOISE, Prior, choose, priors
from experiments.cases import vtrain
from experiments.cases.vtrain_host import TIMED
from experiments.cases.vtrain_inferred import drawn
from experiments.fit_host import fit
from experiments.fit_vtrain_profile import run_of

SPLITS = {"tensor": ("tp", (1, 2), 8, "tp"), "hidden": ("hidden", (1024,), 5, "microbatch")}
"""Column, its values on the fitted side, one row in so many, and what is left out together."""


def main() -> None:
    """Print errors on the fitted side, of kinds left out, and on the other side, with and without factors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/dev.csv")
    table = vtrain.rows(parser.parse_args().data)
    for name, (column, values, one_in, together) in SPLITS.items():
        rows = drawn([row for row in table if row[column] in values], one_in)
        host, errors = fit(rows, TIMED)
        runs = [run_of(row, host) for row in rows]
        reported = [run_of(row, host) for row in table if row[column] not in values]
        sums, groups = sums_of(runs, {}), [row[together] for row in rows]
        print(f"{name}: {len(rows)} rows fitted, host alone {np.abs(errors).mean():.1%}; {len(reported)} reported")
        parts = {part for run in reported for part in run.parts()}
        for what, prior in (
            ("no factors", Prior({}, NOISE)),
            ("factors", choose(sums, priors(), groups)),
        ):
            factors = sums.estimate(prior, parts)
            left_out = np.abs(sums.left_out(prior, groups)).mean()
            signed = np.array([run.predicted_s(factors) / run.seconds - 1 for run in reported])
            widths = ", ".join(f"{level} {width:g}" for level, width in prior.widths.items() if width)
            print(
                f"  {what}: {left_out:.2%} of a {together} left out, {np.abs(signed).mean():.2%} reported, "
                f"bias {signed.mean():+.1%} {widths}"
            )


if __name__ == "__main__":
    main()
