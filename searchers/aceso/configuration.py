"""A configuration of Aceso: what its search changes, and the plan it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from searchers.aceso.tables import PARTITIONS
from simulator.plan import Axis, Plan, Stage
from simulator.problem import Problem
from workloads.operators import Workload


@dataclass(frozen=True)
class Run:
    """Consecutive operators of a stage that are cut alike.

    Attributes:
        count: Operators.
        tp: Tensor-parallel ranks; the rest of the stage's GPUs are replicas.
        partition: 0 for Megatron's choice, 1 for the other.
    """

    count: int
    tp: int
    partition: int = 0


@dataclass(frozen=True)
class StageChoice:
    """One pipeline stage.

    Attributes:
        gpus: GPUs, a power of two.
        runs: Operators in order; their counts add up to the stage's.
    """

    gpus: int
    runs: tuple[Run, ...]

    @property
    def count(self) -> int:
        """Operators."""
        return sum(run.count for run in self.runs)

    @property
    def is_uniform(self) -> bool:
        """All operators are cut alike."""
        return len(self.runs) == 1

    def moved(self, old: tuple[int, int], new: tuple[int, int]) -> StageChoice:
        """Return the stage with operators ``new`` instead of ``old``, both ``[start, stop)``.

        What is added takes the degrees of the operator it is added to.
        """
        first = self.runs[0]
        size = new[1] - new[0]
        if self.is_uniform or new[0] >= old[1] or new[1] <= old[0]:
            return StageChoice(self.gpus, (Run(size, first.tp, first.partition),))
        values = [(run.tp, run.partition) for run in self.runs for _ in range(run.count)]
        front = [values[0]] * (old[0] - new[0])
        back = [values[-1]] * (new[1] - old[1])
        kept = values[max(0, new[0] - old[0]) : len(values) - max(0, old[1] - new[1])]
        return StageChoice(self.gpus, runs_of([*front, *kept, *back]))

    def with_degree(self, tp: int, gpus: int | None = None) -> StageChoice:
        """Return the stage with one tensor degree for all operators."""
        return StageChoice(self.gpus if gpus is None else gpus, (Run(self.count, tp),))


def runs_of(values: Iterable[tuple[int, int]]) -> tuple[Run, ...]:
    """Return runs of equal ``(tp, partition)``."""
    found: list[Run] = []
    for tp, partition in values:
        if found and (found[-1].tp, found[-1].partition) == (tp, partition):
            found[-1] = Run(found[-1].count + 1, tp, partition)
        else:
            found.append(Run(1, tp, partition))
    return tuple(found)


@dataclass(frozen=True)
class Configuration:
    """Stages and the aggregate microbatch. Equal configurations mean the same; recomputation follows from them.

    Attributes:
        microbatch: Samples of one microbatch over all replicas of a stage.
        stages: In pipeline order.
        recompute: Flags per operator where they are given instead of chosen (plans of others).
    """

    microbatch: int
    stages: tuple[StageChoice, ...]
    recompute: bytes | None = None

    @property
    def cuts(self) -> tuple[int, ...]:
        """First operator of each stage, and the number of operators."""
        return (0, *accumulate(stage.count for stage in self.stages))

    def replace_stages(self, changes: Sequence[tuple[int, StageChoice]]) -> Configuration:
        """Return the configuration with some stages changed."""
        stages = list(self.stages)
        for position, stage in changes:
            stages[position] = stage
        return Configuration(self.microbatch, tuple(stages))

    def with_cuts(self, cuts: Sequence[int]) -> Configuration:
        """Return the configuration with the stages' borders at other operators."""
        if any(later <= earlier for earlier, later in pairwise(cuts)):
            raise ValueError(f"every stage must keep an operator, got cuts {list(cuts)}")
        stages = [
            stage.moved(old, new)
            for stage, old, new in zip(self.stages, pairwise(self.cuts), pairwise(cuts), strict=True)
        ]
        return Configuration(self.microbatch, tuple(stages))


