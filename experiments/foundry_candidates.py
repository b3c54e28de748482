"""What would change llm-foundry's errors: its trainer's metrics, FSDP's copies, a replay that stops early.

For every run, the signed error of the iteration time and what is missing a microbatch, as shipped and with one thing
changed. Only to look: nothing is chosen by it.

Run: ``python -m experiments.foundry_candidates --data DIR``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.cases import llm_foundry
from experiments.cases.case import Case
from hardware_models.runtime import Runtime
from simulator.simulate import simulate_time_s

VARIANTS: Mapping[str, Callable[[Runtime], Runtime]] = {
    "as shipped": lambda runtime: runtime,
    "no metrics": lambda runtime: replace(runtime, implementation=replace(runtime.implementation, loss_metrics=0)),
    "no copies": lambda runtime: replace(runtime, sharded_gradient_copies=0),
    "stops early": lambda runtime: replace(runtime, recompute_stops_early=True),
}


def seconds(case: Case, change: Callable[[Runtime], Runtime]) -> float:
    """Return the simulated iteration time of a run under a changed runtime."""
    problem = case.problem()
    problem = replace(problem, runtime=change(problem.runtime))
    return simulate_time_s(case.plan(problem), problem, engine="compiled")


def main() -> None:
    """Print a line per run, then the mean absolute error of each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds measured_runs/dev.csv")
    data = parser.parse_args().data
    errors: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for case in llm_foundry.cases(data):
        if not isinstance(case, Case) or case.measured.iteration_time_s is None:
            continue
        measured, features = case.measured.iteration_time_s, case.features
        found = {name: seconds(case, change) for name, change in VARIANTS.items()}
        for name, own in found.items():
            errors[name].append(own / measured - 1)
        words = ", ".join(f"{name} {own / measured - 1:+.1%}" for name, own in found.items())
        missing_s = (measured - found["no metrics"]) / float(features["accumulation"])
        print(
            f"{features['model']}, {features['tokens']} tokens x {features['microbatch']}, {features['gpus']} GPUs, "
            f"recompute {features['recompute']}: {words}; without metrics {1e3 * missing_s:+.0f} ms a microbatch"
        )
    for name, own_errors in errors.items():
        print(f"{name}: {np.abs(own_errors).mean():.1%} ({np.mean(own_errors):+.1%}), {len(own_errors)} runs")


if __name__ == "__main__":
    main()
