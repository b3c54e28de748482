"""DAPPLE Figure 3: memory over time of GPipe and of early backward."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.cases.case import problem_of
from experiments.cases.dapple_table5 import MICROBATCH, MODEL
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.legends import legend_beside
from simulator.simulate import simulate
from simulator.uniform import uniform_plan


def run(context: Context) -> Report:
    """Simulate BERT-48 on two stages with growing numbers of microbatches."""
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    rows = []
    shown = 4
    for count in (2, shown, 8):
        for schedule in ("gpipe", "1f1b"):
            problem = problem_of(
                model=MODEL,
                cluster="v100-1gpu-25g:2x1",
                runtime="dapple-tensorflow",
                global_batch=MICROBATCH * count,
            )()
            plan = uniform_plan(problem, pp=2, microbatch=MICROBATCH, schedule=schedule)
            result = simulate(plan, problem, engine="compiled")
            first = min(result.memory, key=lambda memory: int(result.graph.device_stage[memory.device]))
            name = "GPipe" if schedule == "gpipe" else "DAPPLE"
            rows.append(
                {
                    "M": count,
                    "schedule": name,
                    "iteration, s": result.iteration_time_s,
                    "peak of the first stage, GB": first.peak_allocated_bytes / 1e9,
                    "bubble, share": result.bubble_share,
                    "fits": result.fits,
                }
            )
            if count == shown:
                live = result.live_bytes(first.device)
                axes.step(live.times_s, live.live_bytes / 1e9, where="post", label=f"{name}, M = {count}", lw=0.8)
    axes.set_xlabel("time, s")
    axes.set_ylabel("live tensors of the first stage, GB")
    legend_beside(axes)
    table = pd.DataFrame(rows)
    peaks = table.pivot(index="M", columns="schedule", values="peak of the first stage, GB")
    times = table.pivot(index="M", columns="schedule", values="iteration, s")
    growth = float(peaks["GPipe"].iloc[-1] / peaks["GPipe"].iloc[0])
    slower = float((times["DAPPLE"] / times["GPipe"]).max())
    return Report(
        tables={"peaks": table},
        figures={"memory": figure},
        verdicts=[
            Verdict(
                "GPipe's peak grows with M, DAPPLE's does not",
                "from M = 2 to 8 the first by more than a quarter, the second by less than 1 %",
                f"{growth - 1:.0%} and {float(peaks['DAPPLE'].max() / peaks['DAPPLE'].min()) - 1:.1%}",
                growth > 1.25 and float(peaks["DAPPLE"].max() / peaks["DAPPLE"].min()) < 1.01,
            ),
            Verdict(
                "early backward has the bubbles of GPipe",
                "with warm-up P_A no more than 1 % slower",
                f"at most {slower - 1:+.1%} (P_A waits for transfers that GPipe hides)",
                slower <= 1.01,
            ),
        ],
        notes=["BERT-48 of 384 tokens, microbatches of two, two GPUs over 25 Gb/s, fp32; live bytes, fit or not."],
    )
