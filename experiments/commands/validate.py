"""``windtunnel validate``: a plan simulated with this machine's calibration, then executed; or a campaign of many."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from experiments.console import AsJson, all_writable

DEVICES = ("cpu", "cuda")
Device = Annotated[str, typer.Option(help="cpu (gloo) or cuda (nccl).")]
DeviceOfPlan = Annotated[
    str | None, typer.Option(help="Of a plan: cpu (gloo, the default) or cuda (nccl).", show_default=False)
]


def require_torch() -> None:
    """Refuse, in words, what needs torch.

    Raises:
        ValueError: If torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError(
            "executing plans needs torch; install it: pip install 'windtunnel[validation]' (in a clone: make setup)"
        )


def check_device(device: str) -> None:
    """Refuse a device that plans cannot be executed on.

    Raises:
        ValueError: If it is none of ``DEVICES``.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")


def validate_file(
    target: Annotated[
        str, typer.Argument(help="Plan file, campaign file, or a shipped campaign: cpu-gloo, single-gpu, "
                                 "single-gpu-families, single-gpu-convolutions, multi-gpu.")
    ],
    profile: Annotated[
        Path | None,
        typer.Option(help="Folder profiles/ of an earlier run's output, or of a plan a machine profile (windtunnel "
                     "profile); default: measured now.", show_default=False),
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
    device: DeviceOfPlan = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the results; the same one goes on.",
                                  show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Of a campaign, instead of its own.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run, and run nothing.")] = False,
    write_cases: Annotated[
        Path | None, typer.Option(help="Write a campaign's results as accuracy cases.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a plan with this machine's calibration, execute it, and show the signed errors; or a campaign of many.

    The plan must be for a machine and a runtime that are here, such as -c local-cpu:1x2 -r windtunnel-executor-fp32 of
    windtunnel plan.

    Example: windtunnel validate plan.yaml --profile machine.json --limit 20%

    Example: windtunnel validate cpu-gloo -o out/cpu-gloo --limit 10%
    """
    require_torch()
    check_device(device or DEVICES[0])
    from experiments.commands.campaign import validate_campaign
    from simulator.plan_file import load_plan
    from validation.campaigns.definition import campaign_names, is_campaign, load_campaign
    from validation.campaigns.plan_campaign import plan_campaign
    from validation.campaigns.run import missing_devices

    largest = parse_share(limit) if limit is not None else None
    all_writable(read=[Path(target)], data=[write_cases])
    is_word = not (Path(target).suffix or Path(target).exists())  # no file was meant
    if is_word or is_campaign(target):
        campaign = load_campaign(target, cluster=cluster)
        if device is not None:
            raise ValueError(f"--device is for plans, got the campaign {target}, which says its own: {campaign.device}")
        validate_campaign(
            campaign, profile=profile, limit=largest, rounds=rounds, output=output, dry_run=dry_run,
            write_cases=write_cases, as_json=as_json,
        )  # fmt: skip
        return
    for word, given in (("--cluster", cluster), ("--write-cases", write_cases)):
        if given:
            known = ", ".join(campaign_names())
            raise ValueError(f"{word} is for campaigns, got the plan {target}; shipped ones are {known}")
    spec, plan = load_plan(target)
    campaign = plan_campaign(spec, plan, name=Path(target).stem, device=device or DEVICES[0])
    missing = missing_devices(campaign)
    if missing and not dry_run:
        raise ValueError(f"{missing}; --dry-run lists what would run")
    validate_campaign(
        campaign,
        profile=profile,
        limit=largest,
        rounds=rounds,
        output=output or Path("out") / f"validate-{campaign.name}-{campaign.fingerprint[:8]}",
        dry_run=dry_run,
        write_cases=None,
        as_json=as_json,
    )


def parse_share(text: str) -> float:
    """Read a limit.

    Raises:
        ValueError: If the text is no positive percentage, nor a share of at most 1 (10 would be 1000 %).

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
    if value > 1 and not word.endswith("%"):
        raise ValueError(f"a limit above 1 must be a percentage, got {text!r}; write {word}% if that is meant")
    return value
