"""``windtunnel validate CAMPAIGN``: many plans, calibrated and run in interleaved rounds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from datafiles.words import counted
from experiments.campaign_files import FILES
from experiments.compare_files import refuse_foreign
from experiments.console import check_folder, messages, print_json, print_lines, print_table, writable_folder
from experiments.interrupts import INTERRUPTED, terminate_means_interrupt

if TYPE_CHECKING:
    from simulator.plan import Plan
    from validation.campaigns.definition import Campaign
    from validation.campaigns.fit import Calibration
    from validation.campaigns.result import CampaignResult, PlanOutcome
    from validation.campaigns.run import Listener
    from validation.campaigns.work import UnitWork

NONE_RAN = "no plan ran, so the limit was not met"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables from which PyTorch takes the settings of its caching allocator."""


def validate_campaign(
    campaign: Campaign,
    *,
    profile: Path | None,
    limit: float | None,
    rounds: int | None,
    output: Path | None,
    dry_run: bool,
    write_cases: Path | None,
    as_json: bool,
) -> None:
    """Run a campaign, or say what would run.

    Args:
        campaign: Which.
        profile: Of an earlier run, as ``load_calibrations`` takes it; None measures.
        limit: Exit with 1 if the median absolute error of the iteration time is above.
        rounds: Instead of the campaign's.
        output: Folder; None for ``out/validate-NAME``.
        dry_run: List plans and predicted times only.
        write_cases: File of accuracy cases to write.
        as_json: Print JSON.

    Raises:
        ValueError: If a profile or the folder is not what it must be.
        typer.Exit: With 1 above the limit, 130 when interrupted.
    """
    from validation.campaigns.definition import campaign_names
    from validation.campaigns.profiles import load_calibrations
    from validation.campaigns.run import finished_units, missing_devices
    from validation.campaigns.work import campaign_work, estimated_s
    from validation.profiling.machine_profile import other_gpu

    if write_cases is not None and campaign.name not in campaign_names():
        known = ", ".join(campaign_names())
        raise ValueError(
            f"accuracy cases are of the campaigns {known}, got {campaign.name!r}; leave --write-cases out, and hold "
            "your own runs against predictions with windtunnel predict --baseline"
        )
    work = campaign_work(campaign, with_profiling=profile is None)
    turns = rounds or campaign.options.rounds
    folder = output or Path("out") / f"validate-{campaign.name}"
    check_folder(folder)
    refuse_foreign(folder, "campaign.json", FILES)
    missing = missing_devices(campaign)
    kept = finished_units(campaign, work, folder, with_profiling=profile is None) if missing else []
    if missing and not dry_run and not kept:
        messages().print(f"skipped: the campaign {missing}; --dry-run lists its plans")
        if as_json:
            print_json({"skipped": f"the campaign {missing}"})
        if limit is not None:
            messages().print(NONE_RAN)
            raise typer.Exit(1)
        return
    seconds = estimated_s(work, campaign.device, turns)
    given = None if profile is None else load_calibrations(profile, work)  # Before hours of measuring.
    for words in dict.fromkeys(each.profile.other_versions() for each in (given or {}).values()):
        if words:
            messages().print(f"note: {words}", markup=False, soft_wrap=True)
    if dry_run:
        show_plans(campaign, work, seconds, turns, given, as_json=as_json)
        return
    if campaign.device == "cuda" and not missing:
        notes = [other_gpu(campaign.report[0].problem)]
        notes += [
            f"{name} is set to {os.environ[name]}: measured memory is with it, predicted is PyTorch's defaults'"
            for name in ALLOCATOR_VARIABLES
            if os.environ.get(name)
        ]
        for words in filter(None, notes):
            messages().print(f"note: {words}", markup=False, soft_wrap=True)
    if missing:
        messages().print(f"nothing is run, since the campaign {missing}: reported is what {folder} holds")
    else:
        _run(campaign, work, folder, turns, seconds, fresh=profile is None)
    result = _evaluated(campaign, work, folder, turns, given)
    if result is None:
        raise typer.Exit(INTERRUPTED)
    _report(result, folder, write_cases, as_json=as_json)
    reported = {each.plan.unit for each in result.outcomes}
    left_out = [unit.name for unit in work if unit.report and unit.name not in reported]
    if left_out:
        messages().print(f"no round has measured {', '.join(left_out)}; the same command goes on", soft_wrap=True)
    elif result.rounds < turns:
        messages().print(f"interrupted after {result.rounds} of {counted(turns, 'round')}; the same command goes on")
    if (left_out or result.rounds < turns) and not missing:
        raise typer.Exit(INTERRUPTED)
    if limit is not None and not result.median_absolute <= limit:
        found = f"the median error is {100 * result.median_absolute:.1f} %, the limit is {100 * limit:g} %"
        messages().print(found if result.errors() else NONE_RAN)
        raise typer.Exit(1)


