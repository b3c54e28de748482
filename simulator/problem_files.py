"""The files that a problem names: found where they stand or beside its plan, or missed in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_models.runtime_files import files_of_runtime

if TYPE_CHECKING:
    from simulator.problem import ProblemSpec

FILE_SUFFIXES = (".yaml", ".yml", ".json", ".csv", ".gz")
"""A model, cluster or runtime of such a name is a file; any other is one of ours."""


def with_files(spec: ProblemSpec, *, folder: Path | None = None) -> ProblemSpec:
    """Return the problem with the files that it names as they stand, else from a folder.

    Args:
        spec: The problem.
        folder: Where else to look: that of the plan.

    Raises:
        ValueError: If a file is in neither place; names the key, the file and where it was looked for.
    """
    model, mark, batch = spec.model.partition("@")
    runtime, profile = spec.runtime, spec.profile
    return replace(
        spec,
        model=(_found("model", model, folder) if _is_file(model) else model) + mark + batch,
        cluster="+".join(_with_node(part, folder) for part in spec.cluster.split("+")),
        runtime=_found("runtime", runtime, folder) if _is_file(runtime) else runtime,
        profile=_found("profile", profile, folder) if profile else profile,
    )


def files_of(
    model: str | None = None, cluster: str | None = None, runtime: str | None = None, profile: str | None = None
) -> list[Path]:
    """Return the files that the names of a problem stand for, there or not; None names nothing.

    >>> [file.name for file in files_of("mine.yaml@8", "node.yaml:1x4+v100-32g-dgx1:1x4", "megatron-lm-2021", "p.json")]
    ['mine.yaml', 'node.yaml', 'p.json']
    """
    model = (model or "").partition("@")[0]
    configuration = Path(model, "config.json")  # of a folder, as Hugging Face lays it out
    nodes = [re.sub(r":[^:]*$", "", part.strip()) for part in (cluster or "").split("+")]
    found = [Path(name) for name in (model, *nodes) if _is_file(name)] + ([Path(profile)] if profile else [])
    found += files_of_runtime(runtime or "")
    return [*found, configuration] if model and configuration.is_file() else found


def _with_node(part: str, folder: Path | None) -> str:
    node, colon, shape = part.strip().rpartition(":")
    return f"{_found('cluster', node, folder)}{colon}{shape}" if _is_file(node) else part


def _is_file(name: str) -> bool:
    return name.lower().endswith(FILE_SUFFIXES)


def _found(key: str, file: str, folder: Path | None) -> str:
    if Path(file).exists():
        return file
    if folder is not None and (folder / file).is_file():
        return str(folder / file)
    if Path(file).is_absolute():
        raise ValueError(f"{key}: no such file: {file}")
    beside = f" and beside the plan in {folder.resolve()}" if folder is not None else ""
    raise ValueError(f"{key}: no such file: {file}; looked in {Path.cwd()}{beside}")
