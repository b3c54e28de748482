"""A table of runs: a CSV with a row for each, what was run and, where it is known, what was measured.

A row names a plan file, or a model, a machine and degrees that hold for the whole model::

    model,layers,hidden,heads,seq,vocab,gpus,tp,pp,dp,microbatch,global_batch,recompute,iteration_time_s
    mine,24,2304,24,2048,51200,32,1,1,32,16,512,full,3.53

What the rows have in common (cluster, runtime, model) may be said once instead of in a column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from datafiles.schema import validated
from datafiles.tables import load_table
from datafiles.values import resolve_scalar
from experiments.cases.case import Case, Measured, cluster_string, hardware
from experiments.run_gpus import check_gpu
from experiments.run_rates import METRICS, iteration_s, published_flop
from hardware_models.calibrated import Calibration
from hardware_models.calibration_file import load_calibration
from hardware_models.cluster import cluster_gpus_per_node, parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime import Runtime
from hardware_models.runtime_files import load_runtime
from simulator.measured_times import check_times
from simulator.plan import Plan
from simulator.plan_file import load_plan
from simulator.problem import MAX_BATCH, Problem, ProblemSpec
from simulator.profile_check import check_profile
from simulator.uniform import uniform_plan
from simulator.validate import validate
from workloads.layer_profile import is_profile_name
from workloads.model_file import spec_from_mapping
from workloads.models.families import FAMILIES
from workloads.models.fields import ModelSpec
from workloads.operators import Workload
from workloads.registry import build_from_spec, build_workload, model_names, model_spec

PLAN = "plan"
DEGREES = ("tp", "pp", "dp", "zero", "chunks", "microbatch")
WORDS = ("recompute", "schedule")
ALIASES = {"seq": "seq_len", "vpp": "chunks", "virtual_stages": "chunks", "seqpar": "sequence_parallel"}
"""What published tables call these columns."""
SECONDS, OUT_OF_MEMORY = "iteration_time_s", "out_of_memory"
ROUNDING = 0.01
"""What two figures of one run may differ by: their digits."""
PEAKS = {"peak_allocated_gib": False, "peak_reserved_gib": True}
"""Columns of the fullest device's peak, and whether it is of what the allocator held."""
MEASURED = (SECONDS, OUT_OF_MEMORY, "metric", "value", "unit", *PEAKS)
_PROBLEM = ("model", "family", "cluster", "runtime", "gpus", "gpus_per_node", "global_batch", "sequence_parallel")
CHECKED = ("gpu", "dtype")
"""What a run had, in the table's own words: compared with the cluster's and the runtime's, never taken from here."""
_SHAPES = frozenset(name for family in FAMILIES.values() for name in family.spec.model_fields) - {"name"}
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")


class MissingColumnError(ValueError):
    """A row lacks what a run needs; perhaps it stands there under another name."""


@dataclass(frozen=True)
class Common:
    """What holds for every row whose own column is missing or empty.

    Attributes:
        cluster: Cluster string, or preset alone: then each row's ``gpus`` fill its nodes.
        runtime: Name or file.
        model: Name or file.
        profile: Calibration file of all rows, in place of a plan file's own.
    """

    cluster: str | None = None
    runtime: str | None = None
    model: str | None = None
    profile: str | None = None


def load_runs(table: Path, common: Common | None = None, refused: list[str] | None = None) -> list[Case]:
    """Return the runs of a table, each with its plan built and checked.

    Args:
        table: CSV; the header names the columns above, others are kept as features of the run.
        common: What is the same in all rows.
        refused: Takes what is wrong with rows that cannot be run, which are then left out.

    Raises:
        ValueError: If a row lacks what a run needs or its plan is not legal; names the row and what would help. With
            ``refused``, if no row can be run.
    """
    rows = load_table(table)
    if not rows:
        raise ValueError(f"{table}: must hold at least one run, got only a header")
    if len(rows[0]) == 1 and (other := re.search(r"[;\t]", next(iter(rows[0])))):
        raise ValueError(f"{table}: cells must be separated by commas, got {other[0]!r} in the header")
    found, first = [], ""
    for number, row in enumerate(rows, start=1):
        try:
            found.append(_Row(table, number, _cells(row), common or Common()).case())
        except ValueError as error:
            others = _others(table) if isinstance(error, MissingColumnError) else ""
            words = str(error).removeprefix(f"{row_id(table, number)}: ")  # the row is named here
            first = first or f"{table}, row {number}: {words}{others}"
            if refused is None:
                raise ValueError(first) from None
            refused.append(f"row {number}: {words}")
    if not found:
        raise ValueError(first)
    return found


