"""A folder to sweep in; the command that calibrates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.commands import run
from tests.experiments.sweeps import Place

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Return a call of ``windtunnel calibrate`` that must succeed, write ``out/c.json`` and a plot; its summary."""

    def call(*words: object) -> dict[str, Any]:
        files = ("-o", tmp_path / "out" / "c.json", "--plot", tmp_path / "c.png")
        code, out, err = run(capsys, "calibrate", *words, *files, "--json")
        assert code == 0, err
        assert (tmp_path / "c.png").read_bytes()[:8] == PNG
        summary: dict[str, Any] = json.loads(out)
        assert all({"what", "how", "num_points", "median", "p90", "worst"} <= set(fit) for fit in summary["fits"])
        return summary

    return call
