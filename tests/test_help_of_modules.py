"""Modules that are run with ``python -m``: each answers --help, with an example, before it does anything."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_imports import FLOORS, ROOT, files

SCRIPTS = [
    path.relative_to(ROOT)
    for folder in (*FLOORS, "tests/benchmarks")
    for path in files(folder)
    if path.name != "__main__.py" and "\nif __name__ == " in path.read_text()
]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv[1:] = ["--help"]
from validation.{name} import main
main()
"""


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_a_module_that_is_run_shows_an_example(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ".".join(path.with_suffix("").parts)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(name).main()
    example = f"python -m {name}" if "importers" not in name else f"python -I {path}"
    assert end.value.code in (None, 0)
    assert f"Run: ``{example}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["list_entries", "memory_check", "run_plan"])
def test_help_does_not_wait_for_torch(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(name=name)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"python -m validation.{name}" in done.stdout
