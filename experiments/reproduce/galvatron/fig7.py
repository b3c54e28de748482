"""Galvatron-BMW's Figure 7: the estimator's error with and without the overlap slowdown.

What the paper measured is simulated here, so the errors are the estimator's against the simulator.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.ticker import PercentFormatter

from experiments.cases.galvatron_table2 import Run
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.galvatron.figures import new_figure
from experiments.reproduce.galvatron.table2 import MODELS
from experiments.reproduce.legends import legend_beside
from searchers.galvatron.options import Options
from searchers.galvatron.pipeline_plan import split
from searchers.galvatron.planner import Planner
from searchers.galvatron.plans import to_plan
from searchers.plan_words import describe_plan
from simulator.simulate import simulate_time_s

MEMORY_GB = 24
BATCHES = (16, 32)
PLAN_MIXES = (("dp", "sdp", "tp"), ("dp",), ("sdp", "dp"))


def run(context: Context) -> Report:
    """Return errors per model over the plans of every pipeline degree."""
    models = MODELS if not context.quick else MODELS[:2]
    rows = []
    for model in models:
        context.say(model)
        own = Run(model=model, cluster="titan-rtx-pcie:1x8", memory_gb=MEMORY_GB)
        profiles = own.profiles
        for batch in BATCHES:
            problem = own.problem(batch)
            seen = set()
            for kinds in PLAN_MIXES:
                options = Options(kinds=kinds, partition="base")
                slowed = Planner(problem, options, profiles=profiles)
                ideal = Planner(problem, replace(options, overlap_slowdown=False), profiles=profiles)
                for found in slowed.plans(batch):
                    plan = to_plan(found, problem)
                    if plan in seen:
                        continue
                    seen.add(plan)
                    stages = split(profiles.layers, found.partition)
                    chosen = [stage.chosen for stage in found.stages]
                    other = ideal.searches[len(found.stages)].assess(stages, chosen, batch, found.cut)
                    assert other is not None, "the same plan"
                    measured_s = simulate_time_s(plan, problem, engine="compiled")
                    rows.append(
                        {
                            "model": model,
                            "batch": batch,
                            "plan": describe_plan(plan),
                            "simulated_s": measured_s,
                            "with_slowdown": found.iteration_time_s / measured_s - 1,
                            "without_slowdown": other.iteration_time_s / measured_s - 1,
                        }
                    )
    frame = pd.DataFrame(rows)
    sizes = frame.assign(**{name: frame[name].abs() for name in ("with_slowdown", "without_slowdown")})
    summary = sizes.groupby("model", sort=False)[["with_slowdown", "without_slowdown"]].mean().reset_index()
    with_it, without = (float(frame[name].abs().mean()) for name in ("with_slowdown", "without_slowdown"))
    lower = float((frame["without_slowdown"] <= frame["with_slowdown"] + 1e-12).mean())
    figure, (place,) = new_figure(width=8.0)
    positions = np.arange(len(summary))
    place.bar(positions - 0.2, summary["with_slowdown"], 0.4, label="with the overlap slowdown")
    place.bar(positions + 0.2, summary["without_slowdown"], 0.4, label="without")
    place.set_xticks(positions, list(summary["model"]), rotation=20, fontsize=8)
    place.set_ylabel("mean absolute error of iteration time")
    place.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend_beside(place)
    verdicts = [
        Verdict(
            "the estimator's average error is below 5 %", "against the simulator", f"{with_it:.1%}", with_it < 0.05
        ),
        Verdict("without the slowdown it is above 15 %", "against the simulator", f"{without:.1%}", without > 0.15),
        Verdict("without the slowdown no estimate is higher", "for every plan", f"{lower:.0%} of plans", lower == 1.0),
    ]
    return Report({"summary": summary, "plans": frame}, {"errors": figure}, verdicts)
