"""What was measured of one machine with one model, as a data file, and a problem that uses it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.writer import dump_json, dump_yaml, write_text_atomically
from hardware_models.collective_table import CollectiveTable
from hardware_models.model import HardwareModel
from hardware_models.profile import OperatorProfile
from hardware_models.profile_file import profile_from_mapping, profile_mapping
from hardware_models.schema import Count, Positive, Text
from simulator.plan import Plan
from simulator.problem import Problem
from validation.communication_times import Row

FORMAT = "windtunnel-machine-profile-1"
UNITS = {"seconds": "s", "bytes": "B", "times": "wall clock of one rank", "sizes": "bytes of a message"}


@dataclass(frozen=True)
class MachineProfile:
    """Measured times of a machine.

    Attributes:
        operators: Times inside the executor.
        communication: Transfers and collectives.
        operator_factor: What operators take in a pipeline, as a multiple of what they took in the profiling run:
            how much the other devices disturb differs. Fitted on the stage times of another plan.
        pass_overhead_s: What a pass of one microbatch takes in a pipeline beyond its operators: posting and taking
            transfers, wake-ups. Fitted on the iteration time of another plan.
        optimizer_bandwidth_fraction: Share of the device type's memory bandwidth that the optimizer step moves
            at; above 1 where the states of a small model stay in caches.
        machine, date, versions: Where and when it was measured, with what.
        fitted_on: The calibration plans in words.
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
        table = CollectiveTable.from_rows(self.communication, self.machine) if self.communication else None
        cluster = problem.hardware.cluster
        nodes = tuple(
            replace(
                node,
                gpu=node.gpu.model_copy(update={"optimizer_bandwidth_fraction": self.optimizer_bandwidth_fraction})
                if node.gpu.name == self.operators.gpu_type
                else node.gpu,
            )
            for node in cluster.nodes
        )
        hardware = HardwareModel(
            cluster=replace(cluster, nodes=nodes),
            operator_profile=replace(self.operators, rows=rows),
            collective_table=table,
        )
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


class _File(FileModel):
    format: Literal["windtunnel-machine-profile-1"]
    machine: Text
    date: Text
    versions: dict[str, Text]
    units: dict[str, Text]
    fitted_on: Text
    operator_factor: Positive
    pass_overhead_s: float
    optimizer_bandwidth_fraction: Positive
    communication: tuple[tuple[Text, Count, Positive, Positive], ...]
    operators: dict[str, object]


def save_machine_profile(profile: MachineProfile, path: str | Path) -> None:
    """Write a profile atomically: JSON if the name ends in ``.json``, else YAML."""
    mapping = {
        "format": FORMAT,
        "machine": profile.machine,
        "date": profile.date,
        "versions": profile.versions,
        "units": UNITS,
        "fitted_on": profile.fitted_on,
        "operator_factor": profile.operator_factor,
        "pass_overhead_s": profile.pass_overhead_s,
        "optimizer_bandwidth_fraction": profile.optimizer_bandwidth_fraction,
        "communication": [list(row) for row in profile.communication],
        "operators": profile_mapping(profile.operators),
    }
    write_text_atomically(path, dump_json(mapping) if str(path).endswith(".json") else dump_yaml(mapping))


def load_machine_profile(path: str | Path) -> MachineProfile:
    """Read a profile.

    Raises:
        DataFileError: If the file breaks a rule.
    """
    file = validated(_File, load_mapping(path), str(path))
    operators = profile_from_mapping(file.operators, str(path))
    return MachineProfile(
        operators=operators,
        communication=tuple((kind, size, float(count), float(time)) for kind, size, count, time in file.communication),
        operator_factor=file.operator_factor,
        pass_overhead_s=file.pass_overhead_s,
        optimizer_bandwidth_fraction=file.optimizer_bandwidth_fraction,
        machine=file.machine,
        date=file.date,
        versions=file.versions,
        fitted_on=file.fitted_on,
    )


def machine_name() -> str:
    """Return this machine in words: processor (or GPU) and cores, not its name on the network."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{_processor()}, {os.cpu_count()} cores"


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
