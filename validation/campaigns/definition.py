"""Campaign files: models, the plans that calibrate, and the plans whose errors are reported.

A plan is written in the words of ``simulator.uniform``; lists stand for every combination. Calibration and report
are disjoint: no plan of one, however it is spelled, may be in the other.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from datafiles.errors import DataFileError
from datafiles.loader import load_mapping
from datafiles.names import nearest
from datafiles.schema import FileModel, validated
from datafiles.words import counted
from hardware_models.cluster import parse_cluster
from hardware_models.model import HardwareModel
from hardware_models.runtime import Attention, Runtime
from hardware_models.runtime_files import load_runtime
from hardware_models.schema import Text
from simulator.plan import Plan, Stage
from simulator.problem import Problem
from simulator.uniform import recompute_segments, repeated_layers, uniform_plan
from simulator.validate import validate
from workloads.model_file import spec_from_mapping
from workloads.models.fields import ModelSpec
from workloads.registry import build_from_spec, model_spec

FOLDER = Path(__file__).parent
MAX_PLANS = 1000
RANKING_MARGIN = 0.15
COMMUNICATION = "communication"
"""The part of a round that is of no unit."""
ONLY_PREDICTED = (
    "name", "sources", "communication_buffer_bytes", "context_bytes", "handover_s", "host_seconds_per_collective",
    "host_seconds_per_kernel", "host_seconds_per_list_entry", "host_seconds_per_operator", "host_seconds_per_pass",
    "matmul_workspaces", "optimizer_workspace_bytes",
)  # fmt: skip
"""Fields of a runtime that nothing executed depends on: what was measured stands when they are known better."""
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")]
Small = Annotated[int, Field(ge=1, le=4096)]
Numbers = Small | Annotated[tuple[Small, ...], Field(min_length=1)]
Words = Name | Annotated[tuple[Name, ...], Field(min_length=1)]
Recompute = Literal["none", "selective", "full"]


class RuntimeEntry(FileModel):
    """A runtime under a name of the campaign: a shipped one, perhaps with another attention."""

    base: Name
    attention: Attention | None = None

    def load(self) -> Runtime:
        """Return it."""
        runtime = load_runtime(self.base)
        return runtime if self.attention is None else replace(runtime, attention=self.attention)


class PlanEntry(FileModel):
    """One plan, or every combination of the lists in it.

    Attributes:
        model, runtime: Names of the campaign; the runtime may be left out where there is one.
        num_microbatches: Per replica; more than one accumulates gradients.
        stage_layers: Repeated layers of each stage, where they are not even.
        others: As ``simulator.uniform.uniform_plan``.
    """

    model: Words
    runtime: Words | None = None
    microbatch: Numbers = 1
    num_microbatches: Numbers = 1
    tp: Small = 1
    pp: Small = 1
    dp: Small = 1
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    recompute: Recompute | Annotated[tuple[Recompute, ...], Field(min_length=1)] = "none"
    sequence_parallel: bool = False
    schedule: Words = "1f1b"
    chunks: Small = 1
    stage_layers: tuple[Annotated[int, Field(ge=0, le=4096)], ...] | None = None

    def combinations(self) -> Iterator[PlanEntry]:
        """Yield one entry per combination, the last list varying fastest."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        lists = {name: value for name, value in own.items() if isinstance(value, tuple) and name != "stage_layers"}
        for values in itertools.product(*lists.values()):
            yield type(self)(**{**own, **dict(zip(lists, values, strict=True))})

    def words(self) -> str:
        """Return what is special about one combination, in words."""
        found = [f"{word}{getattr(self, word)}" for word in ("dp", "tp", "pp") if getattr(self, word) > 1]
        if self.zero:
            found.append(f"zero-{self.zero}")
        if self.sequence_parallel:
            found.append("sequence")
        if self.pp > 1:
            found.append(str(self.schedule))
        if self.chunks > 1:
            found.append(f"chunks{self.chunks}")
        if self.stage_layers:
            found.append("layers" + "-".join(map(str, self.stage_layers)))
        if self.recompute != "none":
            found.append(f"recompute-{self.recompute}")
        return " ".join([*found, f"{self.num_microbatches}x{self.microbatch}"])


class Options(FileModel):
    """How a campaign is measured.

    Attributes:
        rounds: Interleaved rounds of everything.
        statistic: What counts of the rounds: ``median``, or ``fastest``, the round in which a run was quickest, which
            other load on the machine spoils least.
        iterations, warmup: Of every plan in every round.
        ranking_margin: Plans that differ by more than this share must be ranked right.
        records_memory: On CUDA, keep the allocator's history of the first round.
    """

    rounds: Annotated[int, Field(ge=1, le=100)] = 5
    statistic: Literal["median", "fastest"] = "median"
    iterations: Annotated[int, Field(ge=1, le=1000)] = 3
    warmup: Annotated[int, Field(ge=0, le=100)] = 1
    ranking_margin: Annotated[float, Field(gt=0, le=10)] = RANKING_MARGIN
    records_memory: bool = False


