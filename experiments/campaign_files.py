"""What a campaign's output folder holds: table, summary, plot, traces, profiles."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datafiles.words import counted
from datafiles.writer import dump_json, write_bytes_atomically, write_text_atomically
from simulator.reports.figures import CYCLE

if TYPE_CHECKING:
    from validation.campaigns.result import CampaignResult, PlanOutcome

INK, MUTED = "#1f2933", "#7b8794"
BAND = 0.10
MARKERS = ("o", "s", "^", "D")
"""The next where colours begin anew."""

FILES = ("summary.md", "results.csv", "results.json", "predicted-vs-measured.png")
"""What a reader opens first."""


def write_campaign(result: CampaignResult, folder: Path) -> list[Path]:
    """Write everything; return the files that a reader opens first."""
    from validation.campaigns.profiles import save_calibration

    for unit, calibration in result.calibrations.items():
        save_calibration(calibration, folder / "profiles", unit)
    written = [folder / name for name in FILES]
    mapping = {"summary": result.summary(), "plans": [each.to_mapping() for each in result.outcomes]}
    write_text_atomically(written[0], summary_text(result))
    write_text_atomically(written[1], table_text(result))
    write_text_atomically(written[2], dump_json(mapping))
    write_bytes_atomically(written[3], plot(result))
    write_traces(result, folder / "traces")
    return written


def write_traces(result: CampaignResult, folder: Path) -> None:
    """Write one trace per plan: the predicted timeline above the measured one."""
    from validation.campaigns.combined_trace import write_combined_trace
    from validation.campaigns.definition import file_stem

    folder.mkdir(exist_ok=True)
    for each in result.outcomes:
        actions, spans = each.measured[0].traced
        if actions:
            path = folder / f"{file_stem(each.plan.name)}.json.gz"
            devices = sorted(each.plan.plan.devices)
            write_combined_trace(each.result, each.plan.problem.workload, devices, actions, spans, path)


def table_text(result: CampaignResult) -> str:
    """Return the table of plans as CSV."""
    from validation.campaigns.error_split import CLASSES

    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    columns = [
        "plan", "unit", "predicted_s", "measured_s", "error", "spread", "predicted_allocated_bytes",
        "measured_allocated_bytes", "predicted_reserved_bytes", "measured_reserved_bytes", "out_of_memory",
    ]  # fmt: skip
    parts = [f"{side}_{word.replace(' ', '_')}_s" for word in CLASSES for side in ("predicted", "measured")]
    writer.writerow([*columns, *parts])
    for each in result.outcomes:
        memory = each.memory
        row: list[Any] = [
            each.plan.name,
            each.plan.unit,
            each.iteration.predicted_s,
            each.iteration.measured_s or None,
            None if each.out_of_memory else each.iteration.error,
            each.spread,
            memory.predicted_allocated,
            memory.measured_allocated,
            memory.predicted_reserved,
            memory.measured_reserved,
            each.out_of_memory,
        ]
        for word in CLASSES:
            row += [*each.part(word)] if each.splits else [None, None]
        writer.writerow(["" if cell is None else cell for cell in row])
    return stream.getvalue()


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share in words.

    >>> percent(0.0512), percent(None)
    ('5.1 %', 'not measured')
    """
    return "not measured" if value is None else f"{100 * value:.{digits}f} %"


def headline(result: CampaignResult) -> str:
    """Return the campaign's figures in one line."""
    summary = result.summary()
    rounds = counted(summary["rounds"], "round")
    if not result.errors():
        text = f"{counted(summary['plans'], 'plan')}, {rounds}: out of memory"
    elif summary["plans"] == 1:
        text = f"{rounds}: iteration time off by {percent(summary['bias'])}"
    else:
        words = ("median", "mean", "worst")
        errors = ", ".join(f"{percent(summary[f'{word}_absolute_error'])} ({word})" for word in words)
        text = (
            f"{summary['plans']} plans, {rounds}: iteration time off by {errors}, bias {percent(summary['bias'])}; "
            f"{summary['ranked_right']} of {counted(summary['ranked_pairs'], 'pair')} ranked right"
        )
    if result.campaign.device == "cpu":
        text += f"; passes took {summary['disturbance']:.2f} times their processor time"
    if summary["mean_absolute_allocated_error"] is not None:
        text += (
            f"; peak allocated off by {percent(summary['mean_absolute_allocated_error'])}, reserved by "
            f"{percent(summary['mean_absolute_reserved_error'])} (means)"
        )
    return text


