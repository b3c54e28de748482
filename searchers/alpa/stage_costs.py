"""The optimum of every stage (a run of layers) on one logical mesh, from one pass over the layers.

A layer's inner operators are eliminated once per distinct layer; what remains is a table from the strategies that
enter the layer to those that leave it. Joining such tables in turn gives every interval, exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.elimination import Trail, eliminate, follow
from searchers.alpa.intra_op import ATTRIBUTES, IntraOp
from searchers.alpa.layer_needs import LayerNeeds, layer_needs
from searchers.alpa.milp import solve_milp
from searchers.alpa.pareto import solve_within
from searchers.alpa.strategy_graph import Array, Factor, StrategyGraph, join, minimised
from simulator.plan import Sharding

Spans = tuple[tuple[int, int], ...]
Solver = Literal["elimination", "milp", "pareto"]
SHARED_ELEMENTS = 1_000_000
"""Elements from which on a weight that operators of a stage share is counted once.

Counting it asks what the whole stage chose for each of them (`StageSolver.assignment`); stages without such a weight
are spared that. Ours, not Alpa's: it lies between the shared weights of the shipped models that are no matter, relative
position biases (512 elements, read by every layer of `t5-large-32`), and embeddings (2.1 million and more). A smaller
weight is counted for every reader: at most 20 MB each, with 20 bytes of states an element.
"""


class Room(NamedTuple):
    """Memory that a stage may fill.

    Attributes:
        limit_bytes: Of one device, working memory and what is received and sent already taken off.
        microbatches_in_flight: Microbatches between forward and backward.
        sharded: Model states are sharded over the batch axes.
    """

    limit_bytes: float
    microbatches_in_flight: int
    sharded: bool = False


@dataclass(frozen=True)
class StageCosts:
    """Intra-operator optimum of layers i to j (inclusive), on one mesh.

    Arrays are float64[num_layers, num_layers], infinite where j < i or nothing is legal.

    Attributes:
        objective: What the intra-operator problem minimises.
        seconds: One microbatch, forward and backward.
        sync_s: Synchronisation of gradients, once per iteration.
        elements, sharded_elements: Of parameters; sums over the interval, as those that follow.
        saved_bytes: Kept of a microbatch.
        remaining_bytes: The same where layers are recomputed: what leaves each, and tokens or images.
    """

    objective: Array
    seconds: Array
    sync_s: Array
    elements: Array
    sharded_elements: Array
    saved_bytes: Array
    remaining_bytes: Array


class StageSolver:
    """All stages of a workload on one logical mesh.

    Args:
        problem: The intra-operator problem of the mesh.
        spans: Operator ranges of the layers.
    """

    def __init__(self, problem: IntraOp, spans: Spans) -> None:
        self.problem = problem
        self.spans = spans
        workload = problem.costs.problem.workload
        self._last_reader = [
            max((workload.consumers[name][-1] for name in op.outputs if name in workload.consumers), default=-1)
            for op in workload.operators
        ]
        self._tables: dict[object, tuple[Factor, Trail]] = {}
        self._layers: dict[tuple[int, int], _Layer] = {}
        self._producers_before = [
            sorted({p for index in range(*span) for p in problem.producers(index) if p < span[0]}) for span in spans
        ]
        self._walked: tuple[int, list[_Step], Iterator[_Step]] | None = None
        self._sharing = [
            index
            for index in range(len(workload))
            if any(each.tie and prod(each.shape) >= SHARED_ELEMENTS for each in workload.parameters(index))
        ]
        self.legal = all(problem.strategies(index) for index in range(len(workload)))

    def all_stages(self) -> StageCosts:
        """Return every interval of layers."""
        count = len(self.spans)
        found = {name: np.full((count, count), np.inf) for name in StageCosts.__dataclass_fields__}
        if self.legal:
            for first in range(count):
                self._walk(first, count - 1, found)
        return StageCosts(**found)

    def stage(self, first: int, last: int) -> dict[str, float]:
        """Return one interval, computed alone: the same fields as `StageCosts`."""
        count = len(self.spans)
        found = {name: np.full((count, count), np.inf) for name in StageCosts.__dataclass_fields__}
        if self.legal:
            self._walk(first, last, found)
        return {name: float(values[first, last]) for name, values in found.items()}

    def needs(self) -> list[LayerNeeds]:
        """Return per layer what it takes besides what its stage keeps, the layer sharded for itself.

        Where layers are recomputed, what the layer has made again is there too.
        """
        workload = self.problem.costs.problem.workload
        known: dict[object, LayerNeeds] = {}
        found = []
        for layer, (start, stop) in enumerate(self.spans):
            keeps = tuple(self.problem.keeps_first(index) for index in range(start, stop))
            key = workload.signatures[start:stop], keeps
            if key not in known:
                shardings = dict(zip(range(start, stop), self.assignment(layer, layer), strict=True))
                before = self.spans[max(0, layer - 1)][0]
                again = (start, stop) if self.problem.options.recompute else None
                known[key] = layer_needs(self.problem, shardings, before, again)
            found.append(known[key])
        return found

    def shared_elements(self, first: int, last: int) -> tuple[float, float]:
        """Return elements that an interval of layers counts more than once, whole and divided over the batch axes.

        A weight that operators of a stage share and lay out alike is there once: the embedding and the head. Weights
        below ``SHARED_ELEMENTS`` are not worth following their choices.
        """
        problem = self.problem
        start, stop = self.spans[first][0], self.spans[last][1]
        users = [index for index in self._sharing if start <= index < stop]
        whole = sharded = 0.0
        if len(users) > 1:
            chosen = self.assignment(first, last)
            seen: set[Hashable] = set()
            for index in users:
                for layout, elements, divided in problem.tied_layouts(index, chosen[index - start]):
                    whole += elements if layout in seen else 0.0
                    sharded += divided if layout in seen else 0.0
                    seen.add(layout)
        return whole, sharded

    def waiting_elements(self, first: int, last: int) -> list[tuple[int, int, float]]:
        """Return, for weights that layers of an interval share and lay out alike, the first and last, and elements.

        Layers are counted from the first of the interval. See `shared_elements`.
        """
        start, stop = self.spans[first][0], self.spans[last][1]
        users = [index for index in self._sharing if start <= index < stop]
        found: dict[Hashable, tuple[int, int, float]] = {}
        if len(users) > 1:
            chosen = self.assignment(first, last)
            layer_of = [place for place, (a, b) in enumerate(self.spans[first : last + 1]) for _ in range(a, b)]
            for index in users:
                for layout, elements, _ in self.problem.tied_layouts(index, chosen[index - start]):
                    begun, *_ = found.get(layout, (layer_of[index - start],))
                    found[layout] = begun, layer_of[index - start], elements
        return [each for each in found.values() if each[0] < each[1]]

    def assignment(
        self, first: int, last: int, solver: Solver = "elimination", room: Room | None = None
    ) -> list[Sharding]:
        """Return the best sharding of every operator of an interval.

        Args:
            first, last: Layers, inclusive.
            solver: ``elimination`` and ``milp`` are exact without a memory limit, as Alpa poses the problem; ``pareto``
                keeps to ``room``.
            room: Memory of the stage, for ``pareto``.

        Raises:
            ValueError: If the stage does not fit in its room.
        """
        start, stop = self.spans[first][0], self.spans[last][1]
        if solver == "elimination":
            chosen: Sequence[int] = self._traced(first, last)
        else:
            graph = self.problem.graph(start, stop, self._leaving(first, last))
            if solver == "milp":
                _, chosen = solve_milp(graph)
            else:
                assert room is not None, "the pareto solver needs to know the room"
                point, _ = solve_within(self._with_memory(graph, room, start), 0, room.limit_bytes)
                chosen = point.assignment
        return [self.problem.strategies(start + number)[choice] for number, choice in enumerate(chosen)]

    def _leaving(self, first: int, last: int) -> set[int]:
        return {
            index
            for begin, stop in self.spans[first : last + 1]
            for index in range(begin, stop)
            if self._last_reader[index] >= stop
        }

    def _with_memory(self, graph: StrategyGraph, room: Room, start: int) -> StrategyGraph:
        """Return the graph with one attribute: bytes of the stage with its microbatches in flight.

        A shared weight is there once where its user has the layout of the user before.
        """
        kept = "remaining_bytes" if self.problem.options.recompute else "saved_bytes"
        rows = [ATTRIBUTES.index(name) for name in ("elements", "sharded_elements", kept)]
        states = self.problem.state_bytes_per_element(sharded=room.sharded)
        weights = np.array([*states, float(room.microbatches_in_flight)])
        pairs: dict[tuple[int, int], Array] = {}
        users = [index for index in self._sharing if start <= index < start + len(graph.costs)]
        for before, index in pairwise(users):
            first, then = (
                [dict(self._shared_bytes(user, each, states)) for each in self.problem.strategies(user)]
                for user in (before, index)
            )
            twice = [[-sum(size for layout, size in b.items() if layout in a) for b in then] for a in first]
            pairs[before - start, index - start] = np.array([twice])
        edges = {edge: np.zeros(table.shape[1:]) for edge, table in pairs.items()} | dict(graph.edges)
        attributes = [(weights @ table[rows])[np.newaxis] for table in graph.attributes]
        return StrategyGraph(graph.costs, edges, attributes, pairs)

    def _shared_bytes(
        self, index: int, sharding: Sharding, states: tuple[float, float]
    ) -> Iterator[tuple[Hashable, float]]:
        """Yield tie and layout of an operator's shared weights, and the bytes of their states."""
        for layout, elements, divided in self.problem.tied_layouts(index, sharding):
            yield layout, elements * states[0] + divided * states[1]

    def _walk(self, first: int, last: int, found: dict[str, NDArray[np.float64]]) -> None:
        for layer, step in zip(range(first, last + 1), self._steps(first), strict=False):
            least = step.number
            found["objective"][first, layer] = step.table.cost.flat[least]
            followed = step.table.attributes.reshape(len(ATTRIBUTES), -1)[:, least]
            for name, value in zip(ATTRIBUTES, followed.tolist(), strict=True):
                found[name][first, layer] = value

    def _steps(self, first: int) -> Iterator[_Step]:
        """Yield the intervals from a layer on, one layer longer each."""
        start = self.spans[first][0]
        running: Factor | None = None
        for layer in range(first, len(self.spans)):
            inside = self._layer(layer, start)
            own = inside.table
            running = own if running is None else join((running, own))
            stop = self.spans[layer][1]
            read: Trail = []
            for variable in running.variables:
                if self._last_reader[variable] < stop:
                    running, chosen = minimised(running, variable)
                    read.append((variable, running.variables, chosen))
            yield _Step(running, read, inside)

    def _traced(self, first: int, last: int) -> list[int]:
        """Return the choices behind an interval's table: the tables that follow from layer to layer say them."""
        if self._walked is None or self._walked[0] != first:
            self._walked = first, [], self._steps(first)
        _, steps, more = self._walked
        while len(steps) <= last - first:
            steps.append(next(more))
        end = steps[last - first]
        if not np.isfinite(end.table.cost[end.best]):
            raise ValueError("no assignment of strategies is allowed")
        chosen = {variable: int(choice) for variable, choice in zip(end.table.variables, end.best, strict=True)}
        for step in reversed(steps[: last - first + 1]):
            follow(step.read, chosen)
            step.inside.follow(chosen)
        return [chosen[index] for index in range(self.spans[first][0], self.spans[last][1])]

    def _layer(self, layer: int, start: int) -> _Layer:
        """Return a layer's table over what enters it from inside the stage and what leaves it."""
        outside = bisect_left(self._producers_before[layer], start)
        key = layer, outside
        if key not in self._layers:
            self._layers[key] = self._numbered(layer, self._producers_before[layer][outside:], start)
        return self._layers[key]

    def _numbered(self, layer: int, entering: list[int], start: int) -> _Layer:
        problem = self.problem
        workload = problem.costs.problem.workload
        begin, stop = self.spans[layer]
        operators = range(begin, stop)
        leaving = {index for index in operators if self._last_reader[index] >= stop}
        order = {index: number for number, index in enumerate([*entering, *operators])}
        key = (
            tuple(workload.signatures[index] for index in order),
            tuple(problem.keeps_first(index) for index in operators),
            tuple(
                (order[index], tuple(order.get(producer, -1) for producer in problem.producers(index)))
                for index in operators
            ),
            tuple(order[index] for index in sorted(leaving)),
        )
        if key not in self._tables:
            trail: Trail = []
            table = eliminate(problem.factors(operators, leaving, start), [*entering, *leaving], trail)
            self._tables[key] = (
                Factor(tuple(order[variable] for variable in table.variables), table.cost, table.attributes),
                [(order[variable], tuple(order[other] for other in others), best) for variable, others, best in trail],
            )
        return _Layer(tuple(order), *self._tables[key])


