"""``mpe-fig5``: stages estimated from layers and pairs, against the simulator on whole stages."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.reproduce.alpa_mpe.counting import oracle_of, problem_named
from experiments.reproduce.experiment import Context, Report, Verdict
from searchers.alpa.meshes import LogicalMesh, all_logical_meshes
from searchers.alpa.oracle import Oracle
from searchers.alpa.simulator_oracle import NoisyOracle, SimulatorOracle
from searchers.mpe.estimator import StageEstimator
from simulator.problem import Problem

MODELS = ("gpt2-1.5b", "bert-large", "t5-770m")
CLUSTER = "rtx3090-pcie:1x8"
MICROBATCH = 8
NOISE = 0.02
"""Standard deviation of one run as a share of it: the order of the run-to-run spread that GPU profilers report."""
CONTENTION = 0.05
"""Mean slowdown of stages that Alpa's workers profile side by side; MPE profiles one at a time."""
STRIDE = 7


def run(context: Context) -> Report:
    """Compare every STRIDE-th interval on every mesh that can cut the microbatch."""
    rows = []
    for model in MODELS[:1] if context.quick else MODELS:
        problem = problem_named(model, CLUSTER)
        meshes = [mesh for mesh in all_logical_meshes(problem.hardware.cluster) if mesh.batch_forced]
        for mesh in meshes[:4] if context.quick else meshes:
            context.say(f"{model}, mesh {mesh.name}")
            rows += _errors(problem, model, mesh, context)
    frame = pd.DataFrame(rows)
    frame["time_mape_percent"] = 100 * frame["time_error"].abs()
    frame["memory_mape_percent"] = 100 * frame["memory_error"].abs()
    columns = ["time_mape_percent", "memory_mape_percent"]
    summary = frame.groupby(["model", "mesh", "estimator"], sort=False)[columns].mean().reset_index()
    means = frame.groupby("estimator")[columns].mean()
    time, memory = means["time_mape_percent"], means["memory_mape_percent"]
    return Report(
        tables={"by_mesh": summary, "intervals": frame},
        figures={"errors": _figure(frame)},
        verdicts=[
            Verdict(
                "MPE's error is far below the naive estimator's",
                "mean absolute error of time and of peak memory, noise-free, at most half the naive one's",
                f"time {time['mpe']:.2f} against {time['naive']:.2f} %, memory {memory['mpe']:.1f} against "
                f"{memory['naive']:.1f} %",
                bool(2 * time["mpe"] <= time["naive"] and 2 * memory["mpe"] <= memory["naive"]),
            ),
            Verdict(
                "MPE's error is below the error of Alpa's own profiling",
                "mean absolute error of time of MPE on noisy measurements at most that of noisy whole stages",
                f"{time['mpe, noisy']:.2f} against {time['profiled side by side']:.2f} %",
                bool(time["mpe, noisy"] <= time["profiled side by side"]),
            ),
        ],
        notes=[
            "With a noise-free oracle whose costs add up, MPE is exact by construction; here the oracle is the "
            "simulator on each stage (hosts, overlap, contention, live bytes), whose times and peaks need not add up.",
            f"Noise: {100 * NOISE:g} % per run, 5 runs; stages profiled side by side are slowed by "
            f"{100 * CONTENTION:g} % on average (assumed).",
        ],
    )


def _errors(problem: Problem, model: str, mesh: LogicalMesh, context: Context) -> list[dict[str, object]]:
    oracle = SimulatorOracle(oracle_of(problem, MICROBATCH))
    if not oracle.model.solver(mesh).legal:
        return []
    alone = NoisyOracle(oracle, NOISE, seed=context.seed)
    side_by_side = NoisyOracle(oracle, NOISE, contention=CONTENTION, seed=context.seed)
    costs = oracle.model.costs
    estimators: dict[str, StageEstimator | Oracle] = {
        "mpe": StageEstimator(oracle, costs),
        "naive": StageEstimator(oracle, costs, edges=False),
        "mpe, noisy": StageEstimator(alone, costs),
        "profiled side by side": side_by_side,
    }
    count = len(oracle.spans)
    intervals = [(first, last) for first in range(count) for last in range(first, count)][:: STRIDE]
    rows: list[dict[str, object]] = []
    for first, last in intervals:
        true = oracle.answer(mesh, first, last)
        for name, estimator in estimators.items():
            found = (
                estimator.lookup(mesh, first, last)
                if isinstance(estimator, StageEstimator)
                else estimator.answer(mesh, first, last)
            )
            rows.append(
                {
                    "model": model,
                    "mesh": mesh.name,
                    "first": first,
                    "last": last,
                    "estimator": name,
                    "seconds": found.seconds,
                    "oracle_seconds": true.seconds,
                    "time_error": found.seconds / true.seconds - 1,
                    "peak_bytes": found.peak_bytes(),
                    "oracle_peak_bytes": true.peak_bytes(),
                    "memory_error": found.peak_bytes() / true.peak_bytes() - 1,
                }
            )
    return rows


def _figure(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(9, 4))
    left, right = figure.subplots(1, 2)
    names = list(frame["estimator"].unique())
    for axes, column, title in ((left, "time_error", "time"), (right, "memory_error", "peak memory")):
        data = [np.asarray(100 * frame.loc[frame["estimator"] == name, column]) for name in names]
        axes.boxplot(data, tick_labels=[name.replace(" ", "\n") for name in names], whis=(5, 95), showfliers=False)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set_title(f"signed error of {title} (%)")
    figure.tight_layout()
    return figure
