"""What a stage takes on a mesh, and what it costs to find out: the interface that Alpa and MPE both ask.

Every question is one compilation (with its intra-operator problem) and two profiles (forward and backward module),
counted where it is answered. Answers to equal questions are shared in memory, but counted each time they are asked
for a stage that was not asked before: the published systems do not know that two stages are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from searchers.alpa.intra_op import IntraOp, IntraOpOptions
from searchers.alpa.layer_needs import LayerNeeds, stage_working_bytes
from searchers.alpa.meshes import LogicalMesh
from searchers.alpa.stage_costs import Room, Solver, Spans, StageCosts, StageSolver
from simulator.costs import CostTables
from simulator.plan import Sharding


class StageCost(NamedTuple):
    """One stage alone on one mesh.

    Attributes:
        seconds: One microbatch, forward and backward.
        state_bytes: Parameters, gradients, optimizer states of a device.
        kept_bytes: What one microbatch keeps between its forward and its backward.
        ends_bytes: What it holds besides of what the stages before sent and of what is sent on.
        working_bytes: What is alive besides, at most, while a pass runs.
        step_bytes: What the optimizer step works in, when nothing is kept any more.
    """

    seconds: float
    state_bytes: float
    kept_bytes: float
    ends_bytes: float
    working_bytes: float
    step_bytes: float

    @property
    def microbatch_bytes(self) -> float:
        """What one microbatch more takes."""
        return self.kept_bytes + self.ends_bytes

    def peak_bytes(self, microbatches_in_flight: int = 1) -> float:
        """Return the peak with so many microbatches between forward and backward."""
        passes = microbatches_in_flight * self.microbatch_bytes + self.working_bytes
        return self.state_bytes + max(passes, self.step_bytes)


NOT_LEGAL = StageCost(*[np.inf] * len(StageCost._fields))


@dataclass
class SearchCost:
    """What a search would have cost on a real machine.

    Attributes:
        compile_s_per_layer: Compilation of a stage, per layer in it.
        profile_repeats: Runs of a stage behind one profile, warm-up included.
        num_hosts: Nodes; each compiles at the same time as the others.
        num_devices: GPUs; as many stages are profiled at once as there are disjoint submeshes.
        compilations, profiles, ilp_solves: Counted.
        compiled_layers: Layers in all compiled stages.
        device_s: Seconds of all devices together that profiled modules ran.
    """

    compile_s_per_layer: float = 1.0
    profile_repeats: int = 5
    num_hosts: int = 1
    num_devices: int = 1
    compilations: int = 0
    profiles: int = 0
    ilp_solves: int = 0
    compiled_layers: int = 0
    device_s: float = 0.0

    def stage(self, num_layers: int, seconds: float, mesh_devices: int) -> None:
        """Count one stage on one mesh."""
        self.compilations += 1
        self.ilp_solves += 1
        self.profiles += 2
        self.compiled_layers += num_layers
        if np.isfinite(seconds):
            self.device_s += self.profile_repeats * seconds * mesh_devices

    @property
    def estimated_s(self) -> float:
        """Seconds on a real machine: compilations spread over hosts, profiles over devices."""
        return self.compile_s + self.profile_s

    @property
    def compile_s(self) -> float:
        """Seconds of compilation."""
        return self.compile_s_per_layer * self.compiled_layers / self.num_hosts

    @property
    def profile_s(self) -> float:
        """Seconds of profiling."""
        return self.device_s / self.num_devices

    def counters(self) -> Mapping[str, int | float]:
        """Return the counters by name."""
        return {
            "compilations": self.compilations,
            "profiles": self.profiles,
            "ilp_solves": self.ilp_solves,
            "compiled_layers": self.compiled_layers,
            "estimated_search_s": self.estimated_s,
        }


class Oracle(ABC):
    """Answers what layers ``first`` to ``last`` take on a mesh. Subclasses say how."""

    def __init__(self, spans: Spans, cost: SearchCost) -> None:
        self.spans = spans
        self.cost = cost
        self._asked: set[tuple[str, int, int, int]] = set()

    def measure(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        """Return what a stage takes; the first time it is asked, it is compiled and profiled."""
        answer = self.answer(mesh, first, last)
        key = (mesh.name, mesh.submesh.nodes, first, last)
        if key not in self._asked:
            self._asked.add(key)
            self.cost.stage(last - first + 1, answer.seconds, mesh.num_devices)
        return answer

    @abstractmethod
    def answer(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        """Return the answer, uncounted."""

    @abstractmethod
    def shardings(
        self, mesh: LogicalMesh, first: int, last: int, solver: Solver = "elimination", room: Room | None = None
    ) -> list[Sharding]:
        """Return the intra-operator plan of a stage: one sharding per operator. See `StageSolver.assignment`."""


@dataclass
class CostModelOracle(Oracle):
    """The intra-operator optimum on the shared cost tables: additive, without noise.

    Attributes:
        costs: Cost tables.
        spans: Operator ranges of the layers.
        microbatch_size, num_microbatches: Samples of a microbatch over the mesh; how many.
        options: The intra-operator problem.
        cost: What asking costs.
        zero: 0, or 2 where all-reduces of gradients become reduce-scatter and all-gather; times are the same.
    """

    costs: CostTables
    spans: Spans
    microbatch_size: int
    num_microbatches: int
    options: IntraOpOptions
    cost: SearchCost = field(default_factory=SearchCost)
    zero: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.spans, self.cost)
        self._solvers: dict[LogicalMesh, StageSolver] = {}
        self._tables: dict[LogicalMesh, StageCosts] = {}
        self._needs: dict[LogicalMesh, list[LayerNeeds]] = {}
        self._shared: dict[tuple[LogicalMesh, int, int], tuple[float, float]] = {}

    def sharding_states(self) -> CostModelOracle:
        """Return the same oracle with model states sharded over the batch axes; measurements are shared."""
        other = replace(self, zero=2)
        other._solvers, other._tables, other._asked = self._solvers, self._tables, self._asked
        other._needs, other._shared = self._needs, self._shared
        return other

    def solver(self, mesh: LogicalMesh) -> StageSolver:
        """Return the solver of a mesh."""
        if mesh not in self._solvers:
            problem = IntraOp(self.costs, mesh, self.microbatch_size, self.num_microbatches, self.options)
            self._solvers[mesh] = StageSolver(problem, self.spans)
        return self._solvers[mesh]

    def answer(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        """Return one interval of the table of all (cheaper than one by one)."""
        if mesh not in self._tables:
            self._tables[mesh] = self.solver(mesh).all_stages()
        table = self._tables[mesh]
        if not np.isfinite(table.seconds[first, last]):
            return NOT_LEGAL
        if mesh not in self._needs:
            self._needs[mesh] = self.solver(mesh).needs()
        needs = self._needs[mesh][first : last + 1]
        received = needs[0].received_bytes if first > 0 else 0.0
        sent = needs[-1].sent_bytes if last < len(self.spans) - 1 else 0.0
        recompute = self.options.recompute
        kept = table.remaining_bytes if recompute else table.saved_bytes
        interval = mesh, first, last
        if interval not in self._shared:
            self._shared[interval] = self.solver(mesh).shared_elements(first, last)
        twice, sharded_twice = self._shared[interval]
        elements = float(table.elements[first, last]) - twice
        sharded = float(table.sharded_elements[first, last]) - sharded_twice
        solver = self.solver(mesh)
        per_element, per_sharded = solver.problem.state_bytes_per_element(sharded=self.zero > 0)
        waits = self.zero < 2 or not solver.problem.scatters_gradients
        each_bytes = self.costs.problem.runtime.tied_gradient_bytes if waits else 0
        tied = solver.waiting_elements(first, last) if twice and each_bytes else []
        return StageCost(
            float(table.seconds[first, last]),
            elements * per_element + sharded * per_sharded,
            float(kept[first, last]),
            received + sent,
            stage_working_bytes(needs, [(begun, end, count * each_bytes) for begun, end, count in tied]),
            (sharded if self.zero else elements) * self.costs.problem.runtime.optimizer_workspace_bytes,
        )

    def shardings(
        self, mesh: LogicalMesh, first: int, last: int, solver: Solver = "elimination", room: Room | None = None
    ) -> list[Sharding]:
        """Return the optimum's shardings."""
        if room is not None:
            room = room._replace(sharded=self.zero > 0)
        chosen = self.solver(mesh).assignment(first, last, solver, room)
        if not self.zero:
            return chosen
        return [
            tuple(axis._replace(zero=self.zero) if axis.split == "batch" else axis for axis in sharding)
            for sharding in chosen
        ]
