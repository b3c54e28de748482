"""The spec of a sweep: a grid, cases and runs, each run made once; errors name place, line and remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest

from datafiles.errors import DataFileError
from datafiles.writer import dump_yaml
from experiments.sweep import run as run_module
from experiments.sweep.job import Job, Outcome, run_job
from experiments.sweep.run import Progress, Sweep, load_sweep
from experiments.sweep.values import _options_of
from experiments.sweep.workers import Waiting
from hardware_models.calibration_file import Calibration, GpuConstants, save_calibration
from hardware_models.cluster import parse_cluster
from searchers.registry import searcher_class, searcher_names
from tests.experiments.sweeps import BASE, MODEL, Place


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


def test_a_layer_profile_is_a_model_of_the_specs_folder(place: Place) -> None:
    head = "node,layer,fw_ms,bw_ms,output_activation_bytes,param_bytes,preds"
    (place.spec.parent / "layers.csv").write_text(f"{head}\n1,conv,3,6,1000000,4000000,\n2,fc,2,4,1000,8000000,1\n")
    spec = load_sweep(place.write(runs=[{"model": "layers.csv@4", "global_batch": 4, "searcher": "ddp"}]))
    assert spec.jobs[0].run.model == "layers.csv@4" and dict(spec.jobs[0].digests).keys() == {"layers.csv"}
    assert run_job(spec.jobs[0]).row["status"] == "ok"
    with pytest.raises(DataFileError, match=r"or write layers\.csv@32$"):
        load_sweep(place.write(runs=[{"model": "layers.csv", "global_batch": 4, "searcher": "ddp"}]))
    with pytest.raises(DataFileError, match=r"base\.model: files must lie in the spec's folder"):
        load_sweep(place.write(base={**BASE, "model": "../layers.csv@4"}))


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


def test_a_runtime_is_another_with_another_base(place: Place) -> None:
    path = place.write(runs=[{"global_batch": 4, "searcher": "ddp", "runtime": "ours.yaml"}])
    changes = "base: {}\ngradient_clipping: {}\nsources: {{gradient_clipping: read}}\n"
    (path.parent / "ours.yaml").write_text("description: ours\n" + changes.format("theirs.yaml", "false"))
    theirs = path.parent / "theirs.yaml"
    theirs.write_text("description: theirs\n" + changes.format("megatron-lm-2021", "true"))
    before = load_sweep(path).jobs[0].key
    assert load_sweep(path).jobs[0].key == before
    theirs.write_text("description: theirs\n" + changes.format("megatron-lm-2023", "true"))
    assert load_sweep(path).jobs[0].key != before
    theirs.rename(path.parent.parent / "theirs.yaml")
    (path.parent / "ours.yaml").write_text("description: ours\n" + changes.format("../theirs.yaml", "false"))
    with pytest.raises(ValueError, match=r"files must lie in the spec's folder or below, .* got '../theirs.yaml'"):
        load_sweep(path)


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
        ("base:\n  searcher: {name: random, options: {max_microbatch: abc}}", ["option max_microbatch", "got 'abc'"]),
        ("base:\n  searcher: {name: aceso, options: {races: 1.5}}", ["option races", "got 1.5"]),
        ("base:\n  searcher: {name: alpa, options: {solver: best}}", ["option solver"]),
        ("base:\n  searcher: {name: random, options: {max_microbatch: 0}}", ["max_microbatch must be at least 1"]),
        ("base:\n  searcher: {name: random, options: {max_microbatch: 1e308}}", ["must lie within", "got 1e+308"]),
        ("base:\n  searcher: ../mine.py:Mine", ["line 2, base.searcher: files must lie in the spec's folder"]),
        ("base:\n  model: /etc/tiny.yaml", ["line 2, base.model: files must lie in the spec's folder"]),
        ("base:\n  model: none.yaml", ["line 2, base.model: no file 'none.yaml'"]),
        ("base:\n  without: [hots]", ["line 2, base.without: unknown effect 'hots'", "did you mean 'host'?"]),
        ("base:\n  engine: simpi", ["line 2, base.engine: unknown engine 'simpi'", "'simpy'?"]),
        ("base:\n  budget: soon", ["line 2, base.budget: a budget must be a time"]),
        ("base:\n  memory_limit: 8 apples", ["line 2, base.memory_limit: a size must be like"]),
        ("base:\n  memory_limit: 28", ["line 2, base.memory_limit: the memory limit must be at least 1 MiB, got '28'"]),
        ("base:\n  memory_limit: 1.5", ["base.memory_limit: the memory limit must be at least 1 MiB, got '1.5'"]),
        ("base:\n  memory_limit: 1e30", ["line 2, base.memory_limit: must be at most 2**60 bytes, got 1e+30"]),
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


def test_a_memory_limit_above_that_of_a_runs_gpus_is_found_before_anything_runs(place: Place) -> None:
    both = {"cluster": ["v100-32g-dgx1:1x2", "p3.8xlarge:1x2"], "global_batch": [4], "searcher": ["ddp"]}
    base = {name: value for name, value in BASE.items() if name != "cluster"}
    with pytest.raises(DataFileError, match=r"base\.memory_limit: .*at most the 15\.78 GiB of .* \(cluster p3\.8x"):
        load_sweep(place.write(base={**base, "memory_limit": "28GiB"}, grid=both))
    with pytest.raises(DataFileError, match=r"runs\.0\.memory_limit: .*must be more than the .* GiB that"):
        load_sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp", "memory_limit": "2MiB"}]))


def test_a_profile_beside_the_spec_is_what_a_run_is_simulated_on(place: Place) -> None:
    (node,) = parse_cluster(BASE["cluster"]).nodes
    seconds, keys = [], set()
    for share in (0.5, 0.05, None):  # of the memory bandwidth in the optimizer step
        if share is not None:
            constants = {node.gpu.name: GpuConstants(optimizer_bandwidth_fraction=share)}
            save_calibration(Calibration(source="mine", gpus=constants), place.spec.parent / "own.yaml")
        profile = {} if share is None else {"profile": "own.yaml"}
        (job,) = load_sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp", **profile}])).jobs
        seconds.append(run_job(job).row["iteration_time_s"])
        keys.add(job.key)
    assert seconds[1] > 1.05 * seconds[0] and len(keys) == len(set(seconds)) == 3
    (place.spec.parent / "own.yaml").write_text("nothing: 1")
    with pytest.raises(DataFileError, match="profile"):
        load_sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp", "profile": "own.yaml"}]))


def test_a_run_without_a_plan_says_how_long_it_searched_and_where(place: Place) -> None:
    spec = load_sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp", "memory_limit": "801MiB"}]))
    outcome = run_job(spec.jobs[0])
    assert outcome.row["status"] == "no plan" and not outcome.row["reason"].startswith("ddp: ")
    assert outcome.details["process"] == os.getpid()
    assert 0.0 <= outcome.row["search_s"] <= outcome.details["wall_s"] < 600.0


def test_an_interrupted_sweep_says_what_remained_and_goes_on_with_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four runs of 10 s end, the second failed, and nothing for 4 s, then for longer than a run takes."""
    clock = [100.0]

    def outcomes(pending: Sequence[Job], workers: object) -> Iterator[tuple[Job, Outcome] | Waiting]:
        for number, job in enumerate(pending[:3]):
            clock[0] += 10.0
            yield job, Outcome({"status": "failed" if number == 1 else "ok"})
        for waited_s in (4.0, 8.0):
            clock[0] += waited_s
            yield Waiting(pending[3], waited_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "outcomes", outcomes)
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: clock[0])
    grid = {"searcher": ["ddp"], "global_batch": [2, 4, 6, 8]}
    found = Sweep(load_sweep(place.write(grid=grid)), place.output)
    said: list[Progress] = []
    with pytest.raises(KeyboardInterrupt):
        found.run(None, said.append)  # type: ignore[arg-type]
    assert [(each.done, each.total, each.failed, each.elapsed_s, each.remaining_s) for each in said] == [
        (0, 4, 0, 0.0, None), (1, 4, 0, 10.0, 30.0), (2, 4, 1, 20.0, 20.0), (3, 4, 1, 30.0, 10.0), (3, 4, 1, 34.0, 6.0),
        (3, 4, 1, 42.0, None),
    ]  # fmt: skip
    assert said[-1].oldest == (found.pending[0].run, 8.0)
    assert [job.run.global_batch for job in found.pending] == [8]
    assert found.counts() == {"ok": 2, "failed": 1}
    assert list(pd.read_csv(place.output / "table.csv")["global_batch"]) == [2, 4, 6]

    again = Sweep(load_sweep(place.spec), place.output)
    assert [job.run.global_batch for job in again.pending] == [8]
    assert (again.num_failed_kept, again.num_other) == (1, 0)
    retried = Sweep(load_sweep(place.spec), place.output, retry_failed=True)
    assert [job.run.global_batch for job in retried.pending] == [4, 8] and retried.num_failed_kept == 0
    fewer = Sweep(load_sweep(place.write(grid={**grid, "global_batch": [6, 8]})), place.output)
    assert [job.run.global_batch for job in fewer.pending] == [8] and fewer.num_other == 2


@pytest.mark.parametrize("name", searcher_names())
def test_no_searcher_takes_a_negative_number(name: str) -> None:
    found = searcher_class(name)
    numbers = [option for option, kind in _options_of(found).items() if kind in (int, float, int | None, float | None)]
    assert "keep" in numbers
    for option in numbers:
        with pytest.raises(ValueError, match=f"{option}.* must be"):
            found(**{option: -1})
