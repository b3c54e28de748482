"""``windtunnel simulate``: one iteration of a plan file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from experiments.console import (
    AsJson,
    Engine,
    Profile,
    Without,
    all_writable,
    comma_separated,
    messages,
    print_json,
    print_lines,
)


def simulate_file(
    plan_file: Annotated[Path, typer.Argument(help="Plan file (YAML or JSON).")],
    engine: Engine = "auto",
    without: Without = "",
    profile: Profile = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace (.json.gz) that opens in Perfetto.", show_default=False),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a picture (.png) of the timeline.", show_default=False)
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Write a picture (.png) of live memory over time.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate one training iteration of a plan: time, throughput, memory, and where the time goes.

    A plan that does not fit is a result too: the first line says so (in JSON "fits"), and the exit code is 0.
    MFU counts convolutions as products; in fp32 those of 3x3 may take Winograd's algorithm, which does fewer
    operations, and MFU then be above 100 %.

    Example: windtunnel simulate plan.yaml --without contention,overlap-slowdown --trace trace.json.gz
    """
    from experiments.progress import simulation_progress
    from simulator.fidelity import Fidelity
    from simulator.plan_file import load_plan, problem_of_file
    from simulator.reports.timeline import readable_window
    from simulator.simulate import simulate

    all_writable(trace, timeline, memory, read=[plan_file])
    fidelity = Fidelity().without(*comma_separated(without))
    spec, plan = load_plan(plan_file)
    spec = replace(spec, profile=profile) if profile is not None else spec
    all_writable(read=spec.files, pictures=[timeline, memory], traces=[trace])
    problem = problem_of_file(plan_file, spec, plan)
    with simulation_progress(f"simulating {plan_file.name}") as progress:
        result = simulate(plan, problem, fidelity=fidelity, engine=engine, progress=progress)
    if trace is not None:
        written = result.write_trace(trace)
        if not written.complete:
            messages().print(f"the trace shows the first {written.window_s[1]:.3g} s: a larger one would not open")
    if timeline is not None:
        window = readable_window(plan, result.iteration_time_s)
        result.plot_timeline(timeline, window=window)
        if window is not None:
            messages().print(f"the timeline shows the first {window[1]:.3g} s: what follows repeats itself")
    if memory is not None:
        result.plot_memory(memory, title=plan_file.name)
    if as_json:
        print_json(result.summary())
        return
    print_lines(result.describe())
    for what, path in (("trace", trace), ("timeline", timeline), ("memory", memory)):
        if path is not None:
            messages().print(f"{what}: {path}", markup=False)
