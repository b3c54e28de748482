"""A sweep on a Dask cluster: the same table, whatever happens to workers."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from experiments.sweep.run import Progress, Sweep, load_sweep, open_workers, sweep
from tests.experiments.sweeps import Place, without_timings


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A real cluster: a scheduler and two worker processes, restarted should they die."""
    distributed = pytest.importorskip("distributed", reason="needs windtunnel[distributed]")
    dask = pytest.importorskip("dask")
    settings = {"distributed.scheduler.allowed-failures": 1, "distributed.worker.daemon": True}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
        ) as running,
    ):
        yield running


def test_a_dask_cluster_and_local_processes_give_the_same_table(place: Place, cluster: Any) -> None:
    spec = place.write(grid={"global_batch": [4, 8], "searcher": ["random", "deepspeed-3d"], "seed": [0, 1]})
    local = sweep(spec, place.output, num_processes=2)
    remote = sweep(spec, place.output.with_name("dask"), scheduler=cluster.scheduler_address)
    pd.testing.assert_frame_equal(without_timings(local), without_timings(remote))


def test_a_killed_dask_worker_loses_nothing_and_counts_nothing_twice(place: Place, cluster: Any) -> None:
    searcher = place.recorded(sleep_s=0.25)
    spec = place.write(grid={"global_batch": [2, 4], "seed": [0, 1, 2, 3, 4]}, cases=[{"searcher": searcher}])
    found = Sweep(load_sweep(spec), place.output)
    ended: Counter[str] = Counter()
    killed: list[int] = []
    workers = open_workers(None, cluster.scheduler_address)

    def listen(progress: Progress) -> None:
        if progress.last is not None:
            ended[f"{progress.last.global_batch}-{progress.last.seed}"] += 1
        if progress.done == 3 and not killed:
            killed.append(busy_process(place))
            os.kill(killed[0], signal.SIGKILL)

    try:
        found.run(workers, listen)
    finally:
        workers.close()
    names = {f"{batch}-{seed}" for batch in (2, 4) for seed in range(5)}
    assert killed
    assert ended == dict.fromkeys(names, 1)
    assert list(found.table()["status"]) == ["ok"] * 10
    assert len(place.records()) == 10
    begun = place.begun()
    assert begun.keys() == names
    assert sum(begun.values()) >= 11, "the run that the killed worker had begun must have been begun again"


def busy_process(place: Place) -> int:
    """Return the process that began the latest run, which it cannot have finished yet."""
    latest = max(place.log.glob("*-*"), key=lambda file: int(file.name.split("-")[3]))
    return int(latest.name.split("-")[2])


def test_a_run_that_kills_every_dask_worker_fails_alone(place: Place, cluster: Any) -> None:
    searcher = place.recorded(dies_at=[8])
    spec = place.write(grid={"global_batch": [2, 4, 8, 16]}, cases=[{"searcher": searcher}])
    table = sweep(spec, place.output, scheduler=cluster.scheduler_address).set_index("global_batch")
    assert dict(table["status"]) == {2: "ok", 4: "ok", 8: "failed", 16: "ok"}
    assert "every Dask worker that took it died" in str(table.loc[8, "reason"])


def test_without_dask_or_a_scheduler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not both"):
        open_workers(2, "tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"must be named like tcp://host:8786, got '127\.0\.0\.1'"):
        open_workers(None, "127.0.0.1")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r"pip install 'windtunnel\[distributed\]'"):
        open_workers(None, "tcp://127.0.0.1:1")
