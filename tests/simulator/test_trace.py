from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simulator.memory.usage import LiveBytes
from simulator.reports.trace import _samples
from simulator.result import SimulationResult
from simulator.simulate import simulate
from simulator.uniform import uniform_plan
from tests.simulator.problems import chain_of_opaque, chain_problem
from tests.simulator.results import pipeline_result


@pytest.fixture(scope="module")
def result() -> SimulationResult:
    return pipeline_result()


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        content: dict[str, Any] = json.load(file)
    return content


def of_phase(content: dict[str, Any], *phases: str) -> list[dict[str, Any]]:
    return [event for event in content["traceEvents"] if event["ph"] in phases]


def assert_trace_event_format(content: dict[str, Any]) -> None:
    """Check what the Trace Event Format asks of the phases used."""
    assert content["displayTimeUnit"] in ("ms", "ns")
    named_processes, named_threads = set(), set()
    for event in content["traceEvents"]:
        assert event["ph"] in "XMstfC"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                named_processes.add(event["pid"])
            if event["name"] == "thread_name":
                named_threads.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], float | int) and event["ts"] >= 0
        assert event["pid"] in named_processes
        if event["ph"] != "C":
            assert (event["pid"], event["tid"]) in named_threads
        if event["ph"] == "X":
            assert event["dur"] >= 0
    last: dict[tuple[int, str], float] = {}
    for event in of_phase(content, "C"):
        key = (event["pid"], event["name"])
        assert event["ts"] >= last.get(key, 0.0)
        last[key] = event["ts"]
        assert all(isinstance(value, int | float) for value in event["args"].values())
    slices = defaultdict(list)
    for event in of_phase(content, "X"):
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in slices.values():
        spans.sort()
        assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(spans)), "slices of a thread overlap"
    flows = defaultdict(list)
    for event in of_phase(content, "s", "t", "f"):
        flows[event["id"]].append(event)
        spans = slices[event["pid"], event["tid"]]
        assert any(low - 1e-6 <= event["ts"] <= high + 1e-6 for low, high in spans)
    for events in flows.values():
        phases = [event["ph"] for event in events]
        assert phases[0] == "s" and phases[-1] == "f" and set(phases[1:-1]) <= {"t"}
        assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
        assert events[-1]["bp"] == "e"


def test_trace_follows_the_format_and_shows_every_task_on_every_stream(
    result: SimulationResult, tmp_path: Path
) -> None:
    report = result.write_trace(tmp_path / "trace.json.gz")
    content = read(tmp_path / "trace.json.gz")
    assert_trace_event_format(content)
    assert report.complete
    assert report.num_events == len(content["traceEvents"])
    assert len(of_phase(content, "X")) == len(result.graph.streams.items)
    end_us = max(event["ts"] + event["dur"] for event in of_phase(content, "X"))
    assert end_us == pytest.approx(result.iteration_time_s * 1e6, abs=1e-3)


def test_every_transfer_has_an_arrow_from_its_producer_to_another_device(
    result: SimulationResult, tmp_path: Path
) -> None:
    result.write_trace(tmp_path / "trace.json.gz")
    content = read(tmp_path / "trace.json.gz")
    starts = {event["id"]: event for event in of_phase(content, "s")}
    ends = {event["id"]: event for event in of_phase(content, "f")}
    assert starts.keys() == ends.keys()
    transfer = result.graph.causes.index("transfer")
    assert len(starts) == int((result.graph.cause == transfer).sum())
    assert all(starts[flow]["pid"] != ends[flow]["pid"] for flow in starts)


def test_slices_carry_cause_stage_microbatch_and_both_durations(result: SimulationResult, tmp_path: Path) -> None:
    result.write_trace(tmp_path / "trace.json.gz")
    event = next(e for e in of_phase(read(tmp_path / "trace.json.gz"), "X") if e["args"]["task"] == 0)
    assert event["name"] == "forward 0"
    assert event["cat"] == "forward"
    assert event["args"]["stage"] == event["args"]["microbatch"] == 0
    assert event["args"]["alone_us"] == pytest.approx(1e4)
    assert event["args"]["real_us"] == pytest.approx(event["dur"], abs=1e-3)