class CampaignFile(FileModel):
    """The file's top level."""

    windtunnel_campaign: Literal[1]
    name: Name
    description: Text
    device: Literal["cpu", "cuda"]
    cluster: Text
    runtimes: Mapping[Name, RuntimeEntry]
    models: Mapping[Name, Text | dict[str, Any]]
    options: Options = Options()
    calibration: tuple[PlanEntry, ...]
    report: Annotated[tuple[PlanEntry, ...], Field(min_length=1)]


@dataclass(frozen=True)
class CampaignPlan:
    """One plan of a campaign.

    Attributes:
        name: Model, runtime and what is special.
        unit: Model and runtime: what shares a machine profile.
        model, runtime: Names of the campaign.
        plan: Canonical.
        problem: What it is for, on modelled hardware.
    """

    name: str
    unit: str
    model: str
    runtime: str
    plan: Plan
    problem: Problem

    @cached_property
    def identity(self) -> str:
        """Hash of plan, model and runtime: equal for plans that mean the same."""
        workload, runtime = self.problem.workload, self.problem.runtime
        names = [each.name for each in fields(runtime) if each.name not in ONLY_PREDICTED]
        executed = [(name, getattr(runtime, name)) for name in names]
        choices = hashlib.sha256(repr(executed).encode()).hexdigest()[:16]
        return f"{self.unit} {workload.fingerprint} {choices} {self.plan.canonical_hash(workload)}"


@dataclass(frozen=True)
class Campaign:
    """A checked campaign.

    Attributes:
        name, description, device: Of the file.
        options: How it is measured.
        calibration, report: Its plans.
        models: Specification of each model.
        runtimes: As in the file.
        cluster: Cluster string in use.
    """

    name: str
    description: str
    device: str
    options: Options
    calibration: tuple[CampaignPlan, ...]
    report: tuple[CampaignPlan, ...]
    models: Mapping[str, ModelSpec]
    runtimes: Mapping[str, RuntimeEntry]
    cluster: str

    @property
    def units(self) -> list[str]:
        """Model and runtime pairs in use, in order of first appearance."""
        return list(dict.fromkeys(each.unit for each in (*self.calibration, *self.report)))

    @property
    def num_devices(self) -> int:
        """Devices that the largest plan needs."""
        return max(len(each.plan.devices) for each in (*self.calibration, *self.report))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that is executed: results of another campaign are not continued."""
        words = [each.identity for each in (*self.calibration, *self.report)]
        # What counts of the rounds is no part of it; `ranking_margin` stands with its default, as it always has.
        executed = {**self.options.model_dump(exclude={"rounds", "statistic"}), "ranking_margin": RANKING_MARGIN}
        text = json.dumps([self.name, self.device, self.cluster, executed, words])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def campaign_names() -> tuple[str, ...]:
    """Return the names of the shipped campaigns."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def is_campaign(text: str) -> bool:
    """Return whether a word names a shipped campaign, or a file that holds one."""
    if text in campaign_names():
        return True
    return Path(text).is_file() and "windtunnel_campaign" in load_mapping(text)


def load_campaign(name_or_path: str | Path, *, cluster: str | None = None) -> Campaign:
    """Return a shipped campaign by name, or one from a file.

    Args:
        name_or_path: Which.
        cluster: Instead of the file's cluster.

    Raises:
        DataFileError: If the file breaks a rule, a name is unknown, a plan is not legal, or a plan is in
            calibration and report, or twice.
        ValueError: If there is no such campaign.
    """
    text = str(name_or_path)
    path = FOLDER / f"{text}.yaml" if text in campaign_names() else Path(text)
    if not path.is_file():
        raise ValueError(f"a campaign must be a shipped one or a file, got {text!r}; {nearest(text, campaign_names())}")
    return campaign_from_mapping(load_mapping(path), str(path), cluster=cluster)


def campaign_from_mapping(mapping: Mapping[str, Any], source: str, *, cluster: str | None = None) -> Campaign:
    """Return the campaign that plain data describe; errors as for :func:`load_campaign`."""
    file = validated(CampaignFile, mapping, source)
    chosen = cluster or file.cluster
    hardware = HardwareModel(cluster=parse_cluster(chosen))
    runtimes = {name: entry.load() for name, entry in file.runtimes.items()}
    models = {name: _model(name, value, source) for name, value in file.models.items()}

    def plans(part: str, entries: Sequence[PlanEntry]) -> tuple[CampaignPlan, ...]:
        found = []
        for position, entry in enumerate(entries):
            for single in entry.combinations():
                try:
                    found.append(_plan(single, models, runtimes, hardware))
                except ValueError as error:
                    raise DataFileError(source, f"{part}.{position}: {error}") from None
                if len(found) > MAX_PLANS:
                    raise DataFileError(source, f"{part} must have at most {MAX_PLANS} plans; split the campaign")
        return tuple(found)

    calibration, report = plans("calibration", file.calibration), plans("report", file.report)
    _check_disjoint(calibration, report, source)
    _check_files(dict.fromkeys(each.unit for each in (*calibration, *report)), source)
    return Campaign(
        file.name, file.description, file.device, file.options, calibration, report, models, file.runtimes, chosen
    )


