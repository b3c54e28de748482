"""For tests of sweeps: a folder to sweep in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.sweeps import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
