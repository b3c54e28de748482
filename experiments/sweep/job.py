"""One run of a sweep: its inputs, and what it leaves behind. This is what travels to worker processes."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from datafiles.words import counted
from datafiles.writer import dump_yaml
from experiments.compare_files import code_fingerprint

if TYPE_CHECKING:
    from searchers.base import SearchResult
    from searchers.budget import Budget
    from simulator.problem import Problem, ProblemSpec


class OtherCodeError(ValueError):
    """A worker runs other code, or sees other files, than the process that started the sweep."""


@dataclass(frozen=True)
class Run:
    """Inputs of one run, in names as the spec spells them.

    Attributes:
        model: See `simulator.problem.ProblemSpec`, as for the next five.
        cluster: Cluster string.
        runtime: Name or file.
        global_batch: Samples per iteration.
        memory_limit_bytes: Per device; None for the device's own memory.
        profile: Operator profile; None for none.
        searcher: Name or ``path.py:Class``.
        options: Arguments of the searcher, as JSON with sorted keys.
        objective: ``paper`` or ``simulator``.
        budget_s: Limit of the search in seconds.
        budget_evaluations: Limit of the search in evaluations.
        seed: Seed of the search.
        without: Effects switched off in the simulation, comma-separated, sorted.
        engine: Engine of the simulation.
    """

    model: str
    cluster: str
    runtime: str
    global_batch: int
    memory_limit_bytes: int | None
    profile: str | None
    searcher: str
    options: str
    objective: str
    budget_s: float | None
    budget_evaluations: int | None
    seed: int
    without: str
    engine: str

    @property
    def budget(self) -> Budget:
        """The budget as searchers take it."""
        from searchers.budget import Budget

        return Budget(seconds=self.budget_s, evaluations=self.budget_evaluations)

    @property
    def label(self) -> str:
        """A few words for progress."""
        samples = counted(self.global_batch, "sample")
        return f"{self.model}, {self.cluster}, {samples}, {self.searcher}, seed {self.seed}"


@dataclass(frozen=True)
class Job:
    """A run, ready for any process of this code.

    Attributes:
        run: The inputs.
        paths: Values of the inputs that name files, as ``(field, value with absolute paths)``.
        digests: ``(file, SHA-256)`` of the files, as spelled in the spec: other content is another run.
        code: Fingerprint of the code the run belongs to.
    """

    run: Run
    paths: tuple[tuple[str, str], ...] = ()
    digests: tuple[tuple[str, str], ...] = ()
    code: str = ""

    @cached_property
    def key(self) -> str:
        """Name of the run's file: a hash of inputs and files, then the version of the code."""
        text = json.dumps(self.inputs(), sort_keys=True)
        return f"{hashlib.sha256(text.encode()).hexdigest()[:20]}-{self.code[:12]}"

    def inputs(self) -> dict[str, Any]:
        """Return the inputs as plain data."""
        return {**asdict(self.run), "files": dict(self.digests)}

    def resolved(self) -> Run:
        """Return the run with absolute paths."""
        changes: dict[str, Any] = dict(self.paths)
        return replace(self.run, **changes)


@dataclass(frozen=True)
class Outcome:
    """What one run leaves behind.

    Attributes:
        row: Results for the table; ``status`` is one of `experiments.statuses`.
        details: Counters, history, summary, error with traceback, where and how long it ran.
        plan: The plan file's text; None without a plan.
    """

    row: dict[str, Any]
    details: dict[str, Any] = field(default_factory=dict)
    plan: str | None = None

    @staticmethod
    def failed(error: BaseException, *, text: str | None = None) -> Outcome:
        """Return the outcome of a run that ended with an error."""
        lines = traceback.format_exception(error)
        reason = text or f"{type(error).__name__}: {error}"
        return Outcome({"status": "failed", "reason": reason}, {"traceback": "".join(lines)})


def code_of(run: Run) -> str:
    """Return the fingerprint of all code a run depends on; paths in it must be absolute."""
    return code_fingerprint(run.searcher)


