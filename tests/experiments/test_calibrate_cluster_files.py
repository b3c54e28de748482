"""A calibration of a user's own cluster file: every command takes its links, however the file's path is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datafiles.writer import dump_yaml
from experiments.calibrate.galvatron import galvatron
from experiments.sweep.run import sweep
from hardware_models.calibration_file import load_calibration, save_calibration
from hardware_models.cluster import measured_name, parse_cluster
from hardware_models.machine_factors import with_factors
from simulator.plan_file import load_plan, save_plan
from simulator.problem import ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.experiments.commands import run
from tests.experiments.sweeps import BASE, MODEL, Place
from tests.experiments.test_calibrate import nccl_logs
from tests.hardware_models.test_cluster_files import NODE

SPELLINGS = ("ours.yaml", "./ours.yaml", "../one/ours.yaml", "absolute")
RUNTIME = "megatron-lm-2021"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where one stands: a small model, a cluster file, and a calibration of its GPU, links and network."""
    found = tmp_path / "one"
    found.mkdir()
    (found / "tiny.yaml").write_text(dump_yaml(MODEL))
    (found / "ours.yaml").write_text(dump_yaml(NODE))
    monkeypatch.chdir(found)
    factors = {"products": 0.9, "links": 0.2, "network": 0.2}
    save_calibration(with_factors(parse_cluster("ours.yaml:1x8"), factors, "test"), "mine.json")
    return found


def spelled(name: str, folder: Path) -> str:
    return str(folder / "ours.yaml") if name == "absolute" else name


def seconds(capsys: pytest.CaptureFixture[str], *words: object) -> float:
    code, out, err = run(capsys, *words, "--json")
    assert code == 0, err
    found = json.loads(out)
    return float(found["runs"][0]["predicted_iteration_time_s"] if "runs" in found else found["iteration_time_s"])


def saved_plan(path: Path, cluster: str, profile: str | None = "mine.json") -> float:
    """Write a plan that names the cluster so, and return what it takes."""
    spec = ProblemSpec("tiny.yaml", cluster, RUNTIME, 32, profile=profile)
    problem = spec.load()
    plan = uniform_plan(problem, tp=2, microbatch=2)
    save_plan(path, spec, plan)
    return simulate_time_s(plan, problem)


def test_plans_and_tables_have_one_time_however_the_file_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {saved_plan(folder / "plan.yaml", f"{spelled(name, folder)}:2x8") for name in SPELLINGS}
    assert len(found) == 1 and min(found) > 1.05 * saved_plan(folder / "plain.yaml", "ours.yaml:2x8", None)
    simulated = set()
    for name in SPELLINGS:
        saved_plan(folder / "plan.yaml", f"{spelled(name, folder)}:2x8")
        simulated.add(seconds(capsys, "simulate", "plan.yaml"))
        simulated.add(seconds(capsys, "simulate", "plan.yaml", "--profile", folder / "mine.json"))
    (folder / "runs.csv").write_text("tp,pp,dp,microbatch,global_batch\n2,1,8,2,32\n")
    predicted = {
        seconds(capsys, "predict", "runs.csv", "-m", "tiny.yaml", "-c", f"{spelled(name, folder)}:2x8", "-r", RUNTIME,
                "--profile", profile)
        for name in SPELLINGS for profile in ("mine.json", folder / "mine.json")
    }  # fmt: skip
    assert len(simulated) == len(predicted) == 1


