"""PipeDream's planner as a searcher, for synchronous training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from searchers.base import Ledger, Searcher, SearchResult, check_least
from searchers.budget import Budget
from searchers.dapple.chain import layer_spans
from searchers.layer_graph import LayerGraph, layer_graph
from searchers.pipedream.antichains import States, antichain_states
from searchers.pipedream.planner import Level, PipeDreamOptions, PipeDreamStage, bottleneck_s, plan_pipeline
from searchers.scores import Objective, Score, estimated
from simulator.costs import cost_tables
from simulator.divisors import divisors
from simulator.plan import Axis, Plan, Stage, batch_replicas
from simulator.problem import Problem


class PipeDream(Searcher):
    """PipeDream: stages and replicas with the smallest bottleneck, by hierarchical dynamic programming.

    Its plan knows no microbatches: a replica works on whole minibatches. For synchronous training they are
    chosen here, by the closed form of a pipeline, unless given. The objective is the bottleneck times the
    microbatches of an iteration, so it is the same for every microbatch size.

    Args:
        microbatch: Samples per microbatch; None tries every divisor of the global batch.
        profile_samples: Samples at which layers are profiled; times are taken as linear in the samples.
        granularity: What counts as a layer: ``layers``, ``blocks`` or ``operators``.
        options: Deviations of the public code from the paper, by name.
        bandwidths: Bytes per second inside and between machines; None for the cluster's large all-reduces.
        replica_assignment: ``slice`` (DAPPLE's runtime) or ``round_robin`` (PipeDream's own).
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "pipedream"
    paper = "Narayanan et al., SOSP 2019"

    def __init__(
        self,
        *,
        microbatch: int | None = None,
        profile_samples: int = 4,
        granularity: str = "layers",
        options: PipeDreamOptions | None = None,
        bandwidths: tuple[float, float] | None = None,
        replica_assignment: str = "slice",
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(1, microbatch=microbatch, profile_samples=profile_samples)
        if replica_assignment not in ("slice", "round_robin"):
            raise ValueError(f"replica_assignment must be slice or round_robin, got {replica_assignment!r}")
        self.microbatch = microbatch
        self.profile_samples = profile_samples
        self.granularity = granularity
        self.options = options or PipeDreamOptions()
        self.bandwidths = bandwidths
        self.replica_assignment = replica_assignment

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Plan once, then choose the microbatch; nothing is random. Recompute whole stages if nothing else fits."""
        ledger = Ledger(self, problem, budget or Budget(), seed)
        graph, states = self._states(problem)
        ledger.count("states", states.num_states)
        try:
            found = plan_pipeline(states, self.levels(problem), self._executable(problem))
        except ValueError as error:
            ledger.refuse(error)
            return ledger.result()
        sizes = divisors(problem.global_batch) if self.microbatch is None else [self.microbatch]
        for recompute in (False, True):
            fastest: tuple[float, Plan] | None = None
            for size in sizes:
                if ledger.spent:
                    break
                if problem.global_batch % size:
                    ledger.refuse(f"microbatch must divide the global batch {problem.global_batch}, got {size}")
                    continue
                plan = self.to_plan(problem, graph, states, found.stages, size, recompute)
                if not ledger.is_legal(plan) or not ledger.evaluate(plan).fits:
                    continue
                score = estimated(plan, problem)
                if fastest is None or score.objective < fastest[0]:
                    fastest = score.objective, plan
            if fastest is not None:
                ledger.choose(fastest[1])
                break
        return ledger.result()

    def paper_objective(self, plan: Plan, problem: Problem) -> Score:
        """Score by the bottleneck, for all samples of an iteration.

        Raises:
            ValueError: If a stage is split otherwise than by batch, or cuts a layer.
        """
        if any(batch_replicas(stage) != len(stage.devices) for stage in plan.stages):
            raise ValueError("PipeDream's stages are split by batch only")
        graph, states = self._states(problem)
        stages, before = [], -1
        done: set[str] = set()
        names = {index: name for name, span in graph.spans.items() for index in range(*span)}
        known = set().union(*states.nodes)
        for stage in plan.stages:
            done |= {names[index] for index in stage.indices()} & known
            last = states.nodes.index(frozenset(done))
            stages.append(PipeDreamStage(before, last, stage.devices))
            before = last
        slowest = bottleneck_s(states, self.levels(problem), stages, self.options)
        return replace(estimated(plan, problem), objective=slowest * problem.global_batch / graph.profile.batch)

    def levels(self, problem: Problem) -> list[Level]:
        """Return the hierarchy of the cluster: GPUs of a machine, machines.

        Raises:
            ValueError: If machines have different numbers of GPUs.
        """
        nodes = problem.hardware.cluster.nodes
        sizes = {node.num_devices for node in nodes}
        if len(sizes) > 1:
            raise ValueError(f"PipeDream plans for machines with equal numbers of GPUs, got {sorted(sizes)}")
        size = sizes.pop()
        groups = [(size, tuple(range(size))), (len(nodes), tuple(node.first_device for node in nodes))]
        found = []
        for position, (members, devices) in enumerate(groups):
            if members == 1:
                continue
            rate = self.bandwidths[position] if self.bandwidths else bus_bytes_per_s(problem, devices)
            found.append(Level(members, rate))
        return found or [Level(1, 1.0)]

    def to_plan(
        self,
        problem: Problem,
        graph: LayerGraph,
        states: States,
        stages: Sequence[PipeDreamStage],
        microbatch: int,
        recompute: bool,
    ) -> Plan:
        """Return the executable plan; nodes that the planner leaves out go where they are read or made."""
        sets = [
            states.nodes[stage.last] - (states.nodes[stage.first] if stage.first >= 0 else set()) for stage in stages
        ]
        home = {name: position for position, names in enumerate(sets) for name in names}
        readers: dict[str, list[str]] = {}
        for node in graph.profile.nodes:
            for name in node.predecessors:
                readers.setdefault(name, []).append(node.name)
        for node in reversed(graph.profile.topological()):
            if node.name not in home and readers.get(node.name):
                home[node.name] = min(home[name] for name in readers[node.name])
        for node in graph.profile.topological():
            if node.name not in home:
                home[node.name] = max((home[name] for name in node.predecessors), default=len(stages) - 1)
        made = []
        for position, stage in enumerate(stages):
            ranges = graph.ranges(name for name, where in home.items() if where == position)
            count = sum(stop - start for start, stop in ranges)
            sharding = (Axis("batch", len(stage.devices)),)
            made.append(Stage(ranges, stage.devices, ((count, sharding),), ranges if recompute else ()))
        rotates = self.replica_assignment == "round_robin" and any(len(stage.devices) > 1 for stage in stages)
        return Plan(
            stages=tuple(made),
            microbatch_size=microbatch,
            num_microbatches=problem.global_batch // microbatch,
            overlap_gradient_sync=False,
            replica_assignment="round_robin" if rotates else "slice",
        )

    def _executable(self, problem: Problem) -> PipeDreamOptions:
        """Return the options with no more replicas than there are samples, or microbatches that they take in turn."""
        batch = problem.global_batch
        if self.replica_assignment == "slice":
            most = self.microbatch or batch
        else:
            most = max(1, batch // (self.microbatch or 1))
        return replace(self.options, max_replicas=min(self.options.max_replicas or most, most))

    def _states(self, problem: Problem) -> tuple[LayerGraph, States]:
        return _problem_states(problem, self.granularity, self.profile_samples)


@lru_cache(maxsize=8)
def _problem_states(problem: Problem, granularity: str, samples: int) -> tuple[LayerGraph, States]:
    graph = layer_graph(cost_tables(problem), min(samples, problem.global_batch), layer_spans(problem, granularity))
    return graph, antichain_states(graph.profile)


def bus_bytes_per_s(problem: Problem, devices: Sequence[int]) -> float:
    """Return bytes per second of each member's link in a large all-reduce: what PipeDream calls bandwidth."""
    size, count = float(2**28), len(devices)
    seconds = problem.hardware.collective("all_reduce", size, devices).alone_s
    return float(np.float64(2 * (count - 1) / count * size / seconds))
