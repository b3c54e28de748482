"""A problem: what is trained, on what, by which framework, with which batch and memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hardware_models.calibration_file import load_calibration
from hardware_models.cluster import Cluster, parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime import Runtime
from hardware_models.runtime_files import load_runtime
from simulator.measured_times import check_times
from simulator.problem_files import files_of, with_files
from simulator.profile_check import check_profile
from workloads.operators import Workload
from workloads.registry import build_workload

MAX_BATCH = 1_000_000_000
"""Samples per iteration that a problem may have: far above any, and small enough to count with."""


@dataclass(frozen=True)
class ProblemSpec:
    """A problem in names: what plan files hold and the command line takes.

    Attributes:
        model: Registered name, or path of a model file or Hugging Face ``config.json``.
        cluster: Cluster string (``v100-32g-dgx1:1x4``) or path.
        runtime: Name or path.
        global_batch: Samples per iteration.
        memory_limit_bytes: Per device; None for the device's own memory.
        profile: Optional path of a calibration or operator profile.
    """

    model: str
    cluster: str
    runtime: str
    global_batch: int
    memory_limit_bytes: int | None = None
    profile: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data; optional fields left out when unset."""
        return {key: value for key, value in self.__dict__.items() if value is not None}

    @property
    def files(self) -> list[Path]:
        """Files that it names."""
        return files_of(self.model, self.cluster, self.runtime, self.profile)

    def load(self) -> Problem:
        """Build the problem. Raises ValueError (unknown names, missing or bad files, batch or limit out of range)."""
        if self.global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, got {self.global_batch}")
        if self.global_batch > MAX_BATCH:
            raise ValueError(f"global_batch must be at most {MAX_BATCH:,} samples, got {self.global_batch:.3g}")
        with_files(self)
        runtime = load_runtime(self.runtime)
        cluster = parse_cluster(self.cluster)
        workload = build_workload(self.model, attention=runtime.attention)
        hardware = shipped = HardwareModel(cluster)
        if self.profile:
            calibration = load_calibration(self.profile)
            hardware = calibration.hardware(cluster)
            check_profile(calibration, hardware.operator_profile, workload, runtime)
        problem = Problem(
            workload=workload,
            hardware=hardware,
            runtime=runtime,
            global_batch=self.global_batch,
            memory_limit_bytes=self.memory_limit_bytes,
            spec=self,
        )
        if self.profile:
            check_times(problem, shipped, self.profile)
        check_memory_limit(problem.memory_limit_bytes, problem.hardware.cluster, problem.runtime)
        return problem


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything a searcher and the simulator are given.

    Attributes:
        workload: Operator graph.
        hardware: Cluster and its cost functions.
        runtime: The framework's defaults.
        global_batch: Samples per iteration.
        memory_limit_bytes: Per device; None for the device's own memory.
        spec: The names it was built from, where it was.
    """

    workload: Workload
    hardware: HardwareModel
    runtime: Runtime
    global_batch: int
    memory_limit_bytes: int | None = None
    spec: ProblemSpec | None = None

    @property
    def num_devices(self) -> int:
        """Devices of the cluster."""
        return self.hardware.cluster.num_devices

    def capacity_bytes(self, device: int) -> int:
        """Bytes a device can give to tensors: the limit less context and communication buffers."""
        limit = self.hardware.memory_bytes(device)
        if self.memory_limit_bytes is not None:
            limit = min(limit, self.memory_limit_bytes)
        return limit - self.runtime.context_bytes - self.runtime.communication_buffer_bytes

    @cached_property
    def matmul_workspace_bytes(self) -> int:
        """Bytes that a device holds for its library of matrix products (``Runtime.matmul_workspaces``)."""
        largest = max(node.gpu.matmul_workspace_bytes for node in self.hardware.cluster.nodes)
        return self.runtime.matmul_workspaces * largest

    @cached_property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU type of every device."""
        return tuple(self.hardware.gpu_type(device) for device in range(self.num_devices))


SOLD_AS = 1.05
"""A GPU sold as one of 80 GB shows 79.35 GiB: a limit of what it is called by is one of all it has."""


def check_memory_limit(limit: int | None, cluster: Cluster, runtime: Runtime) -> None:
    """Check that a limit of bytes a device (None: all it has) leaves memory for tensors, and that a GPU has as much.

    Raises:
        ValueError: If not.
    """
    outside, nodes = runtime.outside_allocator_bytes, cluster.nodes
    smallest, gpu = min((node.gpu.memory_bytes, node.gpu.name) for node in nodes)
    if smallest <= outside:
        raise ValueError(
            f"context_bytes and communication_buffer_bytes of {runtime.name} must leave memory for tensors, "
            f"got {outside / 2**30:.2f} GiB of the {smallest / 2**30:.2f} GiB of {gpu}; "
            "give them in bytes, or a larger GPU"
        )
    if limit is None:
        return
    if limit <= outside:
        raise ValueError(
            f"the memory limit must be more than the {outside / 2**30:.2f} GiB that {runtime.name} takes for "
            f"context and communication buffers, got {limit / 2**30:.2f} GiB; raise it"
        )
    # Each node's devices are alike; on a mixed cluster a limit may bind on the larger ones only.
    largest, gpu = max((node.gpu.memory_bytes, node.gpu.name) for node in nodes)
    if limit > SOLD_AS * largest:
        raise ValueError(
            f"the memory limit must be at most the {largest / 2**30:.2f} GiB of {gpu}, got {limit / 2**30:.2f} GiB; "
            "leave it out for all the GPU has"
        )