def summary_text(result: CampaignResult) -> str:
    """Return the summary as Markdown."""
    campaign, margin = result.campaign, result.campaign.options.ranking_margin
    lines = [
        f"# Campaign {campaign.name}",
        "",
        f"{campaign.description}. Machine: {result.machine}.",
        "",
        f"{headline(result)}. A pair counts where times per sample differ by more than {percent(margin, 0)}.",
        "",
        "Largest misses are those of the busiest device.",
        "",
        "| plan | predicted (ms) | measured (ms) | error | spread of rounds | largest misses (ms) |",
        "|---|---|---|---|---|---|",
    ]
    for each in result.outcomes:
        if each.out_of_memory:
            fits = "fits" if each.result.fits else "does not fit"
            lines.append(
                f"| {each.plan.name} | {1e3 * each.iteration.predicted_s:.1f} | out of memory | predicted: {fits} | | |"
            )
            continue
        time = each.iteration
        cells = f"{1e3 * time.predicted_s:.1f} | {1e3 * time.measured_s:.1f} | {100 * time.error:+.1f} %"
        lines.append(f"| {each.plan.name} | {cells} | {percent(each.spread)} | {misses(each)} |")
    if result.ranking.wrong:
        lines += ["", "Ranked wrong: " + "; ".join(f"{a} and {b}" for a, b in result.ranking.wrong) + "."]
    lines += ["", "## Calibration", ""]
    for unit, calibration in result.calibrations.items():
        profile = calibration.profile
        lines.append(
            f"- {unit}: {counted(len(profile.operators.rows), 'row')}; operators x {profile.operator_factor:.3f} in a "
            f"pipeline, {1e3 * profile.pass_overhead_s:+.2f} ms per pass, "
            f"{1e3 * calibration.collective_overhead_s:.2f} ms per collective, {percent(calibration.company_cost)} of "
            f"an operator's time due to company. Fitted on: {profile.fitted_on}."
        )
    for kind, (computation, communication) in result.overlap.items():
        lines.append(f"- While both run, computation is {computation:.2f} and {kind} {communication:.2f} times slower.")
    for each in result.outcomes:
        lines += _details(each)
    return "\n".join(lines) + "\n"


def misses(outcome: PlanOutcome, count: int = 2) -> str:
    """Return the classes that the error of a plan comes from most, in ms."""
    classes = sorted(outcome.splits[0].by_class(), key=lambda row: -abs(row[1] - row[2]))
    return ", ".join(f"{word} {1e3 * (predicted - measured):+.1f}" for word, predicted, measured in classes[:count])


def _details(outcome: PlanOutcome) -> list[str]:
    if not outcome.splits:
        return []
    split = outcome.splits[0]
    lines = ["", f"## {outcome.plan.name}", "", f"Device {split.device}, in ms:", ""]
    lines += ["| | predicted | measured | difference |", "|---|---|---|---|"]
    for rows in (split.by_class(), split.by_cause()[:3]):
        for word, predicted, measured in rows:
            if predicted or measured:
                cells = f"{1e3 * predicted:.2f} | {1e3 * measured:.2f} | {1e3 * (predicted - measured):+.2f}"
                lines.append(f"| {word} | {cells} |")
    for each in outcome.quantities[1:]:
        cells = f"{1e3 * each.predicted_s:.2f} | {1e3 * each.measured_s:.2f} | {100 * each.error:+.1f} %"
        lines.append(f"| {each.name} | {cells} |")
    memory = outcome.memory
    if memory.measured_allocated is not None and memory.measured_reserved is not None:
        for word, predicted_bytes, measured_bytes in (
            ("peak allocated (MiB)", memory.predicted_allocated, memory.measured_allocated),
            ("peak reserved (MiB)", memory.predicted_reserved, memory.measured_reserved),
        ):
            error = predicted_bytes / measured_bytes - 1
            lines.append(
                f"| {word} | {predicted_bytes / 2**20:.0f} | {measured_bytes / 2**20:.0f} | {100 * error:+.1f} % |"
            )
    return lines + [f"Note: {note}" for note in outcome.measured[0].notes]


def plot(result: CampaignResult) -> bytes:
    """Return a picture of predicted against measured times: the diagonal, a band of ten percent, a colour per unit."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from experiments.accuracy.plots import scale_by_log

    ran = [each for each in result.outcomes if not each.out_of_memory]
    figure = Figure(figsize=(6.4, 6.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times = np.array([(each.iteration.measured_s, each.iteration.predicted_s) for each in ran]).reshape(-1, 2) * 1e3
    if len(ran):
        low, high = float(times.min()) / 1.3, float(times.max()) * 1.3
        line = np.array([low, high])
        axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), color="#e3f0fb", linewidth=0)
        axes.plot(line, line, color=MUTED, linewidth=1.0)
        for number, unit in enumerate(dict.fromkeys(each.plan.unit for each in ran)):
            own = np.array([each.plan.unit == unit for each in ran])
            turn, place = divmod(number, len(CYCLE))
            axes.plot(
                times[own, 0], times[own, 1], MARKERS[turn % len(MARKERS)], markersize=5, alpha=0.75, markeredgewidth=0,
                label=unit, color=CYCLE[place],
            )  # fmt: skip
        scale_by_log(axes, low, high)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    axes.set_xlabel("measured iteration time (ms)", color=INK)
    axes.set_ylabel("predicted iteration time (ms)", color=INK)
    title = f"{result.campaign.name}, {result.machine} (band: {100 * BAND:.0f} %)"
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, metadata={"Software": None})
    return stream.getvalue()