def test_a_plan_is_simulated_alike_from_another_folder(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = saved_plan(folder / "plan.yaml", "ours.yaml:2x8")
    assert seconds(capsys, "simulate", "plan.yaml") == pytest.approx(found, rel=1e-12)
    monkeypatch.chdir(folder.parent)
    assert seconds(capsys, "simulate", folder / "plan.yaml") == pytest.approx(found, rel=1e-12)
    again = seconds(capsys, "simulate", "one/plan.yaml", "--profile", "one/mine.json")
    assert again == pytest.approx(found, rel=1e-12)


def test_a_sweep_takes_the_links_too(place: Place, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps name every file by its absolute path."""
    for name in ("ours.yaml", "mine.json"):
        shutil.copy(folder / name, place.spec.parent)
    monkeypatch.chdir(place.spec.parent)
    own = {"cluster": "ours.yaml:1x8", "runtime": "pytorch-ddp", "profile": "mine.json"}
    spec = place.write(grid={"global_batch": [32], "searcher": ["deepspeed-3d"]}, base={**BASE, **own})
    (swept,) = sweep(spec, place.output).to_dict("records")
    assert swept["status"] == "ok", swept
    problem, plan = load_plan(place.output / "plans" / f"{swept['run']}.yaml")
    near = replace(problem, cluster="ours.yaml:1x8", profile="mine.json")
    assert swept["iteration_time_s"] == simulate_time_s(plan, near.load())
    assert swept["iteration_time_s"] > 1.01 * simulate_time_s(plan, replace(near, profile=None).load())


def test_another_file_of_the_name_and_an_edited_one_are_refused_in_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_plan(folder / "plan.yaml", "ours.yaml:2x8")
    other = folder.parent / "two"
    other.mkdir()
    for path in (other / "ours.yaml", folder / "ours.yaml"):
        path.write_text(dump_yaml({**NODE, "network": "ib-400g"}))
    for name in ("plan.yaml", "../two/plan.yaml"):
        shutil.copy(folder / "plan.yaml", other)
        code, out, err = run(capsys, "simulate", name)
        words = " ".join(err.split())
        assert code == 2 and not out and "Traceback" not in err
        assert f"must be of the cluster file, now {measured_name('ours.yaml')}" in words and "edited since" in words


def test_a_calibration_of_links_says_which_file_it_is_of(
    calibrate: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name for the reader, the digest for the simulator: a copy of another name has the links."""
    name = measured_name("ours.yaml")
    summary = calibrate("nccl-tests", *nccl_logs(folder), "-c", folder / "ours.yaml")
    assert summary["links"] == [name] and name.startswith("ours.yaml#")
    found = load_calibration(folder.parent / "out" / "c.json")
    assert found.collectives_of == name and set(found.links) == {name}
    shutil.copy("ours.yaml", "copy.yaml")
    first, second = (found.hardware(parse_cluster(f"{file}:1x8")) for file in ("ours.yaml", "copy.yaml"))
    assert first.collective("all_reduce", 2**26, range(8)) == second.collective("all_reduce", 2**26, range(8))
    assert first.collective("all_reduce", 2**26, range(8)).source != "modelled"
    Path("bandwidth.json").write_text('{"allreduce_size_8_consec_1": 120.0}')
    of_galvatron = galvatron([Path("bandwidth.json")], preset="../one/ours.yaml", model=None, runtime="galvatron-v1")
    assert list(of_galvatron.calibration.links) == [name]


def test_runs_are_of_one_machine_by_what_its_file_says(
    calibrate: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder.parent / "two"
    other.mkdir()
    (other / "ours.yaml").write_text(dump_yaml({**NODE, "network": "ib-400g"}))

    def table(*clusters: str) -> None:
        times = [saved_plan(folder / f"{number}.yaml", cluster, None) for number, cluster in enumerate(clusters)]
        lines = [f"{number}.yaml,{1.2 * seconds}\n" for number, seconds in enumerate(times)]
        Path("runs.csv").write_text("plan,iteration_time_s\n" + "".join(lines))

    table("ours.yaml:1x8", f"{folder}/ours.yaml:2x8")
    assert calibrate("runs", "runs.csv", "--constants", "host")["gpus"].keys() <= {NODE["gpu"]}
    table("ours.yaml:1x8", "../two/ours.yaml:2x8")
    code, _, err = run(capsys, "calibrate", "runs", "runs.csv", "--constants", "host")
    assert code == 2 and "must be of one kind of machine" in err
