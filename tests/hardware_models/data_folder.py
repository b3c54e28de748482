"""Where the measured data sets lie, if they are here at all: they are never committed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data"


def data_folder(name: str) -> Path:
    """Return a data set's folder, or skip the test."""
    folder = Path(os.environ.get("WINDTUNNEL_DATA", DEFAULT)) / name
    if not folder.is_dir():
        pytest.skip(f"measured data set {name} is not at {folder.parent}; set WINDTUNNEL_DATA to its folder")
    return folder
