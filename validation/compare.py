"""Validation: a plan simulated with the machine's profile, executed, and the signed errors."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from simulator.plan import Plan
from simulator.problem import Problem
from simulator.simulate import simulate
from validation.jobs import execute_rounds, plan_job
from validation.machine_profile import MachineProfile
from validation.measurement import Measurement
from validation.stage_times import stage_times


@dataclass(frozen=True)
class Quantity:
    """One predicted and measured time.

    Attributes:
        name: What it is.
        predicted_s, measured_s: Seconds.
    """

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Signed: (predicted - measured) / measured."""
        return (self.predicted_s - self.measured_s) / self.measured_s if self.measured_s > 0 else 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
        }


@dataclass(frozen=True)
class ValidationReport:
    """What validating a plan found.

    Attributes:
        quantities: The iteration time, then forward and backward of one microbatch per stage.
        measured_share: Share of the simulated compute time that comes from measured operators.
        spread: Largest less smallest measured iteration time, as a share of the median.
        rounds: Executions behind the medians.
        plan_hash, machine, notes: Of the measurement.
    """

    quantities: tuple[Quantity, ...]
    measured_share: float
    spread: float
    rounds: int
    plan_hash: str
    machine: str
    notes: tuple[str, ...]

    @property
    def iteration(self) -> Quantity:
        """The iteration time."""
        return self.quantities[0]

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data with units in the keys."""
        return {
            "plan_hash": self.plan_hash,
            "machine": self.machine,
            "iteration_time_error": self.iteration.error,
            "quantities": [each.to_mapping() for each in self.quantities],
            "measured_share": self.measured_share,
            "spread": self.spread,
            "rounds": self.rounds,
            "notes": list(self.notes),
        }


def validate_plan(
    plan: Plan,
    problem: Problem,
    profile: MachineProfile,
    *,
    rounds: int = 5,
    iterations: int = 4,
    device: str = "cpu",
) -> ValidationReport:
    """Simulate a plan with a machine's profile, execute it, and compare.

    Args:
        plan, problem: What is validated.
        profile: Of this machine and this model.
        rounds, iterations: Rounds of the execution, and iterations in each.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: If the plan cannot be executed, or the profile is of another machine, model or dtype.
        launch.WorkerError: If a process fails.
    """
    profile.check_machine()
    _check_profile(problem, profile)
    job = plan_job(plan, problem, iterations=iterations, device=device)
    measured = execute_rounds([job], rounds=rounds, device=device)
    return compare(job.plan, problem, profile, [turn[0] for turn in measured])


def _check_profile(problem: Problem, profile: MachineProfile) -> None:
    own = (problem.workload.name, problem.gpu_types[0], problem.runtime.implementation.dtype)
    theirs = (profile.operators.model, profile.operators.gpu_type, profile.operators.dtype)
    for what, wanted, got in zip(("model", "device type", "dtype"), own, theirs, strict=True):
        if wanted != got:
            raise ValueError(f"the profile's {what} must be {wanted}, got {got}; measure one with windtunnel profile")


def compare(plan: Plan, problem: Problem, profile: MachineProfile, measured: list[Measurement]) -> ValidationReport:
    """Return the report of a canonical plan that was executed once or more often."""
    result = simulate(plan, profile.apply(problem, plan))
    forward_s, backward_s = stage_times(result, len(plan.stages))
    samples = [each.iteration_time_s for each in measured]
    median_s = statistics.median(samples)
    quantities = [Quantity("iteration", result.iteration_time_s, median_s)]
    for stage in range(len(plan.stages)):
        for word, predicted, attribute in (
            ("forward", forward_s, "stage_forward_s"),
            ("backward", backward_s, "stage_backward_s"),
        ):
            taken = statistics.median(getattr(each, attribute)[stage] for each in measured)
            quantities.append(Quantity(f"stage {stage} {word}", predicted[stage], taken))
    return ValidationReport(
        quantities=tuple(quantities),
        measured_share=result.duration_sources["measured"] + result.duration_sources["interpolated"],
        spread=(max(samples) - min(samples)) / median_s,
        rounds=len(measured),
        plan_hash=measured[0].plan_hash,
        machine=profile.machine,
        notes=measured[0].notes,
    )
