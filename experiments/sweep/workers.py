"""Where the runs of a sweep are executed: processes on this machine, or an existing Dask cluster.

Both are `concurrent.futures` executors, so one loop (`outcomes`) drives both:

    waiting --submit--> workers --outcome--> caller writes it down
       ^                   |
       +--- process died --+   (once more; then the run counts as failed)

Local processes are joblib's (loky), one pool of one process per worker: a run that takes its process down
(out of memory, segmentation fault) is then known by name and ends no other run. `joblib.Parallel` itself
is not used: its Dask backend waits forever for a run that kills its workers (joblib 1.6.0).
"""

from __future__ import annotations

import importlib
import os
import queue
import re
import signal
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from datafiles.words import counted
from experiments.compare_files import code_fingerprint
from experiments.sweep.job import Job, OtherCodeError, Outcome, run_job

MAX_TRIES = 2
"""Times a run is begun on this machine if its process dies: the first death may be another one's fault."""

TICK_S = 0.5
"""Seconds after which `outcomes` reports that it is still waiting, so that progress stays alive."""

# loky replaces a process that has grown by 300 MB, as caches do here, and the run goes to the new one.
warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning, r"joblib\.externals\.loky")

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class Workers(Protocol):
    """What `outcomes` needs of a place to run.

    Attributes:
        name: In words.
        capacity: Runs to hand over at a time; None for all.
        crowded: Workers that run several runs at once as threads.
    """

    name: str
    capacity: int | None
    crowded: int

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a run."""

    def release(self, future: Future[Outcome]) -> None:
        """Take note that a run ended, well or not."""

    def begin_again(self, error: BaseException) -> bool:
        """Return whether a run that ended so should be begun again."""

    def close(self) -> None:
        """End what still runs."""


class LocalWorkers:
    """Processes on this machine.

    Args:
        num_processes: How many; None for one per core this process may use.
    """

    def __init__(self, num_processes: int | None = None) -> None:
        from joblib import cpu_count

        if num_processes is not None and num_processes < 1:
            raise ValueError(f"the number of processes must be at least 1, got {num_processes}")
        self.capacity: int | None = num_processes or int(cpu_count())
        self.name = f"{counted(self.capacity, 'process', 'processes')} on this machine"
        self.crowded = 0
        self._idle: list[Executor] = []
        self._busy: dict[Future[Outcome], Executor] = {}

    def submit(self, job: Job) -> Future[Outcome]:
        """Begin a run in an idle process, or in a new one."""
        while self._idle:
            lane = self._idle.pop()
            try:
                future = lane.submit(run_job, job)
            except BrokenExecutor:  # it died while idle, which is no fault of this run
                continue
            self._busy[future] = lane
            return future
        lane = _new_process()
        with interrupts_wait():
            future = lane.submit(run_job, job)
        self._busy[future] = lane
        return future

    def release(self, future: Future[Outcome]) -> None:
        """Keep the process for the next run, unless it died."""
        lane = self._busy.pop(future)
        if isinstance(future.exception(), BrokenExecutor):
            lane.shutdown(wait=False)
        else:
            self._idle.append(lane)

    def begin_again(self, error: BaseException) -> bool:
        """Return whether the process died."""
        return isinstance(error, BrokenExecutor)

    def close(self) -> None:
        """Kill the processes."""
        for lane in [*self._idle, *self._busy.values()]:
            lane.shutdown(wait=True, kill_workers=True)  # type: ignore[call-arg]  # loky's own
        self._idle.clear()
        self._busy.clear()


def _new_process() -> Executor:
    from joblib.externals.loky import ProcessPoolExecutor

    executor: Executor = ProcessPoolExecutor(
        max_workers=1, initializer=follow, initargs=(os.getpid(),), env=_ONE_THREAD
    )
    return executor


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold Ctrl-C back while a process begins, which inherits that: it would end in its imports, with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow(parent: int) -> None:
    """Leave Ctrl-C, which reaches every process of the terminal, to the parent; end when the parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(TICK_S)
        os._exit(1)  # loky's processes would wait for work forever

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, name="follow-parent", daemon=True).start()


