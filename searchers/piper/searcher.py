"""Piper's planner as a searcher."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hardware_models.gpus import DtypeError
from searchers.base import Ledger, Searcher, SearchResult, check_least
from searchers.budget import Budget
from searchers.dapple.chain import layer_spans
from searchers.layer_graph import LayerGraph, layer_graph
from searchers.layers import LayerTables
from searchers.pipedream.searcher import bus_bytes_per_s
from searchers.piper.model import Edge, Implementation, PiperInput, Tie
from searchers.piper.planner import KNAPSACKS, PiperPlan, plan_piper
from searchers.scores import Objective, Score, estimated
from simulator.costs import cost_tables
from simulator.divisors import divisors
from simulator.lowering.mesh import parameter_layout
from simulator.plan import Axis, Plan, Sharding, Stage, batch_replicas, resolve
from simulator.problem import Problem

VANILLA, RECOMPUTED = "vanilla", "activation recomp"
LESS = 0.99
"""Of what a plan that does not fit holds by Piper's account: the memory that the next one is searched in."""


class Piper(Searcher):
    """Piper: pipeline stages of a layer graph, each with tensor and data degrees and recomputed layers, in memory.

    Microbatches are of a fixed size, replicas take them in turn, so a stage's data degree divides their number.
    The objective is the time of the slowest stage over an iteration: no bubble.

    Args:
        microbatch: Samples per microbatch; None tries the divisors of the global batch that leave at least as many
            microbatches as devices.
        degrees: Tensor-parallel degrees to offer; None for the powers of two up to a machine's GPUs.
        granularity: What counts as a layer: ``layers``, ``blocks`` or ``operators``.
        knapsack: ``greedy`` or ``exact``: see `searchers.piper.planner`.
        bandwidth_bytes_per_s: Between any two devices; None for the cluster's large all-reduces.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "piper"
    paper = "Tarnawski et al., NeurIPS 2021"

    def __init__(
        self,
        *,
        microbatch: int | None = None,
        degrees: tuple[int, ...] | None = None,
        granularity: str = "layers",
        knapsack: str = "greedy",
        bandwidth_bytes_per_s: float | None = None,
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, microbatch=microbatch, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
        if knapsack not in KNAPSACKS:
            raise ValueError(f"knapsack must be one of {', '.join(KNAPSACKS)}, got {knapsack!r}")
        self.microbatch = microbatch
        self.degrees = degrees
        self.granularity = granularity
        self.knapsack = knapsack
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Plan for every microbatch size; nothing is random."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        batch = problem.global_batch
        sizes = [self.microbatch] if self.microbatch else divisors(batch)
        enough = [size for size in sizes if batch // size >= problem.num_devices] or sizes[:1]
        for size in enough:
            if ledger.spent:
                break
            if batch % size:
                ledger.refuse(f"microbatch must divide the global batch {batch}, got {size}")
                continue
            self._search_size(ledger, size)
        return ledger.result()

    def _search_size(self, ledger: Ledger, size: int) -> None:
        """Evaluate the plan of a microbatch size; while it does not fit, the next one within less memory than it holds.

        Piper's own account leaves out work space and fills the memory that it is told of.
        """
        problem = ledger.problem
        stated = self.input(problem, size)
        memory_bytes = stated.problem.memory_bytes
        while True:
            try:
                found = plan_piper(replace(stated.problem, memory_bytes=memory_bytes), knapsack=self.knapsack)
            except ValueError as error:
                ledger.refuse(error)
                self._score_smallest(problem, stated, size, ledger)
                return
            plan = self.to_plan(problem, stated, found, size)
            if ledger.spent or not ledger.is_legal(plan) or ledger.evaluate(plan).fits or ledger.spent:
                return
            memory_bytes = LESS * min(found.held_bytes, memory_bytes)

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score by the load of the slowest stage, for all microbatches of an iteration.

        A pipeline of more stages than microbatches never fills: each stage has its turn all the same.
        """
        stated = self.input(problem, plan.microbatch_size)
        owner = {index: name for name, span in stated.graph.spans.items() for index in range(*span)}
        slowest = 0.0
        for stage in plan.stages:
            inside = dict.fromkeys(owner[index] for index in stage.indices())
            again = {owner[index] for start, stop in stage.recompute for index in range(start, stop)}
            data = batch_replicas(stage)
            chosen = {name: RECOMPUTED if name in again else VANILLA for name in inside}
            degree = len(stage.devices) // data
            if any(degree not in stated.problem.implementations[place] for place in range(len(stated.graph.spans))):
                raise ValueError(f"Piper's tensor degrees stay inside a node and divide the model, got {degree}")
            slowest = max(slowest, load_s(stated.problem, chosen, degree, data))
        return replace(estimated(plan, problem), objective=slowest * max(plan.num_microbatches, len(plan.stages)))

    def input(self, problem: Problem, microbatch: int) -> StatedInput:
        """Return the problem as Piper states it, from the shared cost tables."""
        largest = problem.hardware.cluster.devices_per_node
        degrees = self.degrees or tuple(1 << power for power in range(largest.bit_length()) if 1 << power <= largest)
        return _input(problem, microbatch, degrees, self.granularity, self.bandwidth_bytes_per_s)

    def to_plan(self, problem: Problem, stated: StatedInput, found: PiperPlan, microbatch: int) -> Plan:
        """Return the executable plan; stages take devices in order."""
        stages, device = [], 0
        for stage in found.stages:
            count = stage.tensor_degree * stage.data_degree
            ranges = stated.graph.ranges(stage.layers)
            sharding = (Axis("batch", stage.data_degree), Axis("tensor", stage.tensor_degree))
            again = [
                stated.graph.spans[name]
                for name, chosen in zip(stage.layers, stage.implementations, strict=True)
                if chosen == RECOMPUTED
            ]
            stages.append(
                Stage(
                    operators=ranges,
                    devices=tuple(range(device, device + count)),
                    shardings=((sum(stop - start for start, stop in ranges), sharding),),
                    recompute=tuple(sorted(again)),
                )
            )
            device += count
        rotates = any(stage.data_degree > 1 for stage in found.stages)
        return Plan(
            stages=tuple(stages),
            microbatch_size=microbatch,
            num_microbatches=problem.global_batch // microbatch,
            overlap_gradient_sync=False,
            replica_assignment="round_robin" if rotates else "slice",
        )

    def _score_smallest(self, problem: Problem, stated: StatedInput, microbatch: int, ledger: Ledger) -> None:
        """Score what needs least memory: everything recomputed, layers spread over a straight pipeline."""
        names = [node.name for node in stated.graph.profile.topological()]
        count = min(problem.num_devices, len(names))
        cuts = [round(part * len(names) / count) for part in range(count + 1)]
        stages = []
        for device in range(count):
            ranges = stated.graph.ranges(names[cuts[device] : cuts[device + 1]])
            size = sum(stop - start for start, stop in ranges)
            stages.append(Stage(ranges, (device,), ((size, (Axis("batch", 1),)),), ranges))
        plan = Plan(tuple(stages), microbatch, problem.global_batch // microbatch, overlap_gradient_sync=False)
        if not ledger.spent and ledger.is_legal(plan):
            ledger.evaluate(plan)


@dataclass(frozen=True)
class StatedInput:
    """A problem as Piper states it, and where its layers are.

    Attributes:
        problem: Ids are the names of the graph's nodes.
        graph: Layers.
    """

    problem: PiperInput
    graph: LayerGraph


def load_s(problem: PiperInput, chosen: dict[str, str], tensor: int, data: int) -> float:
    """Return the load of one stage.

    Args:
        problem: Layers, edges, bandwidth.
        chosen: Implementation of each layer of the stage, by name.
        tensor, data: Degrees.
    """
    number = {name: index for index, name in enumerate(problem.names)}
    time = weights = 0.0
    for name, implementation in chosen.items():
        option = next(each for each in problem.implementations[number[name]][tensor] if each.name == implementation)
        time += option.time_s
        weights += option.weight_bytes
    weights -= problem.tied_weight_bytes(chosen, tensor)
    cut = sum(edge.num_bytes for edge in problem.edges if (edge.source in chosen) != (edge.target in chosen))
    sent = 2 * cut / data + 4 * (data - 1) * weights / (data * problem.num_microbatches)
    return time / data + sent / problem.bandwidth_bytes_per_s


@lru_cache(maxsize=32)
def _input(
    problem: Problem, microbatch: int, degrees: tuple[int, ...], granularity: str, bandwidth: float | None
) -> StatedInput:
    costs, runtime = cost_tables(problem), problem.runtime
    graph = layer_graph(costs, microbatch, layer_spans(problem, granularity))
    names = tuple(node.name for node in graph.profile.nodes)
    tables = LayerTables(costs, tuple(graph.spans.values()))
    implementations: list[dict[int, tuple[Implementation, ...]]] = [{} for _ in names]
    ties: list[Tie] = []
    for degree in degrees:
        sharding = (Axis("tensor", degree),) if degree > 1 else ()
        try:
            found = tables.slowest(sharding, microbatch)
        except DtypeError:
            raise
        except ValueError:  # this degree does not divide heads or widths
            continue
        state = runtime.state_bytes_per_parameter
        for layer, name in enumerate(names):
            node = graph.profile.nodes[layer]
            entering = sum(graph.edge_bytes[before, name] for before in node.predecessors)
            elements, saved = float(found.parameter_elements[layer]), float(found.saved_bytes[layer])
            again = max(0.0, saved - entering)  # One microbatch holds the same either way, as in Piper's own inputs.
            forward, total = float(found.forward_s[layer]), float(found.forward_s[layer] + found.backward_s[layer])
            weights = elements * runtime.travelling_gradient_bytes
            implementations[layer][degree] = (
                Implementation(VANILLA, total, weights, saved, elements * state, {}, {}),
                Implementation(RECOMPUTED, total + forward, weights, entering, elements * state + again, {}, {}),
            )
            assert names[layer] == name
        ties += _ties(problem, graph, degree, sharding)
    edges = tuple(
        Edge(before, node.name, graph.edge_bytes[before, node.name])
        for node in graph.profile.nodes
        for before in node.predecessors
    )
    everything = tuple(range(problem.num_devices))
    rate = bandwidth or (bus_bytes_per_s(problem, everything) if len(everything) > 1 else float(np.inf))
    return StatedInput(
        PiperInput(
            names=names,
            implementations=tuple(implementations),
            edges=edges,
            num_devices=problem.num_devices,
            memory_bytes=float(min(problem.capacity_bytes(device) for device in everything)),
            bandwidth_bytes_per_s=rate,
            num_microbatches=problem.global_batch // microbatch,
            ties=tuple(ties),
        ),
        graph,
    )


def _ties(problem: Problem, graph: LayerGraph, degree: int, sharding: Sharding) -> list[Tie]:
    """Return the weights that layers share where they lay them out alike."""
    costs, runtime = cost_tables(problem), problem.runtime
    layers: dict[tuple[str, Hashable], list[str]] = {}
    elements: dict[tuple[str, Hashable], int] = {}
    for name, span in graph.spans.items():
        for index in range(*span):
            own = resolve(sharding, problem.workload.operators[index])
            cost = costs.operator(index, own, 1, problem.gpu_types[0])
            for number, (parameter, count) in enumerate(cost.parameters):
                if parameter.tie is not None:
                    key = parameter.tie, parameter_layout(own, costs.splits(index, own), number)
                    layers.setdefault(key, []).append(name)
                    elements[key] = count
    gradient_bytes = 0.0 if runtime.reduces_ties_by_use else float(runtime.travelling_gradient_bytes)
    return [
        Tie(degree, tuple(own), elements[key] * gradient_bytes, elements[key] * runtime.state_bytes_per_parameter)
        for key, own in layers.items()
        if len(own) > 1
    ]
