"""``windtunnel profile``: what this machine takes for operators, collectives, launches; resumable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from datafiles.words import counted
from experiments.commands.validate import Device, check_device, parse_share, require_torch
from experiments.console import (
    AsJson,
    Cluster,
    Model,
    RuntimeName,
    all_writable,
    comma_separated,
    messages,
    print_json,
    print_lines,
)
from experiments.interrupts import INTERRUPTED, one_interrupt, terminate_means_interrupt
from experiments.notes import show_notes

if TYPE_CHECKING:
    from simulator.problem import Problem
    from validation.profiling.machine_profile import MachineProfile
    from validation.profiling.profile_run import Listener, ProfileWork

GIB = 2**30


def profile_machine_file(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Profile (.json or .yaml); --dry-run needs none.", show_default=False),
    ] = None,
    cluster: Cluster = "local-cpu:1x2",
    runtime: RuntimeName = "windtunnel-executor-fp32",
    microbatches: Annotated[str, typer.Option(help="Samples per rank, comma-separated.")] = "1",
    tensor_degrees: Annotated[str, typer.Option(help="Tensor-parallel degrees, comma-separated.")] = "1",
    groups: Annotated[
        str | None,
        typer.Option(help="Ranks of the groups whose collectives are measured; default: 2 and all.",
                     show_default=False),
    ] = None,
    skip: Annotated[
        str, typer.Option(help="Parts to leave out: host, memory, groups, overlap.", show_default=False)
    ] = "",
    rounds: Annotated[int, typer.Option(help="Rounds at most; medians count.", min=1)] = 9,
    spread: Annotated[
        str, typer.Option(help="Repeat (3 times, or --rounds) until half the middle half's range is below this.")
    ] = "5%",
    restart: Annotated[bool, typer.Option("--restart", help="Drop what an interrupted profile has measured.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost, and measure nothing.")] = False,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure this machine with a model, inside the executor: operators, memory, collectives, overlap, launches.

    It says first what it costs. An interrupt (Ctrl-C, SIGTERM) loses the part at work; the same command goes on
    from there.

    Example: windtunnel profile -m model.yaml -c local-cpu:1x2 --microbatches 1,2 -o machine.json
    """
    if output is None and not dry_run:
        raise ValueError("a profile must have a file, got no --output; give -o machine.json, or --dry-run for its cost")
    require_torch()
    from simulator.problem import ProblemSpec
    from validation.execution.launch import WorkerError, check_devices
    from validation.profiling.group_times import LARGE_SIZES, SIZES
    from validation.profiling.machine_profile import now, other_gpu, save_machine_profile
    from validation.profiling.profile_journal import Journal
    from validation.profiling.profile_run import ProfileOptions, profile_work, run_profile

    check_device(device)
    sizes = counts(microbatches, "microbatches")
    spec = ProblemSpec(model, cluster, runtime, max(sizes))
    problem = spec.load()
    everyone = problem.num_devices
    measured = {gpu_type for gpu_type in problem.hardware.cluster.gpu_types if (device == "cpu") != ("cpu" in gpu_type)}
    if measured:
        raise ValueError(
            f"what is measured on {device} must not be kept as {', '.join(sorted(measured))}; measure on the machine "
            "itself, with --device cuda for GPUs, and processes of a CPU as --cluster local-cpu:1xN or of a GPU type "
            "with cpu in its name"
        )
    default = tuple(sorted({2, everyone})) if everyone > 1 else ()
    options = ProfileOptions(
        microbatch_sizes=sizes,
        tensor_sizes=counts(tensor_degrees, "tensor-degrees"),
        group_sizes=counts(groups, "groups") if groups is not None else default,
        message_sizes=(*SIZES, *LARGE_SIZES) if device == "cuda" else SIZES,
        max_rounds=rounds,
        skip=comma_separated(skip),
        spread=parse_share(spread),
        device=device,
    )
    show_notes(_too_large(problem, min(options.tensor_sizes)))
    work = profile_work(problem, options)
    least, most = work.estimate_s()
    how_many = f"3 to {rounds} rounds" if rounds > 3 else counted(rounds, "round")
    how_long = f"{least / 60:.1f} to {most / 60:.1f}" if rounds > 3 else f"{most / 60:.1f}"
    messages().print(
        f"{counted(len(work.parts), 'part')} and {counted(len(work.job_s), 'plan')} in {how_many} on "
        f"{counted(everyone, 'process', 'processes')}: about {how_long} minutes"
    )
    if output is None or dry_run:
        if as_json:
            print_json({"parts": len(work.parts), "plans": len(work.job_s), "least_s": least, "most_s": most})
        return
    check_devices(everyone, device)
    if device == "cuda" and (words := other_gpu(problem)):
        messages().print(f"note: {words}", markup=False, soft_wrap=True)
    partial = output.with_name(f"{output.name}.partial")
    all_writable(partial, read=spec.files, data=[output])
    if restart:
        partial.unlink(missing_ok=True)
    journal = Journal(partial, work.identity, now())
    if journal.results:
        messages().print(
            f"going on from {partial}: {counted(len(journal.results), 'part is', 'parts are')} there",
            markup=False,
        )
    try:
        with terminate_means_interrupt(), one_interrupt(), _progress(work) as listener:
            profile = run_profile(work, journal, listener)
    except WorkerError as error:
        raise ValueError(f"the machine was not measured: {error}\nfinished parts are in {partial}") from None
    except KeyboardInterrupt:
        kept = counted(len(journal.results), "part is", "parts are")
        messages().print(f"interrupted; {kept} in {partial}: the same command goes on", markup=False)
        raise typer.Exit(INTERRUPTED) from None
    save_machine_profile(profile, output)
    journal.remove()
    if as_json:
        print_json(_summary(profile, output))
        return
    _show(profile)
    messages().print(f"profile: {output}", markup=False)


