"""``windtunnel search``: let one searcher find a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.console import (
    DEFAULT_RUNTIME,
    AsJson,
    BudgetText,
    Cluster,
    GlobalBatch,
    MemoryLimit,
    Model,
    ObjectiveName,
    Profile,
    RuntimeName,
    Seed,
    all_writable,
    console,
    messages,
    print_json,
    print_table,
    problem_spec,
    short_number,
)
from experiments.interrupts import INTERRUPTED, one_interrupt, terminate_means_interrupt
from experiments.statuses import BUDGET_ENDED

if TYPE_CHECKING:
    from experiments.judged import Judged
    from searchers.base import SearchResult


def search(
    model: Model,
    cluster: Cluster,
    searcher: Annotated[
        str, typer.Option("--searcher", "-s", help="Name (windtunnel list searchers) or path.py:Class.")
    ],
    global_batch: GlobalBatch,
    budget: BudgetText = "20s",
    seed: Seed = 0,
    objective: ObjectiveName = "paper",
    runtime: RuntimeName = DEFAULT_RUNTIME,
    memory_limit: MemoryLimit = None,
    profile: Profile = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Plan file: the first that fits, else the best.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let one searcher find a plan, and show its best plans, what the search cost and what the simulator says.

    Plans are simulated in the searcher's order until one fits, as in compare; that one is written, or the searcher's
    best if none does. Ctrl-C ends the search: what it has found is simulated and written.

    Example: windtunnel search -m gpt3-1.3b -c v100-32g-dgx1:1x4 -b 1024
    --searcher megatron-grid --budget 20s -o plan.yaml
    """
    from experiments.judged import first_that_fits
    from experiments.late import told_when_late
    from experiments.notes import show_notes
    from experiments.progress import simulation_progress
    from searchers.budget import Budget
    from searchers.checked_search import checked_search
    from searchers.plan_words import describe_plan
    from searchers.registry import file_and_class, is_file, raised, searcher_named
    from simulator.fidelity import Fidelity
    from simulator.plan_file import save_plan

    spec = problem_spec(
        model=model,
        cluster=cluster,
        runtime=runtime,
        global_batch=global_batch,
        memory_limit=memory_limit,
        profile=profile,
    )
    own = [file_and_class(searcher)[0]] if is_file(searcher) else []
    all_writable(read=[*spec.files, *own], data=[output])
    chosen = searcher_named(searcher, objective=objective)
    limit = Budget.parse(budget)
    problem = spec.load()
    is_interrupted = False

    shown = messages()

    def say_late() -> None:
        words = f"{searcher} still searches, beyond its budget of {limit}; Ctrl-C ends it, a plan that fits is kept"
        shown.print(words, markup=False, soft_wrap=True)

    with shown.status(f"{searcher} searches, at most {limit} ..."):
        try:
            with told_when_late(limit, say_late), terminate_means_interrupt(), one_interrupt():
                found = checked_search(chosen, problem, limit, seed)
        except KeyboardInterrupt:
            if chosen.ledger is None or chosen.ledger.best_objective == float("inf"):
                messages().print("interrupted; no plan that fits had been found")
                raise typer.Exit(INTERRUPTED) from None
            found, is_interrupted = chosen.ledger.result(), True
            messages().print("interrupted; what had been found is simulated (Ctrl-C again: nothing is)")
        except Exception as error:
            if isinstance(error, ValueError) or not is_file(searcher):  # a refusal, or a mistake of ours
                raise
            words = f"{searcher} must end with plans or a ValueError; it raised {raised(error, searcher)}"
            raise ValueError(words) from error
    with simulation_progress("simulating what was found") as progress:
        judged = first_that_fits(found, problem, Fidelity(), "auto", lambda num_tasks: progress(num_tasks or 0))
    row = judged.row(found, limit)
    show_notes(judged.result.notes)
    if output is not None:
        save_plan(output, spec, judged.plan, fingerprint=problem.workload.fingerprint)
    if as_json:
        print_json(
            {
                "searcher": found.searcher,
                "seed": found.seed,
                "wall_s": found.wall_s,
                "counters": dict(found.counters),
                "budget_ended": row["budget_ended"],
                "plans": [
                    {
                        "objective": ranked.objective,
                        "plan": describe_plan(ranked.plan, problem.workload),
                        "plan_hash": ranked.plan.canonical_hash(problem.workload),
                    }
                    for ranked in found.plans
                ],
                "simulated": {
                    name: value
                    for name, value in row.items()
                    if name not in ("search_s", "evaluations", "budget_ended")
                },
                "history": [
                    {
                        "wall_s": entry.wall_s,
                        "evaluations": entry.evaluations,
                        "best_objective": entry.best_objective,
                    }
                    for entry in found.history
                ],
                "notes": list(judged.result.notes),
                "output": str(output) if output is not None else None,
            }
        )
    else:
        title = f"{searcher} on {problem.workload.name}, {cluster}"
        _show(found, judged, title, output, ended=row["budget_ended"] is True)
    if is_interrupted:
        raise typer.Exit(INTERRUPTED)


def _show(found: SearchResult, judged: Judged, title: str, output: Path | None, *, ended: bool) -> None:
    from searchers.plan_words import describe_plan
    from simulator.result import format_bytes, format_s

    rows = [
        (str(rank), short_number(ranked.objective), describe_plan(ranked.plan, judged.workload))
        for rank, ranked in enumerate(found.plans, start=1)
    ]
    columns = [("rank", "right"), ("objective, s", "right"), ("plan", "left")]
    print_table(title, columns, rows)
    counters = ", ".join(f"{_number(count)} {_counter_words(name, count)}" for name, count in found.counters.items())
    cost = [counters, f"{found.wall_s:.2f} s", *([BUDGET_ENDED] if ended else [])]
    console().print("; ".join(cost), soft_wrap=True)
    tightest = judged.tightest
    memory = f"{format_bytes(tightest.peak_reserved_bytes)} reserved of {format_bytes(tightest.capacity_bytes)}"
    simulated = [f"{format_s(judged.result.iteration_time_s)}, {memory}"]
    if judged.reason:
        simulated.append(judged.reason if judged.result.fits else f"DOES NOT FIT: {judged.reason}")
    console().print(f"simulated: {'; '.join(simulated)}", markup=False)
    if output is not None:
        console().print(f"plan: {output}; next: windtunnel simulate {output}", markup=False, soft_wrap=True)


def _counter_words(name: str, count: int | float) -> str:
    """Return what a counter counts, of one thing the first plural word in the singular.

    >>> _counter_words("stage_searches", 1), _counter_words("stages_priced", 1), _counter_words("illegal", 1)
    ('stage search', 'stage priced', 'illegal')
    >>> _counter_words("stages_priced", 2), _counter_words("dynamic_programs", 1)
    ('stages priced', 'dynamic program')
    """
    words = name.split("_")
    for place, word in enumerate(words if count == 1 else ()):
        if word.endswith("s"):
            words[place] = word.removesuffix("es" if word.endswith("ches") else "s")
            break
    return " ".join(words)


def _number(count: int | float) -> str:
    """Return a counter in words: whole, or of four figures where it is small.

    >>> _number(1234), _number(192901.2553), _number(0.25)
    ('1,234', '192,901', '0.25')
    """
    return f"{count:,.0f}" if isinstance(count, int) or abs(count) >= 1000 else f"{count:.4g}"
