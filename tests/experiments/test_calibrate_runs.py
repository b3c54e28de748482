"""``windtunnel calibrate runs``: logs of whole iterations become a profile, or factors on a machine's constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.calibrate.runs import measured_runs
from experiments.run_table import Common
from simulator.plan_file import load_plan, save_plan
from simulator.problem import ProblemSpec
from simulator.simulate import simulate_time_s
from simulator.uniform import uniform_plan
from tests.experiments.commands import run


def plans_with_times(folder: Path, factor: float, **other: str) -> list[tuple[Path, float]]:
    """Write plans of a small model, and return each with a time that is so much longer than simulated."""
    found = []
    for batch, tp in ((8, 1), (16, 1), (8, 2), (16, 2)):
        names = {"model": "gpt3-350m", "cluster": "a100-80g-dgx:1x2", "runtime": "megatron-lm-2021", **other}
        spec = ProblemSpec(**names, global_batch=batch)
        problem = spec.load()
        plan = uniform_plan(problem, tp=tp, microbatch=4)
        path = folder / f"{names['model']}-{batch}-{tp}.yaml"
        save_plan(path, spec, plan)
        found.append((path, factor * simulate_time_s(plan, problem)))
    return found


def test_a_profile_is_inferred_from_logs_of_runs(calibrate: Any, tmp_path: Path) -> None:
    runs = plans_with_times(tmp_path, 1.2)
    table = tmp_path / "runs.csv"
    table.write_text("plan,iteration_time_s\n" + "".join(f"{path.name},{seconds}\n" for path, seconds in runs))
    summary = calibrate("runs", table)
    words = {fit["what"]: fit for fit in summary["fits"]}
    assert words["iterations, shipped model against measured"]["worst"] > 0.1
    assert words["iterations, inferred profile"]["worst"] < 0.03
    path, seconds = runs[1]
    spec, plan = load_plan(path)
    on_it = replace(spec, profile=str(tmp_path / "out" / "c.json")).load()
    assert simulate_time_s(plan, on_it) == pytest.approx(seconds, rel=0.03)


def test_logs_of_unlike_layers_and_plans_without_a_time_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = plans_with_times(tmp_path, 1.0)[:1] + plans_with_times(tmp_path, 1.0, model="gpt3-1.3b")[:1]
    table = tmp_path / "runs.csv"
    table.write_text("plan,iteration_time_s\n" + "".join(f"{path.name},1.0\n" for path, _ in runs))
    code, _, err = run(capsys, "calibrate", "runs", table)
    assert code == 2 and "layers must be alike in all plans" in err and "gpt3-1.3b" in err
    same = plans_with_times(tmp_path, 1e3)
    table.write_text("plan,iteration_time_s\n" + "".join(f"{path.name},{seconds}\n" for path, seconds in same))
    for words in ((), ("--constants", "products")):
        code, _, err = run(capsys, "calibrate", "runs", table, *words)
        assert code == 2 and "are they in milliseconds? times must be in seconds" in err
    table.write_text(f"plan,iteration_time_s\n{runs[0][0].name},\n")
    code, _, err = run(capsys, "calibrate", "runs", table)
    assert code == 2 and "every run must have a measured time (iteration_time_s), runs.csv#1 has none" in err


def test_runs_of_two_models_at_other_degrees_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No operator of one has the other's degree, so no two rows of a profile would meet."""
    small, large = plans_with_times(tmp_path, 1.2)[0], plans_with_times(tmp_path, 1.2, model="gpt3-1.3b")[2]
    table = tmp_path / "runs.csv"
    rows = "".join(f"{path.name},{seconds}\n" for path, seconds in (small, large))
    table.write_text(f"plan,iteration_time_s\n{rows}")
    code, _, err = run(capsys, "calibrate", "runs", table, "-o", tmp_path / "c.json")
    words = " ".join(err.split())
    assert code == 2 and "layers must be alike in all plans" in words and not (tmp_path / "c.json").exists()
    assert "gpt3-350m and of gpt3-1.3b" in words and "--constants" in words