def to_plan(configuration: Configuration, flags: bytes, problem: Problem) -> Plan:
    """Return the plan of a configuration.

    Args:
        configuration: What was found.
        flags: A byte per operator: recomputed or not.
        problem: What it was found for.
    """
    stages: list[Stage] = []
    device = 0
    for start, choice in zip(configuration.cuts, configuration.stages, strict=False):
        stop = start + choice.count
        shardings = []
        for run in choice.runs:
            axes = (Axis("batch", choice.gpus // run.tp), Axis(PARTITIONS[run.partition], run.tp))
            shardings.append((run.count, axes))
        stages.append(
            Stage(
                operators=((start, stop),),
                devices=tuple(range(device, device + choice.gpus)),
                shardings=tuple(shardings),
                recompute=segments_of(flags[start:stop], start, problem.workload),
            )
        )
        device += choice.gpus
    return Plan(
        stages=tuple(stages),
        microbatch_size=configuration.microbatch,
        num_microbatches=problem.global_batch // configuration.microbatch,
        gradient_reduction=problem.runtime.reduce_gradients,
        overlap_gradient_sync=problem.runtime.overlap_gradient_sync,
    )


def segments_of(flags: bytes | Sequence[int], first: int, workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return recomputed segments: maximal runs of flagged operators, cut where a layer ends."""
    ends = {stop for _, stop in workload.layers}
    segments: list[tuple[int, int]] = []
    start: int | None = None
    for offset, flag in enumerate(flags):
        index = first + offset
        if flag and start is None:
            start = index
        going_on = offset + 1 < len(flags) and flags[offset + 1]
        if start is not None and (not going_on or index + 1 in ends):
            segments.append((start, index + 1))
            start = None
    return tuple(segments)


def from_plan(plan: Plan, problem: Problem) -> Configuration:
    """Return the configuration that a plan stands for.

    Raises:
        ValueError: If the plan has what Aceso's space has not; says what.
    """
    flags = bytearray(len(problem.workload))
    stages: list[StageChoice] = []
    position = device = 0
    if plan.schedule != "1f1b" or plan.warmup is not None or plan.rotates:
        raise ValueError(f"Aceso's model is one of 1F1B with sliced microbatches, got schedule {plan.schedule}")
    for number, stage in enumerate(plan.stages):
        if stage.operators != ((position, position + stage.num_operators()),):
            raise ValueError(f"Aceso's stages are consecutive operators, got {stage.operators} in stage {number}")
        if stage.devices != tuple(range(device, device + len(stage.devices))):
            raise ValueError(f"Aceso's stages take consecutive devices, got {stage.devices} in stage {number}")
        values = []
        for index, sharding in zip(stage.indices(), stage.sharding_per_operator(), strict=True):
            values.append(_degrees(sharding, index, len(stage.devices), problem.workload))
        for start, stop in stage.recompute:
            flags[start:stop] = b"\1" * (stop - start)
        stages.append(StageChoice(len(stage.devices), runs_of(values)))
        position, device = position + stage.num_operators(), device + len(stage.devices)
    return Configuration(plan.microbatch_size, tuple(stages), bytes(flags))


def _degrees(sharding: Sequence[Axis], index: int, devices: int, workload: Workload) -> tuple[int, int]:
    op = workload.operators[index]
    replicas = prod(axis.size for axis in sharding if axis.split == "batch")
    others = [axis for axis in sharding if axis.split != "batch" and axis.size > 1]
    words = {"tensor": 0, op.tensor_split: 0, "tensor_alternative": 1}
    words.setdefault(op.alternative_split, 1)
    if any(axis.zero for axis in sharding) or len(others) > 1 or any(axis.split not in words for axis in others):
        raise ValueError(f"operator {index} ({op.name}): Aceso cuts by batch and one tensor axis, got {list(sharding)}")
    if others and tuple(sharding)[-1] != others[0]:
        raise ValueError(f"operator {index} ({op.name}): tensor-parallel ranks are neighbours, got {list(sharding)}")
    return devices // replicas, words[others[0].split] if others else 0




def prefix_gpus(configuration: Configuration) -> list[int]:
    """Return GPUs before each stage, and in all."""
    return [0, *accumulate(stage.gpus for stage in configuration.stages)]


def respects_nodes(gpus: Sequence[int], per_node: int) -> bool:
    """Return whether no stage crosses the border of a node.

    >>> respects_nodes([2, 4, 2, 8], 8), respects_nodes([2, 4, 4, 6], 8)
    (True, False)
    """
    return all(
        first // per_node == (last - 1) // per_node for first, last in pairwise([0, *accumulate(gpus)])
    )
