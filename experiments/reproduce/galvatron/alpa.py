"""Alpa's cells: its plan of every batch size, judged by the simulator."""

from __future__ import annotations

from experiments.cases.galvatron_table2 import Run
from experiments.reproduce.galvatron.cells import LARGEST, Cell
from searchers.alpa.searcher import Alpa
from searchers.base import NoFeasiblePlan
from searchers.galvatron.planner import SATURATED
from searchers.plan_words import describe_plan
from simulator.simulate import simulate

ALPA = "alpa"
RECOMPUTE = (False,)
"""The paper's text: Alpa's space has no checkpointing; data parallelism is sharded for the whole model or not."""
ZERO = (0, 2)


def alpa_cell(run: Run) -> Cell:
    """Return the best batch of Alpa's plans: doubled until throughput rises by less than three per cent."""
    best = Cell(ALPA)
    batch = run.num_gpus
    while batch <= LARGEST:
        cell, before = _at(run, batch), best.throughput or 0.0
        if cell is None or cell.throughput is None:
            break
        best = max(best, cell, key=lambda each: each.throughput or 0.0)
        if cell.throughput < (1 + SATURATED) * before:
            break
        batch *= 2
    return best


def _at(run: Run, batch: int) -> Cell | None:
    """Return the first of Alpa's plans that fits by the simulator, None if none does."""
    problem = run.problem(batch)
    try:
        found = Alpa(recompute=RECOMPUTE, zero=ZERO, max_microbatch=run.num_gpus).search(problem)
    except NoFeasiblePlan:
        return None
    for ranked in found.plans:
        result = simulate(ranked.plan, problem, engine="compiled")
        if result.fits:
            return Cell(
                ALPA,
                throughput=batch / result.iteration_time_s,
                batch=batch,
                estimated=batch / ranked.objective,
                plan=describe_plan(ranked.plan),
                microbatches=ranked.plan.num_microbatches,
            )
    return None
