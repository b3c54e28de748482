"""Piper's planner: stages of a layer graph, each with tensor and data degrees and an implementation per layer.

The objective is the time per microbatch in steady state, the load of the slowest stage:

    sum of p / d  +  [2 * (bytes over cut edges) / d + 4 (d - 1) w / (d N)] / bandwidth

with no bubble, no warm-up and no overlap. A stage keeps a*y + b bytes per layer, y = ceil(sum of the data degrees
of this and all later stages / d) microbatches being in flight. A weight that layers of a stage share is held and
reduced once: what the others count again depends on the stage and its tensor degree alone, so it is exact.

The outer dynamic program over (down-set, devices, sum of data degrees) is exact. The inner choice is a knapsack:
``greedy`` (the fastest everywhere if that fits, else the cheapest exchanges, as Piper's heuristic) or ``exact``.

Source:
    Tarnawski et al., "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from searchers.piper.compiled_planner import Floats, Ints, choose_implementations, fill, stage_times
from searchers.piper.model import Implementation, PiperInput, Tie, down_sets

KNAPSACKS = ("greedy", "exact")
IDEALS_AT_ONCE = 512
FIRST_BOUND = 1.15
"""The first guess of the optimum, over the work of all layers spread evenly; doubled until it suffices, or no stage is
slower."""


@dataclass(frozen=True)
class PiperStage:
    """A stage.

    Attributes:
        layers: Ids.
        tensor_degree, data_degree: t and d.
        implementations: Name of each layer's.
        load_s: Time per microbatch.
        held_bytes: What it holds of a device's memory, microbatches in flight included.
    """

    layers: tuple[str, ...]
    tensor_degree: int
    data_degree: int
    implementations: tuple[str, ...]
    load_s: float
    held_bytes: float


@dataclass(frozen=True)
class PiperPlan:
    """What the planner found.

    Attributes:
        objective_s: Time per microbatch of the slowest stage.
        stages: In order.
    """

    objective_s: float
    stages: tuple[PiperStage, ...]

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return sum(stage.tensor_degree * stage.data_degree for stage in self.stages)

    @property
    def held_bytes(self) -> float:
        """Of the fullest stage."""
        return max(stage.held_bytes for stage in self.stages)


@dataclass(frozen=True, eq=False)
class _Structure:
    """Down-sets of a graph and the stages between them.

    Attributes:
        num_ideals: Down-sets, by size.
        from_ideal, to_ideal: int64[pairs]. Nested down-sets, sorted by ``from_ideal``.
        first_pair: int64[num_ideals + 1]. Where each ``from_ideal`` begins.
        held: bool[num_ideals, layers]. Layers of each down-set; a stage's are those of the larger only.
    """

    num_ideals: int
    from_ideal: Ints
    to_ideal: Ints
    first_pair: Ints
    held: NDArray[np.bool_]


@lru_cache(maxsize=4)
def _structure(names: tuple[str, ...], edges: tuple[tuple[str, str], ...]) -> _Structure:
    ideals = down_sets(names, edges)
    pairs = np.array(
        [(a, b) for a, smaller in enumerate(ideals) for b in range(a + 1, len(ideals)) if not smaller & ~ideals[b]],
        dtype=np.int64,
    ).reshape(-1, 2)
    return _Structure(
        num_ideals=len(ideals),
        from_ideal=pairs[:, 0].copy(),
        to_ideal=pairs[:, 1].copy(),
        first_pair=np.searchsorted(pairs[:, 0], np.arange(len(ideals) + 1)).astype(np.int64),
        held=np.array([[ideal >> node & 1 for node in range(len(names))] for ideal in ideals], dtype=np.bool_),
    )


class _Tables:
    """Arrays of one problem."""

    def __init__(self, problem: PiperInput) -> None:
        self.problem = problem
        self.degrees = sorted({degree for options in problem.implementations for degree in options})
        structure = _structure(problem.names, tuple((edge.source, edge.target) for edge in problem.edges))
        self.num_ideals = structure.num_ideals
        self.from_ideal, self.to_ideal = structure.from_ideal, structure.to_ideal
        self.first_pair = structure.first_pair
        self.held = structure.held
        self.memory_bytes = {degree: self._memory_bytes(degree) for degree in self.degrees}

    def layers(self, pair: int) -> Ints:
        """Return the layers of a stage, ascending."""
        return np.flatnonzero(self.held[self.to_ideal[pair]] & ~self.held[self.from_ideal[pair]])

    def options(self, degree: int) -> tuple[Floats, Floats, Floats, Ints]:
        """Return time, memory per microbatch, other memory float64[layers, choices], and numbers of choices."""
        every = [options.get(degree, ()) for options in self.problem.implementations]
        width = max(1, *(len(options) for options in every))
        arrays = [np.full((len(every), width), np.inf) for _ in range(3)]
        for layer, options in enumerate(every):
            for choice, option in enumerate(options):
                arrays[0][layer, choice] = option.time_s
                arrays[1][layer, choice] = option.memory_per_microbatch_bytes
                arrays[2][layer, choice] = option.memory_bytes
        counts = np.array([len(options) for options in every], dtype=np.int64)
        return arrays[0], arrays[1], arrays[2], counts

    def weight_bytes(self, degree: int) -> Floats:
        """Return weights of every stage, shared ones once: float64[pairs]."""
        options = [self._first(layer, degree) for layer in range(len(self.problem.names))]
        known = self.held @ np.array([option.weight_bytes if option else 0.0 for option in options])
        without = self.held @ np.array([option is None for option in options], dtype=np.int64)
        found: Floats = known[self.to_ideal] - known[self.from_ideal]
        for tie, again in self._counted_again(degree):
            found -= tie.weight_bytes * again
        found[without[self.to_ideal] > without[self.from_ideal]] = np.inf
        return found

    def _memory_bytes(self, degree: int) -> Floats:
        """Return a device's memory and what layers of a stage count again of shared weights: float64[pairs]."""
        found = np.full(len(self.from_ideal), self.problem.memory_bytes)
        for tie, again in self._counted_again(degree):
            found += tie.memory_bytes * again
        return found

    def _counted_again(self, degree: int) -> Iterator[tuple[Tie, Floats]]:
        """Yield shared weights, and how often every stage counts each besides the first time: float64[pairs]."""
        for tie in self.problem.ties:
            if tie.degree == degree:
                uses = self.held @ np.array([tie.layers.count(name) for name in self.problem.names], dtype=float)
                yield tie, np.maximum(uses[self.to_ideal] - uses[self.from_ideal] - 1.0, 0.0)

    def cut_bytes(self, degree: int) -> Floats:
        """Return bytes over the cut edges of every stage, collectives of the tensor degree included.

        An edge enters stage (a, b) if its source is in a, its target in b and not in a; it leaves if its source is in
        b and not in a, its target not in b. Down-sets have the source of each target they have, so both are products
        of what a and b have.
        """
        number = {name: index for index, name in enumerate(self.problem.names)}
        sources, targets, entering, leaving = [], [], [], []
        for edge in self.problem.edges:
            source, target = number[edge.source], number[edge.target]
            reader, maker = self._first(target, degree), self._first(source, degree)
            sources.append(source)
            targets.append(target)
            entering.append(edge.num_bytes + (reader.sync_forward_bytes.get(edge.source, 0.0) if reader else 0.0))
            leaving.append(edge.num_bytes + (maker.sync_backward_bytes.get(edge.target, 0.0) if maker else 0.0))
        has_source, has_target = self.held[:, sources].astype(float), self.held[:, targets].astype(float)
        into, out_of = np.array(entering), np.array(leaving)
        read, made, made_and_read = has_target @ into, has_source @ out_of, has_target @ out_of
        found = np.empty(len(self.from_ideal))
        for first in range(0, self.num_ideals, IDEALS_AT_ONCE):
            rows = slice(self.first_pair[first], self.first_pair[min(first + IDEALS_AT_ONCE, self.num_ideals)])
            a, b = self.from_ideal[rows], self.to_ideal[rows]
            both = (has_source[first : first + IDEALS_AT_ONCE] * (into + out_of)) @ has_target.T
            found[rows] = both[a - first, b] - read[a] + made[b] - made_and_read[b] - made[a]
        return found

    def _first(self, layer: int, degree: int) -> Implementation | None:
        options = self.problem.implementations[layer].get(degree, ())
        return options[0] if options else None


