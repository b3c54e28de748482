"""The cache of compiled functions notices a change in a module that they call or take constants from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numba

from simulator.compiled_cache import inlined

ROOT = Path(__file__).resolve().parents[2]

CALLER = """
import callee
from simulator.compiled_cache import compiled_with


@compiled_with(callee)
def caller(x):
    return callee.called(x) + callee.CONSTANT


print(caller(1), sum(caller.stats.cache_hits.values()))
"""
CALLEE = """
from simulator.compiled_cache import compiled

CONSTANT = {constant}


@compiled
def called(x):
    return {expression}
"""


def printed(folder: Path, constant: int, expression: str) -> tuple[int, int]:
    """Return what the caller makes of 1, and how often it came from the cache, in a new process."""
    text = CALLEE.format(constant=constant, expression=expression)
    callee = folder / "callee.py"
    if not callee.exists() or callee.read_text() != text:
        callee.write_text(text)
        changed = callee.stat().st_mtime + 10 * constant  # clocks of file systems may be coarse
        os.utime(callee, (changed, changed))
    (folder / "caller.py").write_text(CALLER)
    os.utime(folder / "caller.py", (1e9, 1e9))
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "NUMBA_CACHE_DIR": str(folder / "cache")}
    run = subprocess.run(
        [sys.executable, str(folder / "caller.py")], env=environment, capture_output=True, text=True, check=True
    )
    value, hits = run.stdout.split()
    return int(value), int(hits)


def test_a_changed_callee_or_constant_makes_the_caller_stale(tmp_path: Path) -> None:
    assert printed(tmp_path, 100, "x + 1") == (102, 0)
    assert printed(tmp_path, 100, "x + 1") == (102, 1)
    assert printed(tmp_path, 100, "x * 5") == (105, 0)
    assert printed(tmp_path, 700, "x * 5") == (705, 0)


@inlined
def _plus(number: int, other: int) -> int:
    return number + other


def _counted(count: int) -> int:
    total = 0
    for number in range(count):
        total = _plus(total, number) + _plus(0, 1)
    return total


def test_a_number_that_is_written_out_is_no_other_kind_of_argument() -> None:
    """Else each of them would be compiled anew."""
    assert numba.njit(_counted)(4) == 1 + 2 + 3 + 4  # Not from the cache.
    assert len(cast(Any, _plus).signatures) == 1
