"""What the processes of the correctness suite run: every plan of a world size, one after the other."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from math import prod

from simulator.fidelity import Fidelity
from simulator.lowering.epilogue import epilogue_collectives, tied_groups
from simulator.lowering.items import GRADIENTS
from simulator.lowering.mesh import MeshCollective
from simulator.lowering.program import ProgramBuilder
from simulator.lowering.synchronisation import parameter_groups
from tests.validation.cases import cases_of
from validation.execution.executable import check_executable
from validation.execution.gradients import is_overlapped
from validation.execution.launch import Worker
from validation.execution.plan_executor import PlanExecutor
from validation.execution.reference import Reference

Collective = tuple[str, int, int]
"""Name, ranks, bytes."""

PHASES = {"B": GRADIENTS, "I": GRADIENTS[:1], "W": GRADIENTS[1:]}


@dataclass(frozen=True)
class Outcome:
    """One plan on one rank.

    Attributes:
        losses: This rank's share of the loss of each iteration.
        differences: Largest absolute difference of each gradient this rank holds.
        notes: Of the executor.
        seconds: Wall time.
        error: Traceback, if it failed.
        unlike: Collectives that were run but not derived, or derived but not run, and how often.
    """

    losses: tuple[float, ...] = ()
    differences: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    error: str = ""
    unlike: tuple[tuple[str, int], ...] = ()


def run_cases(worker: Worker, references: dict[str, Reference]) -> list[Outcome]:
    """Run all plans of the world size; two iterations each, so that the optimizer step counts."""
    return [_run(worker, number, references) for number in range(len(cases_of(worker.world_size)))]


def _run(worker: Worker, number: int, references: dict[str, Reference]) -> Outcome:
    case = cases_of(worker.world_size)[number]
    reference = references[case.name]
    start = time.perf_counter()
    differences: list[tuple[str, float]] = []

    def compare(executor: PlanExecutor) -> None:
        for runner in executor.runners.values():
            for held in runner.parameters.held:
                assert held.gradient is not None
                wanted = held.part_of(reference.gradients[held.placed.key])
                difference = float((held.gradient - wanted).abs().max()) if wanted.numel() else 0.0
                differences.append((held.placed.key, difference))

    try:
        plan = check_executable(case.plan, case.problem, device="cpu", num_processes=worker.world_size)
        executor = PlanExecutor(plan, case.problem, worker)
        executor.on_gradients = compare
        losses = []
        run: Counter[Collective] = Counter()
        for iteration in range(2):
            worker.pool.note = lambda *collective: run.update([collective])
            executor.run_iteration(iteration)
            losses.append(executor.loss())
            executor.on_gradients = None
    except Exception:
        if worker.world_size > 1 and os.environ.get("WINDTUNNEL_TEST_DEBUG") is None:
            raise
        return Outcome(error=traceback.format_exc())
    derived = derived_collectives(executor)
    unlike = {str(item): run[item] / 2 - derived[item] for item in run.keys() | derived.keys()}
    return Outcome(
        tuple(losses),
        tuple(differences),
        tuple(executor.notes()),
        time.perf_counter() - start,
        unlike=tuple(sorted((item, count) for item, count in unlike.items() if count)),
    )


def derived_collectives(executor: PlanExecutor) -> Counter[Collective]:
    """Return the collectives that the simulator derives for this rank in one iteration."""
    plan = executor.plan
    found: Counter[Collective] = Counter()
    started = set()
    for action in executor.order:
        view = executor.runner_of(action.stage, action.microbatch).view
        sharded = any(group.zero == 3 for group in parameter_groups(view))
        builder = ProgramBuilder(view, Fidelity())
        if action.kind == "F":
            items = builder.forward(gather=sharded and (plan.reshard_after_forward or action.stage not in started))
            started.add(action.stage)
        else:
            makes = action.kind != "I" and is_overlapped(view)
            sync = makes and (action in executor.last_gradients or plan.gradient_reduction == "every")
            gather = sharded and plan.reshard_after_forward and action.kind != "W"
            items = builder.backward(PHASES[action.kind], gather=gather, sync=sync)
        found.update(_named(item.collective) for item in items if item.collective is not None)
    for runner in executor.runners.values():
        for items in epilogue_collectives(runner.view, reduces_early=is_overlapped(runner.view)):
            found.update(_named(item) for item in items)
    views = [wiring.view for wiring in executor.wirings]
    for _, devices, num_bytes in tied_groups(views):
        if executor.device_id in devices:
            found["all_reduce", len(devices), round(num_bytes)] += 1
    return found


def _named(item: MeshCollective) -> Collective:
    return item.collective, prod(item.sizes[axis] for axis in item.axes), round(item.num_bytes)
