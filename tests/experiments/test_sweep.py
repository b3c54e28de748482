"""A sweep runs what is missing, keeps what is finished whatever happens, and fails at nothing but its spec."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from joblib.externals.loky import ProcessPoolExecutor
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import progress as progress_module
from experiments.sweep import progress as sweep_progress
from experiments.sweep.files import COLUMNS, INPUTS
from experiments.sweep.job import Job, OtherCodeError, run_job
from experiments.sweep.plots import MARKER, _along, _draw_line, _finish, _limits, _shifts
from experiments.sweep.run import Progress, Sweep, load_sweep, sweep
from experiments.sweep.workers import interrupts_wait
from simulator.plan_file import load_plan
from simulator.reports.figures import CYCLE
from simulator.simulate import simulate_time_s
from tests.experiments.commands import run
from tests.experiments.sweeps import Place, without_timings

ROOT = Path(__file__).parents[2]

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
    assert row["budget_ended"] is True  # a random search ends with nothing else
    problem, plan = load_plan(place.output / "plans" / f"{row['run']}.yaml")
    assert simulate_time_s(plan, problem.load()) == row["iteration_time_s"]
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
    reason = str(table.loc[4, "reason"])
    assert reason.startswith("KeyError: 'a bug in the searcher' (") and reason.endswith(", in search)")
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
    (place.log / "hurry").touch()
    if number != signal.SIGKILL:
        assert process.returncode == 130, said
        assert f"the same command makes the other {8 - len(kept)}" in " ".join(said.split())
        assert len(pd.read_csv(place.output / "table.csv")) == len(kept)
    table = sweep(spec, place.output, num_processes=1)
    assert list(table["status"]) == ["ok"] * 8
    assert kept.items() <= place.records().items(), "a finished run was made again"
    assert sum(place.begun().values()) - sum(begun.values()) == 8 - len(kept)
    assert len(place.records()) == 8


def test_a_damaged_record_is_made_again(place: Place) -> None:
    spec = place.write(runs=[{"global_batch": 4, "searcher": "ddp"}])
    first = sweep(spec, place.output, num_processes=1)
    file = place.output / "runs" / f"{first['run'][0]}.json"
    text = file.read_text()
    changed = (text.replace('"status":', '"other":'), text.replace('"mfu":', '"mfu": "x", "other":'))
    for damaged in (text[:100], *changed, text.replace('"sha256":', '"other":')):
        assert damaged != text
        file.write_text(damaged)
        found = Sweep(load_sweep(spec), place.output)
        assert found.folder.damaged == [file]
        assert [job.key for job in found.pending] == [first["run"][0]]
    file.write_text(json.dumps(json.loads(text)))  # another layout of the same content
    assert not Sweep(load_sweep(spec), place.output).pending


def test_a_run_whose_plan_is_gone_is_made_again(place: Place) -> None:
    spec = place.write(grid={"global_batch": [2, 4]}, cases=[{"searcher": "ddp"}])
    first = sweep(spec, place.output, num_processes=1)
    gone, emptied = (place.output / "plans" / f"{run}.yaml" for run in first["run"])
    before = gone.read_text()
    gone.unlink()
    emptied.write_text("")
    assert Sweep(load_sweep(spec), place.output).folder.damaged == [gone, emptied]
    sweep(spec, place.output, num_processes=1)
    assert gone.read_text() == before and emptied.stat().st_size
    assert not Sweep(load_sweep(spec), place.output).pending


def test_a_worker_of_other_code_is_refused(place: Place) -> None:
    (job,) = load_sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp"}])).jobs
    other: Job = replace(job, code="0" * 16)
    assert other.key != job.key
    with pytest.raises(OtherCodeError, match="must run the sweep's code 0000"):
        run_job(other)


def test_there_is_no_plot_where_no_axis_varies(place: Place) -> None:
    sweep(place.write(runs=[{"global_batch": 4, "searcher": "ddp"}]), place.output, num_processes=1)
    assert not (place.output / "sweep.png").exists()


def plotted(place: Place, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Axes:
    """Return the axes of a sweep's plot."""
    drawn: list[Axes] = []

    def finish(axes: Axes, *rest: Any, **options: Any) -> None:
        drawn.append(axes)
        _finish(axes, *rest, **options)

    monkeypatch.setattr("experiments.sweep.plots._finish", finish)
    sweep(place.write(**sections), place.output, num_processes=1)
    (axes,) = drawn
    return axes