@dataclass(frozen=True)
class _Layer:
    """A layer with its inner operators eliminated; equal layers share what is numbered from the layer's own start.

    Attributes:
        operators: Operator of each number: those that enter, then the layer's own.
        numbered: Table over what enters and what leaves.
        trail: Choices of the inner operators.
    """

    operators: tuple[int, ...]
    numbered: Factor
    trail: Trail

    @property
    def table(self) -> Factor:
        """The table over operators."""
        variables = tuple(self.operators[number] for number in self.numbered.variables)
        return Factor(variables, self.numbered.cost, self.numbered.attributes)

    def follow(self, chosen: dict[int, int]) -> None:
        """Add the inner operators' choices to those of what enters and leaves."""
        own = {number: chosen[index] for number, index in enumerate(self.operators) if index in chosen}
        follow(self.trail, own)
        chosen.update({self.operators[number]: choice for number, choice in own.items()})


@dataclass(frozen=True)
class _Step:
    """An interval of layers: its table, and what the last layer's coming in has decided.

    Attributes:
        table: Over what leaves the interval.
        read: Operators that nothing behind the interval reads: their choices.
        inside: The last layer.
    """

    table: Factor
    read: Trail
    inside: _Layer

    @property
    def number(self) -> int:
        """Where the table is least, counted through."""
        return int(self.table.cost.argmin())

    @property
    def best(self) -> tuple[np.intp, ...]:
        """The choices there."""
        return np.unravel_index(self.number, self.table.cost.shape)
