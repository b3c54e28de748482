"""How fast the simulator is: every figure of ``docs/performance.md``, measured against a yardstick.

``python -m tests.benchmarks.figures -o docs/performance`` writes figures and growth as CSV and the plot as PNG.
``pytest tests/benchmarks/test_performance.py --benchmark-only`` compares the figures with the committed baseline.

A figure is the least processor time of several repeats, divided by that of a yardstick (a fixed piece of Python
and numpy) timed before and after it in the same process: what the machine does besides cancels, mostly.
"""

from __future__ import annotations

import argparse
import csv
import gc
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from hardware_models.model import HardwareModel
from hardware_models.runtime import load_runtime
from simulator.batch_errors import errors_of
from simulator.costs import CostTables
from simulator.engine_compiled import run_compiled
from simulator.engine_simpy import run_simpy
from simulator.estimate import estimate
from simulator.fast_estimate import FastEstimator, PlanArrays
from simulator.plan_file import save_plan
from simulator.problem import Problem, ProblemSpec
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.benchmarks.random_plans import RandomPlans
from tests.benchmarks.test_engine_speed import pipeline_with_collectives
from workloads.registry import build_workload

COMMAND = "from experiments.cli import main; main()"


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What is timed.
        make: Sets up and returns what to time; what it returns is called again for each repeat.
        units: How many of ``unit`` one call does.
        unit: ``tasks``, ``plans``, ``runs``.
        repeats: Calls timed.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    units: float
    unit: str
    repeats: int = 5


@dataclass(frozen=True)
class Measured:
    """A measured figure; seconds of processor time of one call.

    Attributes:
        least_s, median_s, most_s: Of the repeats.
        yardstick_s: Least of those timed around it.
    """

    least_s: float
    median_s: float
    most_s: float
    yardstick_s: float

    @property
    def ratio(self) -> float:
        """Yardsticks per call."""
        return self.least_s / self.yardstick_s


def yardstick() -> float:
    """Return a number: about a tenth of a second of interpreter and numpy work."""
    total = 0
    for number in range(400_000):
        total += number % 7
    values = np.arange(2_000_000, dtype=np.float64)[::-1].copy()
    values.sort()
    return float(total + np.cumsum(values)[-1])


def processor_s(call: Callable[[], object]) -> float:
    """Return processor seconds of a call, those of child processes included."""
    gc.collect()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time()
    call()
    own = time.process_time() - own
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own + after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime


def measure(figure: Figure) -> Measured:
    """Return a figure, after one call to warm up."""
    call = figure.make()
    call()
    yardsticks = [processor_s(yardstick)]
    seconds = sorted(processor_s(call) for _ in range(figure.repeats))
    yardsticks += [processor_s(yardstick), processor_s(yardstick)]
    return Measured(seconds[0], seconds[len(seconds) // 2], seconds[-1], min(yardsticks))


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
                for kept in (costs.stages, costs.bound_plans, costs.replays, costs.forms):
                    kept.clear()
            return simulate(plan, problem, engine="compiled", costs=costs)

        return call

    return make


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
    yield Figure("four cost tables of 1,024 layers", _deep_tables, 1, "runs", repeats=3)
    yield Figure("windtunnel --help", _command("--help"), 1, "runs")
    yield Figure("windtunnel simulate, SimPy engine", _command("simulate", "PLAN"), 1, "runs")
    yield Figure(
        "windtunnel simulate, compiled engine", _command("simulate", "PLAN", "--engine", "compiled"), 1, "runs"
    )


def peak_mebibytes(statement: str) -> float:
    """Return the peak resident memory of a fresh process that runs a statement."""
    # Not ru_maxrss, which a process inherits from the one that started it.
    words = "; print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    found = subprocess.run([sys.executable, "-c", statement + words], check=True, capture_output=True, text=True)
    return int(found.stdout.split()[-1]) / 1024


MEMORY = {
    "import windtunnel": "import windtunnel",
    "simulate 175B on 512 GPUs": "from tests.benchmarks import figures; figures._simulation(True)()()",
    "simulate 1,024 layers on 1,024 GPUs": "from tests.benchmarks import figures; figures._deep_simulation()()",
    "fast estimate, 20,000 plans": "from tests.benchmarks import figures; figures._batch(False)()()",
}


def growth() -> Iterator[tuple[str, int, int, float, float]]:
    """Yield ``(axis, value, tasks, first simulation s, same plan again s)`` along each axis, others fixed."""
    base = dict(layers=64, tp=8, pp=8, dp=2, microbatches=64)
    axes = {
        "stages": ("pp", [2, 4, 8, 16, 32]),
        "microbatches": ("microbatches", [16, 32, 64, 128, 256]),
        "layers": ("layers", [32, 64, 128, 256, 512]),
        "devices": ("dp", [1, 2, 4, 8, 16]),
    }
    for axis, (name, values) in axes.items():
        for value in values:
            shape = {**base, name: value}
            problem = deep_problem(shape["layers"])
            problem = Problem(problem.workload, problem.hardware, problem.runtime, shape["microbatches"] * shape["dp"])
            costs = CostTables(problem)
            plan = uniform_plan(problem, tp=shape["tp"], pp=shape["pp"], dp=shape["dp"])
            tasks = 0

            def call() -> None:
                nonlocal tasks
                tasks = simulate(plan, problem, engine="compiled", costs=costs).graph.num_tasks  # noqa: B023

            first = processor_s(call)
            again = min(processor_s(call) for _ in range(3))
            yield axis, value if axis != "devices" else 64 * value, tasks, first, again


def errors() -> Iterator[dict[str, str]]:
    """Yield how far the fast estimate is from the engine, effect by effect, on random plans of equal microbatches."""
    effects = ("host", "overlap-slowdown", "contention", "optimizer", "gradient-sync")
    estimator = gpt_2_6b()
    drawn = RandomPlans(estimator, seed=1).many(20)
    plans = [estimator.plan(drawn, index) for index in range(len(drawn))]
    even = [
        uniform_plan(estimator.problem, tp=tp, pp=pp, dp=8 // tp // pp)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        if tp * pp <= 8
    ]
    for words, some in (("uniform", even), ("random", plans)):
        predicted_s = estimator.evaluate(estimator.arrays(some)).iteration_time_s
        for row in errors_of(predicted_s, some, estimator.problem, estimator.costs, effects):
            yield {
                "plans": f"{row.num_plans} {words}",
                "engine_with": row.cause,
                "bias": f"{row.bias:.4f}",
                "mean_absolute": f"{row.mean_absolute:.4f}",
                "worst": f"{row.worst:.4f}",
            }


def _plot(rows: list[tuple[str, int, int, float, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), sharey=True)
    for panel, axis in zip(axes, dict.fromkeys(row[0] for row in rows), strict=True):
        own = [row for row in rows if row[0] == axis]
        for column, words in ((3, "a new plan"), (4, "the same plan again")):
            panel.plot([row[1] for row in own], [row[column] for row in own], "o-", label=words)
        panel.set(xlabel=axis, xscale="log", yscale="log", xticks=[row[1] for row in own])
        panel.set_xticklabels([str(row[1]) for row in own])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("processor seconds per simulation")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure everything and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/performance"))
    parser.add_argument("--only", default="", help="figures whose name holds this")
    parser.add_argument("--no-growth", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for figure in figures():
        if options.only not in figure.name:
            continue
        found = measure(figure)
        rows.append(
            {
                "figure": figure.name,
                "per_s": f"{figure.units / found.least_s:.4g}",
                "unit": figure.unit,
                "least_s": f"{found.least_s:.4g}",
                "median_s": f"{found.median_s:.4g}",
                "most_s": f"{found.most_s:.4g}",
                "yardstick_s": f"{found.yardstick_s:.4g}",
                "ratio": f"{found.ratio:.4g}",
            }
        )
        print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.only:
        return
    _write(options.output / "figures.csv", rows)
    memory = [{"what": what, "peak_mib": f"{peak_mebibytes(statement):.0f}"} for what, statement in MEMORY.items()]
    _write(options.output / "memory.csv", memory)
    _write(options.output / "errors.csv", list(errors()))
    names = ("numpy", "numba", "simpy", "pandas", "pydantic", "typer")
    versions = [{"package": "python", "version": platform.python_version()}]
    versions += [{"package": name, "version": version(name)} for name in names]
    _write(options.output / "versions.csv", versions)
    if not options.no_growth:
        grown = list(growth())
        columns = ("axis", "value", "tasks", "new_plan_s", "same_plan_s")
        _write(options.output / "growth.csv", [dict(zip(columns, row, strict=True)) for row in grown])
        _plot(grown, options.output / "growth.png")


def _write(path: Path, rows: list[dict[str, object]] | list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