def test_budgets_are_numbers_on_the_axis(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {"global_batch": [4], "searcher": ["megatron-grid"], "budget": [3, 1, 20]}
    axes = plotted(place, monkeypatch, grid=budgets)
    assert list(axes.lines[0].get_xdata()) == [1.0, 3.0, 20.0]
    assert axes.lines[0].get_linewidth() > 0
    assert axes.get_xlabel() == "budget, evaluations"


def test_what_goes_along_the_plot_varies_on_its_own(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        {"model": "gpt-scale-8", "global_batch": 4},
        {"model": "gpt-scale-16", "global_batch": 8},
    ]  # along the batch each line would be one point
    axes = plotted(place, monkeypatch, cases=cases, grid={"searcher": ["ddp", "megatron-grid"], "budget": [1, 9]})
    assert axes.get_xlabel() == "budget, evaluations"
    labels = {line.get_label() for line in axes.lines}
    assert {"gpt-scale-8, batch 4, ddp", "gpt-scale-16, batch 8, megatron-grid"} <= labels


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


def test_a_log_names_a_run_that_does_not_end(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "LOG_EVERY_S", 0.2)
    monkeypatch.setattr(sweep_progress, "LONG_S", 0.5)
    spec = place.write(runs=[{"global_batch": 4, "searcher": place.recorded(sleep_s=3.0)}])
    code, _, err = command(capsys, spec, "-o", place.output, "-j", 1)
    assert code == 0
    assert re.search(r"^0/1 run, \d+ s, tiny.yaml, v100.*, mine.py:Recorded, seed 0 runs for \d+ s$", err, re.M)


def test_many_runs_need_a_yes(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    spec = place.write(grid={"global_batch": [4], "searcher": ["ddp"], "seed": list(range(1001))})
    code, _, err = command(capsys, spec, "-o", place.output)
    assert code == 2
    assert "has 1,001 runs to make, more than 1,000; add --yes" in err


def meeting(values: list[list[float]]) -> Axes:
    """Return the axes of a plot with the values of each line at batches 0, 1, ..., 0 where there is no plan."""
    batches = list(range(len(values[0])))
    along = _along("global_batch", pd.Series(batches))
    groups = [pd.DataFrame({"global_batch": batches, "samples_per_s": own}) for own in values]
    for rows in groups:
        rows["status"] = ["ok" if value else "failed" for value in rows["samples_per_s"]]
    axes = Figure().add_subplot()
    limits = _limits([value for own in values for value in own])
    for number, shift in enumerate(_shifts(groups, along, limits)):
        _draw_line(axes, groups[number], along, str(number), number, shift)
    _finish(axes, along, limits, all_ran=True)
    return axes


def shown_at(axes: Axes) -> list[list[tuple[float, float]]]:
    """Return where the markers of each line are seen, in points."""
    axes.figure.draw_without_rendering()
    return [
        [tuple(72 / axes.figure.dpi * at) for at in line.get_transform().transform(line.get_xydata())]
        for line in axes.lines
    ]


def test_markers_that_would_hide_each_other_stand_side_by_side_at_their_values() -> None:
    axes = meeting([[7.0, 0.0], [7.01, 0.0], [7.0, 0.0]])
    assert [line.get_ydata()[0] for line in axes.lines] == [7.0, 0.0, 7.01, 0.0, 7.0, 0.0]
    assert [line.get_xdata()[0] for line in axes.lines] == [0.0, 1.0] * 3
    places = [line[0] for line in shown_at(axes)]
    for kind in (places[::2], places[1::2]):
        assert all(after[0] - before[0] > MARKER for before, after in pairwise(kind))


def test_unlike_throughputs_have_a_logarithmic_axis_whose_floor_is_no_plan() -> None:
    axes = meeting([[2000.0, 0.0], [12.0, 10.0]])
    assert axes.get_yscale() == "log" and axes.get_ylim() == pytest.approx((10.0 / 1.6, 2000.0 * 1.6))
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([2000.0, 10.0 / 1.6, 12.0])
    near = meeting([[200.0, 0.0], [12.0, 10.0]])
    assert near.get_yscale() == "linear" and near.get_ylim()[0] == 0.0
    assert meeting([[0.0, 0.0]]).get_ylim()[0] == 0.0


def test_on_a_logarithmic_axis_what_hides_what_is_decided_by_ratios() -> None:
    axes = meeting([[2000.0, 10.0], [1000.0, 20.0]])  # 10 and 20 are far apart there
    xs = [[x for x, _ in line] for line in shown_at(axes)]
    assert xs[0] == pytest.approx(xs[1])
    near = [line[0][0] for line in shown_at(meeting([[2000.0, 10.0], [1000.0, 10.2]]))]
    assert near[1] - near[0] > MARKER


def test_markers_apart_from_each_other_stand_at_their_places() -> None:
    axes = meeting([[7.0, 3.0], [5.0, 2.0]])
    one, two = shown_at(axes)
    assert [place for place, _ in one] == pytest.approx([place for place, _ in two])


def test_all_lines_of_a_sweep_are_told_apart_and_have_room_above_them() -> None:
    axes = meeting([[7.0, 8.0]] * len(CYCLE))
    assert len(axes.lines) == len(CYCLE)
    for kind in ("marker", "color", "linewidth"):
        assert len({getattr(line, f"get_{kind}")() for line in axes.lines}) == len(CYCLE)
    top = axes.transData.transform((0.0, 8.0))[1]
    assert axes.bbox.y1 - top > MARKER / 2 * axes.figure.dpi / 72


def test_clusters_of_one_preset_are_joined_in_the_order_of_their_sizes() -> None:
    along = _along("cluster", pd.Series(["dgx:2x8", "dgx:1x4", "dgx:1x16"]))
    assert list(along.places) == ["dgx:1x4", "dgx:2x8", "dgx:1x16"] and along.ordered
    other = _along("cluster", pd.Series(["dgx:2x8", "hgx:1x4"]))
    assert list(other.places) == ["dgx:2x8", "hgx:1x4"] and not other.ordered
