"""Fit the host's share of Megatron-DeepSpeed to vTrain's calibration rows: hidden 1024, tensor-parallel 1 and 2.

Two constants: seconds per operator, and seconds per pass of a microbatch through a stage. One kernel launch is
held at 5 us, since launches and operators rise and fall together. Rows: `experiments.cases.vtrain.is_calibration`;
they are never reported.

Run: ``python -m experiments.fit_host --data DIR``
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.accuracy import fastest_engine
from experiments.cases import vtrain
from experiments.cases.case import Case
from simulator.problem import Problem
from simulator.simulate import simulate

LAUNCH_S = 5e-6
START_US = (75.0, 1300.0)


def log_errors(cases: list[tuple[Case, Problem]], per_operator_s: float, per_pass_s: float) -> NDArray[np.float64]:
    """Return log(predicted / measured) of every case under given host constants."""
    found = []
    for case, problem in cases:
        runtime = replace(
            problem.runtime,
            host_seconds_per_kernel=LAUNCH_S,
            host_seconds_per_operator=(per_operator_s, per_operator_s),
            host_seconds_per_pass=per_pass_s,
        )
        changed = replace(problem, runtime=runtime)
        result = simulate(case.plan(changed), changed, engine=fastest_engine())
        assert case.measured.iteration_time_s is not None
        found.append(np.log(result.iteration_time_s / case.measured.iteration_time_s))
    return np.array(found)


def main() -> None:
    """Fit, then print the constants, the residual and the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/dev.csv")
    rows = [row for row in vtrain.rows(parser.parse_args().data) if vtrain.is_calibration(row)]
    cases = [(case, case.problem()) for case in map(vtrain.case_of, rows)]

    def residuals(microseconds: NDArray[np.float64]) -> NDArray[np.float64]:
        per_operator, per_pass = np.abs(microseconds) * 1e-6
        return log_errors(cases, float(per_operator), float(per_pass))

    fitted = least_squares(residuals, START_US, diff_step=[0.05, 0.05], loss="soft_l1", f_scale=0.05, max_nfev=8)
    errors = np.expm1(residuals(fitted.x))
    print(f"host_seconds_per_operator: {abs(fitted.x[0]) * 1e-6:.3g}")
    print(f"host_seconds_per_pass: {abs(fitted.x[1]) * 1e-6:.3g}")
    print(f"{len(cases)} fit rows: mean absolute error {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}")
    print("rows: ground_truth_single.csv#" + ",".join(str(vtrain.row_number(row["notes"])) for row in rows))


if __name__ == "__main__":
    main()
