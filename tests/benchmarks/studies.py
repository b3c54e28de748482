"""What is measured beside the figures: memory, growth along each axis, and the estimate's error by cause."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from simulator.costs import CostTables
from simulator.problem import Problem
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.benchmarks.cases import deep_problem, gpt_2_6b
from tests.benchmarks.errors_by_cause import errors_of
from tests.benchmarks.measuring import processor_s
from tests.benchmarks.random_plans import RandomPlans

MEMORY = {
    "import windtunnel": "import windtunnel",
    "simulate 175B on 512 GPUs": "from tests.benchmarks import cases; cases._simulation(True)()()",
    "simulate 1,024 layers on 1,024 GPUs": "from tests.benchmarks import cases; cases._deep_simulation()()",
    "fast estimate, 20,000 plans": "from tests.benchmarks import cases; cases._batch(False)()()",
}


def growth() -> Iterator[tuple[str, int, int, float, float, float]]:
    """Yield ``(axis, value, tasks, first simulation s, same plan again s, periods left out s)`` along each axis."""
    base = dict(layers=64, tp=8, pp=8, dp=2, microbatches=64)
    axes = {
        "stages": ("pp", [2, 4, 8, 16, 32]),
        "microbatches": ("microbatches", [16, 32, 64, 128, 256, 512, 1024]),
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
            call = partial(simulate, plan, problem, engine="compiled", costs=costs)
            shorter = partial(call, leave_out_periods=True)
            first_s = processor_s(call)
            again_s = min(processor_s(call) for _ in range(3))
            shorter()
            shorter_s = min(processor_s(shorter) for _ in range(3))
            tasks = call().graph.num_tasks
            yield axis, value if axis != "devices" else 64 * value, tasks, first_s, again_s, shorter_s


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


def plot_growth(rows: list[tuple[str, int, int, float, float, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), sharey=True)
    for panel, axis in zip(axes, dict.fromkeys(row[0] for row in rows), strict=True):
        own = [row for row in rows if row[0] == axis]
        for column, words in ((3, "a new plan"), (4, "the same plan again"), (5, "again, periods left out")):
            panel.plot([row[1] for row in own], [row[column] for row in own], "o-", label=words)
        panel.set(xlabel=axis, xscale="log", yscale="log", xticks=[row[1] for row in own])
        panel.set_xticklabels([str(row[1]) for row in own])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("processor seconds per simulation")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
