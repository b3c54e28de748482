"""Allocator snapshots as torch writes them, made by hand: there is no GPU here."""

from __future__ import annotations

import json
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="snapshots are torch's (extra: validation)")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from validation.execution.memory_history import history_mapping, history_peaks, replay_history  # noqa: E402

MIB = 2**20


def event(action: str, address: int, size: int) -> dict[str, Any]:
    frames = [{"filename": "secret.py", "line": 1, "name": "f"}]
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, "time_us": 1}


SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0, "address": 1000, "total_size": 20 * MIB, "allocated_size": 3 * MIB, "active_size": 3 * MIB,
            "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "frames": [],
            "blocks": [
                {"address": 1000, "size": 3 * MIB, "requested_size": 3 * MIB - 7, "state": "active_allocated",
                 "frames": [{"name": "g"}]},
                {"address": 1000 + 3 * MIB, "size": 17 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        },
        {
            "device": 1, "address": 5, "total_size": 2 * MIB, "allocated_size": 0, "active_size": 0, "stream": 0,
            "segment_type": "small", "blocks": [],
        },
    ],
    "device_traces": [
        [
            event("segment_alloc", 1000, 20 * MIB),
            event("alloc", 1000, 3 * MIB - 7),
            event("alloc", 1000 + 3 * MIB, 4 * MIB),
            event("free_requested", 1000 + 3 * MIB, 4 * MIB),
            event("free_completed", 1000 + 3 * MIB, 4 * MIB),
            event("free_completed", 77, MIB),  # allocated before the history began
            event("snapshot", 0, 0),
        ],
        [],
    ],
    "allocator_settings": {},
}  # fmt: skip


def test_a_history_is_plain_data_without_frames() -> None:
    history = history_mapping(SNAPSHOT)
    assert json.loads(json.dumps(history)) == history
    assert "secret" not in json.dumps(history)
    (segment,) = history["segments"]
    assert segment["pool"] == "large" and segment["allocated_bytes"] == 3 * MIB
    assert segment["blocks"][0] == [1000, 3 * MIB, 3 * MIB - 7, "active_allocated"]
    assert history["events"][1] == ["alloc", 1000, 3 * MIB - 7, 0]
    assert history_mapping(SNAPSHOT, device=1)["events"] == []


def test_peaks_follow_requests_and_segments() -> None:
    peaks = history_peaks(history_mapping(SNAPSHOT))
    assert (peaks.requested_bytes, peaks.reserved_bytes) == (7 * MIB - 7, 20 * MIB)


def test_our_allocator_takes_the_segment_that_the_history_took() -> None:
    history = history_mapping(SNAPSHOT)
    result = replay_history(history, 2**34)
    assert result.failure is None
    assert result.reserved_peak_bytes == history_peaks(history).reserved_bytes
    assert result.requested_peak_bytes == history_peaks(history).requested_bytes


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        ({"segments": []}, "must have segments and device_traces"),
        ({"segments": [{}], "device_traces": []}, "must have segments and device_traces"),
        ({"segments": [], "device_traces": [[event("explode", 0, 0)]]}, "must be one of alloc,.* got 'explode'"),
    ],
)
def test_what_is_no_snapshot_is_refused(snapshot: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        history_mapping(snapshot)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 50 * MIB)), max_size=40))
def test_requested_peaks_are_those_of_the_live_set(steps: list[tuple[bool, int, int]]) -> None:
    live: dict[int, int] = {}
    events, peak = [], 0
    for allocates, address, size in steps:
        if allocates and address not in live:
            live[address] = size
            events.append(event("alloc", address, size))
        elif not allocates and address in live:
            size = live.pop(address)
            events += [event("free_requested", address, size), event("free_completed", address, size)]
        peak = max(peak, sum(live.values()))
    history = history_mapping({"segments": [], "device_traces": [events]})
    assert history_peaks(history).requested_bytes == peak
    result = replay_history(history, 2**40)
    assert result.requested_peak_bytes == peak <= result.allocated_peak_bytes <= result.reserved_peak_bytes


def test_pages_of_expandable_segments_are_reserved_while_they_are_mapped() -> None:
    """Four MiB, two more, and what is unmapped is gone: torch notes the bytes of each mapping."""
    events = [event(word, 0, size * MIB) for word, size in
              (("segment_map", 4), ("segment_map", 2), ("segment_unmap", 3), ("segment_map", 2))]  # fmt: skip
    history = history_mapping({"segments": [], "device_traces": [events]})
    assert history_peaks(history).reserved_bytes == 6 * MIB


def test_memory_that_another_stream_still_uses_is_not_given_out_again() -> None:
    """Asked back at once, free once that stream is done: what comes in between needs a segment of its own."""
    size = 20 * MIB
    words = ("alloc", 0), ("free_requested", 0), ("alloc", size), ("free_completed", 0)
    events = [event(word, address, size) for word, address in words]
    result = replay_history(history_mapping({"segments": [], "device_traces": [events]}), 2**34)
    assert result.reserved_peak_bytes == 2 * size