class DaskWorkers:
    """An existing Dask cluster. All runs are handed over at once, so that an adaptive cluster sees them.

    Dask itself begins the runs of a lost worker again elsewhere, up to ``distributed.scheduler.allowed-failures``
    times (3, unless configured); after that the run counts as failed.

    Args:
        address: Of the scheduler, such as ``tcp://host:8786``.

    Raises:
        ValueError: If distributed is not installed, the address is none, or workers there run other code.
        OSError: If no scheduler answers.
    """

    def __init__(self, address: str) -> None:
        try:
            distributed: Any = importlib.import_module("distributed")
        except ImportError:
            raise ValueError(
                "a Dask cluster needs the package distributed; pip install 'windtunnel[distributed]'"
            ) from None
        if not re.fullmatch(r"[a-z]+://[^/\s]+:\d+", address):
            raise ValueError(f"a scheduler must be named like tcp://host:8786, got {address!r}")
        self.capacity: int | None = None
        self._client = distributed.Client(address, timeout="10s", set_as_default=False)
        try:
            threads: dict[str, int] = self._client.ncores()
            self.name = f"{counted(len(threads), 'Dask worker')} at {address}"
            self.crowded = sum(count > 1 for count in threads.values())
            self._check_code(address)
        except BaseException:
            self._client.close()
            raise
        self._executor: Any = self._client.get_executor(pure=False)

    def _check_code(self, address: str) -> None:
        mine = code_fingerprint("")
        try:
            found: dict[str, str] = self._client.run(code_fingerprint, "")
        except ImportError as error:
            raise ValueError(f"the workers at {address} must have windtunnel installed: {error}") from None
        other = sorted(worker for worker, code in found.items() if code != mine)
        if other:
            raise ValueError(
                f"all workers must run this windtunnel ({mine}), but {len(other)} of {len(found)} do not: "
                f"{other[0]} runs {found[other[0]]}; install the same version there and restart the workers"
            )

    def submit(self, job: Job) -> Future[Outcome]:
        """Hand a run to the scheduler."""
        future: Future[Outcome] = self._executor.submit(run_job, job, key=f"sweep-{job.key}")
        return future

    def release(self, future: Future[Outcome]) -> None:
        """Do nothing: the scheduler keeps its own books."""

    def begin_again(self, error: BaseException) -> bool:
        """Return False: the scheduler has done so where it helps."""
        return False

    def close(self) -> None:
        """Cancel what still runs and leave the cluster as it was."""
        self._executor.shutdown(wait=False)
        self._client.close()


@dataclass(frozen=True)
class Waiting:
    """A sign of life while nothing ends.

    Attributes:
        oldest: The run that has gone on for longest; None where only the cluster knows which are running.
        oldest_s: For how long.
    """

    oldest: Job | None = None
    oldest_s: float = 0.0


def outcomes(jobs: Iterable[Job], workers: Workers) -> Iterator[tuple[Job, Outcome] | Waiting]:
    """Run the jobs and yield each with its outcome as it ends, and now and then while waiting.

    Args:
        jobs: Each at most once.
        workers: Where; the caller closes them.

    Raises:
        OtherCodeError: If a worker runs other code.
        ConnectionError: If the cluster went away.
    """
    waiting = deque(jobs)
    running: dict[Future[Outcome], tuple[Job, float]] = {}  # in the order in which they began
    tries: Counter[str] = Counter()
    ended: queue.SimpleQueue[Future[Outcome]] = queue.SimpleQueue()
    while waiting or running:
        while waiting and (workers.capacity is None or len(running) < workers.capacity):
            job = waiting.popleft()
            tries[job.key] += 1
            future = workers.submit(job)
            running[future] = (job, time.perf_counter())
            future.add_done_callback(ended.put)
        try:
            future = ended.get(timeout=TICK_S)
        except queue.Empty:
            oldest, began_s = next(iter(running.values()))
            yield Waiting() if workers.capacity is None else Waiting(oldest, time.perf_counter() - began_s)
            continue
        job, _ = running.pop(future)
        error = _error_of(future)
        workers.release(future)
        if error is None:
            yield job, future.result()
        elif isinstance(error, OtherCodeError):
            raise error
        elif workers.begin_again(error) and tries[job.key] < MAX_TRIES:
            waiting.append(job)
        else:
            yield job, Outcome.failed(error, text=_cause(error))


def _error_of(future: Future[Outcome]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError:
        raise ConnectionError(
            "the Dask scheduler went away or cancelled a run; finished runs are kept, the same command continues"
        ) from None


def _cause(error: BaseException) -> str | None:
    """Return why a process died, in one line; None if it is no death."""
    if isinstance(error, BrokenExecutor):
        codes = re.search(r"exit codes of the workers are \{(.*)\}", str(error))
        how = f" with {codes[1]}" if codes else ""
        return f"its process died {MAX_TRIES} times{how}, perhaps for lack of memory or in compiled code"
    if type(error).__name__ == "KilledWorker":
        return "every Dask worker that took it died, perhaps for lack of memory or in compiled code"
    return None
