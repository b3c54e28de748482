"""DAPPLE Figure 11: speedups of hybrids and of data parallelism on configurations A, B and C."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from datafiles.words import counted
from experiments.reproduce.dapple.benchmarks import BENCHMARKS, NOTES, Setting, judge, one_device_s, setting
from experiments.reproduce.experiment import Context, Report, Verdict
from searchers.dapple.communication import CommunicationCosts
from searchers.dapple.planner import PipelinePlan
from simulator.divisors import divisors
from simulator.result import SimulationResult

GLOBAL_BATCH = 128
MEANS = {"A": 1.71, "B": 1.37, "C": 1.79}
"""Hybrid over overlapped data parallelism, mean of the models."""

MODELS = ("VGG-19", "GNMT-16", "BERT-48", "XLNet-36", "AmoebaNet-36")
ALLOWED = 0.15


def run(context: Context) -> Report:
    """Plan and simulate every model on every configuration, with 128 samples and with Table 4's global batches."""
    rows = []
    for name in ("VGG-19", "BERT-48") if context.quick else MODELS:
        for config in "ABC":
            for batch in dict.fromkeys((GLOBAL_BATCH, BENCHMARKS[name].global_batch)):
                context.say(f"{name} on {config}, {counted(batch, 'sample')}")
                rows.append(_row(context, name, config, batch))
    table = pd.DataFrame(rows)
    with_dp = table[table["hybrid / DP overlap"].notna()]
    fixed = with_dp[with_dp["samples"] == GLOBAL_BATCH]
    own = with_dp[with_dp["samples"] == with_dp["model"].map(lambda name: BENCHMARKS[name].global_batch)]
    means = [
        {
            "config": config,
            "paper": paper,
            "128 samples": float(fixed[fixed["config"] == config]["hybrid / DP overlap"].mean()),
            "own samples": float(own[own["config"] == config]["hybrid / DP overlap"].mean()),
            "own samples, released constants, formula": float(
                own[own["config"] == config]["hybrid / DP overlap, released constants, formula"].mean()
            ),
        }
        for config, paper in MEANS.items()
    ]
    verdicts = [
        Verdict(
            f"hybrids are {row['paper']} times as fast as overlapped data parallelism on {row['config']}, on average",
            f"within {ALLOWED:.0%} at 128 samples, by the simulator, over the models whose data-parallel run fits",
            f"{row['128 samples']:.2f}; with the global batches of Table 4 {row['own samples']:.2f}",
            abs(float(row["128 samples"]) / float(row["paper"]) - 1) <= ALLOWED,  # type: ignore[arg-type]
        )
        for row in means
    ]
    verdicts += [
        Verdict(
            f"the same on {row['config']}",
            f"within {ALLOWED:.0%} with the global batches of Table 4",
            f"{row['own samples']:.2f}",
            abs(float(row["own samples"]) / float(row["paper"]) - 1) <= ALLOWED,  # type: ignore[arg-type]
        )
        for row in means
    ]
    verdicts.append(
        Verdict(
            "hybrids are never slower than overlapped data parallelism",
            "every ratio at least 0.99",
            f"smallest {with_dp['hybrid / DP overlap'].min():.2f}",
            bool(with_dp["hybrid / DP overlap"].min() >= 0.99),
        )
    )
    gnmt = own[(own["model"] == "GNMT-16") & (own["config"] == "C")]["hybrid / DP overlap"]
    if len(gnmt):
        verdicts.append(
            Verdict(
                "up to 2.32 times for GNMT-16 on C",
                f"within {ALLOWED:.0%}, with Table 4's 1,024 samples",
                f"{float(gnmt.iloc[0]):.2f}",
                abs(float(gnmt.iloc[0]) / 2.32 - 1) <= ALLOWED,
            )
        )
    return Report(
        tables={"speedups": table, "means": pd.DataFrame(means)},
        verdicts=verdicts,
        notes=[
            *NOTES,
            "Speedup: time of all samples one after the other on one device over simulated time. The hybrid is the "
            "best of the whole space by the formula, over every microbatch size that leaves each replica whole "
            "samples; data parallelism counts as a hybrid too. Overlap: buckets of 64 MiB.",
            "Mechanism: the all-reduce of data parallelism does not depend on the batch. At 128 samples VGG-19 "
            "computes 40 ms and GNMT-16 31 ms on 16 GPUs, while their 548 and 1,163 MB take 0.2 to 2 s, so no overlap "
            "helps and every pipeline wins by far. The paper's means near 1.4 to 1.8 need batches in which computation "
            "is of the same order: its text on GNMT-16 in this figure speaks of 1,024 samples.",
        ],
    )


def _row(context: Context, name: str, config: str, batch: int) -> dict[str, object]:
    given = setting(context, name, config, batch, min(BENCHMARKS[name].batch, batch))
    alone = one_device_s(given.planner, batch)
    row: dict[str, object] = {"model": name, "config": config, "samples": batch}
    hybrid, form = best_hybrid(given)
    for overlap, label in (("none", "DP no overlap"), ("backward", "DP overlap")):
        plain = given.data_parallel(overlap)
        if plain is None:
            row[f"{label}, simulated"] = np.nan
            continue
        result = judge(given.problem, plain, overlapped=overlap == "backward")
        row[f"{label}, formula"] = alone / plain.latency_s
        row[f"{label}, simulated"] = alone / result.iteration_time_s if result.fits else np.nan
        if overlap == "backward" and result.fits and result.iteration_time_s < hybrid.iteration_time_s:
            hybrid, form = result, plain
    row |= {
        "hybrid plan": form.words,
        "M": form.num_microbatches,
        "hybrid, formula": alone / form.latency_s,
        "hybrid, simulated": alone / hybrid.iteration_time_s,
        "hybrid fits": hybrid.fits,
    }
    row["hybrid / DP overlap, released constants, formula"] = _with_released_constants(given)
    overlapped = row["DP overlap, simulated"]
    row["hybrid / DP overlap"] = row["hybrid, simulated"] / overlapped  # type: ignore[operator]
    return row


def _with_released_constants(given: Setting) -> float:
    """Return the ratio by the formula alone, with the communication constants of the released planner."""
    costs = CommunicationCosts(given.problem.hardware, "released")
    released = replace(given, planner=replace(given.planner, communication=costs))
    plain, hybrid = released.data_parallel(), released.best_of_all()
    if plain is None or hybrid is None:
        return float("nan")
    return plain.latency_s / min(plain.latency_s, hybrid.latency_s)


def best_hybrid(given: Setting) -> tuple[SimulationResult, PipelinePlan]:
    """Return the best pipeline by the formula over all microbatch sizes that can run, and its simulation.

    Raises:
        ValueError: If nothing fits.
    """
    batch = given.problem.global_batch
    found: list[PipelinePlan] = []
    for size in divisors(batch):
        legal = replace(given.planner.options, executable=True, whole_samples=True)
        for options in (legal, replace(legal, max_stages=2), replace(legal, max_replicas=1)):
            form = replace(given.planner, options=options).best(size, batch // size)
            if form is not None and form.num_stages > 1:
                found.append(form)
    if not found:
        raise ValueError(f"no pipeline of {given.problem.workload.name} fits")
    form = min(found, key=lambda each: each.latency_s)
    return judge(given.problem, form), form