def _run(
    campaign: Campaign, work: Sequence[UnitWork], folder: Path, rounds: int, seconds: float, *, fresh: bool
) -> None:
    """Run what the folder lacks, until it is interrupted."""
    from validation.campaigns.run import finished_rounds, prepare_folder, run_campaign
    from validation.execution.launch import WorkerError

    writable_folder(folder)
    prepare_folder(campaign, folder, with_profiling=fresh)
    before = finished_rounds(campaign, work, folder, with_profiling=fresh)
    left_s = seconds * max(0, rounds - before) / rounds
    jobs = sum(len(unit.jobs) for unit in work)
    messages().print(
        f"{campaign.name}: {counted(jobs, 'run')} a round, {counted(rounds, 'round')}"
        + (f", {before} of them kept from an earlier call" if before else "")
        + f"; about {left_s / 60:.1f} minutes. Results: {folder}"
    )
    try:
        with terminate_means_interrupt(), campaign_progress(campaign.name) as listener:
            run_campaign(campaign, work, folder, rounds=rounds, with_profiling=fresh, listener=listener)
    except KeyboardInterrupt:
        pass  # What is finished is reported.
    except WorkerError as error:
        raise ValueError(f"the campaign stopped: {error}; what is finished is kept in {folder}") from None


def _evaluated(
    campaign: Campaign,
    work: Sequence[UnitWork],
    folder: Path,
    rounds: int,
    known: Mapping[str, Calibration] | None,
) -> CampaignResult | None:
    """Return what finished rounds say, or the finished models of the first; None if there are none.

    Args:
        campaign, work, folder, rounds: As measured.
        known: Calibrations of an earlier run, by model; None fits them.
    """
    from validation.campaigns.fit import fit_campaign
    from validation.campaigns.result import evaluate
    from validation.campaigns.run import finished_units, load_rounds, measured_on

    fresh = known is None
    units = finished_units(campaign, work, folder, with_profiling=fresh)
    if not units:
        messages().print("interrupted before a model was finished; the same command goes on where this one stopped")
        return None
    machine, date = measured_on(campaign, folder, with_profiling=fresh)
    turns = list(load_rounds(campaign, units, folder, with_profiling=fresh, limit=rounds))
    calibrations = known or fit_campaign(units, turns, statistic=campaign.options.statistic)
    return evaluate(campaign, units, turns, calibrations, machine, date)


@contextmanager
def campaign_progress(title: str) -> Iterator[Listener]:
    """Show which part runs and how long it may take; yields a listener for ``run_campaign``."""
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=messages(), transient=True, disable=not messages().is_terminal) as bar:
        task = bar.add_task(escape(title), total=None)

        def listen(number: int, part: str, done: int, total: int) -> None:
            bar.update(task, description=escape(f"round {number}: {part}"), completed=done, total=total)

        yield listen


