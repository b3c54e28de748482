"""PipeDream's planner: hierarchical dynamic programming that minimises the slowest stage.

Level 1 are the GPUs of a machine, level 2 the machines. On each level a range of states is one stage,
replicated on all m members, or a shorter range on fewer members followed by a last stage. The result of a
level, with all its members, is the "compute time" of a range one level up. The value is a steady-state time per
minibatch: replication by m divides it by m, and there are no bubbles.

Its public optimizer differs from its paper; both are here by name:

- ``data_parallel="released"``: gradients cost 4(m - 1)/m * weights / bandwidth (as with a parameter server that
  moves weights there and back), *added* to the compute time, the sum divided by m; and on level 2 the first stage's
  share is divided by the number of members of the level below, the last stage's is not.
  ``"paper"``: max(compute, 2(m - 1)/m * weights / bandwidth) / m on every level.
- ``transfers=False``: what stages send each other is computed and then ignored, which is the optimizer's default
  (no activation compression ratio given). ``True`` lets a transfer be the slowest stage.

Source:
    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, Section 3.1, and
    the optimizer in its public repository (msr-fiddle/pipedream, optimizer_graph_hierarchical.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from datafiles.words import counted
from searchers.pipedream.antichains import Floats, States
from searchers.pipedream.compiled_planner import Ints, solve_level

DATA_PARALLEL = ("released", "paper")


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy.

    Attributes:
        size: Members: GPUs of a machine, or machines.
        bytes_per_s: Bandwidth between them.
    """

    size: int
    bytes_per_s: float


@dataclass(frozen=True)
class PipeDreamOptions:
    """Named choices.

    Attributes:
        data_parallel: ``released`` or ``paper``.
        transfers: Stage-to-stage transfers count.
        straight: No replication.
        max_replicas: Replicas of a stage at most, over all levels; 0 for no limit.
        fewer_machines: A level may leave members idle.
        memory_bytes: What a GPU may stash (weights and outputs of the minibatches in flight, the optimizer's own
            rule); None for no check, its default.
    """

    data_parallel: str = "released"
    transfers: bool = True
    straight: bool = False
    max_replicas: int = 0
    fewer_machines: bool = False
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.data_parallel not in DATA_PARALLEL:
            raise ValueError(f"data_parallel must be one of {', '.join(DATA_PARALLEL)}, got {self.data_parallel!r}")


@dataclass(frozen=True)
class PipeDreamStage:
    """A stage.

    Attributes:
        first, last: It runs what is in state ``last`` and not in ``first`` (-1: nothing before it).
        devices: GPU ids.
    """

    first: int
    last: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class PipeDreamPlan:
    """What the planner found.

    Attributes:
        bottleneck_s: Time per minibatch of the slowest stage, at the profile's batch.
        data_parallel_s: The same of one stage on all GPUs.
        stages: In order.
    """

    bottleneck_s: float
    data_parallel_s: float
    stages: tuple[PipeDreamStage, ...]

    @property
    def words(self) -> str:
        """``[0,8)x8 [8,25)x7``: states and replicas."""
        return " ".join(f"[{stage.first + 1},{stage.last + 1})x{len(stage.devices)}" for stage in self.stages)


def plan_pipeline(states: States, levels: Sequence[Level], options: PipeDreamOptions | None = None) -> PipeDreamPlan:
    """Return the plan with the smallest bottleneck.

    Args:
        states: The model; see `searchers.pipedream.antichains`.
        levels: Innermost first.
        options: Choices.

    Raises:
        ValueError: If no plan exists (memory, or too few states for the members with so few replicas each).
    """
    options = options or PipeDreamOptions()
    count = states.num_states
    base = _ranges(states.time_s)
    weights = _ranges(states.parameter_bytes)
    outputs = _ranges(states.activation_bytes)
    times = base
    tables = []
    inner = 1
    inside: Ints = np.ones(base.shape, dtype=np.int64)
    most = options.max_replicas or int(np.prod([level.size for level in levels]))
    for position, level in enumerate(levels):
        tables.append(
            solve_level(
                times,
                weights,
                outputs,
                states.output_bytes,
                states.before,
                level.size,
                inner,
                level.bytes_per_s,
                options.data_parallel == "released",
                options.transfers,
                options.straight,
                options.fewer_machines,
                np.inf if options.memory_bytes is None else options.memory_bytes,
                position == len(levels) - 1,
                inside,
                most,
            )
        )
        times, inside = tables[-1][0][:, :, level.size - 1], tables[-1][4][:, :, level.size - 1]
        inner = level.size
    bottleneck = float(times[0, count - 1])
    if not np.isfinite(bottleneck):
        limits = []
        if options.memory_bytes is not None:
            limits.append("weights and stashed outputs must fit its memory option")
        if options.straight or options.max_replicas:
            limits.append(f"at most {1 if options.straight else options.max_replicas} of them may run one stage")
        raise ValueError(
            f"PipeDream finds no plan of {counted(count, 'state')} that uses all "
            f"{counted(int(np.prod([each.size for each in levels])), 'GPU')}: {', '.join(limits)}"
        )
    sizes = [level.size for level in levels]
    stages = _stages(tables, sizes, len(levels) - 1, 0, count - 1, sizes[-1], 0)
    return PipeDreamPlan(bottleneck, _data_parallel_s(states, levels, options), tuple(stages))


