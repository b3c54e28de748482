"""A campaign's measured results as a file of accuracy cases, written where torch is and read where it is not.

The file holds everything a prediction needs: model, runtime, plan, the machine's profile and what the plan makes of it,
as the campaign predicted; and what was measured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.writer import write_mapping
from hardware_models.profile import OPTIONAL
from hardware_models.profile_file import profile_mapping
from simulator.plan import plan_to_mapping

if TYPE_CHECKING:
    from hardware_models.profile import OperatorProfile, ProfileRow
    from simulator.problem import Problem
    from validation.campaigns.result import CampaignResult

FORMAT = "windtunnel-campaign-cases-1"
GPU_FIELDS = ("optimizer_bandwidth_fraction", "overlap_slowdown_computation", "overlap_slowdown_communication")
"""What a profile replaces of a device type."""


def write_case_file(result: CampaignResult, path: Path) -> None:
    """Write a file of cases atomically: JSON if the name ends in ``.json``, YAML if in ``.yaml`` or ``.yml``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mapping(path, case_document(result))


def case_document(result: CampaignResult) -> dict[str, Any]:
    """Return what a case file holds, as plain data."""
    campaign = result.campaign
    hardware: dict[str, dict[str, Any]] = {}
    plans: list[dict[str, Any]] = []
    for each in result.outcomes:
        calibration = result.calibrations[each.plan.unit]
        if each.plan.unit not in hardware:
            source = f"windtunnel validate {campaign.name}"
            hardware[each.plan.unit] = hardware_mapping(each.problem, calibration.profile.operators, source)
        scaling = calibration.scaling(each.plan.problem, each.plan.plan)
        plan = plan_to_mapping(each.plan.plan)
        if plan["warmup"] is None:
            del plan["warmup"]
        measured: dict[str, Any] = {"out_of_memory": each.out_of_memory, "spread": _rounded(each.spread)}
        if not each.out_of_memory:
            measured["iteration_time_s"] = _rounded(each.iteration.measured_s)
        if each.memory.measured_allocated is not None:
            measured["peak_allocated_bytes"] = each.memory.measured_allocated
            measured["peak_reserved_bytes"] = each.memory.measured_reserved
        plans.append(
            {
                "name": each.plan.name,
                "unit": each.plan.unit,
                "model": each.plan.model,
                "runtime": each.plan.runtime,
                "global_batch": each.plan.problem.global_batch,
                "measured": measured,
                "scaling": {
                    "factor": _rounded(scaling.factor),
                    "extra_forward_s": _rounded(scaling.extra_forward_s),
                    "extra_backward_s": _rounded(scaling.extra_backward_s),
                    "host_factor": _rounded(scaling.host_factor),
                    "backward_factors": {role: _rounded(value) for role, value in scaling.backward_factors.items()},
                },
                "plan": plan,
            }
        )
    return {
        "format": FORMAT,
        "campaign": campaign.name,
        "machine": result.machine,
        "date": result.date,
        "versions": dict(result.outcomes[0].measured[0].versions),
        "rounds": result.rounds,
        "cluster": campaign.cluster,
        "models": {name: _model(spec.model_dump(mode="json")) for name, spec in campaign.models.items()},
        "runtimes": {name: entry.model_dump(exclude_none=True) for name, entry in campaign.runtimes.items()},
        "hardware": hardware,
        "plans": plans,
    }


def hardware_mapping(problem: Problem, operators: OperatorProfile, source: str) -> dict[str, Any]:
    """Return what was measured of a unit's hardware: operators as profiled, communication, device type.

    Args:
        problem: A plan's, with the calibration applied.
        operators: Profiled times, before what a plan makes of them.
        source: In words.
    """
    hardware = problem.hardware
    rows = tuple(replace(row, source=source, **_rounded_values(row)) for row in operators.rows)
    table = hardware.collective_table
    series = {} if table is None else table.series
    gpu = hardware.gpu(operators.gpu_type)
    return {
        "gpu": {name: _rounded(float(getattr(gpu, name))) for name in GPU_FIELDS},
        "communication": [
            [kind, shape.size, num_bytes, _rounded(seconds)]
            for (kind, shape), points in series.items()
            for num_bytes, seconds in points
        ],
        "operators": profile_mapping(replace(operators, rows=rows, source=source)),
    }


def _rounded_values(row: ProfileRow) -> dict[str, Any]:
    measured = {name: getattr(row, name) for name in ("forward_s", "backward_s", *OPTIONAL)}
    return {name: _rounded(value) for name, value in measured.items() if value is not None}


def _model(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _rounded(value: float) -> float:
    """Return a number with six significant digits, far below what times repeat to."""
    return float(f"{value:.6g}")