def show_plans(
    campaign: Campaign,
    work: Sequence[UnitWork],
    seconds: float,
    rounds: int,
    given: Mapping[str, Calibration] | None,
    *,
    as_json: bool,
) -> None:
    """Print what would run: every plan with its predicted time, and whether it is said to fit.

    Args:
        campaign, work: What would run.
        seconds, rounds: How long that takes, and how often.
        given: By unit, a profile to predict with; None for modelled hardware.
        as_json: Print JSON, for scripts.
    """
    from simulator.simulate import simulate
    from validation.campaigns.run import missing_devices

    rows = []
    for unit in work:
        profiling = [run.job for run in (*unit.profiling.profiling, *unit.alone, *unit.halves)]
        named = [("profiling", f"{unit.name} {_profiling_words(job.plan)}", job) for job in profiling]
        named += [("profiling", f"{unit.name} optimizer step", unit.profiling.optimizer)]
        named += [("calibration", plan.name, job) for plan, job in unit.calibration]
        named += [("report", plan.name, job) for plan, job in unit.report]
        for part, name, job in named:
            problem = job.problem if given is None else given[unit.name].apply(job.problem, job.plan)
            result = simulate(job.plan, problem, engine="compiled")
            peak = result.peak_allocated_bytes
            rows.append((part, name, len(job.plan.devices), result.iteration_time_s, peak, result.fits))
    if as_json:
        keys = ("part", "plan", "devices", "predicted_s", "predicted_allocated_bytes", "predicted_fits")
        print_json(
            {
                "campaign": campaign.name,
                "rounds": rounds,
                "estimated_s": seconds,
                "predicted_by": "modelled hardware" if given is None else "profile",
                "runs": [dict(zip(keys, row, strict=True)) for row in rows],
            }
        )
        return
    cells = [
        (part, name, str(devices), f"{1e3 * time_s:.1f}", f"{peak / 2**30:.2f}", "yes" if fits else "NO")
        for part, name, devices, time_s, peak, fits in rows
    ]
    columns = [("", "left"), ("run", "left"), ("devices", "right"), ("predicted (ms)", "right"),
               ("peak (GiB)", "right"), ("fits", "left")]  # fmt: skip
    title = f"{campaign.name} on {campaign.cluster}, {'modelled hardware' if given is None else 'by the profile'}; "
    title += "nothing is run"
    print_table(title, columns, cells)
    missing = missing_devices(campaign)
    print_lines(
        f"{counted(len(rows), 'run')} a round, {counted(rounds, 'round')}, about {seconds / 60:.1f} minutes"
        + (f"\nhere it would be skipped: {missing}" if missing else "")
    )


def _profiling_words(plan: Plan) -> str:
    words = "in halves " if plan.schedule in ("zb-h1",) else ""
    words += "recomputed " if any(stage.recompute for stage in plan.stages) else ""
    return f"operators {words}{plan.num_microbatches}x{plan.microbatch_size} on {len(plan.devices)}"


def _report(result: CampaignResult, folder: Path, write_cases: Path | None, *, as_json: bool) -> None:
    from experiments.campaign_files import headline, misses, write_campaign

    written = write_campaign(result, folder)
    if write_cases is not None:
        from experiments.campaign_cases import write_case_file

        write_case_file(result, write_cases)
        written.append(write_cases)
    if as_json:
        print_json({"summary": result.summary(), "plans": [each.to_mapping() for each in result.outcomes]})
        return
    rows = []
    for each in result.outcomes:
        if each.out_of_memory:
            rows.append((each.plan.name, f"{1e3 * each.iteration.predicted_s:.1f}", "out of memory", "", "", ""))
            continue
        time = each.iteration
        rows.append(
            (each.plan.name, f"{1e3 * time.predicted_s:.1f}", f"{1e3 * time.measured_s:.1f}",
             f"{100 * time.error:+.1f} %", f"{100 * each.spread:.0f} %", misses(each))
        )  # fmt: skip
    columns = [("plan", "left"), ("predicted (ms)", "right"), ("measured (ms)", "right"), ("error", "right"),
               ("spread", "right"), ("largest misses (ms)", "left")]  # fmt: skip
    print_table(f"{result.campaign.name} on {result.machine}", columns, rows)
    if len(result.outcomes) == 1 and result.errors():
        _show_parts(result.outcomes[0])
    print_lines(headline(result))
    messages().print("written: " + ", ".join(str(path) for path in written), soft_wrap=True)


def _show_parts(outcome: PlanOutcome) -> None:
    """Print what one plan's time is made of: passes of every stage; classes and causes of the busiest device."""
    rows = [(each.name, each.predicted_s, each.measured_s) for each in outcome.quantities[1:]]
    if outcome.splits:
        busiest = outcome.splits[0]
        for title, parts in (("", busiest.by_class()), ("cause ", busiest.by_cause())):
            rows += [(f"device {busiest.device}: {title}{word}", old, new) for word, old, new in parts]
    cells = [
        (name, f"{1e3 * predicted:.2f}", f"{1e3 * measured:.2f}", f"{1e3 * (predicted - measured):+.2f}")
        for name, predicted, measured in rows
        if predicted or measured
    ]
    columns = [("", "left"), ("predicted (ms)", "right"), ("measured (ms)", "right"), ("difference", "right")]
    print_table(None, columns, cells)
