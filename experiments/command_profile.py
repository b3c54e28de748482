"""``windtunnel profile``: times of operators, transfers and collectives on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments.command_validate import Device, require_torch
from experiments.console import Cluster, Model, RuntimeName, comma_separated, messages, print_lines, writable


def profile_machine_file(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Machine profile (.json or .yaml).")],
    cluster: Cluster = "local-cpu:1x2",
    runtime: RuntimeName = "windtunnel-executor-fp32",
    microbatches: Annotated[str, typer.Option(help="Samples per rank, comma-separated.")] = "1",
    tensor_degrees: Annotated[str, typer.Option(help="Tensor-parallel degrees, comma-separated.")] = "1",
    rounds: Annotated[int, typer.Option(help="Rounds; medians count.", min=1)] = 5,
    device: Device = "cpu",
) -> None:
    """Measure this machine with a model, inside the executor, and write what windtunnel validate predicts from.

    Example: windtunnel profile -m model.yaml -c local-cpu:1x2 --microbatches 1,2 -o machine.json
    """
    require_torch()
    from simulator.problem import ProblemSpec
    from validation.calibration import profile_machine
    from validation.launch import WorkerError
    from validation.machine_profile import save_machine_profile

    sizes = counts(microbatches, "microbatches")
    degrees = counts(tensor_degrees, "tensor-degrees")
    problem = ProblemSpec(model, cluster, runtime, max(sizes)).load()
    runs = len(sizes) * len(degrees)
    messages().print(f"measuring {runs} runs in {rounds} rounds on {problem.num_devices} processes")
    try:
        profile = profile_machine(problem, sizes, degrees, rounds=rounds, device=device)
    except WorkerError as error:
        raise ValueError(f"the machine was not measured: {error}") from None
    save_machine_profile(profile, writable(output))
    print_lines(
        f"machine           {profile.machine}\n"
        f"operators         {len(profile.operators.rows)} rows\n"
        f"communication     {len(profile.communication)} rows\n"
        f"operator factor   {profile.operator_factor:.3f} in a pipeline\n"
        f"overhead of pass  {1e3 * profile.pass_overhead_s:.3f} ms\n"
        f"fitted on         {profile.fitted_on}"
    )
    messages().print(f"profile: {output}")


def counts(text: str, what: str) -> tuple[int, ...]:
    """Read positive whole numbers.

    Raises:
        ValueError: If there is none, or something else.

    >>> counts("1,2", "microbatches")
    (1, 2)
    """
    words = comma_separated(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{what} must be positive whole numbers such as 1,2,4, got {text!r}")
    return tuple(int(word) for word in words)
