"""What was measured of one machine with one model, as a data file, and a problem that uses it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from datafiles.errors import DataFileError
from hardware_models.calibrated import Calibration, GpuConstants, PipelineConstants, Quantity
from hardware_models.calibration_file import load_calibration, save_calibration
from hardware_models.collective_table import CollectiveTable, Row
from hardware_models.profile import OperatorProfile
from simulator.plan import Plan
from simulator.problem import Problem

SAME_MEMORY = 0.1
"""GPUs of one name are sold with 40 and 80 GB; of what a card has the driver shows some per cent less."""


@dataclass(frozen=True)
class MachineProfile:
    """Measured times of a machine.

    Attributes:
        operators: Times inside the executor.
        communication: Transfers and collectives.
        operator_factor: What operators take in a pipeline, as a multiple of what they took in the profiling run:
            how much the other devices disturb differs. Fitted on the stage times of another plan.
        pass_overhead_s: What a pass of one microbatch takes in a pipeline beyond its operators: posting and taking
            transfers, wake-ups; not below 0. Fitted on the iteration time of another plan.
        optimizer_bandwidth_fraction: Share of the device type's memory bandwidth that the optimizer step moves
            at; above 1 where the states of a small model stay in caches.
        machine, date, versions: Where and when it was measured, with what.
        fitted_on: The calibration plans in words.
        overlap: Slowdown of computation and of communication while both run; None keeps the device type's.
        launch_s: Host seconds per kernel launch; None keeps the device type's.
        measurements: What else was measured.
        preset: Measured name of the preset that the communication is of; None for any.
    """

    operators: OperatorProfile
    communication: tuple[Row, ...]
    operator_factor: float
    pass_overhead_s: float
    optimizer_bandwidth_fraction: float
    machine: str
    date: str
    versions: dict[str, str]
    fitted_on: str
    overlap: tuple[float, float] | None = None
    launch_s: float | None = None
    measurements: tuple[Quantity, ...] = ()
    preset: str | None = None

    def constants(self) -> GpuConstants:
        """Return what was measured of the device type."""
        computation, communication = self.overlap if self.overlap is not None else (None, None)
        return GpuConstants(
            launch_s=self.launch_s,
            optimizer_bandwidth_fraction=self.optimizer_bandwidth_fraction,
            overlap_slowdown_computation=computation,
            overlap_slowdown_communication=communication,
        )

    def calibration(self) -> Calibration:
        """Return the same as a calibration: what a file holds, and what ``--profile`` reads."""
        return Calibration(
            source=self.operators.source,
            operators=self.operators,
            collectives=CollectiveTable.from_rows(self.communication, self.machine) if self.communication else None,
            collectives_of=self.preset if self.communication else None,
            gpus={self.operators.gpu_type: self.constants()},
            pipeline=PipelineConstants(self.operator_factor, self.pass_overhead_s, self.fitted_on),
            measurements=self.measurements,
            machine=self.machine,
            date=self.date,
            versions=self.versions,
        )

    def apply(self, problem: Problem, plan: Plan) -> Problem:
        """Return the problem with these measurements in the place of the model.

        What was fitted on a pipeline holds for pipelines; a plan of one stage runs as the profiling runs do.
        The overhead of a pass is spread over the operators of the plan's stages, since the executor's passes run
        on the core that computes; stages of unequal numbers of operators get unequal parts, the sum is right.
        """
        is_pipeline = len(plan.stages) > 1
        factor = self.operator_factor if is_pipeline else 1.0
        share_s = self.pass_overhead_s * len(plan.stages) / len(problem.workload) if is_pipeline else 0.0
        rows = tuple(
            replace(
                row,
                forward_s=max(0.0, row.forward_s * factor + share_s),
                backward_s=max(0.0, row.backward_s * factor + share_s),
            )
            for row in self.operators.rows
        )
        own = replace(self.calibration(), operators=replace(self.operators, rows=rows), pipeline=None)
        hardware = own.hardware(problem.hardware.cluster)
        return replace(problem, hardware=hardware)

    def check_machine(self) -> None:
        """Refuse a profile of another machine.

        Raises:
            ValueError: Says which machine it is from, and how to make one here.
        """
        here = machine_name()
        if self.machine != here:
            raise ValueError(
                f"the profile is from another machine ({self.machine}; this is {here}); measure this one with "
                "windtunnel profile"
            )

    def other_versions(self) -> str:
        """Return, in words, which versions it was measured with that are not those here; nothing if none."""
        here = versions()
        known = [(name, own, here.get(name, own)) for name, own in self.versions.items()]
        other = [f"{name} {own}, here {current}" for name, own, current in known if own != current]
        return f"the profile was measured with {'; '.join(other)}: kernels may take another time" if other else ""


def save_machine_profile(profile: MachineProfile, path: str | Path) -> None:
    """Write a profile atomically, as a calibration file: JSON or YAML, as its name ends."""
    save_calibration(profile.calibration(), path)


def load_machine_profile(path: str | Path) -> MachineProfile:
    """Read a profile: a calibration file that says which machine it is from, and holds its operators.

    Raises:
        DataFileError: If the file breaks a rule, or is another's calibration.
    """
    found = load_calibration(path)
    if found.operators is None or not found.machine:
        raise DataFileError(path, "must be a profile of a machine with its operators; make one with windtunnel profile")
    constants = found.gpus.get(found.operators.gpu_type, GpuConstants())
    pipeline = found.pipeline or PipelineConstants(1.0, 0.0, "no plan")
    overlap = constants.overlap_slowdown_computation, constants.overlap_slowdown_communication
    return MachineProfile(
        operators=found.operators,
        communication=tuple(found.collectives.rows()) if found.collectives is not None else (),
        operator_factor=pipeline.operator_factor,
        pass_overhead_s=pipeline.pass_overhead_s,
        optimizer_bandwidth_fraction=constants.optimizer_bandwidth_fraction or 1.0,
        machine=found.machine,
        date=found.date,
        versions=dict(found.versions),
        fitted_on=pipeline.fitted_on,
        overlap=(overlap[0], overlap[1]) if overlap[0] is not None and overlap[1] is not None else None,
        launch_s=constants.launch_s,
        measurements=found.measurements,
        preset=found.collectives_of,
    )


def machine_name() -> str:
    """Return this machine in words: processor (or GPU) and cores, not its name on the network."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{_processor()}, {os.cpu_count()} cores"


def other_gpu(problem: Problem) -> str:
    """Return, in words, that this machine's first GPU is of another type than the problem's; nothing if it is of that.

    What is not measured (what fits, the host, links) would be predicted for the other type.
    """
    gpu_type = problem.gpu_types[0]
    here = torch.cuda.get_device_properties(0)
    memory = here.total_memory / problem.hardware.gpu(gpu_type).memory_bytes
    if gpu_type.split("-")[0] in here.name.lower().replace(" ", "") and abs(memory - 1) < SAME_MEMORY:
        return ""
    return (
        f"the cluster {problem.hardware.cluster.name} has {gpu_type}, but this machine {here.name} of "
        f"{here.total_memory / 2**30:.1f} GiB: what is not measured, such as what fits, is the other's; name this "
        "machine's own with --cluster (windtunnel list clusters)"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def now() -> str:
    """Return the date and time in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def versions() -> dict[str, str]:
    """Return the versions that times depend on."""
    return {"torch": str(torch.__version__), "python": platform.python_version()}
