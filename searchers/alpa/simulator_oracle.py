"""Oracles beyond the cost model: the simulator on a stage of its own, and measurement noise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from searchers.alpa.meshes import LogicalMesh
from searchers.alpa.oracle import NOT_LEGAL, CostModelOracle, Oracle, StageCost
from searchers.alpa.stage_costs import Room, Solver
from simulator.costs import CostTables
from simulator.fidelity import Fidelity
from simulator.plan import Plan, Sharding, Stage, run_lengths
from simulator.problem import Problem
from simulator.simulate import simulate
from workloads.part import part_of

STEADY = (2, 4)
"""Microbatches of the two runs whose difference is the time of two: what a run does once cancels."""


@lru_cache(maxsize=4)
def _simulated(costs: CostTables) -> dict[object, tuple[float, float]]:
    """Return what is known of a problem's stages: seconds and peak bytes by all that they depend on."""
    return {}


@dataclass
class SimulatorOracle(Oracle):
    """Simulates each stage alone: hosts, overlap, contention, live bytes; times and peaks are not additive.

    The intra-operator plan is the cost model's. Equal stages are simulated once, also where several oracles (of the
    searchers that are compared) ask for them.

    Attributes:
        model: Gives the intra-operator optimum.
        fidelity: Effects to simulate.
    """

    model: CostModelOracle
    fidelity: Fidelity = field(default_factory=Fidelity)

    def __post_init__(self) -> None:
        super().__init__(self.model.spans, self.model.cost)
        self._answers: dict[object, StageCost] = {}

    def answer(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        """Return what the simulator says of a stage."""
        planned = self.model.answer(mesh, first, last)
        if planned is NOT_LEGAL:
            return NOT_LEGAL
        start, stop = self.spans[first][0], self.spans[last][1]
        key = (mesh, self.model.costs.problem.workload.signatures[start:stop])
        if key not in self._answers:
            self._answers[key] = self._answer(mesh, first, last, planned)
        return self._answers[key]

    def _answer(self, mesh: LogicalMesh, first: int, last: int, planned: StageCost) -> StageCost:
        start, stop = self.spans[first][0], self.spans[last][1]
        again = tuple((a - start, b - start) for a, b in self.spans[first : last + 1])
        stage = Stage(
            operators=((0, stop - start),),
            devices=self.model.solver(mesh).problem.devices,
            shardings=run_lengths(self.shardings(mesh, first, last)),
            recompute=again if self.model.options.recompute else (),
        )
        whole = self.model.costs
        signatures = whole.problem.workload.signatures[start:stop]
        key = (stage, signatures, self.model.microbatch_size, self.fidelity)
        known = _simulated(whole)
        if key not in known:
            known[key] = self._simulate(stage, start, stop)
        seconds, peak = known[key]
        working = max(0.0, peak - planned.state_bytes - planned.kept_bytes)
        return planned._replace(seconds=seconds, working_bytes=working)

    def _simulate(self, stage: Stage, start: int, stop: int) -> tuple[float, float]:
        """Return seconds of one microbatch and the peak of a device."""
        whole, size = self.model.costs.problem, self.model.microbatch_size
        part = part_of(whole.workload, start, stop)
        # What the optimizer works in comes when nothing is kept any more: it is no part of what passes need.
        runtime = replace(whole.runtime, optimizer_workspace_bytes=0.0)
        problems = [Problem(part, whole.hardware, runtime, count * size) for count in STEADY]
        costs = CostTables(problems[0])  # they say nothing of the number of microbatches
        fidelity = self.fidelity.without("allocator")  # live bytes are asked for, not reserved ones
        times, peak = [], 0.0
        for count, problem in zip(STEADY, problems, strict=True):
            plan = Plan(
                stages=(stage,),
                microbatch_size=size,
                num_microbatches=count,
                overlap_gradient_sync=whole.runtime.overlap_gradient_sync,
            )
            found = simulate(plan, problem, fidelity=fidelity, engine="compiled", costs=costs)
            times.append(found.iteration_time_s)
            peak = max(memory.peak_allocated_bytes for memory in found.memory)
        return (times[1] - times[0]) / (STEADY[1] - STEADY[0]), peak

    def shardings(
        self, mesh: LogicalMesh, first: int, last: int, solver: Solver = "elimination", room: Room | None = None
    ) -> list[Sharding]:
        """Return the cost model's optimum."""
        return self.model.shardings(mesh, first, last, solver, room)


@dataclass
class NoisyOracle(Oracle):
    """Measurements of another oracle, as noisy as profiling on devices.

    Attributes:
        exact: What is measured.
        relative_noise: Standard deviation of one run's time, as a share of it.
        repeats: Runs behind one measurement.
        contention: Mean share by which profiling workers that run side by side slow each other (0: one at a time).
        seed: Same seed, same measurements.
    """

    exact: Oracle
    relative_noise: float = 0.02
    repeats: int = 5
    contention: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.exact.spans, self.exact.cost)

    def answer(self, mesh: LogicalMesh, first: int, last: int) -> StageCost:
        """Return a measurement; the same question gets the same answer."""
        exact = self.exact.answer(mesh, first, last)
        if not np.isfinite(exact.seconds):
            return exact
        text = f"{self.seed} {mesh.name} {mesh.submesh} {first} {last}"
        random = np.random.default_rng(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big"))
        noise = self.relative_noise * random.standard_normal() / np.sqrt(self.repeats)
        slowed = self.contention * random.exponential() if self.contention > 0 else 0.0
        return exact._replace(seconds=exact.seconds * max(0.1, 1.0 + noise + slowed))

    def shardings(
        self, mesh: LogicalMesh, first: int, last: int, solver: Solver = "elimination", room: Room | None = None
    ) -> list[Sharding]:
        """Return the exact oracle's."""
        return self.exact.shardings(mesh, first, last, solver, room)