def _model(name: str, value: str | dict[str, Any], source: str) -> ModelSpec:
    if isinstance(value, str):
        return model_spec(value)
    return spec_from_mapping({"name": name, **value}, f"{source}: models.{name}")


def _plan(
    entry: PlanEntry, models: Mapping[str, ModelSpec], runtimes: Mapping[str, Runtime], hardware: HardwareModel
) -> CampaignPlan:
    model = str(entry.model)
    runtime = str(entry.runtime) if entry.runtime is not None else next(iter(runtimes), "")
    if entry.runtime is None and len(runtimes) != 1:
        raise ValueError(f"runtime must be named where there are {len(runtimes)}: {', '.join(runtimes)}")
    for what, word, known in (("model", model, models), ("runtime", runtime, runtimes)):
        if word not in known:
            raise ValueError(f"{what} must be one of the campaign, got {word!r}; {nearest(word, known)}")
    assert isinstance(entry.microbatch, int) and isinstance(entry.num_microbatches, int)
    problem = Problem(
        workload=build_from_spec(models[model], runtimes[runtime].attention),
        hardware=hardware,
        runtime=runtimes[runtime],
        global_batch=entry.microbatch * entry.dp * entry.num_microbatches,
    )
    plan = validate(plan_of_entry(entry, problem), problem)
    unit = model if len(runtimes) == 1 else f"{model} {runtime}"
    return CampaignPlan(f"{unit} {entry.words()}", unit, model, runtime, plan, problem)


def plan_of_entry(entry: PlanEntry, problem: Problem) -> Plan:
    """Return the plan of an entry without lists; gradients are reduced when the runtime says, at any ZeRO level."""
    plan = uniform_plan(
        problem,
        tp=entry.tp,
        pp=entry.pp,
        dp=entry.dp,
        microbatch=int(str(entry.microbatch)),
        recompute=str(entry.recompute),
        zero=entry.zero,
        sequence_parallel=entry.sequence_parallel,
        schedule=str(entry.schedule),
        chunks=entry.chunks,
        gradient_reduction=problem.runtime.reduce_gradients,
    )
    if entry.stage_layers is None:
        return plan
    layers = repeated_layers(problem.workload)
    if len(entry.stage_layers) != len(plan.stages) or sum(entry.stage_layers) != len(layers):
        raise ValueError(
            f"stage_layers must name {counted(len(plan.stages), 'number')} that add up to "
            f"{counted(len(layers), 'layer')}, got {list(entry.stage_layers)}"
        )
    stages, start, taken = [], 0, 0
    for old, count in zip(plan.stages, entry.stage_layers, strict=True):
        taken += count
        stop = layers[taken][0] if taken < len(layers) else len(problem.workload)
        segments = recompute_segments(problem.workload, start, stop, str(entry.recompute))
        stages.append(Stage(((start, stop),), old.devices, ((stop - start, old.shardings[0][1]),), segments))
        start = stop
    return replace(plan, stages=tuple(stages))


def file_stem(name: str) -> str:
    """Return what files of a unit or plan are called.

    >>> file_stem("gpt tp2 4x1")
    'gpt_tp2_4x1'
    """
    return name.replace(" ", "_")


def _check_files(units: Iterable[str], source: str) -> None:
    """Refuse units whose files would be one another's, or those of what is measured of no unit."""
    taken = {COMMUNICATION: f"the campaign's own {COMMUNICATION}"}
    for unit in units:
        for stem in (file_stem(unit), f"{file_stem(unit)}.calibration"):
            if stem in taken:
                raise DataFileError(
                    source, f"the files of {unit!r} ({stem}) would be those of {taken[stem]} too; give another name"
                )
            taken[stem] = repr(unit)


def _check_disjoint(calibration: Sequence[CampaignPlan], report: Sequence[CampaignPlan], source: str) -> None:
    seen: dict[str, tuple[str, CampaignPlan]] = {}
    for part, plans in (("calibration", calibration), ("report", report)):
        for each in plans:
            other, earlier = seen.get(each.identity, ("", each))
            if other == part:
                raise DataFileError(source, f"{part} has the plan {each.name!r} twice; keep one")
            if other:
                raise DataFileError(
                    source,
                    f"calibration and report must not share a plan, but {each.name!r} of the report is "
                    f"{earlier.name!r} of the calibration; change one of them",
                )
            seen[each.identity] = part, each
