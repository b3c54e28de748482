"""``windtunnel plan``: a plan with the same degrees everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from datafiles.words import counted
from experiments.console import (
    DEFAULT_RUNTIME,
    AsJson,
    Cluster,
    MemoryLimit,
    Model,
    Profile,
    RuntimeName,
    all_writable,
    console,
    messages,
    print_json,
    print_lines,
    problem_spec,
)

PLAN = "Plan"

MICROBATCHES_PER_STAGE = 8
"""Default batch: that many microbatches per pipeline stage, so that the bubble is about an eighth."""


def plan(
    model: Model,
    cluster: Cluster,
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree.", rich_help_panel=PLAN)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.", rich_help_panel=PLAN)] = 1,
    dp: Annotated[
        int | None,
        typer.Option(
            help="Data-parallel replicas; default: as many as the cluster has GPUs for.",
            show_default=False,
            rich_help_panel=PLAN,
        ),
    ] = None,
    microbatch: Annotated[int, typer.Option(help="Samples per replica.", rich_help_panel=PLAN)] = 1,
    recompute: Annotated[str, typer.Option(help="none, full or selective.", rich_help_panel=PLAN)] = "none",
    zero: Annotated[
        int,
        typer.Option(
            help="ZeRO level, 0-3. Under pytorch-fsdp2 and composer-fsdp (keeps_root_gathered) 2 is FSDP's: 3 whose "
            "parameters stay gathered.",
            rich_help_panel=PLAN,
        ),
    ] = 0,
    gradient_reduction: Annotated[
        str | None,
        typer.Option(
            help="Gradients are reduced every microbatch or after the last; default: every with ZeRO 2 and 3, else as "
            "the runtime.",
            show_default=False,
            rich_help_panel=PLAN,
        ),
    ] = None,
    overlap_gradient_sync: Annotated[
        bool | None,
        typer.Option(
            help="Gradients travel while the last backward pass runs, if the runtime reduces them in buckets or units; "
            "default: as the runtime.",
            show_default=False,
            rich_help_panel=PLAN,
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Megatron's, with tp.", rich_help_panel=PLAN)
    ] = False,
    schedule: Annotated[
        str, typer.Option(help="1f1b, gpipe, interleaved (needs --chunks) or zb-h1.", rich_help_panel=PLAN)
    ] = "1f1b",
    chunks: Annotated[int, typer.Option(help="interleaved: stages per pipeline rank.", rich_help_panel=PLAN)] = 1,
    smaller_last: Annotated[
        bool, typer.Option("--smaller-last", help="The last microbatch takes what is left.", rich_help_panel=PLAN)
    ] = False,
    runtime: RuntimeName = DEFAULT_RUNTIME,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            "-b",
            help=f"Samples per iteration; default: {MICROBATCHES_PER_STAGE} microbatches per stage.",
            show_default=False,
            rich_help_panel="Problem",
        ),
    ] = None,
    memory_limit: MemoryLimit = None,
    profile: Profile = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Plan file; else it is printed.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a plan from degrees that hold for the whole model, and say what the estimate thinks of it.

    Example: windtunnel plan --model gpt3-175b --cluster a100-80g-dgx:8x8 --tp 8 --pp 8
    --recompute selective -o plan.yaml
    """
    from datafiles.writer import dump_yaml
    from experiments.notes import show_notes
    from searchers.plan_words import describe_plan
    from simulator.closed_forms.estimate import estimate
    from simulator.plan import plan_to_mapping
    from simulator.plan_file import plan_document, save_plan
    from simulator.remarks import remarks
    from simulator.result import format_bytes, format_s
    from simulator.uniform import uniform_plan
    from simulator.validate import validate

    spec = problem_spec(
        model=model,
        cluster=cluster,
        runtime=runtime,
        global_batch=1 if global_batch is None else global_batch,
        memory_limit=memory_limit,
        profile=profile,
    )
    all_writable(read=spec.files, data=[output])
    problem = spec.load()
    if dp is None:
        dp = max(1, problem.num_devices // max(1, tp * pp))
    if global_batch is None:
        global_batch = max(1, dp) * max(1, microbatch) * max(1, pp) * MICROBATCHES_PER_STAGE
        spec = replace(spec, global_batch=global_batch)
        problem = replace(problem, global_batch=global_batch, spec=spec)
    built = uniform_plan(
        problem,
        tp=tp,
        pp=pp,
        dp=dp,
        microbatch=microbatch,
        recompute=recompute,
        zero=zero,
        sequence_parallel=sequence_parallel,
        schedule=schedule,
        chunks=chunks,
        gradient_reduction=gradient_reduction,
        overlap_gradient_sync=overlap_gradient_sync,
        smaller_last=smaller_last,
    )
    validate(built, problem)
    if sequence_parallel and tp == 1:
        messages().print("--sequence-parallel changes nothing here: --tp 1 splits no layer over GPUs")
    if zero and dp == 1:
        messages().print("--zero changes nothing here: --dp 1 has no replicas to shard states over")
    by_unit = problem.runtime.reduces_by_unit
    by_unit |= any(axis.zero == 3 for stage in built.stages for _, axes in stage.shardings for axis in axes)
    if overlap_gradient_sync and dp == 1:
        messages().print("--overlap-gradient-sync changes nothing here: --dp 1 has no gradients to reduce")
    elif overlap_gradient_sync and not by_unit and problem.runtime.gradient_bucket_bytes is None:
        messages().print(
            f"--overlap-gradient-sync changes nothing here: {problem.runtime.name} reduces all gradients at once, when "
            "the last is there (gradient_bucket_bytes: null); megatron-deepspeed and pytorch-ddp have buckets",
            soft_wrap=True,
        )
    notes = remarks(built, problem)
    show_notes(notes)
    found = estimate(built, problem)
    if output is not None:
        save_plan(output, spec, built, fingerprint=problem.workload.fingerprint)
    if as_json:
        summary = {
            "plan": plan_to_mapping(built),
            "plan_hash": built.canonical_hash(problem.workload),
            "num_gpus_used": len(built.devices),
            "num_gpus": problem.num_devices,
            "estimated_iteration_time_s": found.iteration_time_s,
            "estimated_peak_bytes": list(found.peak_bytes),
            "estimated_fits": found.fits,
            "estimated_host_binds": found.host_binds,
            "notes": list(notes),
            "output": str(output) if output is not None else None,
        }
        print_json(summary)
        return
    if output is None:
        document = plan_document(spec, built, fingerprint=problem.workload.fingerprint)
        print_lines(dump_yaml(document))
    tokens = problem.workload.tokens_per_sample
    samples = counted(global_batch, "sample") + (f" of {tokens:,} tokens" if tokens else "")
    fits = "fits" if found.fits else "does NOT fit"
    if found.host_binds:
        fits += ", the host takes longer than this"
    words = (
        f"{describe_plan(built)}, {gpus_words(tp, pp, dp, problem.num_devices)}: "
        f"about {format_s(found.iteration_time_s)} for {samples}, "
        f"peak {format_bytes(max(found.peak_bytes))}, {fits} (estimate; windtunnel simulate knows better)"
    )
    if output is not None:
        console().print(f"{output}: {words}", markup=False, soft_wrap=True)
    else:
        messages().print(words, soft_wrap=True)


def gpus_words(tp: int, pp: int, dp: int, num_gpus: int) -> str:
    """Return how many of a cluster's GPUs a plan uses, and what would use all.

    >>> gpus_words(2, 2, 2, 8), gpus_words(2, 2, 1, 8)
    ('on all 8 GPUs', 'on 4 of 8 GPUs (--dp 2 would use all)')
    >>> gpus_words(3, 1, 2, 8)
    'on 6 of 8 GPUs (tp * pp must divide 8 to use all, got 3)'
    """
    used = tp * pp * dp
    if used == num_gpus:
        return f"on all {num_gpus} GPUs" if num_gpus > 1 else "on the one GPU"
    if num_gpus % (tp * pp):
        remedy = f"tp * pp must divide {num_gpus} to use all, got {tp * pp}"
    else:
        remedy = f"--dp {num_gpus // (tp * pp)} would use all"
    return f"on {used} of {num_gpus} GPUs ({remedy})"
