"""FlexFlow's search: a random walk over per-operator strategies, each step evaluated by what it changes.

Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6: Metropolis
steps that change the strategy of one random operator, accepted with ``min(1, exp(beta (cost - cost')))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from searchers.alpa.intra_op import ATTRIBUTES, IntraOp, IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, Submesh
from searchers.alpa.searcher import CAPACITY_STEPS
from searchers.alpa.strategy_graph import StrategyGraph
from searchers.base import Ledger, Searcher, SearchResult, check_least
from searchers.budget import Budget
from searchers.degrees import microbatch_sizes
from searchers.scores import Objective
from simulator.costs import cost_tables
from simulator.plan import Plan, Stage, run_lengths
from simulator.problem import Problem

SCORE_EVERY = 5_000
"""Steps after which the best of a walk is scored in full, if it improved; so it is at the end."""


class FlexFlowMcmc(Searcher):
    """Metropolis search over the splits of every operator, all devices in one stage.

    FlexFlow has no pipeline of microbatches; gradients may be accumulated over microbatches, whose size the search
    takes in turn. A walk is over nodes and edges of the shared cost tables, so a step costs microseconds; now and
    then the best of a walk is scored in full (that is what counts as an evaluation).

    Args:
        steps: Proposals per microbatch size.
        temperature: Of the walk, as a share of the first cost: 1 / (beta cost).
        max_microbatch: Largest microbatch over all devices, in samples.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "flexflow-mcmc"
    paper = "Jia et al., MLSys 2019"

    def __init__(
        self,
        *,
        steps: int = 20_000,
        temperature: float = 0.005,
        max_microbatch: int = 512,
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, steps=steps, max_microbatch=max_microbatch)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.steps = steps
        self.temperature = temperature
        self.max_microbatch = max_microbatch

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Walk for every microbatch size, from data parallelism where that is legal."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        random = np.random.default_rng(seed)
        for microbatch in microbatch_sizes(problem.global_batch, largest=self.max_microbatch):
            if ledger.spent:
                break
            self._walk(ledger, microbatch, random)
        return ledger.result()

    def _walk(self, ledger: Ledger, microbatch: int, random: np.random.Generator) -> None:
        problem = ledger.problem
        cluster = problem.hardware.cluster
        per_node = cluster.devices_per_node
        count = problem.global_batch // microbatch
        mesh = LogicalMesh(Submesh(cluster.num_nodes, per_node), cluster.num_nodes, per_node, batch_forced=False)
        if len(cluster.gpu_types) > 1 or mesh.num_devices != problem.num_devices:
            raise ValueError(f"one stage over all devices needs nodes of one kind and size, got {cluster.name}")
        intra = IntraOp(cost_tables(problem), mesh, microbatch, count, IntraOpOptions(recompute=False, free_axes=True))
        if not all(intra.strategies(index) for index in range(len(problem.workload))):
            ledger.refuse(
                f"a microbatch of {counted(microbatch, 'sample')} cannot be split over "
                f"{counted(mesh.num_devices, 'device')}"
            )
            return
        graph = intra.graph(0, len(problem.workload))
        capacity = min(problem.capacity_bytes(device) for device in range(problem.num_devices))
        start = _most_batch(intra, len(problem.workload))
        per_element, _ = intra.state_bytes_per_element(sharded=False)
        for share in CAPACITY_STEPS:
            walk = Walk.start(graph, list(start), count, share * capacity, self.temperature, per_element)
            # A walk more leaves the others the chance that they had without it.
            chance = random if share == CAPACITY_STEPS[0] else random.spawn(1)[0]
            if not self._walk_on(ledger, intra, walk, chance) or ledger.spent:
                return

    def _walk_on(self, ledger: Ledger, intra: IntraOp, walk: Walk, random: np.random.Generator) -> bool:
        """Walk to the end, score the best now and then, and return whether less memory may give what fits.

        That is where the last scored does not fit, but does by the walk's own account.
        """
        best, scored, chosen = walk.cost, walk.cost, list(walk.chosen)
        fits = self._score(ledger, intra, chosen)
        for number in range(1, self.steps + 1):
            if ledger.spent:
                return False
            walk.step(random)
            if walk.cost < best:
                best, chosen = walk.cost, list(walk.chosen)
            if (number % SCORE_EVERY == 0 or number == self.steps) and best < scored:
                scored = best
                fits = self._score(ledger, intra, chosen)
        ledger.count("proposals", self.steps)
        held = sum(float(table[choice]) for table, choice in zip(walk.memory, chosen, strict=True))
        return not fits and held <= walk.capacity_bytes

    def _score(self, ledger: Ledger, intra: IntraOp, chosen: list[int]) -> bool:
        """Score an assignment, and return whether it fits."""
        problem = ledger.problem
        shardings = [intra.strategies(index)[choice] for index, choice in enumerate(chosen)]
        stage = Stage(
            operators=((0, len(problem.workload)),),
            devices=tuple(range(problem.num_devices)),
            shardings=run_lengths(shardings),
        )
        plan = Plan(
            stages=(stage,),
            microbatch_size=intra.microbatch_size,
            num_microbatches=intra.num_microbatches,
            overlap_gradient_sync=problem.runtime.overlap_gradient_sync,
        )
        return not ledger.spent and ledger.is_legal(plan) and ledger.evaluate(plan).fits


