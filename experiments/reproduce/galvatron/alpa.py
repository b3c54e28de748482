"""Alpa's cells: its plan of every batch size, judged by the simulator."""

from __future__ import annotations

from dataclasses import replace

from experiments.cases.galvatron_table2 import Run
from experiments.reproduce.galvatron.cells import Cell
from searchers.alpa.searcher import Alpa
from searchers.base import NoFeasiblePlan, RankedPlan, SearchResult
from searchers.galvatron.pipeline_plan import ATTEMPTS
from searchers.galvatron.planner import SATURATED
from searchers.plan_words import describe_plan
from simulator.costs import cost_tables
from simulator.problem import Problem
from simulator.result import SimulationResult
from simulator.simulate import simulate

ALPA = "alpa"
RECOMPUTE = (False,)
"""The paper's text: Alpa's space has no checkpointing; data parallelism is sharded for the whole model or not."""
ZERO = (0, 2)
LARGEST = 1 << 14
"""Samples; throughput is flat long before."""


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
    """Return the best of Alpa's plans that fit by the simulator, None if none does.

    As for the other searchers, a planner whose first choice does not fit is told of less memory and asked again.
    """
    problem = run.problem(batch)
    told = float(run.memory_gb << 30)
    best: Cell | None = None
    for _ in range(ATTEMPTS):
        lacking = 0.0
        try:
            plans = _search(replace(problem, memory_limit_bytes=int(told)), run.num_gpus).plans
        except NoFeasiblePlan:
            break
        for ranked in plans:
            result = simulate(ranked.plan, problem, engine="compiled", costs=cost_tables(problem))
            if result.fits:
                cell = _cell(batch, ranked, result)
                best = cell if best is None else max(best, cell, key=lambda each: each.throughput or 0.0)
                break
            over = max(memory.peak_reserved_bytes - memory.capacity_bytes for memory in result.memory)
            lacking = lacking or max(0.01 * told, float(over))
        if not lacking:
            break
        told -= lacking
    return best


def _search(problem: Problem, max_microbatch: int) -> SearchResult:
    return Alpa(recompute=RECOMPUTE, zero=ZERO, max_microbatch=max_microbatch).search(problem)


def _cell(batch: int, ranked: RankedPlan, result: SimulationResult) -> Cell:
    return Cell(
        ALPA,
        throughput=batch / result.iteration_time_s,
        batch=batch,
        estimated=batch / ranked.objective,
        plan=describe_plan(ranked.plan),
        microbatches=ranked.plan.num_microbatches,
        fits=True,
    )
