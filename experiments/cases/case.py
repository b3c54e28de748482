"""What a case is: a problem, a plan and what somebody measured; and what a source of cases does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path
from typing import Any, Protocol

from datafiles.words import counted
from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.plan import Plan, Sharding, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments, repeated_layers, uniform_plan
from workloads.models.fields import ModelSpec
from workloads.registry import build_from_spec, model_spec

PRINTED = Path(__file__).parent.parent / "accuracy_data"
"""Figures printed in papers, committed."""

Feature = str | int


@dataclass(frozen=True)
class Measured:
    """What was measured; None where a source has no such figure.

    Attributes:
        iteration_time_s: One training iteration.
        out_of_memory: Whether the run failed for lack of memory.
        peak_bytes: Peak of the memory in use on a device.
        peak_is_average: The peak is the mean over all devices, else that of the fullest one.
        peak_is_reserved: The peak is of what the allocator held, else of live bytes.
        limits_live_bytes: The memory limit was a planner's budget for live bytes, on larger devices: no allocator
            met it.
    """

    iteration_time_s: float | None = None
    out_of_memory: bool | None = None
    peak_bytes: float | None = None
    peak_is_average: bool = False
    peak_is_reserved: bool = False
    limits_live_bytes: bool = False


@dataclass(frozen=True)
class Case:
    """One measured run.

    Attributes:
        row_id: ``source#row``; calibration files name rows by the same ids.
        groups: Groups that report it.
        problem: Builds the problem.
        plan: Makes the plan.
        measured: What was measured.
        source: Where the figures come from.
        rivals: Cases with the same word are plans for one model and cluster: they are ranked, by time per
            sample where their batches differ.
        rival_samples: Samples of one iteration, for that.
        features: What errors are tabulated by.

    Raises:
        ValueError: If what was measured is not above 0.
    """

    row_id: str
    groups: tuple[str, ...]
    problem: Callable[[], Problem]
    plan: Callable[[Problem], Plan]
    measured: Measured
    source: str
    rivals: str | None = None
    rival_samples: int = 1
    features: Mapping[str, Feature] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("iteration_time_s", "peak_bytes"):
            value = getattr(self.measured, name)
            if value is not None and not (isfinite(value) and value > 0):
                raise ValueError(f"{self.row_id}: {name} must be above 0 where it was measured, got {value:g}")


@dataclass(frozen=True)
class Skipped:
    """Rows of a source that do not run, and why."""

    groups: tuple[str, ...]
    num_rows: int
    reason: str


class CaseSource(Protocol):
    """A module of this package: yields its cases, or what it skips.

    ``data`` is the folder with a user's own copies of public sets, None if there is none.
    """

    def __call__(self, data: Path | None) -> Iterator[Case | Skipped]: ...


@lru_cache(maxsize=256)
def hardware(cluster: str) -> HardwareModel:
    """Return the modelled hardware of a cluster string, shared so that prices are computed once."""
    return HardwareModel(cluster=parse_cluster(cluster))


def problem_of(
    *,
    model: str | ModelSpec,
    cluster: str | HardwareModel,
    runtime: str,
    global_batch: int,
    memory_limit_bytes: int | None = None,
) -> Callable[[], Problem]:
    """Return a function that builds the problem (loading cases must cost nothing).

    Args:
        model: Preset name or specification.
        cluster: Cluster string, or hardware with measured tables.
        runtime: Name.
        global_batch: Samples per iteration.
        memory_limit_bytes: Per device; None for the device's own memory.
    """

    def build() -> Problem:
        chosen = load_runtime(runtime)
        spec = model_spec(model) if isinstance(model, str) else model
        return Problem(
            workload=build_from_spec(spec, chosen.attention),
            hardware=hardware(cluster) if isinstance(cluster, str) else cluster,
            runtime=chosen,
            global_batch=global_batch,
            memory_limit_bytes=memory_limit_bytes,
        )

    return build


def uniform(
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    microbatch: int = 1,
    recompute: str = "none",
    zero: int = 0,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> Callable[[Problem], Plan]:
    """Return the rule that makes a uniform plan; arguments as `simulator.uniform.uniform_plan`."""
    return lambda problem: uniform_plan(
        problem,
        tp=tp,
        pp=pp,
        dp=dp,
        microbatch=microbatch,
        recompute=recompute,
        zero=zero,
        schedule=schedule,
        chunks=chunks,
    )


def cluster_string(preset: str, num_gpus: int, gpus_per_node: int) -> str:
    """Return the cluster string of ``num_gpus`` on as few full nodes as possible.

    >>> cluster_string("a100-80g-dgx", 32, 8), cluster_string("dgx2-v100", 4, 16)
    ('a100-80g-dgx:4x8', 'dgx2-v100:1x4')
    """
    if num_gpus <= gpus_per_node:
        return f"{preset}:1x{num_gpus}"
    if num_gpus % gpus_per_node:
        raise ValueError(
            f"GPUs must fill nodes of {gpus_per_node}, got {num_gpus}; say how many of each are used (gpus_per_node)"
        )
    return f"{preset}:{num_gpus // gpus_per_node}x{gpus_per_node}"


def in_unit(row: Mapping[str, Any], unit: str, row_id: str) -> float:
    """Return the column ``value`` of a row.

    Raises:
        ValueError: If it is not in that unit, not above 0 or empty.
    """
    value = row["value"]
    if row["unit"] != unit or value is None or not value > 0:
        raise ValueError(f"{row_id}: value must be a number of {unit} above 0, got {value} {row['unit']}")
    return float(value)


def data_file(data: Path | None, relative: str, groups: tuple[str, ...]) -> Path | Skipped:
    """Return the path of a public set, or why its groups are skipped."""
    if data is None:
        return Skipped(groups, 0, "no data folder; give --data DIR or set WINDTUNNEL_DATA")
    path = data / relative
    return path if path.exists() else Skipped(groups, 0, f"the data folder has no {relative}")


def stages_of_layers(
    problem: Problem,
    layers_per_stage: Sequence[int],
    shardings: Sequence[Sharding],
    recompute: str = "none",
) -> tuple[Stage, ...]:
    """Return pipeline stages of whole repeated layers on consecutive devices.

    What comes before the first repeated layer goes to the first stage, the rest to the last.

    Args:
        problem: The problem.
        layers_per_stage: Repeated layers of each stage.
        shardings: Mesh of each stage; its size is the stage's number of devices.
        recompute: As in `simulator.uniform.uniform_plan`.
    """
    layers = repeated_layers(problem.workload)
    if sum(layers_per_stage) != len(layers):
        raise ValueError(f"stages must hold {counted(len(layers), 'layer')} in all, got {list(layers_per_stage)}")
    stages: list[Stage] = []
    start, taken, device = 0, 0, 0
    for count, sharding in zip(layers_per_stage, shardings, strict=True):
        taken += count
        stop = layers[taken][0] if taken < len(layers) else len(problem.workload)
        size = prod(axis.size for axis in sharding)
        stages.append(
            Stage(
                operators=((start, stop),),
                devices=tuple(range(device, device + size)),
                shardings=((stop - start, tuple(sharding)),),
                recompute=recompute_segments(problem.workload, start, stop, recompute),
            )
        )
        start, device = stop, device + size
    return tuple(stages)
