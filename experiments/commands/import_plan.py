"""``windtunnel import-plan``: a plan that a published system wrote, as a plan file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from datafiles.names import nearest
from experiments.console import (
    DEFAULT_RUNTIME,
    AsJson,
    Cluster,
    GlobalBatch,
    MemoryLimit,
    Model,
    Profile,
    RuntimeName,
    all_writable,
    console,
    print_json,
    problem_spec,
)

IMPORTERS: dict[str, str] = {
    "aceso": "searchers.aceso.import_plan:import_plan",
    "alpa": "searchers.alpa.import_plan:import_plan",
    "galvatron": "searchers.galvatron.import_plan:import_plan",
}
"""System to ``module:function``; the function takes the file and the problem and returns the plan."""


def import_plan(
    system: Annotated[str, typer.Argument(help=f"Who wrote the file: {', '.join(IMPORTERS)}.")],
    file: Annotated[Path, typer.Argument(help="Its plan file.")],
    model: Model,
    cluster: Cluster,
    global_batch: GlobalBatch,
    output: Annotated[Path, typer.Option("--output", "-o", help="Plan file to write.")],
    runtime: RuntimeName = DEFAULT_RUNTIME,
    memory_limit: MemoryLimit = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Read a plan in the format of the system that found it, and write it as a plan file.

    Aceso's JSON, Galvatron's strategy files, and Alpa's plans as its benchmark files state them (docs/alpa-and-mpe.md).

    Example: windtunnel import-plan aceso plan.json -m gpt3-1.3b -c v100-32g-dgx1:1x4 -b 1024 -o plan.yaml
    """
    from datafiles.errors import DataFileError
    from searchers.plan_words import describe_plan
    from simulator.plan import Plan, plan_to_mapping
    from simulator.plan_file import save_plan
    from simulator.validate import validate

    if system not in IMPORTERS:
        raise ValueError(f"unknown plan format {system!r}; {nearest(system, tuple(IMPORTERS))}")
    spec = problem_spec(
        model=model,
        cluster=cluster,
        runtime=runtime,
        global_batch=global_batch,
        memory_limit=memory_limit,
        profile=profile,
    )
    all_writable(read=[file, *spec.files], data=[output])
    problem = spec.load()
    module, _, function = IMPORTERS[system].partition(":")
    importer = getattr(importlib.import_module(module), function)
    try:
        plan: Plan = importer(file, problem)
        validate(plan, problem)
    except DataFileError:
        raise
    except ValueError as error:
        raise DataFileError(str(file), str(error)) from error
    save_plan(output, spec, plan, fingerprint=problem.workload.fingerprint)
    if as_json:
        print_json(
            {
                "plan": plan_to_mapping(plan),
                "plan_hash": plan.canonical_hash(problem.workload),
                "words": describe_plan(plan, problem.workload),
                "output": str(output),
            }
        )
        return
    words = f"{describe_plan(plan, problem.workload)}\nwritten: {output}; next: windtunnel simulate {output}"
    console().print(words, markup=False, soft_wrap=True)