def test_runs_that_say_nothing_give_a_file_that_holds_nothing_and_is_refused(
    calibrate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = plans_with_times(tmp_path, 1.0)
    times = [seconds * factor for (_, seconds), factor in zip(runs, (1.2, 0.8, 0.8, 1.2), strict=True)]
    table = tmp_path / "runs.csv"
    rows = zip(runs, times, strict=True)
    table.write_text("plan,iteration_time_s\n" + "".join(f"{path.name},{seconds}\n" for (path, _), seconds in rows))
    summary = calibrate("runs", table)
    assert summary["operators"] == 0
    assert (
        "no factors predict left-out runs better than the shipped model: it stays, leave --profile out"
        in summary["notes"]
    )
    code, _, err = run(capsys, "simulate", runs[0][0], "--profile", tmp_path / "out" / "c.json")
    assert code == 2 and "holds nothing that prices anything" in " ".join(err.split())


def test_several_runs_of_a_plan_count_once_with_the_median_of_their_times(
    calibrate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = plans_with_times(tmp_path, 1.2)
    table = tmp_path / "runs.csv"
    head, once = "plan,iteration_time_s\n", [f"{path.name},{seconds}\n" for path, seconds in runs]
    table.write_text(head + "".join(once))
    alone = calibrate("runs", table)
    others = [f"{path.name},{seconds * factor}\n" for path, seconds in runs for factor in (0.97, 1.3)]
    for rows in (once + others, others + once):
        table.write_text(head + "".join(rows))
        assert calibrate("runs", table)["fits"] == alone["fits"]
    table.write_text(head + once[0] * 3)
    code, _, err = run(capsys, "calibrate", "runs", table)
    assert code == 2 and "must hold timed runs of at least two plans, got 3 of 1" in " ".join(err.split())


def test_plans_of_two_runtimes_that_are_called_alike_are_two(tmp_path: Path) -> None:
    """A file beside the table may be called as a shipped runtime is."""
    (tmp_path / "megatron-lm-2021.yaml").write_text(
        'description: "ours"\nbase: megatron-lm-2021\nhost_seconds_per_pass: 0.02\n'
        'sources: {host_seconds_per_pass: "measured"}\n'
    )
    (table := tmp_path / "runs.csv").write_text(
        "model,gpus,tp,microbatch,global_batch,runtime,iteration_time_s\n"
        "gpt3-350m,2,2,4,8,megatron-lm-2021,1.0\n"
        "gpt3-350m,2,2,4,8,megatron-lm-2021.yaml,1.2\n"
    )
    assert len(measured_runs(table, Common(cluster="a100-80g-dgx"))) == 2


@pytest.mark.parametrize("words", [(), ("--constants", "links,products")])
def test_factors_that_no_machine_has_are_said(calibrate: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    table = tmp_path / "runs.csv"
    rows = [f"{path.name},{seconds}\n" for path, seconds in plans_with_times(tmp_path, 5.0)]
    table.write_text("plan,iteration_time_s\n" + "".join(rows))
    notes = calibrate("runs", table, *words)["notes"]
    (note,) = [note for note in notes if note.startswith("factors should be between 0.33 and 3, got ")]
    assert ("products 0." if words else "layer tp 1 x 4 5") in note and "check the GPU type" in note


def test_constants_of_a_machine_are_fitted_to_logs_of_runs_of_any_models(calibrate: Any, tmp_path: Path) -> None:
    runs = plans_with_times(tmp_path, 1.2) + plans_with_times(tmp_path, 1.2, model="gpt3-1.3b")
    table = tmp_path / "runs.csv"
    table.write_text("plan,iteration_time_s\n" + "".join(f"{path.name},{seconds}\n" for path, seconds in runs))
    with table.open("a") as lines:
        lines.writelines(f"{path.name},{seconds * factor}\n" for path, seconds in runs for factor in (0.99, 1.01))
    summary = calibrate("runs", table, "--constants", "products,memory,network")
    words = {fit["what"]: fit for fit in summary["fits"]}
    assert words["iterations, fitted constants"]["num_points"] == len(runs), "several runs of a plan count once"
    assert words["iterations, shipped constants"]["median"] > 0.15
    assert words["iterations, fitted constants"]["worst"] < 0.04
    assert words["factors on the machine's constants"]["constants"]["network"] == 1
    assert summary["gpus"] == {"a100-sxm4-80gb": ["curves", "optimizer_bandwidth_fraction"]} and not summary["networks"]
    path, seconds = runs[-1]
    spec, plan = load_plan(path)
    on_it = replace(spec, profile=str(tmp_path / "out" / "c.json")).load()
    assert simulate_time_s(plan, on_it) == pytest.approx(seconds, rel=0.04)


def test_runs_of_two_machines_profiled_plans_and_unknown_constants_are_refused(
    calibrate: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = plans_with_times(tmp_path, 1.0, cluster="h100-dgx:1x2")[:1]
    table = tmp_path / "runs.csv"
    (tmp_path / "other.yaml").write_text(there[0][0].read_text())
    here = plans_with_times(tmp_path, 1.2)
    table.write_text(f"plan,iteration_time_s\n{here[0][0].name},1.0\nother.yaml,1.0\n")
    code, _, err = run(capsys, "calibrate", "runs", table, "--constants", "all")
    assert code == 2 and "runs must be of one kind of machine" in err and "h100-dgx (other.yaml)" in err
    code, _, err = run(capsys, "calibrate", "runs", table, "--constants", "wheels")
    assert code == 2 and "must be all or one of products, memory" in err
    table.write_text("plan,iteration_time_s\n" + "".join(f"{path.name},{seconds}\n" for path, seconds in here))
    calibrate("runs", table)
    spec, plan = load_plan(here[0][0])
    save_plan(here[0][0], replace(spec, profile=str(tmp_path / "out" / "c.json")), plan)
    for words in ((), ("--constants", "all")):
        code, _, err = run(capsys, "calibrate", "runs", table, *words)
        assert code == 2 and "must be made without --profile" in err