def test_counters_show_the_live_peak(result: SimulationResult, tmp_path: Path) -> None:
    result.write_trace(tmp_path / "trace.json.gz")
    values = [event["args"]["live"] for event in of_phase(read(tmp_path / "trace.json.gz"), "C")]
    assert max(values) == result.peak_allocated_bytes


def test_of_many_moments_neighbours_share_one_and_the_peak_stays() -> None:
    live = 1e9 + 1e6 * np.random.default_rng(1).integers(0, 1000, 5000)
    times_s = np.arange(5000) * 1e-3
    times, values = _samples(LiveBytes(times_s, live), 100)
    assert len(np.unique(times)) <= 200
    assert values.max() == live.max() and values[-1] == live[-1]
    assert abs(times[values.argmax()] * 1e-9 - times_s[live.argmax()]) < 5.0 / 99
    assert (np.diff(times) >= 0).all()
    assert len(_samples(LiveBytes(times_s, live), 5000)[0]) == 5000


def test_the_same_result_gives_the_same_bytes(result: SimulationResult, tmp_path: Path) -> None:
    result.write_trace(tmp_path / "one.json.gz")
    result.write_trace(tmp_path / "two.json.gz")
    assert (tmp_path / "one.json.gz").read_bytes() == (tmp_path / "two.json.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json.gz", "two.json.gz"]


def test_what_ends_the_iteration_in_no_time_is_shown(tmp_path: Path) -> None:
    problem = chain_problem(chain_of_opaque(4, 1.0, 2.0), num_devices=4, global_batch=4)
    result = simulate(uniform_plan(problem, pp=4), problem)
    start_s, end_s = result.schedule.start_s, result.iteration_time_s
    last = {int(task) for task in result.graph.streams.items if start_s[task] == end_s}
    assert last, "a step without parameters"
    for window in (None, (0.5 * end_s, end_s)):
        result.write_trace(tmp_path / "trace.json.gz", window=window)
        shown = {event["args"]["task"] for event in of_phase(read(tmp_path / "trace.json.gz"), "X")}
        assert last <= shown
    result.write_trace(tmp_path / "trace.json.gz", window=(0.0, 0.999 * end_s))
    assert not last & {event["args"]["task"] for event in of_phase(read(tmp_path / "trace.json.gz"), "X")}


def test_a_window_shows_what_overlaps_it(result: SimulationResult, tmp_path: Path) -> None:
    window = (0.3, 0.5)
    report = result.write_trace(tmp_path / "trace.json.gz", window=window)
    content = read(tmp_path / "trace.json.gz")
    assert_trace_event_format(content)
    assert report.complete and report.window_s == window
    shown = of_phase(content, "X")
    assert 0 < len(shown) < len(result.graph.streams.items)
    assert all(event["ts"] < 0.5e6 and event["ts"] + event["dur"] >= 0.3e6 for event in shown)


@pytest.mark.parametrize("hosts", [False, True])
def test_the_cap_ends_the_window_and_says_so(result: SimulationResult, tmp_path: Path, hosts: bool) -> None:
    report = result.write_trace(tmp_path / "trace.json.gz", max_events=250, hosts=hosts)
    content = read(tmp_path / "trace.json.gz")
    assert_trace_event_format(content)
    assert not report.complete and not content["otherData"]["complete"]
    assert report.window_s[1] < result.iteration_time_s
    assert 100 < report.num_events <= 250
    assert of_phase(content, "X")


def test_hosts_get_a_thread_when_asked(result: SimulationResult, tmp_path: Path) -> None:
    result.write_trace(tmp_path / "trace.json.gz", hosts=True)
    content = read(tmp_path / "trace.json.gz")
    assert_trace_event_format(content)
    launches = [event for event in of_phase(content, "X") if event["cat"] == "host"]
    assert len(launches) == len(result.graph.hosts.items)


@pytest.mark.parametrize("options", [{"window": (1.0, 1.0)}, {"max_events": 0}])
def test_impossible_options_are_refused_and_leave_no_file(
    result: SimulationResult, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"window must end|max_events must be"):
        result.write_trace(tmp_path / "trace.json.gz", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["trace.json", "trace.gz", "trace"])
def test_a_trace_is_named_as_what_it_is(result: SimulationResult, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"a trace must be a file that ends in \.json\.gz, got .*; name it"):
        result.write_trace(tmp_path / name)
    assert not list(tmp_path.iterdir())
