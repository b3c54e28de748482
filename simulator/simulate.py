"""Simulate one iteration of a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

from simulator.costs import CostTables, cost_tables
from simulator.engines.engine_common import DeadlockError
from simulator.engines.engine_simpy import run_simpy
from simulator.engines.steady_state import shortened
from simulator.fidelity import Fidelity
from simulator.flops import model_and_hardware_flop
from simulator.lowering.lower import Lowered, lower
from simulator.memory.device_memory import device_memory, live_bytes
from simulator.plan import Plan
from simulator.problem import Problem
from simulator.remarks import remarks
from simulator.result import SimulationResult
from simulator.run import LaterRun, Run
from simulator.schedules.one_f_one_b import warmup_p_a
from simulator.segments import SOURCES
from simulator.taskgraph import Schedule, TaskGraph
from simulator.validate import validate

Progress = Callable[[int], None]


def _run_compiled(graph: TaskGraph, progress: Progress | None) -> Schedule:
    """Run the compiled engine; numba is imported when it is first asked for."""
    from simulator.engines.engine_compiled import run_compiled

    return run_compiled(graph, progress)


ENGINES: dict[str, Callable[[TaskGraph, Progress | None], Schedule]] = {
    "simpy": run_simpy,
    "compiled": _run_compiled,
}
ENGINE_NAMES = ("auto", *ENGINES)
COMPILED_FROM_TASKS = 50_000
"""From here on ``auto`` takes the compiled engine. Measured in fresh processes, GPT-3 6.7B in 8 and 16 stages, compiled
against SimPy: 1.8 and 0.3 s for 826 tasks (it loads numba), 2.4 and 2.0 s for 36,130, 2.6 and 3.3 s for 72,226."""


def check_engine(name: str) -> None:
    """Raise ValueError unless there is an engine of that name."""
    if name not in ENGINE_NAMES:
        raise ValueError(f"engine must be one of {', '.join(ENGINE_NAMES)}, got {name!r}")


def simulate(
    plan: Plan,
    problem: Problem,
    *,
    fidelity: Fidelity | None = None,
    engine: str = "auto",
    costs: CostTables | None = None,
    progress: Progress | None = None,
    leave_out_periods: bool = False,
) -> SimulationResult:
    """Return what one iteration of ``plan`` takes, in time and memory. Deterministic.

    Args:
        plan: Any legal plan.
        problem: Workload, hardware, runtime, batch, memory limit.
        fidelity: Effects to include; None for all.
        engine: ``simpy`` (the readable one) or ``compiled`` (the fast one); they agree to the last bit. ``auto``:
            the quicker one for that many tasks.
        costs: Cost tables; None for those that all calls on the same problem share, of the last four problems
            (``costs.cost_tables``; not for several threads).
        progress: Called with the number of tasks simulated so far.
        leave_out_periods: Simulate fewer microbatches where what a full pipeline does repeats itself
            (``steady_state``): the same time, to rounding, and the same memory. Whatever needs all tasks
            (breakdown, critical path, trace) is simulated when first asked for.

    Raises:
        ValueError: If the plan is malformed (not if it does not fit: that is a result) or comes to more tasks than can
            be simulated, or if the engine is unknown.
    """
    check_engine(engine)
    began = perf_counter()
    fidelity = fidelity or Fidelity()
    canonical = validate(plan, problem)
    costs = (costs or cost_tables(problem)).under(fidelity)
    timed = _timed(canonical, costs, fidelity, engine, progress, leave_out_periods)
    lowered, schedule, iteration_time_s = timed.lowered, timed.schedule, timed.iteration_time_s
    run: Run | LaterRun
    if timed.is_whole:
        run = _run_of(canonical, lowered, schedule, costs)
    else:
        run = LaterRun(partial(_whole_run, canonical, costs, fidelity, engine))
    engine = _engine_for(engine, lowered.graph)
    memory = device_memory(
        canonical,
        lowered,
        schedule,
        costs,
        fidelity,
        compiled=engine == "compiled",
        left_out_s=iteration_time_s - float(schedule.end_s.max()),
    )
    model_flop, hardware_flop = model_and_hardware_flop(canonical, problem, costs)
    dtype = problem.runtime.implementation.dtype
    total = sum(lowered.recorded_s) or 1.0
    return SimulationResult(
        iteration_time_s=iteration_time_s,
        global_batch=problem.global_batch,
        tokens_per_sample=problem.workload.tokens_per_sample,
        num_devices=len(canonical.devices),
        model_flop=model_flop,
        hardware_flop=hardware_flop,
        peak_flop_per_s=sum(
            problem.hardware.peak_flop_per_s(problem.gpu_types[device], dtype) for device in canonical.devices
        ),
        memory=memory,
        run=run,
        fidelity=fidelity,
        duration_sources={name: seconds / total for name, seconds in zip(SOURCES, lowered.recorded_s, strict=True)},
        plan_hash=canonical.own_hash(),
        engine=engine,
        wall_s=perf_counter() - began,
        notes=remarks(canonical, problem),
    )


def simulate_time_s(
    plan: Plan,
    problem: Problem,
    *,
    fidelity: Fidelity | None = None,
    engine: str = "auto",
    costs: CostTables | None = None,
) -> float:
    """Return the iteration time that ``simulate`` finds, to rounding, and nothing else: for fits, which ask often.

    A pipeline's like periods are left out, and memory is not simulated: a plan that does not fit has a time all the
    same.

    Args:
        plan, problem, fidelity, engine, costs: As in ``simulate``.

    Raises:
        ValueError: As in ``simulate``.
    """
    check_engine(engine)
    canonical = validate(plan, problem)
    fidelity = fidelity or Fidelity()
    costs = (costs or cost_tables(problem)).under(fidelity)
    return _timed(canonical, costs, fidelity, engine, None, leave_out_periods=True).iteration_time_s


class _Timed(NamedTuple):
    lowered: Lowered
    schedule: Schedule
    iteration_time_s: float
    is_whole: bool


def _timed(
    plan: Plan,
    costs: CostTables,
    fidelity: Fidelity,
    engine: str,
    progress: Progress | None,
    leave_out_periods: bool,
) -> _Timed:
    if leave_out_periods:
        shorter = shortened(plan, costs, fidelity, lambda graph: _run_plan(plan, engine, graph, progress))
        if shorter is not None:
            return _Timed(shorter.lowered, shorter.schedule, shorter.iteration_time_s, is_whole=False)
    lowered = lower(plan, costs, fidelity)
    schedule = _run_plan(plan, engine, lowered.graph, progress)
    return _Timed(lowered, schedule, float(schedule.end_s.max()), is_whole=True)


def _whole_run(plan: Plan, costs: CostTables, fidelity: Fidelity, engine: str) -> Run:
    lowered = lower(plan, costs, fidelity)
    return _run_of(plan, lowered, _run_engine(engine, lowered.graph, None), costs)


def _run_of(plan: Plan, lowered: Lowered, schedule: Schedule, costs: CostTables) -> Run:
    live = partial(live_bytes, plan=plan, lowered=lowered, schedule=schedule, costs=costs)
    return Run(lowered.graph, schedule, live)


def _run_plan(plan: Plan, engine: str, graph: TaskGraph, progress: Progress | None) -> Schedule:
    try:
        return _run_engine(engine, graph, progress)
    except DeadlockError as error:
        if plan.warmup is None:
            raise
        other = list(warmup_p_a(len(plan.stages), plan.num_microbatches))
        words = f"warmup {list(plan.warmup)} lets passes wait for each other for ever; leave it out, which is {other}"
        raise DeadlockError(f"{words}: {error}") from None


def _run_engine(engine: str, graph: TaskGraph, progress: Progress | None) -> Schedule:
    return ENGINES[_engine_for(engine, graph)](graph, progress)


def _engine_for(engine: str, graph: TaskGraph) -> str:
    if engine != "auto":
        return engine
    return "compiled" if graph.num_tasks >= COMPILED_FROM_TASKS else "simpy"
