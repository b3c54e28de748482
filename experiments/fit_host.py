"""Fit the host's share of Megatron-DeepSpeed to vTrain's calibration rows: hidden 1024, tensor-parallel 1 and 2.

Two readings of the table (``--reading``):

- ``timed``, that of the accuracy cases: operators were timed one by one. Seconds per operator forward and backward, per
  kernel, per pass of a microbatch through a stage, and per collective; and what is left of the rate of matrix products
  whose rows are not aligned (the unsplit vocabulary of 50257). Runtime ``megatron-deepspeed-timed``.
- ``whole``: whole runs whose host runs ahead, everything recomputed, the vocabulary padded. Seconds per operator and
  per pass; a kernel launch is held at 5 us, since launches and operators rise and fall together. Runtime
  ``megatron-deepspeed``.

Rows: `experiments.cases.vtrain.is_calibration`; they are never reported. ``--oracle GROUP`` chooses the constants on a
reported group instead, to see what this form of host could reach there at all: such constants are for looking only.

Run: ``python -m experiments.fit_host --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from experiments.accuracy.run import fastest_engine
from experiments.cases import vtrain
from experiments.cases.case import uniform
from experiments.cases.vtrain_host import TIMED, WHOLE, hardware_with, runtime_with
from simulator.problem import Problem
from simulator.simulate import simulate
from workloads.operators import Workload
from workloads.registry import build_from_spec

START: Mapping[str, Mapping[str, float]] = {
    TIMED: {
        "forward_s": 50e-6,
        "backward_s": 80e-6,
        "kernel_s": 12e-6,
        "pass_s": 0.3e-3,
        "collective_s": 20e-6,
        "misaligned": 0.4,
    },
    WHOLE: {"operator_s": 75e-6, "pass_s": 1.3e-3},
}
"""Constants of each reading, and where their fit starts."""


def log_errors(
    rows: list[dict[str, Any]], workloads: list[Workload], reading: str, values: Mapping[str, float]
) -> NDArray[np.float64]:
    """Return log(predicted / measured) of every row under given constants."""
    runtime, hardware = runtime_with(reading, values), hardware_with(values.get("misaligned"))
    recompute = vtrain.RECOMPUTE if reading == TIMED else "full"
    found = []
    for row, workload in zip(rows, workloads, strict=True):
        problem = Problem(workload=workload, hardware=hardware, runtime=runtime, global_batch=row["global_batch"])
        degrees = {name: row[name] for name in ("tp", "pp", "dp", "microbatch")}
        result = simulate(uniform(**degrees, recompute=recompute)(problem), problem, engine=fastest_engine())
        found.append(np.log(result.iteration_time_s / (row["value"] / 1e3)))
    return np.array(found)


def fit(rows: list[dict[str, Any]], reading: str) -> tuple[dict[str, float], NDArray[np.float64]]:
    """Return the constants of a reading that fit rows best, and the signed errors of the rows under them."""
    specs = [vtrain.spec_of(row) for row in rows]
    if reading == WHOLE:
        specs = [spec.model_copy(update={"vocab_multiple": vtrain.PADDED_TO}) for spec in specs]
    workloads = [build_from_spec(spec, runtime_with(reading, START[reading]).attention) for spec in specs]
    names, start = list(START[reading]), np.array(list(START[reading].values()))

    def values_of(scaled: NDArray[np.float64]) -> dict[str, float]:
        values = dict(zip(names, (np.abs(scaled) * start).tolist(), strict=True))
        return {name: min(value, 1.0) for name, value in values.items()}

    def residuals(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        return log_errors(rows, workloads, reading, values_of(scaled))

    fitted = least_squares(
        residuals, np.ones(len(names)), diff_step=[0.05] * len(names), loss="soft_l1", f_scale=0.05, max_nfev=8
    )
    return values_of(fitted.x), np.expm1(residuals(fitted.x))


def main() -> None:
    """Fit, then print the constants, the residual and the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/dev.csv")
    parser.add_argument("--reading", choices=(TIMED, WHOLE), default=TIMED)
    parser.add_argument("--oracle", choices=vtrain.GROUPS, help="choose on the reported rows of a group, to look")
    arguments = parser.parse_args()
    oracle = arguments.oracle
    rows = [row for row in vtrain.rows(arguments.data) if vtrain.is_calibration(row) == (oracle is None)]
    rows = [row for row in rows if oracle is None or oracle in vtrain.case_of(row).groups]
    values, errors = fit(rows, arguments.reading)
    for name, value in values.items():
        print(f"{name}: {value:.3g}")
    kind = "fit" if oracle is None else "reported"
    print(f"{len(rows)} {kind} rows: mean absolute error {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}")
    print("rows: ground_truth_single.csv#" + ",".join(str(vtrain.row_number(row["notes"])) for row in rows))


if __name__ == "__main__":
    main()
