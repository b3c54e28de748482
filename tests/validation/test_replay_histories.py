"""Recorded allocator histories through the simulator's allocator, from a folder."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch (extra: validation)")

from validation import replay_histories  # noqa: E402
from validation.execution import memory_history  # noqa: E402
from validation.execution.memory_history import FORMAT  # noqa: E402

MIB = 1 << 20


def write(path: Path, events: list[list[object]]) -> None:
    history = {"format": FORMAT, "device": 0, "segments": [], "events": events}
    path.write_bytes(gzip.compress(json.dumps(history).encode()))


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["replay_histories", str(folder)])
    replay_histories.main()


def test_what_was_reserved_stands_beside_what_the_replay_reserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 MiB takes a segment of 20; a driver's machine that took one of 40 is told apart."""
    request = [["alloc", 0, 3 * MIB, 0], ["free_requested", 0, 3 * MIB, 0], ["free_completed", 0, 3 * MIB, 0]]
    write(tmp_path / "alike.json.gz", [["segment_alloc", 0, 20 * MIB, 0], *request])
    write(tmp_path / "twice.json.gz", [["segment_alloc", 0, 40 * MIB, 0], *request])
    run(tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert "alike: 0.02 GiB recorded, 0.02 replayed, +0.0%" in shown
    assert "twice: 0.04 GiB recorded, 0.02 replayed, -50.0%" in shown
    assert "2 histories, 0 without their beginning left out: reserved peaks 25.0% off (-50.0% to +0.0%)" in shown
    monkeypatch.setattr(memory_history, "MAX_EVENTS", 4)
    run(tmp_path, monkeypatch)
    assert "none of 2 histories has its beginning" in capsys.readouterr().out


def test_a_folder_without_histories_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for write_something in (False, True):
        if write_something:
            (tmp_path / "plan.json.gz").write_bytes(gzip.compress(b'{"format": "something else"}'))
        with pytest.raises(SystemExit) as end:
            run(tmp_path, monkeypatch)
        assert end.value.code == 2
    shown = capsys.readouterr().err
    assert "must hold histories (*.json.gz)" in shown and "must be an allocator's history" in shown
