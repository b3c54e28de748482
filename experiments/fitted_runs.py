"""Which runs a calibration was fitted to: their errors say how well that went, not how well it predicts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from experiments.cases.case import Case
from hardware_models.calibration_file import load_calibration
from simulator.plan import Plan
from simulator.problem import Problem


def run_digest(problem: Problem, plan: Plan) -> str:
    """Return what tells a run from others, whatever table it stands in: model, cluster, runtime, batch and plan."""
    workload = problem.workload
    parts = workload.fingerprint, problem.hardware.cluster.name, problem.runtime.name, str(problem.global_batch)
    return hashlib.sha256("\n".join((*parts, plan.canonical_hash(workload))).encode()).hexdigest()[:16]


def fitted_rows(cases: Iterable[Case], profile: Path | str | None) -> frozenset[str]:
    """Return the rows of runs with measured times that a calibration file was fitted to.

    Raises:
        DataFileError: If the file breaks a rule.
    """
    known = set(load_calibration(profile).fitted_on) if profile is not None else set[str]()
    if not known:
        return frozenset()
    found = set()
    for case in cases:
        if case.measured.iteration_time_s is not None:
            problem = case.problem()
            if run_digest(problem, case.plan(problem)) in known:
                found.add(case.row_id)
    return frozenset(found)
