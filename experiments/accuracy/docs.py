"""``docs/accuracy.md``: every group, good or bad, beside its target and its peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datafiles.words import counted
from datafiles.writer import write_text_atomically
from experiments.accuracy.baseline import load_baseline
from experiments.accuracy.errors import DISTINGUISHABLE
from experiments.accuracy.groups import Group
from experiments.accuracy.groups import groups as known_groups
from experiments.accuracy.plots import plot_group
from experiments.accuracy.run import GroupReport, Outcome
from hardware_models.gpus import gpu_names

INTRODUCTION = f"""# Accuracy

Every measured run that states its plan is simulated and compared. `windtunnel accuracy --docs docs/accuracy.md` makes
this page; groups marked * need a copy of a public data set (`--data DIR`).

- *Errors* are signed and relative, `(predicted - measured) / measured`. The tables give the mean of their absolute
  values, the median, the bias (mean of the signed errors) and the worst case.
- *Fits* is the share of runs whose "out of memory or not" is predicted right.
- *Rank* is over pairs of plans for one problem (model, machine and batch; times per sample where a source varies the
  batch) whose measured times differ by more than {100 * DISTINGUISHABLE:.0f} % of the shorter: the share of them
  ordered right, less the share ordered wrong, of so many pairs in all problems of the group.

No row that a constant was fitted on is reported: `windtunnel accuracy` refuses it.
[What had been seen](#what-had-been-seen) says which mechanisms and choices came after these errors were known: errors
on runs nobody here has seen may be larger. [Where runs are missed](residuals.md), and by what;
[costs](costs.md) of collectives, layers and overlap.
"""

SEEN = """## What had been seen

*Mechanisms added after the residuals of these groups were known*, each from a published source and none tuned on their
rows:

- kernels: flash attention by generation and its Triton port, how many of its tiles there are, TensorFlow's one kernel
  per operation, the dispatch of an unfused softmax's operations and where Megatron's fused one stops, torch's
  gradient of the loss, Adam in plain operations, its flat tensors, additions to gradient buffers and where residuals
  branch off, RTX TITAN's products, the power limit of H100s;
- communication: gathers without prefetch, transfers in parts, copies of gradients, what a device stands still around a
  collective between operators, each protocol's own share of NVLink over several nodes, the one communicator of FSDP;
- machines: the T4's curves and links, the A100's memory fractions and TF32 products, the clocks of the DGX-2's V100;
- trainers: Composer's metrics;
- memory: what FSDP and reentrant checkpointing hold, in the order of the host ([memory](memory.md));
- Galvatron's runs: whole embeddings, tied weights reduced by each module, microbatches by the samples of a replica and
  at most eight of them, memory in steps of 1 MiB, sharded layers gathered once more where they are computed again.

*Choices that had measured rows in view*:

- Galvatron's pipelines sum tied weights over stages, which nothing in its later release does
  ([Galvatron](galvatron.md)).
- How vTrain's rows are read, and that a host which never runs ahead hides a hand-over behind the operator that waits
  for it ([where runs are missed](residuals.md)).
- The 2 GB outside the allocator in AMP's runs, which decide one of its five runs out of memory ([AMP](amp.md)).
- Of the constants that Galvatron's release has for memory outside the layers, those of BERT alone: its shipped plans
  come out with them, and printed batches of other models do not ([Galvatron](galvatron.md)).
- Galvatron's variants without checkpointing cut batches by the formulas of 2022, and BMW by those of 2023.
- That DAPPLE's BERT-48 has no word head: its paper says SQuAD, and Table 5's peaks, which agree, and times, which are
  further off for it, were in view ([where runs are missed](residuals.md)).
- Gathers of Wide-ResNet's channels are joined in three copies. Its smallest model's operators show it; it was looked
  for when the larger ones' runs came out 14 % too short ([model](model.md)).
- Fits to whole iterations count runs far off less than squared ([calibration](calibration.md)).
"""


def write_docs(reports: Sequence[GroupReport], outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the page, and one picture per group into a folder of the page's name beside it.

    Args:
        reports: All groups; those that did not run are shown with their accepted figures.
        outcomes: The cases.
        path: ``docs/accuracy.md``.
    """
    pictures = path.with_suffix("")
    lines = [INTRODUCTION, *_table(reports), "", *uncovered_words(outcomes, reports), ""]
    lines += ["## Peers on the same runs", "", *_peers(reports), "", SEEN]
    for report in reports:
        group = known_groups()[report.name]
        lines += [f"## {group.title.strip()}", "", f"{group.note[0].upper()}{group.note[1:]}."]
        if report.reasons:
            skipped = counted(report.num_skipped, "row") if report.num_skipped else "all rows"
            lines.append(f"Skipped: {skipped} ({'; '.join(report.reasons)}).")
        lines.append("")
        if plot_group(report, outcomes, pictures / f"{report.name}.png"):
            lines += [f"![predicted against measured]({pictures.name}/{report.name}.png)", ""]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, "\n".join(lines).rstrip() + "\n")


