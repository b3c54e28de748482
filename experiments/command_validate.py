"""``windtunnel validate``: a plan simulated with this machine's profile, then executed."""

from __future__ import annotations

import importlib.util
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.console import AsJson, console, messages, print_json, table

if TYPE_CHECKING:
    from simulator.plan import Plan
    from simulator.problem import Problem
    from validation.compare import ValidationReport

Device = Annotated[str, typer.Option(help="cpu (gloo) or cuda (nccl).")]


def require_torch() -> None:
    """Refuse, in words, what needs torch.

    Raises:
        ValueError: If torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError("executing plans needs torch; install it with: pip install 'windtunnel[validation]'")


def validate_file(
    target: Annotated[
        str, typer.Argument(help="Plan file, campaign file, or a shipped campaign: cpu-gloo, single-gpu, multi-gpu.")
    ],
    profile: Annotated[
        Path | None,
        typer.Option(help="Machine profile (windtunnel profile), for a campaign its folder of profiles; default: "
                     "measured now.", show_default=False),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(help="Exit with 1 if the iteration time (of a campaign: its median error) is further off than "
                     "this, such as 20%.", show_default=False),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Executions; their median counts. Default: 5, or the campaign's.", min=1,
                                 show_default=False)
    ] = None,
    device: Device = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of a campaign's results; the same one goes on.",
                                  show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Of a campaign, instead of its own.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List a campaign's plans and run nothing.")] = False,
    write_cases: Annotated[
        Path | None, typer.Option(help="Write a campaign's results as accuracy cases.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan with this machine's calibration, execute it, and show the signed errors; or a campaign of many.

    Example: windtunnel validate plan.yaml --profile machine.json --limit 20%

    Example: windtunnel validate cpu-gloo -o out/cpu-gloo --limit 10%
    """
    require_torch()
    from validation.campaign import is_campaign

    largest = parse_share(limit) if limit is not None else None
    if is_campaign(target):
        from experiments.command_campaign import validate_campaign

        validate_campaign(
            target, profile=profile, limit=largest, rounds=rounds, output=output, cluster=cluster, dry_run=dry_run,
            write_cases=write_cases, as_json=as_json,
        )  # fmt: skip
        return
    for word, given in (("-o", output), ("--cluster", cluster), ("--dry-run", dry_run), ("--write-cases", write_cases)):
        if given:
            raise ValueError(f"{word} is for campaigns, got the plan {target}; {_campaigns()}")
    _validate_plan(Path(target), profile, largest, rounds or 5, device, as_json=as_json)


def _campaigns() -> str:
    from validation.campaign import campaign_names

    return f"shipped ones are {', '.join(campaign_names())}"


def _validate_plan(
    plan_file: Path, profile: Path | None, largest: float | None, rounds: int, device: str, *, as_json: bool
) -> None:
    from simulator.plan_file import load_plan
    from validation.calibration import profile_machine
    from validation.compare import validate_plan
    from validation.launch import WorkerError
    from validation.machine_profile import load_machine_profile

    spec, plan = load_plan(plan_file)
    problem = spec.load()
    try:
        if profile is not None:
            measured = load_machine_profile(profile)
        else:
            messages().print("measuring this machine (windtunnel profile writes a file that can be used again)")
            measured = profile_machine(problem, samples_per_rank(problem, plan), rounds=rounds, device=device)
        report = validate_plan(plan, problem, measured, rounds=rounds, device=device)
    except WorkerError as error:
        raise ValueError(f"the plan was not executed: {error}") from None
    if as_json:
        print_json(report.to_mapping())
    else:
        show(report)
    if largest is not None and abs(report.iteration.error) > largest:
        off = f"{100 * report.iteration.error:+.1f} % off"
        messages().print(f"the iteration time is {off}, the limit is {100 * largest:g} %")
        raise typer.Exit(1)


def parse_share(text: str) -> float:
    """Read a limit.

    Raises:
        ValueError: If the text is no positive percentage or share.

    >>> parse_share("20%"), parse_share("0.2")
    (0.2, 0.2)
    """
    word = text.strip()
    try:
        value = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"a limit must be like 20% or 0.2, got {text!r}")
    return value


def samples_per_rank(problem: Problem, plan: Plan) -> list[int]:
    """Return the microbatch sizes that a plan's ranks work on, ascending."""
    from simulator.plan import resolve

    found = set()
    for stage in plan.stages:
        for index, word in zip(stage.indices(), stage.sharding_per_operator(), strict=True):
            axes = resolve(word, problem.workload.operators[index])
            replicas = prod(axis.size for axis in axes if axis.split == "batch")
            found.add(-(-plan.microbatch_size // replicas))
    return sorted(found)


def show(report: ValidationReport) -> None:
    """Print a report as a table."""
    rows = [
        (each.name, f"{1e3 * each.predicted_s:.2f}", f"{1e3 * each.measured_s:.2f}", f"{100 * each.error:+.1f} %")
        for each in report.quantities
    ]
    columns = [("", "left"), ("predicted (ms)", "right"), ("measured (ms)", "right"), ("error", "right")]
    console().print(table(None, columns, rows))
    spread = f"{report.rounds} rounds, spread {100 * report.spread:.1f} %"
    console().print(f"{spread}; {100 * report.measured_share:.0f} % of the simulated compute time was measured")
    for note in report.notes:
        console().print(f"note: {note}", markup=False)