def row_id(table: Path, number: int) -> str:
    """Return what a row is called; the first after the header is 1."""
    return f"{table.name}#{number}"


def columns_not_read(table: Path) -> dict[str, str | None]:
    """Return the columns that say nothing about the run itself (sources, notes), each with the one it resembles."""
    known = {PLAN, *DEGREES, *WORDS, *MEASURED, *_PROBLEM, *_SHAPES, *ALIASES, *CHECKED}
    return {name: resembled(name) for name in (load_table(table) or [{}])[0] if name not in known}


def resembled(name: str) -> str | None:
    """Return the column that another framework's word for it, or a slip of the pen, stands for; None if none does.

    >>> resembled("zero_stage"), resembled("micro-batch-size"), resembled("notes")
    ('zero', 'microbatch', None)
    """
    words = re.sub(r"[^a-z0-9]+", "_", name.lower())
    told = {SECONDS, OUT_OF_MEMORY, *PEAKS}
    known = sorted({*DEGREES, *WORDS, *_SHAPES, *ALIASES, *told, "global_batch", "sequence_parallel"})
    within = [each for each in known if f"_{each}_" in f"_{words}_"]
    return max(within, key=len) if within else next(iter(get_close_matches(words, known, n=1, cutoff=0.75)), None)


def _others(table: Path) -> str:
    """Return, in words, the columns of a table that are not read."""
    names = columns_not_read(table)
    listed = [f"{name} (did you mean {alike}?)" if alike else name for name, alike in names.items()]
    return f"; columns that are not read: {', '.join(listed)}" if listed else ""


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the cells that hold something, under their own names."""
    cells: dict[str, str] = {}
    columns: dict[str, str] = {}
    for name, text in row.items():
        if text.strip():
            key = ALIASES.get(name, name)
            if key in cells:
                raise ValueError(f"columns {columns[key]} and {name} say the same; keep one of them")
            cells[key], columns[key] = text.strip(), name
    return cells


@dataclass(frozen=True)
class _Row:
    table: Path
    number: int
    cells: Mapping[str, str]
    common: Common

    def case(self) -> Case:
        if PLAN in self.cells:
            spec, plan = load_plan(self.table.parent / self.cells[PLAN])
            problem = (replace(spec, profile=self.common.profile) if self.common.profile else spec).load()
        else:
            problem = self._problem()
            self._check_gpu(problem)
            plan = self._plan(problem)
        validate(plan, problem)
        return Case(
            row_id=row_id(self.table, self.number),
            groups=(),
            problem=lambda: problem,
            plan=lambda _: plan,
            measured=self._measured(problem, plan),
            source=self.table.name,
            rivals=f"{problem.workload.fingerprint} on {problem.hardware.cluster.name}, batch {problem.global_batch}",
            rival_samples=plan.global_batch,
            features={name: text for name, text in self.cells.items() if name not in MEASURED},
        )

    def _problem(self) -> Problem:
        batch = self._count("global_batch")
        named = self._file("runtime", self.common.runtime)
        runtime, shape = load_runtime(named), self._shape()
        if shape:
            workload, spec = build_from_spec(self._model_spec(shape), runtime.attention), None
        else:
            model = self._file("model", self.common.model)
            workload = build_workload(model, attention=runtime.attention)
            spec = ProblemSpec(model, self._cluster(), named, batch, profile=self.common.profile)
        problem = Problem(
            workload=workload,
            hardware=self._hardware(workload, runtime),
            runtime=runtime,
            global_batch=batch,
            spec=spec,
        )
        if self.common.profile is not None:
            check_times(problem, hardware(self._cluster()), self.common.profile)
        return problem

    def _hardware(self, workload: Workload, runtime: Runtime) -> HardwareModel:
        if self.common.profile is None:
            return hardware(self._cluster())
        calibration, calibrated = _calibrated(self._cluster(), self.common.profile)
        check_profile(calibration, calibrated.operator_profile, workload, runtime)
        return calibrated

    def _shape(self) -> dict[str, Any]:
        return {name: resolve_scalar(text) for name, text in self.cells.items() if name in _SHAPES}

    def _model_spec(self, shape: Mapping[str, Any]) -> ModelSpec:
        """Return the shape of the model: a known one, some of its fields changed; under another name all in columns."""
        where = row_id(self.table, self.number)
        label = self.cells.get("model", self.common.model)
        if label is not None and ("layers" not in shape or label in model_names()):
            known = model_spec(self._file("model", self.common.model))
            if shape.get("family", known.family_name) != known.family_name:
                raise ValueError(
                    f"family must be that of {label}, {known.family_name}, or empty, got {shape['family']}"
                )
            return validated(type(known), {**known.model_dump(), **shape}, where)
        name = self.cells.get("model", f"row {self.number}")
        return spec_from_mapping({"family": self.cells.get("family", "gpt"), "name": name, **shape}, where)

    def _cluster(self) -> str:
        text = self._file("cluster", self.common.cluster)
        if re.search(r":\d+x\d+\s*$", text):
            gpus = parse_cluster(text).num_devices
            if self._count("gpus", gpus) != gpus:
                alone = f"; name the preset alone, {text.rsplit(':', 1)[0]}, and gpus will fill it"
                raise ValueError(
                    f"gpus must be those of the cluster, {gpus} of {text}, got {self.cells['gpus']}"
                    + ("" if "+" in text else alone)
                )
            return text
        if "+" in text:
            raise ValueError(f"every part of a mixed cluster must have a shape, a100-80g-dgx:1x8+..., got {text}")
        per_node = self._count("gpus_per_node", cluster_gpus_per_node(text))
        used = self._count("tp", 1) * self._count("pp", 1) * self._count("dp", 1)
        return cluster_string(text, self._count("gpus", used), per_node)

    def _check_gpu(self, problem: Problem) -> None:
        """Refuse a run on another GPU than the cluster has: one table may hold several machines."""
        check_gpu(self.cells.get("gpu", ""), sorted(set(problem.hardware.cluster.gpu_types)))

    def _plan(self, problem: Problem) -> Plan:
        degrees = {name: self._count(name, default=None, least=0 if name == "zero" else 1) for name in DEGREES}
        given = {name: count for name, count in degrees.items() if count is not None}
        if "dp" not in given:
            given["dp"] = max(1, problem.num_devices // (given.get("tp", 1) * given.get("pp", 1)))
        tp, pp, gpus = given.get("tp", 1), given.get("pp", 1), self._count("gpus", None)
        if gpus is not None and tp * pp * given["dp"] != gpus:
            raise ValueError(f"tp * pp * dp must be the run's {gpus} gpus, got {tp} * {pp} * {given['dp']}")
        if "microbatch" not in given:
            raise MissingColumnError("a run without a plan file must have a microbatch (samples of one replica)")
        words = {name: self.cells[name] for name in WORDS if name in self.cells}
        if given.get("chunks", 1) > 1:
            words.setdefault("schedule", "interleaved")
        split = self._flag("sequence_parallel") and given.get("tp", 1) > 1
        return uniform_plan(problem, **given, **words, sequence_parallel=split)  # type: ignore[arg-type]

    def _measured(self, problem: Problem, plan: Plan) -> Measured:
        out_of_memory = self._flag(OUT_OF_MEMORY) if OUT_OF_MEMORY in self.cells else None
        seconds = self._number(SECONDS)
        value = self._number("value")
        if value is not None and (seconds is None or "metric" in self.cells):
            if "metric" not in self.cells:
                raise MissingColumnError(f"a run with a value must have a metric, one of {', '.join(METRICS)}")
            metric, unit = self.cells["metric"], self.cells.get("unit")
            said = iteration_s(metric, value, unit, problem, plan, lambda: self._flop(plan.global_batch))
            if seconds is not None and abs(said - seconds) > ROUNDING * seconds:
                raise ValueError(
                    f"{SECONDS} and value must say the same, got {seconds:g} s and {said:g} s by {metric}; "
                    "keep one of them"
                )
            seconds = said if seconds is None else seconds
        peaks = {name: self._number(name) for name in PEAKS if name in self.cells}
        if len(peaks) > 1:
            raise ValueError(f"a run must have one peak of memory, got {' and '.join(peaks)}; keep one of them")
        name, gib = next(iter(peaks.items()), ("", None))
        if out_of_memory and (seconds is not None or peaks):
            told = "a time" if seconds is not None else name
            raise ValueError(f"a run that was out of memory must have no time and no peak, got {told}; empty the cell")
        most = max(node.gpu.memory_bytes for node in problem.hardware.cluster.nodes) / 2**30
        if gib is not None and gib > most:
            raise ValueError(
                f"{name} must be at most the GPU's memory, {most:.4g} GiB, got {gib:g}; is it in GiB, and of this GPU?"
            )
        return Measured(
            iteration_time_s=seconds,
            out_of_memory=out_of_memory,
            peak_bytes=None if gib is None else gib * 2**30,
            peak_is_reserved=PEAKS.get(name, False),
        )

    def _flop(self, samples: int) -> float:
        """Return the FLOP of an iteration that a published rate counts."""
        if PLAN in self.cells:
            raise ValueError("tflops_per_gpu is counted from columns, which a plan file has not; give iteration_time_s")
        shape = self._shape()
        model = self._file("model", self.common.model) if not shape else ""
        spec = None if is_profile_name(model) else self._model_spec(shape)
        return published_flop(spec, samples, recompute=self.cells.get("recompute") == "full")

    # Cells

    def _word(self, name: str, common: str | None = None) -> str:
        text = self.cells.get(name, common)
        if not text:
            where = f"give the column, or say it once for all rows (--{name})"
            raise MissingColumnError(f"a run must have a {name}: {where}")
        return text

    def _file(self, name: str, common: str | None) -> str:
        """Return a word that may name a file, beside the table or as it stands; of a cluster, before its shape."""
        found = re.fullmatch(r"(.+?)(:\d+x\d+)?", self._word(name, common), flags=re.DOTALL)
        assert found is not None, "words are not empty"
        beside = self.table.parent / found[1]
        return f"{beside if name in self.cells and beside.is_file() else found[1]}{found[2] or ''}"

    def _count(self, name: str, default: Any = ..., least: int = 1) -> Any:
        if name not in self.cells:
            if default is ...:
                raise MissingColumnError(f"a run without a plan file must have a {name}")
            return default
        found = resolve_scalar(self.cells[name])
        if isinstance(found, float) and found.is_integer():
            found = int(found)
        if isinstance(found, bool) or not isinstance(found, int):
            raise ValueError(f"{name} must be an integer, got {self.cells[name]!r}")
        if found < least:
            raise ValueError(f"{name} must be at least {least}, got {found}")
        if found > MAX_BATCH:
            raise ValueError(f"{name} must be at most {MAX_BATCH:,}, got {self.cells[name]}")
        return found

    def _number(self, name: str) -> float | None:
        if name not in self.cells:
            return None
        found = resolve_scalar(self.cells[name])
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found <= 0:
            raise ValueError(f"{name} must be a number above 0, got {self.cells[name]!r}")
        return float(found)

    def _flag(self, name: str) -> bool:
        text = self.cells.get(name, "").lower().removesuffix(".0")
        if text not in _TRUE + _FALSE:
            raise ValueError(f"{name} must be 1 or 0, got {self.cells[name]!r}")
        return text in _TRUE


@lru_cache(maxsize=64)
def _calibrated(cluster: str, profile: str) -> tuple[Calibration, HardwareModel]:
    calibration = load_calibration(profile)
    return calibration, calibration.hardware(parse_cluster(cluster))