def uncovered_words(outcomes: Sequence[Outcome], reports: Sequence[GroupReport]) -> list[str]:
    """Return which shipped GPU types none of the cases ran on, in words.

    A run without all groups knows the cases that ran alone, and says so.
    """
    covered = {name for each in outcomes for name in each.case.problem().gpu_types}
    missing = [name for name in gpu_names() if name not in covered]
    skipped = [report.name for report in reports if report.num_run == 0]
    if not missing:
        return ["Every shipped GPU type has a measured run above."]
    words = (
        "No measured run above is on these GPU types, so nothing says how far predictions for them are off: "
        f"{', '.join(missing)}."
    )
    return [words + (f" (Groups not run now may cover some: {', '.join(skipped)}.)" if skipped else "")]


def _table(reports: Sequence[GroupReport]) -> list[str]:
    lines = [
        "| group | runs | time error | target | median | bias | worst | peak memory | fits | rank |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        group = known_groups()[report.name]
        lines.append("| " + " | ".join(_cells(report, group)) + " |")
    return lines


def _cells(report: GroupReport, group: Group) -> list[str]:
    title = group.title.replace("  ", "&nbsp;&nbsp;") + (" *" if group.needs_data else "")
    target = percent(group.target_time) if group.target_time is not None else ""
    if report.num_run == 0:
        accepted = load_baseline().groups.get(report.name)
        if accepted is None:
            return [title, "0", "not run", target, *[""] * 6]
        return [
            title,
            f"({accepted.num_run})",
            f"({percent(accepted.time_mean_absolute)})",
            target,
            f"({percent(accepted.time_median_absolute)})",
            f"({percent(accepted.time_bias)})",
            "not run now; accepted figures",
            f"({percent(accepted.memory_mean_absolute)})" if accepted.memory_mean_absolute is not None else "",
            f"({percent(accepted.memory_agreement)})" if accepted.memory_agreement is not None else "",
            f"({accepted.rank_correlation:.3f})" if accepted.rank_correlation is not None else "",
        ]
    time = report.time
    return [
        title,
        str(report.num_run),
        percent(time.mean_absolute) if time else "",
        target,
        percent(time.median_absolute) if time else "",
        f"{100 * time.bias:+.1f} %" if time else "",
        f"{100 * time.worst[1]:+.1f} % ({time.worst[0]})" if time else "",
        f"{percent(report.memory.mean_absolute)} ({100 * report.memory.bias:+.1f} %)" if report.memory else "",
        f"{report.num_fits_right} of {report.num_fits_asked}" if report.num_fits_asked else "",
        f"{report.rank.correlation:.3f} of {counted(report.rank.num_pairs, 'pair')}" if report.rank else "",
    ]


def _peers(reports: Sequence[GroupReport]) -> list[str]:
    lines = ["| group | ours | peer | its error | |", "|---|---|---|---|---|"]
    for report in reports:
        group = known_groups()[report.name]
        ours = percent(report.time.mean_absolute) if report.time else ""
        for peer in group.peers:
            lines.append(
                f"| {group.title.strip()} | {ours} | {peer.name} | {percent(peer.mean_absolute_error)} | {peer.note} |"
            )
    return lines


def percent(value: float | None) -> str:
    """Return a share as text.

    >>> percent(0.0425), percent(None)
    ('4.2 %', '')
    """
    return "" if value is None else f"{100 * value:.1f} %"
