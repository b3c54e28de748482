"""The problem set: a file, and the sweep it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from datafiles.loader import load_mapping
from datafiles.schema import FileModel, validated
from datafiles.writer import dump_yaml

PROBLEMS = Path(__file__).parent / "problems.yaml"

Text = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Row(FileModel):
    name: Text
    model: Text
    cluster: Text
    runtime: Text
    global_batch: Count
    source: Text
    memory_limit: Text | None = None
    quick: bool = False


class _File(FileModel):
    problems: Annotated[tuple[_Row, ...], Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class NamedProblem:
    """One problem of the leaderboard.

    Attributes:
        name: As in tables.
        values: What a sweep's case holds: model, cluster, runtime, global batch, memory limit.
        source: Whose experiment it is from.
        quick: Part of the quick subset.
    """

    name: str
    values: tuple[tuple[str, Any], ...]
    source: str
    quick: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies it in a sweep's table."""
        values = dict(self.values)
        return values["model"], values["cluster"], values["runtime"], values["global_batch"]


def load_problems(path: Path = PROBLEMS) -> tuple[NamedProblem, ...]:
    """Read a problem set.

    Raises:
        ValueError: If the file breaks a rule, or two problems share a name.
    """
    file = validated(_File, load_mapping(path), str(path))
    found = []
    for row in file.problems:
        values = {"model": row.model, "cluster": row.cluster, "runtime": row.runtime, "global_batch": row.global_batch}
        if row.memory_limit is not None:
            values["memory_limit"] = row.memory_limit
        found.append(NamedProblem(row.name, tuple(values.items()), row.source, row.quick))
    if len({problem.name for problem in found}) < len(found):
        raise ValueError(f"{path}: problems must have different names")
    return tuple(found)


def sweep_text(
    problems: tuple[NamedProblem, ...],
    searchers: tuple[str, ...],
    *,
    budget: str,
    stochastic: tuple[str, ...],
    seeds: int,
    seed: int,
    objective: str = "paper",
) -> str:
    """Return the spec of the leaderboard as a sweep: every searcher on every problem, seeds for the stochastic."""
    shared = {"budget": budget, "engine": "compiled", "objective": objective}
    runs = [
        {**dict(problem.values), **shared, "searcher": searcher, "seed": number}
        for problem in problems
        for searcher in searchers
        for number in range(seed, seed + (seeds if searcher in stochastic else 1))
    ]
    return dump_yaml({"title": "leaderboard", "runs": runs})
