"""A sweep runs what is missing, keeps what is finished whatever happens, and fails at nothing but its spec."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from joblib.externals.loky import ProcessPoolExecutor

from datafiles.errors import DataFileError
from datafiles.writer import dump_yaml
from experiments.sweep.files import COLUMNS, INPUTS, TIMINGS
from experiments.sweep.job import Job, OtherCodeError, run_job
from experiments.sweep.run import Progress, Sweep, load_sweep, open_workers, sweep
from experiments.sweep.workers import interrupts_wait
from simulator.plan_file import load_plan
from simulator.simulate import simulate
from tests.experiments.commands import run

ROOT = Path(__file__).parents[2]

MODEL = {"family": "gpt", "layers": 2, "hidden": 256, "heads": 4, "seq_len": 64, "vocab": 512}

PLUGIN = '''
import os, time
from pathlib import Path
from searchers.pure import DistributedDataParallel

class Recorded(DistributedDataParallel):
    """Leaves a file for every time it begins; sleeps, raises or dies where told."""
    name = "recorded"

    def __init__(self, *, log, sleep_s=0.0, raises_at=(), dies_at=(), objective="paper", keep=5):
        super().__init__(objective=objective, keep=keep)
        self.log, self.sleep_s, self.raises_at, self.dies_at = Path(log), sleep_s, raises_at, dies_at

    def search(self, problem, budget=None, seed=0):
        (self.log / f"{problem.global_batch}-{seed}-{os.getpid()}-{time.time_ns()}").touch()
        time.sleep(self.sleep_s)
        if problem.global_batch in self.raises_at and not (self.log / "mended").exists():
            raise KeyError("a bug in the searcher")
        if problem.global_batch in self.dies_at:
            os._exit(9)
        return super().search(problem, budget, seed)
'''

BASE = {"model": "tiny.yaml", "cluster": "v100-32g-dgx1:1x2", "budget": 10}


class Place:
    """A folder with a spec, a small model, and a searcher that keeps a log."""

    def __init__(self, folder: Path) -> None:
        self.spec, self.output, self.log = folder / "spec.yaml", folder / "out", folder / "log"
        self.log.mkdir()
        (folder / "tiny.yaml").write_text(dump_yaml(MODEL))
        (folder / "mine.py").write_text(PLUGIN)

    def write(self, **sections: Any) -> Path:
        self.spec.write_text(dump_yaml({"base": BASE, **sections}))
        return self.spec

    def recorded(self, **options: Any) -> dict[str, Any]:
        return {"name": "mine.py:Recorded", "options": {"log": str(self.log), **options}}

    def begun(self) -> Counter[str]:
        """Return how often each run has begun, by batch and seed."""
        return Counter("-".join(file.name.split("-")[:2]) for file in self.log.glob("*-*"))

    def records(self) -> dict[str, int]:
        """Return the files of finished runs and when they were written."""
        return {file.name: file.stat().st_mtime_ns for file in (self.output / "runs").glob("*.json")}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def without_timings(table: pd.DataFrame) -> pd.DataFrame:
    return table.drop(columns=list(TIMINGS))


# -- the spec ---------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_in_the_specs_order(place: Place) -> None:
    spec = load_sweep(place.write(grid={"global_batch": [4, 8], "searcher": ["ddp", "random"], "seed": [0, 1, 2]}))
    found = [(job.run.global_batch, job.run.searcher, job.run.seed) for job in spec.jobs]
    assert found == [(batch, name, seed) for batch in (4, 8) for name in ("ddp", "random") for seed in (0, 1, 2)]
    assert len({job.key for job in spec.jobs}) == 12


def test_cases_keep_values_together_and_meet_the_whole_grid(place: Place) -> None:
    cases = [{"cluster": "v100-32g-dgx1:1x2", "global_batch": 4}, {"cluster": "v100-32g-dgx1:1x4", "global_batch": 8}]
    spec = load_sweep(
        place.write(
            cases=cases,
            grid={"searcher": ["ddp", "gpipe"]},
            runs=[{"global_batch": 2, "searcher": "fsdp", "without": "host, contention", "memory_limit": "8GiB"}],
        )
    )
    runs = [job.run for job in spec.jobs]
    assert [(run.cluster[-3:], run.global_batch, run.searcher) for run in runs] == [
        ("1x2", 4, "ddp"), ("1x2", 4, "gpipe"), ("1x4", 8, "ddp"), ("1x4", 8, "gpipe"), ("1x2", 2, "fsdp"),
    ]  # fmt: skip
    assert (runs[-1].without, runs[-1].memory_limit_bytes) == ("contention,host", 8 << 30)
    assert (runs[0].without, runs[0].memory_limit_bytes, runs[0].budget_evaluations) == ("", None, 10)


def test_a_run_named_twice_in_any_spelling_is_made_once(place: Place) -> None:
    grid = {"without": [[], ["overlap_slowdown", "host"], "host,overlap-slowdown", ""]}
    spec = load_sweep(place.write(grid=grid, cases=[{"global_batch": 4, "searcher": "ddp"}]))
    assert len(spec.jobs) == 2
    assert spec.num_repeated == 2


def test_a_file_with_other_content_is_another_run(place: Place) -> None:
    path = place.write(runs=[{"global_batch": 4, "searcher": "ddp"}])
    before = load_sweep(path).jobs[0].key
    assert load_sweep(path).jobs[0].key == before
    (path.parent / "tiny.yaml").write_text(dump_yaml({**MODEL, "layers": 3}))
    assert load_sweep(path).jobs[0].key != before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("grid:\n  modle: [a]", ["spec.yaml:2: grid.modle: unknown key, did you mean 'model'?"]),
        ("base:\n  model: gpt3-350M\n  cluster: v100",
         ["line 2, base.model: unknown model", "did you mean 'gpt3-350m'?", "line 3, base.cluster: a cluster must be"]),
        ("grid:\n  seed: 3", ["spec.yaml:2: grid.seed: must be a list"]),
        ("grid:\n  seed: []", ["spec.yaml:2: grid.seed:"]),
        ("grid:\n  searcher:\n    - ddp\n    - radnom", ["line 4, grid.searcher.1: unknown searcher", "'random'?"]),
        ("base:\n  searcher: {name: random, options: {max_microbach: 2}}", ["line 2", "'max_microbatch'?"]),
        ("base:\n  searcher: {name: random, options: {max_microbatch: 2, objective: paper}}", ["a field beside"]),
        ("base:\n  searcher: ../mine.py:Mine", ["line 2, base.searcher: files must lie in the spec's folder"]),
        ("base:\n  model: /etc/tiny.yaml", ["line 2, base.model: files must lie in the spec's folder"]),
        ("base:\n  model: none.yaml", ["line 2, base.model: no file 'none.yaml'"]),
        ("base:\n  without: [hots]", ["line 2, base.without: unknown effect 'hots'", "did you mean 'host'?"]),
        ("base:\n  engine: simpi", ["line 2, base.engine: unknown engine 'simpi'", "'simpy'?"]),
        ("base:\n  budget: soon", ["line 2, base.budget: a budget must be a time"]),
        ("base:\n  memory_limit: 8 apples", ["line 2, base.memory_limit: a size must be like"]),
        ("base:\n  seed: null", ["line 2, base.seed: must have a value"]),
        ("base:\n  searcher: ddp\ngrid:\n  seed: [1]", ["every run needs cluster, global_batch, model"]),
        ("cases:\n  - {seed: 1}\ngrid:\n  seed: [2]", ["line 2, cases.0.seed: seed is in grid too"]),
        ("runs:\n  - {seed: 1}", ["spec.yaml:2: runs.0: every run needs"]),
        (f"grid:\n  seed: {list(range(1000))}\n  global_batch: {list(range(1, 1002))}", ["at most 100,000 runs"]),
        ("base: &a {}", ["spec.yaml:1: anchors are not allowed"]),
    ],
)  # fmt: skip
def test_errors_of_a_spec_name_place_line_and_remedy(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(DataFileError) as caught:
        load_sweep(path)
    for part in expected:
        assert part in str(caught.value)


# -- runs on this machine ---------------------------------------------------------------------------


def test_results_are_the_same_with_any_number_of_processes_and_can_be_simulated_again(place: Place) -> None:
    spec = place.write(grid={"global_batch": [4, 8], "searcher": ["random", "deepspeed-3d"], "seed": [0, 1]})
    seen: list[Progress] = []
    one = sweep(spec, place.output, num_processes=1, listener=seen.append)
    two = sweep(spec, place.output.with_name("other"), num_processes=2)
    pd.testing.assert_frame_equal(without_timings(one), without_timings(two))
    assert list(one.columns) == list(COLUMNS)
    assert Counter(one["status"]) == {"ok": 4, "not applicable": 4}
    ends = [progress for progress in seen if progress.last is not None]
    assert [progress.done for progress in ends] == list(range(1, 9))
    assert all(progress.remaining_s is not None for progress in ends)
    row = one[one["status"] == "ok"].iloc[0]
    problem, plan = load_plan(place.output / "plans" / f"{row['run']}.yaml")
    assert simulate(plan, problem.load()).iteration_time_s == row["iteration_time_s"]
    names = {path.name for path in place.output.iterdir()}
    assert names == {"spec.yaml", "runs", "plans", "table.csv", "table.json", "sweep.png"}
    from_csv = pd.read_csv(place.output / "table.csv")
    from_json = json.loads((place.output / "table.json").read_text())
    assert list(from_csv["run"]) == [entry["run"] for entry in from_json] == list(one["run"])
    assert [entry["iteration_time_s"] for entry in from_json if entry["status"] == "ok"] == list(
        one["iteration_time_s"].dropna()
    )


def test_failures_are_kept_end_nothing_else_and_are_made_again_only_when_asked(place: Place) -> None:
    searcher = place.recorded(raises_at=[4], dies_at=[8])
    spec = place.write(grid={"global_batch": [2, 4, 8, 16]}, cases=[{"searcher": searcher}])
    table = sweep(spec, place.output, num_processes=2).set_index("global_batch")
    assert dict(table["status"]) == {2: "ok", 4: "failed", 8: "failed", 16: "ok"}
    assert table.loc[4, "reason"] == "KeyError: 'a bug in the searcher'"
    assert "its process died 2 times with EXIT(9)" in str(table.loc[8, "reason"])
    record = json.loads((place.output / "runs" / f"{table.loc[4, 'run']}.json").read_text())
    assert 'raise KeyError("a bug in the searcher")' in record["traceback"]
    assert place.begun() == {"2-0": 1, "4-0": 1, "8-0": 2, "16-0": 1}
    (place.log / "mended").touch()
    assert list(sweep(spec, place.output)["status"]) == ["ok", "failed", "failed", "ok"]
    assert sum(place.begun().values()) == 5
    again = sweep(spec, place.output, retry_failed=True)
    assert list(again["status"]) == ["ok", "ok", "failed", "ok"]
    assert place.begun() == {"2-0": 1, "4-0": 2, "8-0": 4, "16-0": 1}


def start(place: Place, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from experiments.cli import main; main()", "sweep", str(place.spec)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "-o", str(place.output), *options],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def wait_for_records(place: Place, count: int, process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 60
    while len(place.records()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline_s, "no run finished within a minute"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_sweep_killed_in_the_middle_goes_on_where_it_stopped(place: Place, number: signal.Signals) -> None:
    searcher = place.recorded(sleep_s=0.3)
    spec = place.write(grid={"global_batch": [2, 4], "seed": [0, 1, 2, 3]}, cases=[{"searcher": searcher}])
    process = start(place, "--jobs", "2")
    wait_for_records(place, 2, process)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: the workers get it too
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=30)  # which ends only when all its workers have ended too
    kept, begun = place.records(), place.begun()
    assert 2 <= len(kept) < 8
    if number != signal.SIGKILL:
        assert process.returncode == 130, said
        assert f"the same command makes the other {8 - len(kept)}" in " ".join(said.split())
        assert len(pd.read_csv(place.output / "table.csv")) == len(kept)
    table = sweep(spec, place.output, num_processes=2)
    assert list(table["status"]) == ["ok"] * 8
    assert kept.items() <= place.records().items(), "a finished run was made again"
    assert sum(place.begun().values()) - sum(begun.values()) == 8 - len(kept)
    assert len(place.records()) == 8


def test_a_damaged_record_is_made_again(place: Place) -> None:
    spec = place.write(runs=[{"global_batch": 4, "searcher": "ddp"}])
    first = sweep(spec, place.output, num_processes=1)
    file = place.output / "runs" / f"{first['run'][0]}.json"
    file.write_text(file.read_text()[:100])
    found = Sweep(load_sweep(spec), place.output)
    assert found.folder.damaged == [file]
    assert [job.key for job in found.pending] == [first["run"][0]]


def test_a_worker_of_other_code_is_refused(place: Place) -> None:
    (job,) = load_sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp"}])).jobs
    other: Job = replace(job, code="0" * 16)
    assert other.key != job.key
    with pytest.raises(OtherCodeError, match="must run the sweep's code 0000"):
        run_job(other)


def test_there_is_no_plot_where_no_axis_varies(place: Place) -> None:
    sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp"}]), place.output, num_processes=1)
    assert not (place.output / "sweep.png").exists()


# -- the command ------------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run(capsys, "sweep", *arguments)


def test_the_command_says_what_it_will_do_and_shows_one_table(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    spec = place.write(title="a title", grid={"global_batch": [4, 8], "searcher": [place.recorded(raises_at=[8])]})
    code, out, err = command(capsys, spec, "-o", place.output, "-j", 1)
    assert code == 0
    assert "a title: 2 runs, 2 to make on 1 process on this machine" in err
    assert "code of your own that will be executed: mine.py:Recorded" in err
    assert "2/2 runs" in err
    assert "failed: KeyError: 'a bug in the searcher'" in out
    assert "1 ok, 1 failed" in out
    code, out, err = command(capsys, spec, "-o", place.output, "--json")
    assert code == 0
    assert "2 runs, 2 finished earlier" in err
    assert "1 of the finished runs failed; --retry-failed makes them again" in err
    assert [row["status"] for row in json.loads(out)] == ["ok", "failed"]
    assert set(json.loads(out)[0]) == set(COLUMNS) > set(INPUTS)


def test_many_runs_need_a_yes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    spec = place.write(grid={"global_batch": [4], "searcher": ["ddp"], "seed": list(range(1001))})
    code, _, err = command(capsys, spec, "-o", place.output)
    assert code == 2
    assert "has 1,001 runs to make, more than 1,000; add --yes" in err


# -- Dask -------------------------------------------------------------------------------------------


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


def held_back() -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_process_that_begins_leaves_the_terminals_interrupt_to_its_parent() -> None:
    """From its first instruction on: until its imports are done it could not say so itself."""
    executor = ProcessPoolExecutor(max_workers=1)
    with interrupts_wait():
        assert held_back()
        found = executor.submit(held_back)
    assert found.result() is True and not held_back()
    executor.shutdown()
