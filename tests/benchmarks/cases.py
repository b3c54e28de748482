"""What is measured: every figure of ``docs/performance.md``, set up."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hardware_models.model import HardwareModel
from hardware_models.runtime_files import load_runtime
from simulator.closed_forms.estimate import estimate
from simulator.costs import CostTables
from simulator.engines.engine_compiled import run_compiled
from simulator.engines.engine_simpy import run_simpy
from simulator.fast.estimate import FastEstimator, PlanArrays
from simulator.fidelity import Fidelity
from simulator.lowering.lower import lower
from simulator.plan_file import save_plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from simulator.validate import validate
from tests.benchmarks.measuring import Figure
from tests.benchmarks.random_plans import RandomPlans
from tests.benchmarks.test_engine_speed import pipeline_with_collectives
from workloads.registry import build_workload

COMMAND = "from experiments.cli import main; main()"


def gpt_2_6b() -> FastEstimator:
    """Return the estimator of the 419-operator GPT-3 2.6B on eight V100."""
    return FastEstimator(ProblemSpec("gpt3-2.6b", "v100-32g-dgx1:1x8", "megatron-lm-2021", 64).load())


def _engine(engine: Callable[[object], object], stages: int, microbatches: int, overlap: bool):  # type: ignore[no-untyped-def]
    slowdown, share = (1.2, 0.7) if overlap else (1.0, 0.0)

    def make() -> Callable[[], object]:
        graph = pipeline_with_collectives(
            num_stages=stages, num_microbatches=microbatches, num_chained=41, slowdown=slowdown, transfer_share=share
        )
        return lambda: engine(graph)

    return make, 2 * stages * microbatches * 42


def _batch(new_plans: bool) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        estimator = gpt_2_6b()
        plans = RandomPlans(estimator)
        if not new_plans:
            known = plans.many(20_000)
            return lambda: estimator.evaluate(known)
        for _ in range(5):
            estimator.evaluate(plans.many(20_000))
        batches = iter([plans.operators(10_000) for _ in range(8)])
        return lambda: estimator.evaluate(PlanArrays.from_operators(*next(batches)))

    return make


def _single() -> Callable[[], object]:
    estimator = gpt_2_6b()
    plans = RandomPlans(estimator)
    drawn = [plans.one() for _ in range(2000)]

    def call() -> None:
        for one in drawn:
            estimator.evaluate(PlanArrays.of(*one))

    return call


def _single_plan_objects() -> Callable[[], object]:
    estimator = gpt_2_6b()
    arrays = RandomPlans(estimator).many(500)
    plans = [estimator.plan(arrays, index) for index in range(len(arrays))]

    def call() -> None:
        for plan in plans:
            estimator.estimate(plan)

    return call


def _estimate() -> Callable[[], object]:
    estimator = gpt_2_6b()
    arrays = RandomPlans(estimator).many(10)
    plans = [estimator.plan(arrays, index) for index in range(len(arrays))]

    def call() -> None:
        estimator.costs.stages.clear()
        for plan in plans:
            estimate(plan, estimator.problem, estimator.costs)

    return call


def _simulation(same_plan: bool) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        problem = ProblemSpec("gpt3-175b", "a100-80g-dgx:64x8", "megatron-lm-2021", 384).load()
        costs = CostTables(problem)
        plan = uniform_plan(problem, tp=8, pp=8, dp=8, recompute="full")

        def call() -> object:
            if not same_plan:
                _forget_plans(costs)
            return simulate(plan, problem, engine="compiled", costs=costs)

        return call

    return make


def _forget_plans(costs: CostTables) -> None:
    """Forget everything but the costs of operators: the next plan is new."""
    for kept in (costs.stages, costs.forms, costs.bound_plans, costs.replays):
        kept.clear()


def deep_problem(num_layers: int = 1024) -> Problem:
    """Return a GPT of many layers on 1,024 GPUs."""
    runtime = load_runtime("megatron-lm-2021")
    return Problem(
        workload=build_workload("gpt3-175b", attention=runtime.attention, overrides={"layers": num_layers}),
        hardware=HardwareModel.from_name("a100-80g-dgx:128x8"),
        runtime=runtime,
        global_batch=512,
    )


def _deep_simulation() -> Callable[[], object]:
    problem = deep_problem()
    costs = CostTables(problem)
    plan = uniform_plan(problem, tp=8, pp=16, dp=8, recompute="full")
    return lambda: simulate(plan, problem, engine="compiled", costs=costs)


def _deep_graph() -> Callable[[], object]:
    problem = deep_problem()
    costs = CostTables(problem)
    plan = validate(uniform_plan(problem, tp=8, pp=16, dp=8, recompute="full"), problem)
    return lambda: lower(plan, costs, Fidelity())


def _deep_run() -> Callable[[], object]:
    graph = _deep_graph()().graph  # type: ignore[attr-defined]
    return lambda: run_compiled(graph)


def _long_simulation(leaves_out: bool) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        problem = deep_problem(256)
        costs = CostTables(problem)
        plan = uniform_plan(problem, tp=8, pp=32, recompute="full")
        return lambda: simulate(plan, problem, engine="compiled", costs=costs, leave_out_periods=leaves_out)

    return make


def _deep_tables() -> Callable[[], object]:
    problem = deep_problem()
    plan = uniform_plan(problem, tp=8, pp=16, dp=8, recompute="full")
    sharding = plan.stages[0].shardings[0][1]

    def call() -> None:
        costs = CostTables(problem)
        for samples in (1, 2, 4, 8):
            costs.table(sharding, samples, problem.gpu_types[0])

    return call


def _command(*words: str) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        folder = tempfile.mkdtemp(prefix="windtunnel-benchmark-")
        problem_spec = ProblemSpec("gpt3-350m", "v100-32g-dgx1:1x4", "megatron-lm-2021", 16)
        path = Path(folder) / "plan.yaml"
        save_plan(path, problem_spec, uniform_plan(problem_spec.load(), tp=2, pp=2))
        arguments = [str(path) if word == "PLAN" else word for word in words]
        return lambda: subprocess.run(
            [sys.executable, "-c", COMMAND, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    return make


def figures() -> Iterator[Figure]:
    """Yield every figure."""
    for words, overlap in (("constant speeds", False), ("overlap and contention", True)):
        make, tasks = _engine(run_compiled, 64, 512, overlap)  # type: ignore[arg-type]
        yield Figure(f"compiled engine, {words}", make, tasks, "tasks", repeats=3)
        make, tasks = _engine(run_simpy, 8, 32, overlap)  # type: ignore[arg-type]
        yield Figure(f"SimPy engine, {words}", make, tasks, "tasks", repeats=3)
    yield Figure("fast estimate, batches of known parts", _batch(False), 20_000, "plans")
    yield Figure("fast estimate, batches of new random plans", _batch(True), 10_000, "plans", repeats=7)
    yield Figure("fast estimate, one by one from numbers", _single, 2000, "plans")
    yield Figure("fast estimate, one by one from Plan objects", _single_plan_objects, 500, "plans")
    yield Figure("estimate()", _estimate, 10, "plans", repeats=3)
    yield Figure("simulate 175B on 512 GPUs, a plan seen before", _simulation(True), 1, "runs", repeats=9)
    yield Figure("simulate 175B on 512 GPUs, a plan not seen before", _simulation(False), 1, "runs")
    yield Figure("simulate 1,024 layers on 1,024 GPUs", _deep_simulation, 1, "runs", repeats=3)
    yield Figure("build the task graph of the 1,024 layers", _deep_graph, 924_850, "tasks", repeats=3)
    yield Figure("run the task graph of the 1,024 layers", _deep_run, 924_850, "tasks", repeats=3)
    yield Figure("simulate 32 stages, 512 microbatches", _long_simulation(False), 1, "runs", repeats=3)
    yield Figure("simulate 32 stages, 512 microbatches, periods left out", _long_simulation(True), 1, "runs", repeats=3)
    yield Figure("four cost tables of 1,024 layers", _deep_tables, 1, "runs", repeats=3)
    yield Figure("windtunnel --help", _command("--help"), 1, "runs")
    yield Figure("windtunnel simulate, SimPy engine", _command("simulate", "PLAN", "--engine", "simpy"), 1, "runs")
    yield Figure(
        "windtunnel simulate, compiled engine", _command("simulate", "PLAN", "--engine", "compiled"), 1, "runs"
    )