def _too_large(problem: Problem, degree: int) -> Iterator[str]:
    """Yield, in words, that a model's states alone are more than a device holds: it is trained to be measured."""
    state_bytes = problem.workload.num_parameters * problem.runtime.state_bytes_per_parameter / degree
    capacity_bytes = min(map(problem.capacity_bytes, range(problem.num_devices)))
    if state_bytes > capacity_bytes:
        yield (
            f"parameters, gradients and optimizer states of {problem.workload.name} at tensor degree {degree} take "
            f"{state_bytes / GIB:,.0f} GiB, of {capacity_bytes / GIB:,.1f} that {problem.gpu_types[0]} has by its "
            "description; where this machine has no more either, give the model fewer layers"
        )


@contextmanager
def _progress(work: ProfileWork) -> Iterator[Listener]:
    """Show a bar of estimated seconds while the block runs; without a terminal, one line per part."""
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = messages()
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left at most"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=work.estimate_s()[1])

        def listen(words: str, done: float, total: float) -> None:
            bar.update(task, description=escape(words), completed=done, total=total)
            if not console.is_terminal:
                console.print(f"next: {words}", markup=False)

        yield listen


def _summary(profile: MachineProfile, output: Path) -> dict[str, Any]:
    return {
        "machine": profile.machine,
        "date": profile.date,
        "versions": profile.versions,
        "operator_rows": len(profile.operators.rows),
        "communication_rows": len(profile.communication),
        "operator_factor": profile.operator_factor,
        "pass_overhead_s": profile.pass_overhead_s,
        "overlap_slowdown": profile.overlap,
        "fitted_on": profile.fitted_on,
        "measurements": [asdict(each) for each in profile.measurements],
        "output": str(output),
    }


def _show(profile: MachineProfile) -> None:
    overlap = "not measured" if profile.overlap is None else "{:.2f} and {:.2f}".format(*profile.overlap)
    print_lines(
        f"machine           {profile.machine}\n"
        f"operators         {counted(len(profile.operators.rows), 'row')}\n"
        f"communication     {counted(len(profile.communication), 'row')}\n"
        f"operator factor   {profile.operator_factor:.3f} in a pipeline\n"
        f"overhead of pass  {1e3 * profile.pass_overhead_s:.3f} ms\n"
        f"overlap slowdown  {overlap} (computation, communication)\n"
        f"fitted on         {profile.fitted_on}"
    )
    for each in profile.measurements:
        spread = f", spread {100 * each.spread:.1f} % of {each.repeats}" if each.repeats > 1 else ""
        print_lines(f"{each.name}: {each.value:.4g} {each.unit}{spread}")


def counts(text: str, what: str) -> tuple[int, ...]:
    """Read positive whole numbers.

    Raises:
        ValueError: If there is none, or something else.

    >>> counts("1,2", "microbatches")
    (1, 2)
    """
    words = comma_separated(text)
    if not words or not all(re.fullmatch("[0-9]{1,9}", word) and int(word) > 0 for word in words):
        raise ValueError(f"{what} must be positive whole numbers such as 1,2,4, got {text!r:.60}")
    return tuple(int(word) for word in words)