@dataclass
class Walk:
    """The state of a walk, and what a change of one operator does to it.

    Attributes:
        graph: Costs of nodes and edges, seconds of one microbatch.
        neighbours: Per node, ``(other, table with this node's strategies as rows)``.
        memory: Per node, bytes of each strategy.
        chosen: Strategy of each node.
        num_microbatches: Of an iteration.
        capacity_bytes: Of the device with least memory.
        seconds: Of one microbatch as chosen.
        num_bytes: Of one device as chosen.
        scale_s: Temperature in seconds.
    """

    graph: StrategyGraph
    neighbours: list[list[tuple[int, NDArray[np.float64]]]]
    memory: list[NDArray[np.float64]]
    chosen: list[int]
    num_microbatches: int
    capacity_bytes: float
    seconds: float
    num_bytes: float
    scale_s: float

    @classmethod
    def start(
        cls,
        graph: StrategyGraph,
        chosen: list[int],
        num_microbatches: int,
        capacity: float,
        temperature: float,
        state_bytes: float,
    ) -> Walk:
        """Return a walk at its first assignment; a parameter takes ``state_bytes``."""
        neighbours: list[list[tuple[int, NDArray[np.float64]]]] = [[] for _ in graph.costs]
        for (u, v), table in graph.edges.items():
            neighbours[u].append((v, table))
            neighbours[v].append((u, table.T))
        elements, saved = ATTRIBUTES.index("elements"), ATTRIBUTES.index("saved_bytes")
        memory = [state_bytes * table[elements] + table[saved] for table in graph.attributes]
        seconds = graph.objective(chosen)
        num_bytes = sum(float(table[choice]) for table, choice in zip(memory, chosen, strict=True))
        walk = cls(graph, neighbours, memory, chosen, num_microbatches, capacity, seconds, num_bytes, 0.0)
        walk.scale_s = temperature * walk.cost
        return walk

    @property
    def cost(self) -> float:
        """Seconds of an iteration, punished by the share by which memory is exceeded."""
        return self._cost(self.seconds, self.num_bytes)

    def _cost(self, seconds: float, num_bytes: float) -> float:
        return seconds * self.num_microbatches * max(1.0, num_bytes / self.capacity_bytes) ** 2

    def step(self, random: np.random.Generator) -> None:
        """Propose another strategy for one operator; take it or leave it."""
        node = int(random.integers(len(self.chosen)))
        costs = self.graph.costs[node]
        proposed = int(random.integers(len(costs)))
        old = self.chosen[node]
        if proposed == old:
            return
        seconds = self.seconds + float(costs[proposed] - costs[old])
        for other, table in self.neighbours[node]:
            there = self.chosen[other]
            seconds += float(table[proposed, there] - table[old, there])
        num_bytes = self.num_bytes + float(self.memory[node][proposed] - self.memory[node][old])
        worse = self._cost(seconds, num_bytes) - self.cost
        if worse <= 0 or random.random() < np.exp(-worse / self.scale_s):
            self.chosen[node], self.seconds, self.num_bytes = proposed, seconds, num_bytes


def _most_batch(intra: IntraOp, count: int) -> list[int]:
    """Return per operator the strategy with the largest batch degree: data parallelism as far as it goes."""
    chosen = []
    for index in range(count):
        samples = [intra.samples(sharding) for sharding in intra.strategies(index)]
        chosen.append(int(np.argmin(samples)))
    return chosen
