"""Runs the command line inside a test."""

from __future__ import annotations

import sys

import pytest

from experiments.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a command line."""
    before = sys.argv
    sys.argv = ["windtunnel", *map(str, arguments)]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return code, captured.out, captured.err
