"""Profiles a machine part by part: estimates what it costs, repeats until the spread is small, resumes.

Parts are executed plans (operators at every microbatch size and tensor-parallel degree, the optimizer step, a short
pipeline; in interleaved rounds), memory of every operator, collectives over groups, the overlap of computation and
communication, and the host's launches. Every finished part is in the journal; an interrupt loses the one at work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from datafiles.words import counted
from hardware_models.calibrated import Quantity
from hardware_models.collective_table import Row
from hardware_models.group_shapes import GroupShape
from simulator.problem import Problem
from simulator.simulate import simulate_time_s
from validation.measurement import Measurement
from validation.measurement_file import measurement_from_mapping, measurement_mapping
from validation.profiling.calibration import CalibrationJobs, calibration_jobs, fit
from validation.profiling.group_times import KINDS, SIZES, measure_groups
from validation.profiling.host_times import HostTimes, measure_host
from validation.profiling.jobs import execute_rounds
from validation.profiling.machine_profile import MachineProfile, machine_name, versions
from validation.profiling.operator_memory import OperatorMemory, measure_memory, with_memory
from validation.profiling.overlap import OverlapRow, measure_overlap
from validation.profiling.profile_journal import Journal
from validation.profiling.sampling import MIN_SAMPLES, SPREAD, is_enough, spread

START_S = {"cpu": 0.5, "cuda": 5.0}
"""To start processes: an order of magnitude, for the estimate."""

SKIPPABLE = ("host", "memory", "groups", "overlap")
"""Kinds of parts that a profile can do without; the executed plans it cannot."""

Listener = Callable[[str, float, float], None]
"""Told ``(what comes next, estimated seconds done, estimated seconds in all)``."""


@dataclass(frozen=True)
class ProfileOptions:
    """What is measured.

    Attributes:
        microbatch_sizes: Samples per rank and microbatch.
        tensor_sizes: Tensor-parallel degrees.
        group_sizes: Ranks of the groups whose collectives are measured.
        message_sizes: Bytes.
        max_rounds: Rounds of the executed plans at most, of which there are ``sampling.MIN_SAMPLES`` if it allows.
        spread: Wanted (``validation.profiling.sampling``).
        iterations: Of an executed plan in a round.
        device: ``cpu`` or ``cuda``.
        skip: Kinds of parts (SKIPPABLE) that are left out: memory stays derived, constants those of the device type.
        chunk_s: Plans of a round that take less together start together; an interrupt loses so much.
    """

    microbatch_sizes: tuple[int, ...]
    tensor_sizes: tuple[int, ...] = (1,)
    group_sizes: tuple[int, ...] = ()
    message_sizes: tuple[int, ...] = SIZES
    max_rounds: int = 9
    spread: float = SPREAD
    iterations: int = 4
    device: str = "cpu"
    skip: tuple[str, ...] = ()
    chunk_s: float = 60.0


@dataclass(frozen=True)
class Part:
    """One thing to measure outside the rounds.

    Attributes:
        key: In the journal.
        words: For people.
        seconds: Estimated.
        measure: Returns plain data.
    """

    key: str
    words: str
    seconds: float
    measure: Callable[[], Any]


@dataclass(frozen=True)
class ProfileWork:
    """A profile to be made.

    Attributes:
        problem, options: What is measured.
        jobs: The executed plans.
        job_s: Estimated seconds of each, once.
        parts: The rest.
    """

    problem: Problem
    options: ProfileOptions
    jobs: CalibrationJobs
    job_s: tuple[float, ...]
    parts: tuple[Part, ...]

    @property
    def identity(self) -> dict[str, str]:
        """Return what results depend on; how often they are repeated is not in it."""
        spec, options = self.problem.spec, self.options
        return {
            "machine": machine_name(),
            "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            "model": f"{self.problem.workload.name} {self.problem.workload.fingerprint}",
            "cluster": self.problem.hardware.cluster.name,
            "runtime": spec.runtime if spec is not None else self.problem.runtime.name,
            "microbatch sizes": str(list(options.microbatch_sizes)),
            "tensor degrees": str(list(options.tensor_sizes)),
            "group sizes": str(list(options.group_sizes)),
            "message sizes": str(list(options.message_sizes)),
            "iterations": str(options.iterations),
            "skipped": ", ".join(options.skip) or "nothing",
            "device": options.device,
        }

    def estimate_s(self) -> tuple[float, float]:
        """Return seconds with the fewest and with the most rounds: an order of magnitude."""
        fixed = sum(part.seconds for part in self.parts)
        most = max(1, self.options.max_rounds)
        one = sum(self.job_s) + START_S[self.options.device]
        return fixed + min(MIN_SAMPLES, most) * one, fixed + most * one


def profile_work(problem: Problem, options: ProfileOptions) -> ProfileWork:
    """Return what will be measured, checked to be executable.

    Raises:
        ValueError: If the executor cannot run the problem, or a group is larger than the cluster.
    """
    for word in options.skip:
        if word not in SKIPPABLE:
            raise ValueError(f"what is skipped must be of {', '.join(SKIPPABLE)}, got {word!r}")
    for size in options.group_sizes:
        if not 2 <= size <= problem.num_devices:
            raise ValueError(f"a group must have 2 to {problem.num_devices} ranks on this cluster, got {size}")
    jobs = calibration_jobs(
        problem,
        options.microbatch_sizes,
        options.tensor_sizes,
        iterations=options.iterations,
        device=options.device,
    )
    seconds = tuple(
        (job.iterations + job.warmup) * simulate_time_s(job.plan, job.problem) + 0.5 for job in jobs.jobs
    )
    parts = [part for part in _parts(problem, options) if part.key.split("/")[0] not in options.skip]
    return ProfileWork(problem, options, jobs, seconds, tuple(parts))


def _parts(problem: Problem, options: ProfileOptions) -> Iterator[Part]:
    start_s, device = START_S[options.device], options.device
    yield Part("host", "launches of the host", start_s + 1.0, lambda: measure_host(device=device).__dict__)
    for samples in options.microbatch_sizes:
        for degree in options.tensor_sizes:
            yield Part(
                f"memory/{samples}/{degree}",
                f"memory of operators at {counted(samples, 'sample')}, tp {degree}",
                start_s + 1.0,
                lambda s=samples, d=degree: [list(row) for row in measure_memory(problem, s, d, device=device)],  # type: ignore[misc]
            )
    for size in options.group_sizes:
        yield Part(
            f"groups/{size}",
            f"collectives over {size} ranks",
            start_s + 0.1 * len(KINDS) * len(options.message_sizes),
            lambda n=size: _groups(problem.num_devices, n, options),  # type: ignore[misc]
        )
    if device == "cuda" or problem.num_devices > 1:
        yield Part("overlap", "computation beside communication", start_s + 5.0, lambda: _overlap(device))


def _groups(num_processes: int, size: int, options: ProfileOptions) -> dict[str, Any]:
    rows, notes = measure_groups(
        num_processes, size, sizes=options.message_sizes, spread=options.spread, device=options.device
    )
    return {
        "rows": [[kind, *_shape_cells(shape), size, seconds] for kind, shape, size, seconds in rows],
        "notes": notes,
    }


def _shape_cells(shape: int | GroupShape) -> list[int]:
    assert isinstance(shape, GroupShape)
    return [shape.size, shape.groups_per_node]


def _overlap(device: str) -> list[list[Any]]:
    return [list(row.to_mapping().values()) for row in measure_overlap(device=device)]


def run_profile(work: ProfileWork, journal: Journal, listener: Listener | None = None) -> MachineProfile:
    """Measure what the journal does not hold yet, and return the profile.

    Args:
        work: From ``profile_work``.
        journal: Made with ``work.identity``.
        listener: Told what comes next.

    Raises:
        ValueError: If a plan runs out of memory.
        launch.WorkerError: If a process fails; finished parts stay in the journal.
    """
    tell = listener or (lambda words, done, total: None)
    total, done = work.estimate_s()[1], 0.0
    for part in work.parts:
        if part.key not in journal:
            tell(part.words, done, total)
            journal.add({part.key: part.measure()})
        done += part.seconds
    rounds = 0
    while not _is_stable(work, journal, rounds):
        for chunk in _chunks(work, journal, rounds):
            share = sum(work.job_s[number] for number in chunk)
            tell(f"round {rounds + 1}: {counted(len(chunk), 'plan')}", done, total)
            jobs = [work.jobs.jobs[number] for number in chunk]
            turn = execute_rounds(jobs, rounds=1, device=work.options.device)[0]
            for job, measured in zip(jobs, turn, strict=True):
                if measured.out_of_memory:
                    raise ValueError(
                        f"what is profiled must fit into memory, but {counted(job.plan.microbatch_size, 'sample')} did "
                        "not; give smaller --microbatches"
                    )
            journal.add(
                {
                    _key(number, rounds): measurement_mapping(measured, with_trace=False)
                    for number, measured in zip(chunk, turn, strict=True)
                }
            )
            done += share
        rounds += 1
    tell("fitting", total, total)
    return _profile(work, journal, rounds)


def _key(job: int, turn: int) -> str:
    return f"job/{job}/{turn}"


def _chunks(work: ProfileWork, journal: Journal, turn: int) -> Iterator[list[int]]:
    """Yield jobs of a round that are not measured yet, together as long as they are short."""
    chunk: list[int] = []
    for number, seconds in enumerate(work.job_s):
        if _key(number, turn) in journal:
            continue
        if chunk and sum(work.job_s[each] for each in chunk) + seconds > work.options.chunk_s:
            yield chunk
            chunk = []
        chunk.append(number)
    if chunk:
        yield chunk


def _is_stable(work: ProfileWork, journal: Journal, rounds: int) -> bool:
    """Return whether every plan was repeated often enough (``validation.profiling.sampling``)."""
    return rounds > 0 and all(
        is_enough(
            [float(journal.results[_key(number, turn)]["iteration_time_s"]) for turn in range(rounds)],
            cap=work.options.max_rounds,
            wanted=work.options.spread,
        )
        for number in range(len(work.job_s))
    )


def _profile(work: ProfileWork, journal: Journal, rounds: int) -> MachineProfile:
    source = str(journal.path)
    count = len(work.jobs.jobs)
    measured = [
        [measurement_from_mapping(journal.results[_key(number, turn)], source) for number in range(count)]
        for turn in range(rounds)
    ]
    rows: list[Row] = []
    notes: list[str] = []
    for size in work.options.group_sizes:
        found = journal.results.get(f"groups/{size}", {"rows": [], "notes": []})
        rows += [(kind, GroupShape(n, groups_per_node=at_once), num_bytes, seconds)
                 for kind, n, at_once, num_bytes, seconds in found["rows"]]  # fmt: skip
        notes += found["notes"]
    profile = fit(work.problem, work.jobs, measured, rows)
    operators = replace(profile.operators, rows=tuple(_rows_with_memory(work, journal, profile)))
    host = HostTimes(**journal.results["host"]) if "host" in journal else None
    overlap = [OverlapRow(*row) for row in journal.results.get("overlap", [])]
    return replace(
        profile,
        operators=operators,
        date=journal.date,
        overlap=_factors(overlap),
        launch_s=host.launch_s if host is not None and work.options.device == "cuda" else None,
        measurements=(*_quantities(host, overlap), *_stability(work, measured)),
        fitted_on="; ".join([profile.fitted_on, *notes]),
    )


def _rows_with_memory(work: ProfileWork, journal: Journal, profile: MachineProfile) -> Iterator[Any]:
    for samples in work.options.microbatch_sizes:
        for degree in work.options.tensor_sizes:
            measured: list[OperatorMemory] = [
                tuple(row) for row in journal.results.get(f"memory/{samples}/{degree}", [])
            ]
            own = [row for row in profile.operators.rows if (row.samples, row.tensor_size) == (samples, degree)]
            yield from with_memory(own, measured)


def _factors(rows: Sequence[OverlapRow]) -> tuple[float, float] | None:
    if not rows:
        return None
    parts = [(row.computation_factor, row.communication_factor) for row in rows]
    computation, communication = (min(10.0, statistics.median(values)) for values in zip(*parts, strict=True))
    return computation, communication


def _quantities(host: HostTimes | None, overlap: Sequence[OverlapRow]) -> Iterator[Quantity]:
    if host is not None:
        yield Quantity("host: one launch", host.launch_s, "s", host.repeats, host.spread)
    for row in overlap:
        words: Mapping[str, float] = {
            "computation alone": row.computation_alone_s,
            "communication alone": row.communication_alone_s,
            "computation beside it": row.computation_s,
            "communication beside it": row.communication_s,
        }
        for name, seconds in words.items():
            yield Quantity(f"overlap with {row.kind}: {name}", seconds, "s")


def _stability(work: ProfileWork, measured: Sequence[Sequence[Measurement]]) -> Iterator[Quantity]:
    """Yield the iteration time of every executed plan with its repeats and spread."""
    names = [f"operators at {counted(run.samples, 'sample')}, tp {run.tensor_size}" for run in work.jobs.operators]
    names += ["operators recomputed"] * (work.jobs.recomputed is not None) + ["optimizer", "pipeline"]
    for number, name in zip(range(len(work.jobs.jobs)), names, strict=False):
        samples = [turn[number].iteration_time_s for turn in measured]
        yield Quantity(f"iteration: {name}", statistics.median(samples), "s", len(samples), spread(samples))
