"""The optimum of every stage (a run of layers) on one logical mesh, from one pass over the layers.

A layer's inner operators are eliminated once per distinct layer; what remains is a table from the strategies that
enter the layer to those that leave it. Joining such tables in turn gives every interval, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from searchers.alpa.elimination import eliminate, solve
from searchers.alpa.intra_op import ATTRIBUTES, IntraOp
from searchers.alpa.milp import solve_milp
from searchers.alpa.pareto import solve_within
from searchers.alpa.strategy_graph import Array, Factor, StrategyGraph, minimised
from simulator.plan import Sharding

Spans = tuple[tuple[int, int], ...]
Solver = Literal["elimination", "milp", "pareto"]
_SAVED = ATTRIBUTES.index("saved_bytes")


class Room(NamedTuple):
    """Memory that a stage may fill.

    Attributes:
        limit_bytes: Of one device, working memory already taken off.
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
        state_bytes, sharded_state_bytes, saved_bytes, output_bytes: Sums over the interval.
        layer_bytes: Largest ``saved_bytes`` of one layer.
    """

    objective: Array
    seconds: Array
    sync_s: Array
    state_bytes: Array
    sharded_state_bytes: Array
    saved_bytes: Array
    output_bytes: Array
    layer_bytes: Array


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
        self._tables: dict[object, Factor] = {}
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
        graph = self.problem.graph(start, stop, self._leaving(first, last))
        if solver == "milp":
            _, chosen = solve_milp(graph)
        elif solver == "pareto":
            assert room is not None, "the pareto solver needs to know the room"
            point, _ = solve_within(self._with_memory(graph, room), 0, room.limit_bytes)
            chosen = point.assignment
        else:
            _, chosen = solve(graph)
        return [self.problem.strategies(start + number)[choice] for number, choice in enumerate(chosen)]

    def _leaving(self, first: int, last: int) -> set[int]:
        return {
            index
            for begin, stop in self.spans[first : last + 1]
            for index in range(begin, stop)
            if self._last_reader[index] >= stop
        }

    def _with_memory(self, graph: StrategyGraph, room: Room) -> StrategyGraph:
        """Return the graph with one attribute: bytes of the stage with its microbatches in flight."""
        kept = "output_bytes" if self.problem.options.recompute else "saved_bytes"
        states = "sharded_state_bytes" if room.sharded else "state_bytes"
        rows = [ATTRIBUTES.index(states), ATTRIBUTES.index(kept)]
        weights = np.array([1.0, float(room.microbatches_in_flight)])
        return StrategyGraph(
            graph.costs, graph.edges, [(weights @ table[rows])[np.newaxis] for table in graph.attributes]
        )

    def _walk(self, first: int, last: int, found: dict[str, NDArray[np.float64]]) -> None:
        start = self.spans[first][0]
        running: Factor | None = None
        for layer in range(first, last + 1):
            own = self._layer(layer, start)
            running = _with_largest(own) if running is None else _append(running, own)
            stop = self.spans[layer][1]
            for variable in running.variables:
                if self._last_reader[variable] < stop:
                    running, _ = minimised(running, variable)
            best = np.unravel_index(int(np.argmin(running.cost)), running.cost.shape)
            found["objective"][first, layer] = running.cost[best]
            for number, name in enumerate(ATTRIBUTES):
                found[name][first, layer] = running.attributes[(number, *best)]
            found["layer_bytes"][first, layer] = running.attributes[(len(ATTRIBUTES), *best)]

    def _layer(self, layer: int, start: int) -> Factor:
        """Return a layer's table over what enters it from inside the stage and what leaves it."""
        problem = self.problem
        workload = problem.costs.problem.workload
        begin, stop = self.spans[layer]
        operators = range(begin, stop)
        leaving = {index for index in operators if self._last_reader[index] >= stop}
        entering = sorted(
            {producer for index in operators for producer in problem.producers(index) if start <= producer < begin}
        )
        order = {index: number for number, index in enumerate([*entering, *operators])}
        key = (
            tuple(workload.signatures[index] for index in order),
            tuple(
                (order[index], tuple(order.get(producer, -1) for producer in problem.producers(index)))
                for index in operators
            ),
            tuple(order[index] for index in sorted(leaving)),
        )
        numbered = {number: index for index, number in order.items()}
        if key not in self._tables:
            table = eliminate(problem.factors(operators, leaving, start), [*entering, *leaving])
            self._tables[key] = Factor(
                tuple(order[variable] for variable in table.variables), table.cost, table.attributes
            )
        table = self._tables[key]
        return Factor(tuple(numbered[number] for number in table.variables), table.cost, table.attributes)


def _with_largest(layer: Factor) -> Factor:
    """Return a layer's factor with its kept bytes once more, as the largest of one layer so far."""
    return Factor(
        layer.variables, layer.cost, np.concatenate([layer.attributes, layer.attributes[_SAVED : _SAVED + 1]])
    )


def _append(running: Factor, layer: Factor) -> Factor:
    variables = tuple(sorted({*running.variables, *layer.variables}))
    cost, attributes = running.aligned(variables)
    more_cost, more = layer.aligned(variables)
    joined = cost + more_cost
    shape = joined.shape
    summed = np.broadcast_to(attributes[:-1] + more, (len(ATTRIBUTES), *shape))
    largest = np.broadcast_to(np.maximum(attributes[-1], more[_SAVED]), shape)
    return Factor(variables, joined, np.concatenate([summed, largest[np.newaxis]]))