def _ranges(prefix: Floats) -> Floats:
    """Return float64[s + 1, s]: what lies in state j and not in state i - 1; infinite where j < i."""
    count = len(prefix)
    table = np.full((count + 1, count), np.inf)
    for i in range(count + 1):
        table[i, i:] = prefix[i:] - (prefix[i - 1] if i else 0.0)
    return table


def _stages(
    tables: Sequence[tuple[Floats, Ints, Ints, Ints, Ints]],
    sizes: Sequence[int],
    level: int,
    first: int,
    last: int,
    members: int,
    device: int,
) -> list[PipeDreamStage]:
    """Return the stages of states ``[first, last]`` on ``members`` members of a level, from GPU ``device`` on."""
    _, splits, before, replicas, _ = tables[level]
    split, used = int(splits[first, last, members - 1]), int(replicas[first, last, members - 1])
    per_member = int(np.prod(sizes[:level]))
    found: list[PipeDreamStage] = []
    start, held = first, 0
    if split >= 0:
        held = int(before[first, last, members - 1])
        found = _stages(tables, sizes, level, first, split, held, device)
        start = split + 1
    device += held * per_member
    if level == 0:
        return [*found, PipeDreamStage(start - 1, last, tuple(range(device, device + used)))]
    inner = _stages(tables, sizes, level - 1, start, last, sizes[level - 1], 0)
    return found + [
        PipeDreamStage(
            stage.first,
            stage.last,
            tuple(device + copy * per_member + own for copy in range(used) for own in stage.devices),
        )
        for stage in inner
    ]


def _data_parallel_s(states: States, levels: Sequence[Level], options: PipeDreamOptions) -> float:
    """Return the time per minibatch of one stage on all GPUs."""
    time, inner = float(states.time_s[-1]), 1
    for level in levels:
        time = replicated_s(time, float(states.parameter_bytes[-1]), level, level.size, inner, options)
        inner = level.size
    return time


def replicated_s(
    time_s: float, weight_bytes: float, level: Level, members: int, inner: int, options: PipeDreamOptions
) -> float:
    """Return the time per minibatch of a stage replicated on ``members`` members of a level.

    Args:
        time_s: On one member.
        weight_bytes: Of the stage.
        level: Gives the bandwidth.
        members: Replicas.
        inner: What the released optimizer divides the gradients' time by: members of the level below, or 1.
        options: Choices.
    """
    share = (members - 1) * weight_bytes / (level.bytes_per_s * members)
    if options.data_parallel == "released":
        return (time_s + 4.0 * share / inner) / members
    return max(time_s, 2.0 * share) / members


def bottleneck_s(
    states: States, levels: Sequence[Level], stages: Sequence[PipeDreamStage], options: PipeDreamOptions
) -> float:
    """Return the time per minibatch of the slowest stage of given stages.

    Stages that share one set of machines form a group, which level 2 sees as one stage. GPUs are numbered machine
    by machine.
    """
    per_machine = levels[0].size if len(levels) > 1 else sum(level.size for level in levels)
    groups: list[tuple[frozenset[int], list[PipeDreamStage]]] = []
    for stage in stages:
        machines = frozenset(device // per_machine for device in stage.devices)
        if groups and groups[-1][0] == machines:
            groups[-1][1].append(stage)
        else:
            groups.append((machines, [stage]))
    parts = []
    for machines, inside in groups:
        inner = [(stage.first, stage.last, len(stage.devices) // len(machines)) for stage in inside]
        time = _level_s(states, levels[0], [(*part, _time_s(states, part)) for part in inner], 1, options)
        parts.append((inside[0].first, inside[-1].last, len(machines), time))
    if len(levels) == 1:
        return parts[0][3]
    return _level_s(states, levels[1], parts, levels[0].size, options)


def _time_s(states: States, part: tuple[int, int, int]) -> float:
    return float(states.time_s[part[1]] - (states.time_s[part[0]] if part[0] >= 0 else 0.0))


def _level_s(
    states: States,
    level: Level,
    parts: Sequence[tuple[int, int, int, float]],
    inner: int,
    options: PipeDreamOptions,
) -> float:
    """Return the slowest of parts ``(state before, last state, members, time on one member)`` of one level."""
    slowest = 0.0
    for position, (first, last, members, time) in enumerate(parts):
        weights = float(states.parameter_bytes[last] - (states.parameter_bytes[first] if first >= 0 else 0.0))
        slowest = max(slowest, replicated_s(time, weights, level, members, 1 if position else inner, options))
        if options.transfers and position:
            slowest = max(slowest, 2.0 * float(states.output_bytes[first]) / (level.bytes_per_s * members))
            if last < states.num_states - 1:
                slowest = max(slowest, 2.0 * float(states.output_bytes[last]) / (level.bytes_per_s * members))
    return slowest