def run_job(job: Job) -> Outcome:
    """Search and simulate. An error becomes an outcome too: it must not end the other runs.

    Raises:
        OtherCodeError: If this process is of other code than the one that made the job.
    """
    run = job.resolved()
    code = code_of(run)
    if code != job.code:
        raise OtherCodeError(
            f"a worker on {platform.node()} must run the sweep's code {job.code}, but runs {code}; install the "
            "same windtunnel there, share the searcher's file, and restart the workers"
        )
    began_s = time.perf_counter()
    try:
        outcome = _searched_and_simulated(run, job.digests)
    except (Exception, SystemExit) as error:  # whatever a searcher raises, or a plug-in that calls sys.exit()
        outcome = Outcome.failed(error, text=_in_words(error, run.searcher))
    outcome.details.update(host=platform.node(), process=os.getpid(), wall_s=time.perf_counter() - began_s)
    return outcome


def _in_words(error: BaseException, searcher: str) -> str | None:
    """Return an error of somebody's own searcher with where it is in its file; of others nothing."""
    from searchers.base import UnfitResultError
    from searchers.registry import is_file, raised

    if isinstance(error, UnfitResultError):
        return str(error)
    return raised(error, searcher) if is_file(searcher) else None


@lru_cache(maxsize=2)
def _problem(spec: ProblemSpec, digests: tuple[tuple[str, str], ...]) -> Problem:
    """Return a problem, kept since neighbouring runs share it; files with other content are another one."""
    return spec.load()


def _searched_and_simulated(run: Run, digests: tuple[tuple[str, str], ...]) -> Outcome:
    from searchers.base import NoFeasiblePlan, is_refusal
    from searchers.checked_search import checked_search
    from searchers.registry import searcher_named
    from simulator.compiled_cache import load_compiler, moment_s
    from simulator.costs import cost_tables
    from simulator.problem import ProblemSpec

    load_compiler()
    spec = ProblemSpec(run.model, run.cluster, run.runtime, run.global_batch, run.memory_limit_bytes, run.profile)
    problem = _problem(spec, digests)
    cost_tables(problem)  # shared with neighbouring runs, so no run's budget pays for them
    searcher = searcher_named(run.searcher, objective=run.objective, **json.loads(run.options))
    began_s = moment_s()
    try:
        found = checked_search(searcher, problem, run.budget, run.seed)
    except NoFeasiblePlan as error:
        return _without_plan("no plan", error, moment_s() - began_s, run)
    except ValueError as error:
        if not is_refusal(error):
            raise
        return _without_plan("not applicable", error, moment_s() - began_s, run)
    return _judged(run, spec, problem, found)


def _without_plan(status: str, error: ValueError, search_s: float, run: Run) -> Outcome:
    reason = str(error).removeprefix(f"{run.searcher}: ")
    row = {"status": status, "reason": reason, "search_s": search_s}
    return Outcome(row, {"traceback": "".join(traceback.format_exception(error))})


def _judged(run: Run, spec: ProblemSpec, problem: Problem, found: SearchResult) -> Outcome:
    """Simulate the searcher's plans in its order until one fits, as its user would try them for real."""
    from experiments.judged import first_that_fits
    from simulator.fidelity import Fidelity
    from simulator.plan_file import plan_document

    judged = first_that_fits(found, problem, Fidelity().without(*names_of(run.without)), run.engine)
    details = {
        "counters": dict(found.counters),
        "history": [[entry.wall_s, entry.evaluations, entry.best_objective] for entry in found.history],
        "plan_hash": judged.result.plan_hash,
        "notes": list(judged.result.notes),
    }
    text = dump_yaml(plan_document(spec, judged.plan, fingerprint=problem.workload.fingerprint))
    return Outcome(judged.row(found, run.budget), details, text)


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated field."""
    return tuple(text.split(",")) if text else ()


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with NumPy numbers as Python's, so that JSON takes it."""
    return {key: value.item() if hasattr(value, "item") else value for key, value in row.items()}