def plan_piper(problem: PiperInput, *, knapsack: str = "greedy") -> PiperPlan:
    """Return the plan with the smallest objective.

    Raises:
        ValueError: If nothing fits the memory, the graph branches too much, or the knapsack is unknown.
    """
    if knapsack not in KNAPSACKS:
        raise ValueError(f"knapsack must be one of {', '.join(KNAPSACKS)}, got {knapsack!r}")
    tables = _Tables(problem)
    microbatches, devices = problem.num_microbatches, problem.num_devices
    choices = [
        (degree, replicas, number)
        for number, degree in enumerate(tables.degrees)
        for replicas in range(1, devices // degree + 1)
        if microbatches % replicas == 0
    ]
    most = min(devices, microbatches)
    times = np.stack([_times(tables, degree, most, knapsack) for degree in tables.degrees])
    weights = {degree: tables.weight_bytes(degree) for degree in tables.degrees}
    cuts = {degree: tables.cut_bytes(degree) for degree in tables.degrees}
    extra = np.stack([_extra_s(problem, cuts[degree], weights[degree], d) for degree, d, _ in choices])
    columns = np.array(choices, dtype=np.int64)
    least_work_s = sum(
        min(degree * option.time_s for degree, own in options.items() for option in own)
        for options in problem.implementations
    )
    slowest = sum(float(each[np.isfinite(each)].max(initial=0.0)) for each in (times, extra))
    bound = max(FIRST_BOUND * least_work_s / devices, 1e-12)
    while True:
        value = fill(
            tables.num_ideals,
            tables.from_ideal,
            tables.to_ideal,
            tables.first_pair,
            columns[:, 0].copy(),
            columns[:, 1].copy(),
            columns[:, 2].copy(),
            times,
            extra,
            devices,
            most,
            bound,
        )
        if np.isfinite(value[0]).any():
            return _read_back(tables, value, choices, times, extra, knapsack)
        if bound > slowest:
            raise ValueError(
                f"Piper finds no plan within {problem.memory_bytes:.3g} bytes on each of {counted(devices, 'device')}"
            )
        bound *= 2


def _extra_s(problem: PiperInput, cut_bytes: Floats, weight_bytes: Floats, data_degree: int) -> Floats:
    """Return what every stage communicates in, seconds per microbatch: float64[pairs].

    Infinite where a layer has no implementation (``weight_bytes``).
    """
    d, possible = data_degree, np.isfinite(weight_bytes)
    weights = np.where(possible, weight_bytes, 0.0)
    num_bytes = 2 * cut_bytes / d + 4 * (d - 1) * weights / (d * problem.num_microbatches)
    return np.where(possible, num_bytes / problem.bandwidth_bytes_per_s, np.inf)


def _times(tables: _Tables, degree: int, most: int, knapsack: str) -> Floats:
    memory = tables.memory_bytes[degree]
    if knapsack == "greedy":
        options = tables.options(degree)
        rows = np.hstack([*options[:3], options[3][:, np.newaxis]])
        _, examples, kinds = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        return stage_times(
            tables.from_ideal,
            tables.to_ideal,
            tables.held @ np.eye(len(examples), dtype=np.int64)[kinds.reshape(-1)],
            examples,
            *options,
            most,
            memory,
        )
    found = np.full((len(tables.from_ideal), most + 1), np.inf)
    for pair in range(len(found)):
        own = tables.layers(pair)
        for in_flight in range(1, most + 1):
            found[pair, in_flight] = exact_choice(tables.problem, own.tolist(), degree, in_flight, memory[pair])[0]
    return found


def exact_choice(
    problem: PiperInput, layers: Sequence[int], degree: int, in_flight: int, memory_bytes: float
) -> tuple[float, tuple[int, ...]]:
    """Return the least time of a stage that fits, and the choice per layer; infinite if nothing fits.

    Keeps every pair of (time, memory) that no other beats in both.
    """
    frontier: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for layer in layers:
        grown = [
            (
                time + option.time_s,
                memory + option.memory_per_microbatch_bytes * in_flight + option.memory_bytes,
                (*chosen, number),
            )
            for time, memory, chosen in frontier
            for number, option in enumerate(problem.implementations[layer].get(degree, ()))
        ]
        frontier = []
        for time, memory, chosen in sorted(grown):
            if memory <= memory_bytes and (not frontier or memory < frontier[-1][1]):
                frontier.append((time, memory, chosen))
    return (frontier[0][0], frontier[0][2]) if frontier else (float("inf"), ())


def _read_back(
    tables: _Tables,
    value: Floats,
    choices: Sequence[tuple[int, int, int]],
    times: Floats,
    extra: Floats,
    knapsack: str,
) -> PiperPlan:
    """Walk from the empty down-set; the step taken is any that explains the value."""
    problem = tables.problem
    s, k = (int(index) for index in np.unravel_index(int(np.argmin(value[0])), value[0].shape))
    objective = float(value[0, s, k])
    ideal, stages = 0, []
    while ideal < tables.num_ideals - 1:
        wanted = value[ideal, s, k]
        pair, choice, load = _step(tables, value, choices, times, extra, ideal, s, k, wanted)
        degree, d, _ = choices[choice]
        own = tables.layers(pair)
        in_flight, memory_bytes = ceil(s / d), float(tables.memory_bytes[degree][pair])
        if knapsack == "greedy":
            one_each = np.ones(len(own), dtype=np.int64)
            options = tables.options(degree)
            _, held = choose_implementations(own, one_each, *options, in_flight, memory_bytes)
            chosen = held.argmax(axis=1).tolist()
        else:
            chosen = list(exact_choice(problem, own.tolist(), degree, in_flight, memory_bytes)[1])
        taken = [problem.implementations[layer][degree][option] for layer, option in zip(own, chosen, strict=True)]
        stages.append(
            PiperStage(
                layers=tuple(problem.names[layer] for layer in own),
                tensor_degree=degree,
                data_degree=d,
                implementations=tuple(option.name for option in taken),
                load_s=float(load),
                held_bytes=problem.memory_bytes
                - memory_bytes
                + sum(option.memory_per_microbatch_bytes * in_flight + option.memory_bytes for option in taken),
            )
        )
        ideal, s, k = int(tables.to_ideal[pair]), s - d, k - degree * d
    return PiperPlan(objective, tuple(stages))


def _step(
    tables: _Tables,
    value: Floats,
    choices: Sequence[tuple[int, int, int]],
    times: Floats,
    extra: Floats,
    ideal: int,
    s: int,
    k: int,
    wanted: float,
) -> tuple[int, int, float]:
    for pair in range(int(tables.first_pair[ideal]), int(tables.first_pair[ideal + 1])):
        after = tables.to_ideal[pair]
        for choice, (degree, d, number) in enumerate(choices):
            if d > s or degree * d > k:
                continue
            load = times[number, pair, -(-s // d)] / d + extra[choice, pair]
            if max(value[after, s - d, k - degree * d], load) == wanted:
                return pair, choice, load
    raise AssertionError("every value of the table has a step that explains it")
