"""The file that describes a sweep, and the runs it stands for.

base:   values that all runs share
grid:   lists; every combination is a run
cases:  values that belong together, as a list of mappings; each is combined with the whole grid
runs:   single runs on top, one mapping each
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from datafiles.content import read_text
from datafiles.errors import DataFileError
from datafiles.loader import parse_mapping
from datafiles.schema import FileModel, validated
from experiments.sweep.job import Job, Run, code_of
from experiments.sweep.lines import SpecLines
from experiments.sweep.values import REQUIRED, Checked, ValueChecker
from hardware_models.cluster import parse_cluster
from hardware_models.runtime_files import load_runtime
from simulator.problem import check_memory_limit

MAX_SPEC_BYTES = 1 << 20
MAX_RUNS = 100_000
"""Cap on the runs of one sweep, counted before they are made: one file each in one folder."""

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]


class _Values(FileModel):
    """One value per field; those that may be written in several ways are checked in `experiments.sweep.values`."""

    model: Text | None = None
    cluster: Text | None = None
    runtime: Text | None = None
    global_batch: Count | None = None
    memory_limit: Any = None
    profile: Text | None = None
    searcher: Any = None
    objective: Text | None = None
    budget: Any = None
    seed: Seed | None = None
    without: Any = None
    engine: Text | None = None


def _list_of(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], Field(min_length=1, max_length=MAX_RUNS)] | None


class _Grid(FileModel):
    """A list per field."""

    model: _list_of(Text) = None  # type: ignore[valid-type]
    cluster: _list_of(Text) = None  # type: ignore[valid-type]
    runtime: _list_of(Text) = None  # type: ignore[valid-type]
    global_batch: _list_of(Count) = None  # type: ignore[valid-type]
    memory_limit: _list_of(Any) = None  # type: ignore[valid-type]
    profile: _list_of(Text | None) = None  # type: ignore[valid-type]
    searcher: _list_of(Any) = None  # type: ignore[valid-type]
    objective: _list_of(Text) = None  # type: ignore[valid-type]
    budget: _list_of(Any) = None  # type: ignore[valid-type]
    seed: _list_of(Seed) = None  # type: ignore[valid-type]
    without: _list_of(Any) = None  # type: ignore[valid-type]
    engine: _list_of(Text) = None  # type: ignore[valid-type]


class _Spec(FileModel):
    title: Text | None = None
    base: _Values = _Values()
    grid: _Grid = _Grid()
    cases: Annotated[tuple[_Values, ...], Field(max_length=MAX_RUNS)] = ()
    runs: Annotated[tuple[_Values, ...], Field(max_length=MAX_RUNS)] = ()


@dataclass(frozen=True)
class SweepSpec:
    """A sweep as its file describes it.

    Attributes:
        title: Of table and plot.
        text: The file's text, kept with the results.
        jobs: The runs in the file's order, none twice.
        num_repeated: Runs that the file names more than once, less one each.
        plugins: Files with searchers, whose code will be executed.
    """

    title: str
    text: str
    jobs: tuple[Job, ...]
    num_repeated: int
    plugins: tuple[str, ...]


def load_sweep(path: str | Path) -> SweepSpec:
    """Read and check a spec; every name, option and file in it is looked up before anything runs.

    Args:
        path: YAML or JSON. Files that it names must lie in its folder or below.

    Raises:
        DataFileError: If the file breaks a rule; lists every error with its line.
    """
    source = str(path)
    text = read_text(path, MAX_SPEC_BYTES)
    file_format = "json" if source.lower().removesuffix(".gz").endswith(".json") else "yaml"
    mapping = parse_mapping(text, source=source, format=file_format)  # type: ignore[arg-type]
    lines = SpecLines(text, source)
    try:
        spec = validated(_Spec, mapping, source)
    except DataFileError as error:
        raise lines.numbered(error) from None
    sections = _Sections(spec, ValueChecker(Path(path).resolve().parent))
    sections.check()
    if not sections.errors:
        sections.check_limits()
    if sections.errors:
        raise lines.error(sections.errors)
    codes: dict[str, str] = {}
    jobs = [_job(values, codes) for values in sections.combinations()]
    unique = {job.key: job for job in jobs}
    return SweepSpec(
        title=spec.title or Path(path).name.split(".")[0],
        text=text,
        jobs=tuple(unique.values()),
        num_repeated=len(jobs) - len(unique),
        plugins=tuple(sorted({job.run.searcher for job in jobs if ".py" in job.run.searcher})),
    )


class _Sections:
    """The checked values of all sections, and the errors on the way."""

    def __init__(self, spec: _Spec, checker: ValueChecker) -> None:
        self.errors: list[tuple[tuple[str | int, ...], str]] = []
        self._checker = checker
        self._has_grid = bool(spec.grid.model_fields_set or spec.cases or not spec.runs)
        self._base = self._section(("base",), spec.base)
        self._cases = [self._section(("cases", i), case) for i, case in enumerate(spec.cases)] or [{}]
        self._runs = [self._section(("runs", i), run) for i, run in enumerate(spec.runs)]
        self._grid = {
            name: [self._value(("grid", name, i), name, value) for i, value in enumerate(values)]
            for name, values in _given(spec.grid).items()
            if values is not None
        }

    def _section(self, place: tuple[str | int, ...], section: _Values) -> dict[str, Checked]:
        return {name: self._value((*place, name), name, value) for name, value in _given(section).items()}

    def _value(self, place: tuple[str | int, ...], name: str, value: Any) -> Checked:
        try:
            return self._checker.check(name, value)
        except ValueError as error:
            self.errors.append((place, str(error)))
            return Checked({})

    def check(self) -> None:
        """Note what is missing, named twice, or too much."""
        for index, case in enumerate(self._cases):
            for name in sorted(case.keys() & self._grid.keys()):
                message = f"{name} is in grid too, and one would overrule the other; keep one of them"
                self.errors.append((("cases", index, name), message))
            if self._has_grid and (missing := REQUIRED - {*self._base, *self._grid, *case}):
                place: tuple[str | int, ...] = ("cases", index) if case else ("grid",)
                self.errors.append((place, _missing(missing)))
        for index, run in enumerate(self._runs):
            if missing := REQUIRED - {*self._base, *run}:
                self.errors.append((("runs", index), _missing(missing)))
        num_runs = len(self._cases) * math.prod(map(len, self._grid.values())) + len(self._runs)
        if num_runs > MAX_RUNS:
            message = f"a sweep must have at most {MAX_RUNS:,} runs, got {num_runs:,}; split it"
            self.errors.append((("grid",), message))

    def check_limits(self) -> None:
        """Note memory limits above those of a run's GPUs, or that leave nothing beside what its runtime takes."""
        asked = {
            (_resolved(values, "cluster"), _resolved(values, "runtime"), limit)
            for values in self.combinations()
            if (limit := values["memory_limit"].fields["memory_limit_bytes"]) is not None
        }
        for cluster, runtime, limit in sorted(asked):
            try:
                check_memory_limit(limit, parse_cluster(cluster), load_runtime(runtime))
            except ValueError as error:
                self.errors.append((self._place_of("memory_limit"), f"{error} (cluster {cluster})"))

    def _place_of(self, name: str) -> tuple[str | int, ...]:
        """Return where a field is given first."""
        sections: list[tuple[tuple[str | int, ...], Collection[str]]] = [(("base",), self._base)]
        sections.append((("grid",), self._grid))
        sections += [(("cases", i), case) for i, case in enumerate(self._cases)]
        sections += [(("runs", i), run) for i, run in enumerate(self._runs)]
        return next((*place, name) for place, names in sections if name in names)

    def combinations(self) -> Iterator[dict[str, Checked]]:
        """Yield the values of every run."""
        shared = {**self._checker.defaults, **self._base}
        if self._has_grid:
            for case in self._cases:
                for values in itertools.product(*self._grid.values()):
                    yield {**shared, **case, **dict(zip(self._grid, values, strict=True))}
        for run in self._runs:
            yield {**shared, **run}


def _resolved(values: Mapping[str, Checked], name: str) -> str:
    """Return a name, or the path of the file that it is."""
    checked = values[name]
    return str(checked.paths.get(name, checked.fields[name]))


def _given(section: FileModel) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}


def _missing(names: set[str]) -> str:
    return f"every run needs {', '.join(sorted(names))}: give it here, in base or in grid"


def _job(values: Mapping[str, Checked], codes: dict[str, str]) -> Job:
    fields: dict[str, Any] = {}
    paths: dict[str, str] = {}
    digests: dict[str, str] = {}
    for checked in values.values():
        fields |= checked.fields
        paths |= checked.paths
        digests |= checked.digests
    run = Run(**fields)
    searcher = paths.get("searcher", run.searcher)
    if searcher not in codes:
        codes[searcher] = code_of(Job(run, tuple(paths.items())).resolved())
    return Job(run, tuple(sorted(paths.items())), tuple(sorted(digests.items())), codes[searcher])
