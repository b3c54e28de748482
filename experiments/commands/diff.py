"""``windtunnel diff``: why one plan is faster than another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.console import (
    AsJson,
    Engine,
    Without,
    all_writable,
    comma_separated,
    messages,
    print_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    import pandas as pd

GIB = 2**30


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Plan file to start from.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Plan file to explain.")],
    engine: Engine = "auto",
    without: Without = "",
    plot: Annotated[
        Path | None, typer.Option(help="Write the waterfall as a picture (.png).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why plan B is faster or slower than plan A: time and memory by cause, as a waterfall.

    Example: windtunnel diff out/plans/ddp.yaml out/plans/megatron-grid.yaml --plot why.png
    """
    from experiments.notes import show_notes
    from experiments.progress import simulation_progress
    from simulator.fidelity import Fidelity
    from simulator.plan_file import load_plan, problem_of_file
    from simulator.reports.difference import difference
    from simulator.simulate import simulate

    all_writable(plot, read=[first, second])
    fidelity = Fidelity().without(*comma_separated(without))
    loaded = [(path, *load_plan(path)) for path in (first, second)]
    all_writable(read=[file for _, spec, _ in loaded for file in spec.files], pictures=[plot])
    problems = [problem_of_file(*each) for each in loaded]
    results = []
    for (path, _, plan), problem in zip(loaded, problems, strict=True):
        with simulation_progress(f"simulating {path.name}") as progress:
            results.append(simulate(plan, problem, fidelity=fidelity, engine=engine, progress=progress))
    names = (first.stem, second.stem) if first.stem != second.stem else (str(first), str(second))
    (_, one, _), (_, other, _) = loaded
    unlike = [
        f"{what}s differ: {names[0]} {getattr(one, what)}, {names[1]} {getattr(other, what)}"
        for what in ("model", "cluster", "runtime")
        if getattr(one, what) != getattr(other, what)
    ]
    show_notes([*unlike, *(words for result in results for words in result.notes)])
    found = difference(*results, names=names)
    if plot is not None:
        found.plot_waterfall(plot)
    if as_json:
        print_json(found.summary())
        return
    _show_tables(found.table(), found.memory_table(), names)
    print_lines(found.describe())
    if plot is not None:
        messages().print(f"waterfall: {plot}", markup=False)


def _show_tables(times: pd.DataFrame, sizes: pd.DataFrame, names: tuple[str, str]) -> None:
    header = [(names[0], "right"), (names[1], "right"), ("difference", "right")]
    rows = [
        (cause, f"{a:.3f}", f"{b:.3f}", f"{change:+.3f}")
        for cause, a, b, change in times[["cause", "a_s", "b_s", "difference_s"]].itertuples(index=False)
    ]
    print_table("seconds on the critical path", [("cause", "left"), *header], rows)
    rows = [
        (cause, f"{a / GIB:.2f}", f"{b / GIB:.2f}", f"{change / GIB:+.2f}")
        for cause, a, b, change in sizes.itertuples(index=False)
    ]
    print_table("GiB at the peak of the GPU that holds most", [("consumer", "left"), *header], rows)
