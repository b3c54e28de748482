"""One trace with the predicted timeline above the measured one; opens in Perfetto."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datafiles.writer import check_ending, write_bytes_atomically
from simulator.reports.trace import write_trace
from simulator.result import SimulationResult
from validation.measurement import TimedAction, TimedSpan
from workloads.operators import Workload

MEASURED_PID = 100_000
"""Added to the process ids of measured devices, so that they never meet the predicted ones."""
PASSES, WAITS = 1, 2

WORDS = {"F": "forward", "B": "backward", "I": "backward input", "W": "backward weight"}


def write_combined_trace(
    result: SimulationResult,
    workload: Workload,
    devices: Sequence[int],
    actions: Sequence[TimedAction],
    spans: Sequence[TimedSpan],
    path: str | Path,
    *,
    max_events: int = 200_000,
) -> int:
    """Write the trace of a simulated and of an executed iteration, whole or not at all; both start at 0.

    Args:
        result: Simulated.
        workload: For the names of operators.
        devices: Device id of every rank.
        actions, spans: Of one measured iteration.
        path: A ``.json.gz`` file.
        max_events: Of the predicted part.

    Returns:
        Number of events.

    Raises:
        ValueError: If the name does not end in ``.json.gz``.
    """
    check_ending(path, ".json.gz", "trace")
    with TemporaryDirectory() as folder:
        own = Path(folder) / "predicted.json.gz"
        write_trace(result, own, max_events=max_events)
        document = json.loads(gzip.decompress(own.read_bytes()))
    members = result.graph.device_members
    for event in document["traceEvents"]:
        if event.get("ph") == "M" and event["name"] == "process_name":
            event["args"]["name"] = f"predicted: {event['args']['name']}"
        elif event.get("ph") == "M" and event["name"] == "process_sort_index":
            event["args"]["sort_index"] = 2 * min(members[event["pid"]])
    document["traceEvents"] += list(measured_events(workload, devices, actions, spans))
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    write_bytes_atomically(path, gzip.compress(text.encode(), mtime=0))
    return len(document["traceEvents"])


def measured_events(
    workload: Workload, devices: Sequence[int], actions: Iterable[TimedAction], spans: Iterable[TimedSpan]
) -> Iterable[dict[str, Any]]:
    """Yield trace events of a measured iteration: passes with their operators inside, and waits."""
    for rank, device in enumerate(devices):
        pid = MEASURED_PID + rank
        yield _name("process_name", pid, 0, {"name": f"measured: GPU {device} (rank {rank})"})
        yield _name("process_sort_index", pid, 0, {"sort_index": 2 * device + 1})
        yield _name("thread_name", pid, PASSES, {"name": "passes"})
        yield _name("thread_name", pid, WAITS, {"name": "waits for transfers"})
    for action in actions:
        word = f"{WORDS[action.kind]} {action.stage}.{action.microbatch}"
        where = {"stage": action.stage, "microbatch": action.microbatch}
        yield _slice(word, action.rank, PASSES, action.start_s, action.end_s, WORDS[action.kind], where)
        if action.wait_s > 0:
            start_s = max(0.0, action.start_s - action.wait_s)
            yield _slice(f"wait before {word}", action.rank, WAITS, start_s, action.start_s, "waiting", where)
    for span in spans:
        name = workload.operators[span.operator].name if span.operator >= 0 else span.name
        yield _slice(name, span.rank, PASSES, span.start_s, span.end_s, span.phase, {"operator": span.operator})


def _name(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _slice(
    name: str, rank: int, tid: int, start_s: float, end_s: float, category: str, args: dict[str, Any]
) -> dict[str, Any]:
    start, end = round(start_s * 1e9), round(end_s * 1e9)
    return {
        "ph": "X", "name": name, "cat": category, "pid": MEASURED_PID + rank, "tid": tid,
        "ts": start / 1000, "dur": max(0, end - start) / 1000, "args": args,
    }  # fmt: skip
