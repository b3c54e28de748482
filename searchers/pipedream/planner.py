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
    tables = _Tables(states, levels, options)
    num_devices = int(np.prod([level.size for level in levels]))
    most = 1 if options.straight else options.max_replicas or num_devices
    bottleneck = float(tables.solved(len(levels) - 1, most)[0][0, count - 1, levels[-1].size - 1])
    if not np.isfinite(bottleneck):
        limits = []
        if options.memory_bytes is not None:
            limits.append("weights and stashed outputs must fit its memory option")
        if options.straight or options.max_replicas:
            limits.append(f"at most {1 if options.straight else options.max_replicas} of them may run one stage")
        raise ValueError(
            f"PipeDream finds no plan of {counted(count, 'state')} that uses all "
            f"{counted(num_devices, 'GPU')}: {', '.join(limits)}"
        )
    stages = tables.stages(len(levels) - 1, most, 0, count - 1, levels[-1].size, 0)
    return PipeDreamPlan(bottleneck, _data_parallel_s(states, levels, options), tuple(stages))


class _Tables:
    """What each level has for ranges of states, by how many replicas a stage may have there and below.

    Args:
        states, levels, options: As of `plan_pipeline`.
    """

    def __init__(self, states: States, levels: Sequence[Level], options: PipeDreamOptions) -> None:
        self.states = states
        self.levels = levels
        self.options = options
        self._times, self._weights, self._outputs = (
            _ranges(each) for each in (states.time_s, states.parameter_bytes, states.activation_bytes)
        )
        self._solved: dict[tuple[int, int], tuple[Floats, Ints, Ints, Ints]] = {}

    def solved(self, level: int, most: int) -> tuple[Floats, Ints, Ints, Ints]:
        """Return what `solve_level` has for a level where a stage has ``most`` replicas at most."""
        most = min(most, self._devices(level + 1))
        if (level, most) not in self._solved:
            own, states, options = self.levels[level], self.states, self.options
            # A stage on m members may have a share of the replicas on each, and is the quickest of those that do.
            limits = [min(most // m, self._devices(level)) for m in range(1, own.size + 1)]
            distinct = [limit for limit in dict.fromkeys(limits) if limit > 0]
            self._solved[level, most] = solve_level(
                np.stack([self._below(level, limit) for limit in distinct]),
                self._weights,
                self._outputs,
                states.output_bytes,
                states.before,
                own.size,
                self.levels[level - 1].size if level else 1,
                own.bytes_per_s,
                options.data_parallel == "released",
                options.transfers,
                options.fewer_machines,
                np.inf if options.memory_bytes is None else options.memory_bytes,
                level == len(self.levels) - 1,
                np.array([-1, *(distinct.index(limit) if limit else -1 for limit in limits)]),
            )
        return self._solved[level, most]

    def _devices(self, level: int) -> int:
        """Return the GPUs of a member of a level."""
        return int(np.prod([each.size for each in self.levels[:level]]))

    def _below(self, level: int, most: int) -> Floats:
        """Return the time of every range of states on one member of a level: float64[s + 1, s]."""
        return self.solved(level - 1, most)[0][:, :, self.levels[level - 1].size - 1] if level else self._times

    def stages(
        self, level: int, most: int, first: int, last: int, members: int, device: int
    ) -> list[PipeDreamStage]:
        """Return the stages of states ``[first, last]`` on ``members`` members of a level, from GPU ``device`` on."""
        _, splits, before, replicas = self.solved(level, most)
        split, used = int(splits[first, last, members - 1]), int(replicas[first, last, members - 1])
        found: list[PipeDreamStage] = []
        start, held = first, 0
        if split >= 0:
            held = int(before[first, last, members - 1])
            found = self.stages(level, most, first, split, held, device)
            start = split + 1
        device += held * self._devices(level)
        if level == 0:
            return [*found, PipeDreamStage(start - 1, last, tuple(range(device, device + used)))]
        return found + [
            PipeDreamStage(
                stage.first,
                stage.last,
                tuple(device + copy * self._devices(level) + own for copy in range(used) for own in stage.devices),
            )
            for stage in self.stages(level - 1, most // used, start, last, self.levels[level - 1].size, 0)
        ]


def _ranges(prefix: Floats) -> Floats:
    """Return float64[s + 1, s]: what lies in state j and not in state i - 1; infinite where j < i."""
    count = len(prefix)
    table = np.full((count + 1, count), np.inf)
    for i in range(count + 1):
        table[i, i:] = prefix[i:] - (prefix[i - 1] if i else 0.0)
    return table


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
