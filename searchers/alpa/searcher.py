"""Alpa: a grid over layers, microbatches and rematerialisation; inside, its two-level search.

Source: Zheng et al., OSDI 2022. The outer grid is what its authors' benchmark suites do by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from datafiles.words import counted
from searchers.alpa.clustering import MIN_HEAVY, cluster, num_heavy
from searchers.alpa.inter_op import NO_LIMIT, Pipeline, best_pipeline
from searchers.alpa.intra_op import IntraOpOptions
from searchers.alpa.meshes import LogicalMesh, SubmeshSpace, logical_meshes, submeshes
from searchers.alpa.oracle import CostModelOracle, Oracle, SearchCost
from searchers.alpa.simulator_oracle import NoisyOracle, SimulatorOracle
from searchers.alpa.stage_costs import Solver, Spans
from searchers.alpa.stage_table import Lookup, stage_arrays, to_plan
from searchers.base import Ledger, Searcher, SearchResult, check_least, check_one_of
from searchers.budget import Budget
from searchers.degrees import microbatch_sizes
from searchers.scores import Objective
from simulator.costs import cost_tables
from simulator.problem import Problem
from simulator.uniform import repeated_layers

StageOracle = Literal["cost-model", "simulator"]

CAPACITY_STEPS = (1.0, 0.9, 0.8)
"""Shares of the memory that the inner search is told of, in turn, while its plan does not fit: its own account of
memory leaves out fragmentation and work space."""
MAX_LAYERS = 16
"""Layers that operators are clustered into where their number is not given."""


class Alpa(Searcher):
    """Intra-operator optimum per stage and mesh, dynamic programming over stages.

    Args:
        num_layers: Layers that operators are clustered into; None for one per repeated layer, 16 at most, and as few
            as have three matmuls each; ``"model"`` for the model's own layers, embedding and head included.
        min_microbatch, max_microbatch: Microbatches over a whole mesh, in samples; divisors of the batch between.
        powers_of_two: Of these only powers of two.
        recompute: Rematerialisation: off, on, in the order tried.
        zero: Whole-model choice between replicated (0) and sharded (2) model states.
        submesh_space: ``power_of_two`` numbers of nodes, as its benchmark suites, or ``all``.
        free_axes: See `IntraOpOptions`.
        counts_computation, min_samples: See `IntraOpOptions`.
        solver: Of the stages that are chosen: ``elimination`` or ``milp`` (no memory limit, as published), or
            ``pareto``, which keeps to the memory of a device.
        stage_oracle: ``cost-model`` (additive, exact) or ``simulator`` (each stage simulated alone; far slower).
        relative_noise, contention: Of measurements, see `NoisyOracle`; both 0 for none.
        compile_s_per_layer, profile_repeats: For the estimated search cost, see `SearchCost`.
        objective: See `searchers.base.Searcher`.
        keep: How many of the best plans to return.
    """

    name = "alpa"
    paper = "Zheng et al., OSDI 2022"

    def __init__(
        self,
        *,
        num_layers: int | Literal["model"] | None = None,
        min_microbatch: int = 1,
        max_microbatch: int = 64,
        powers_of_two: bool = False,
        recompute: tuple[bool, ...] = (True, False),
        zero: tuple[int, ...] = (0, 2),
        submesh_space: SubmeshSpace = "power_of_two",
        free_axes: bool = False,
        counts_computation: bool = True,
        min_samples: int = 1,
        solver: Solver = "elimination",
        stage_oracle: StageOracle = "cost-model",
        relative_noise: float = 0.0,
        contention: float = 0.0,
        compile_s_per_layer: float = 1.0,
        profile_repeats: int = 5,
        objective: str | Objective = "paper",
        keep: int = 5,
    ) -> None:
        super().__init__(objective=objective, keep=keep)
        check_least(
            1,
            num_layers=None if num_layers == "model" else num_layers,
            min_microbatch=min_microbatch,
            max_microbatch=max_microbatch,
            min_samples=min_samples,
            profile_repeats=profile_repeats,
        )
        check_least(
            0, relative_noise=relative_noise, contention=contention, compile_s_per_layer=compile_s_per_layer
        )
        check_one_of(get_args(Solver), solver=solver)
        check_one_of(get_args(SubmeshSpace), submesh_space=submesh_space)
        check_one_of(get_args(StageOracle), stage_oracle=stage_oracle)
        self.num_layers = num_layers
        self.min_microbatch = min_microbatch
        self.max_microbatch = max_microbatch
        self.powers_of_two = powers_of_two
        self.solver: Solver = solver
        self.stage_oracle = stage_oracle
        self.relative_noise = relative_noise
        self.contention = contention
        self.recompute = recompute
        self.zero = zero
        self.submesh_space: SubmeshSpace = submesh_space
        self.free_axes = free_axes
        self.counts_computation = counts_computation
        self.min_samples = min_samples
        self.cost = SearchCost(compile_s_per_layer, profile_repeats)

    def search(self, problem: Problem, budget: Budget | None = None, seed: int = 0) -> SearchResult:
        """Search the grid; every point is one two-level search and one evaluation."""
        cost = replace(
            self.cost, num_hosts=problem.hardware.cluster.num_nodes, num_devices=problem.num_devices
        )
        ledger = Ledger(self, problem, budget or Budget(), seed)
        spans = self.layers(problem)
        meshes = self.meshes(problem)
        for microbatch, options in self.grid(problem):
            num_microbatches = problem.global_batch // microbatch
            model = CostModelOracle(cost_tables(problem), spans, microbatch, num_microbatches, options, cost)
            for zero in self.zero:
                if ledger.spent:
                    break
                oracle = self.oracle(model.sharding_states() if zero else model, seed)
                self._search_point(ledger, oracle, meshes, microbatch, options)
        ledger.counters.update(cost.counters())
        ledger.counters["layers"] = len(spans)
        return ledger.result()

    def _search_point(
        self,
        ledger: Ledger,
        oracle: Oracle,
        meshes: list[list[LogicalMesh]],
        microbatch: int,
        options: IntraOpOptions,
    ) -> None:
        problem = ledger.problem
        capacity = min(problem.capacity_bytes(device) for device in range(problem.num_devices))
        lookup = self.lookup(oracle, problem)
        for share in CAPACITY_STEPS:
            seconds, successors = stage_arrays(lookup, meshes, len(oracle.spans), share * capacity)
            solution = self.pipeline(
                seconds, successors, meshes, problem.num_devices, problem.global_batch // microbatch
            )
            within = solution is not None
            if solution is None:
                ledger.count("grid_points_without_memory")
                # The plan that would be best with enough memory says how far off this grid point is.
                unlimited = np.where(np.isfinite(seconds), NO_LIMIT, -1)
                solution = self.pipeline(
                    seconds, unlimited, meshes, problem.num_devices, problem.global_batch // microbatch
                )
            if solution is None:
                ledger.refuse(f"no mesh can cut a microbatch of {counted(microbatch, 'sample')}")
                return
            ledger.count("dynamic_programs", solution.solved)
            try:
                plan = to_plan(
                    solution,
                    problem,
                    oracle,
                    meshes,
                    microbatch_size=microbatch,
                    recompute=options.recompute,
                    solver=self.solver,
                    capacity_bytes=share * capacity,
                )
            except ValueError as error:  # the pareto solver finds no room
                ledger.refuse(error)
                return
            if ledger.spent or not ledger.is_legal(plan):
                return
            if ledger.evaluate(plan).fits or not within:
                return  # told of less memory, the search would find nothing either

    def layers(self, problem: Problem) -> Spans:
        """Return the operator ranges that count as layers."""
        if self.num_layers == "model":
            return problem.workload.layers
        if self.num_layers is not None:
            return cluster(problem.workload, self.num_layers, min_heavy=1)
        heavy = num_heavy(problem.workload)
        count = max(1, min(MAX_LAYERS, len(repeated_layers(problem.workload)), heavy // MIN_HEAVY))
        return cluster(problem.workload, count, min_heavy=min(MIN_HEAVY, heavy))

    def meshes(self, problem: Problem) -> list[list[LogicalMesh]]:
        """Return the logical meshes per submesh."""
        cluster_ = problem.hardware.cluster
        return [list(logical_meshes(submesh)) for submesh in submeshes(cluster_, self.submesh_space)]

    def grid(self, problem: Problem) -> Iterator[tuple[int, IntraOpOptions]]:
        """Yield the outer grid: microbatch sizes that divide the batch, and rematerialisation."""
        sizes = microbatch_sizes(
            problem.global_batch, largest=self.max_microbatch, powers_of_two=self.powers_of_two
        )
        for microbatch in sizes:
            if microbatch >= self.min_microbatch:
                for recompute in self.recompute:
                    yield (
                        microbatch,
                        IntraOpOptions(recompute, self.counts_computation, self.free_axes, self.min_samples),
                    )

    def oracle(self, model: CostModelOracle, seed: int) -> Oracle:
        """Return what answers for stages."""
        exact: Oracle = SimulatorOracle(model) if self.stage_oracle == "simulator" else model
        if self.relative_noise == 0 and self.contention == 0:
            return exact
        return NoisyOracle(exact, self.relative_noise, self.cost.profile_repeats, self.contention, seed)

    def lookup(self, oracle: Oracle, problem: Problem) -> Lookup:
        """Return the stage costs that the dynamic programming reads; Alpa measures every stage."""
        return oracle.measure

    def pipeline(
        self,
        seconds: NDArray[np.float64],
        successors: NDArray[np.int64],
        meshes: list[list[LogicalMesh]],
        num_devices: int,
        num_microbatches: int,
    ) -> Pipeline | None:
        """Return the best stages: the shortest 1F1B pipeline."""
        sizes = np.array([group[0].num_devices for group in meshes])
        return best_pipeline(seconds, successors, sizes, num_devices, num_microbatches)
