"""Exp#3: models of 8 to 1,024 layers on 8 GPUs, on modelled kernels (no profile needed)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from datafiles.words import counted
from experiments.reproduce.aceso.setting import curves
from experiments.reproduce.experiment import Context, Report, Verdict
from experiments.reproduce.kept import kept_rows
from searchers.aceso.searcher import Aceso
from searchers.base import NoFeasiblePlan
from searchers.budget import Budget
from searchers.megatron_grid import MegatronGrid
from searchers.plan_words import describe_plan
from simulator.problem import ProblemSpec

LAYERS = (8, 16, 32, 64, 128, 256, 512, 1024)
SECONDS = 10
ALPA_FAILS_ABOVE = 64


def rows_of(context: Context, depths: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield one row per number of layers."""
    for layers in depths:
        problem = ProblemSpec(
            model=f"gpt-scale-{layers}", cluster="v100-32g-dgx1:1x8", runtime="megatron-lm-2021", global_batch=1024
        ).load()
        searcher = Aceso(judge=0, workers=context.workers)
        row: dict[str, object] = {"layers": layers, "operators": len(problem.workload)}
        try:
            found = searcher.search(problem, Budget(seconds=3 if context.quick else SECONDS), seed=context.seed)
        except NoFeasiblePlan as error:
            yield {**row, "plan": f"none: {error}"[:160]}
            continue
        row |= {
            "wall_s": found.wall_s,
            "evaluations": found.counters["evaluations"],
            "plan": describe_plan(found.best),
            "aceso_s": found.plans[0].objective,
            "samples_per_s": problem.global_batch / found.plans[0].objective,
        }
        grid = MegatronGrid(max_microbatch=8, recompute=("none", "full"), objective=searcher.paper_objective)
        try:
            rival = grid.search(problem)
            row |= {"grid_s": rival.plans[0].objective, "grid_plan": describe_plan(rival.best)}
        except NoFeasiblePlan:
            row |= {"grid_plan": "none fits"}
        yield row


def run(context: Context) -> Report:
    """Plan every depth within 10 s (quick: 8 and 64 layers within 3 s)."""
    depths = (8, 64) if context.quick else LAYERS
    table = pd.DataFrame(kept_rows(context, depths, rows_of, name="{} layers".format, timed=True))
    planned = table["aceso_s"].notna() if "aceso_s" in table else pd.Series([False] * len(table))
    compared = table[planned & table["grid_s"].notna()] if "grid_s" in table else table.iloc[:0]
    worst = float((compared["aceso_s"] / compared["grid_s"]).max()) if len(compared) else float("nan")
    verdicts = [
        Verdict(
            "Aceso always finds a plan, up to 1,024 layers", "a feasible plan at every depth",
            f"{int(planned.sum())} of {counted(len(table), 'depth')}", bool(planned.all()),
        ),
        Verdict(
            "at least as good as the Megatron grid", "Aceso's objective of its plan at most that of the grid's best",
            f"at most {worst:.3f} times" if len(compared) else "no depth where both have a plan",
            bool(worst <= 1 + 1e-9) if len(compared) else None,
        ),
    ]  # fmt: skip
    points = [
        (float(row["layers"]), float(row["samples_per_s"]))
        for _, row in table.iterrows()
        if row.get("samples_per_s") == row.get("samples_per_s")
    ]
    figure = curves({"Aceso": points}, x="layers", y="samples per s (Aceso's model)", title="Aceso's Exp#3, 8 GPUs")
    notes = [f"The paper: Alpa fails above {ALPA_FAILS_ABOVE} layers; Aceso takes 24 to 246 s."]
    return Report({"layers": table}, {"layers": figure}, verdicts, notes)
